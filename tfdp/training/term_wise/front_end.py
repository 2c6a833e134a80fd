"""Parts of variational autoencoders that differ between Keras 2 and Keras 3."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdp.training import front_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd(front_end.FrontEnd):
    """A Keras, and how variational autoencoders are trained with it.

    Attributes:
      scaled: Returns the loss that an optimizer without privacy wants the gradients of.
      networks_called: Context in which the networks of a model are called for a private step, in a
        function without side effects.
    """

    scaled: Callable[[Any, tf.Tensor], tf.Tensor]
    networks_called: Callable[[Any], AbstractContextManager]
