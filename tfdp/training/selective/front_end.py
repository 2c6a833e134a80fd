"""Parts of selective training that differ between Keras 2 and Keras 3."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.training import front_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd(front_end.FrontEnd):
    """A Keras, and how selective training uses its models.

    Attributes:
      build: Makes the variables of a model for inputs of some specs, which lack the first
        dimension. A layer must not see an example when it is made.
      loss: Returns the loss of a model's compiled loss function, in the graph being built. It gets
        the model, inputs, targets, weights, and whether layers are in training mode.
      variables: Returns the TensorFlow variables of a model.
    """

    build: Callable[[Any, Any], None]
    loss: Callable[[Any, Any, Any, Any, bool], tf.Tensor]
    variables: Callable[[Any], list[tf.Variable]]
