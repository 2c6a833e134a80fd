"""Parts of variational autoencoders that differ between Keras 2 and Keras 3."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import tensorflow as tf


class FrontEnd(NamedTuple):
    """A Keras, and what is done with its models in its own manner.

    Attributes:
      keras: The package.
      name: Its name, for messages.
      optimizers: The private optimizers that train its models, for messages.
      takes: Returns the `tf.TensorSpec`s of what a model takes, for any number of rows; None if it
        was never called.
      scaled: Returns the loss that an optimizer without privacy wants the gradients of.
      networks_called: Context in which the networks of a model are called for a private step, in a
        function without side effects.
    """

    keras: Any
    name: str
    optimizers: str
    takes: Callable[[Any], Any]
    scaled: Callable[[Any, tf.Tensor], tf.Tensor]
    networks_called: Callable[[Any], AbstractContextManager]
