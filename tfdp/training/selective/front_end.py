"""Parts of selective training that differ between Keras 2 and Keras 3."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class FrontEnd(NamedTuple):
    """A Keras, and what is done with its models in its own manner.

    Attributes:
      keras: The package.
      name: Its name, for messages.
      part: The part of tfdp for it, for messages.
      build: Makes the variables of a model for inputs of some specs, which lack the first
        dimension. A layer must not see an example when it is made.
      loss: Returns the loss of a model's compiled loss function, in the graph being built. It gets
        the model, inputs, targets, weights, and whether layers are in training mode.
      variables: Returns the TensorFlow variables of a model.
    """

    keras: Any
    name: str
    part: str
    build: Callable[[Any, Any], None]
    loss: Callable[[Any, Any, Any, Any, bool], tf.Tensor]
    variables: Callable[[Any], list[tf.Variable]]
