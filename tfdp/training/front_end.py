"""Description of a Keras, for training: both front ends give one."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

T = TypeVar("T", bound="FrontEnd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """A Keras, and what is done with its models in its own manner.

    Parts of training that differ in more than this have a class of it, with further functions.

    Attributes:
      package: The package, `tf.keras` or `keras`.
      name: Its name as users write it, "tf.keras" or "keras".
      title: "Keras 2" or "Keras 3", for messages.
      part: The part of tfdp for it, "tfdp" or "tfdp.keras3", for messages.
      optimizers: Its private optimizers, for messages.
      ordinary: What its optimizers without privacy are, for messages.
      normalizations: Classes of BatchNormalization.
      takes: Returns the `tf.TensorSpec`s of what a model takes, for any number of rows; None if
        they are not known.
      tf_variable: Returns the TensorFlow variable of a variable.
      is_called_for_inference: Returns whether a layer is in inference mode in training, because of
        the functional model that calls it.
    """

    package: Any
    name: str
    title: str
    part: str
    optimizers: str
    ordinary: str
    normalizations: tuple[type, ...]
    takes: Callable[[Any], Any]
    tf_variable: Callable[[Any], tf.Variable]
    is_called_for_inference: Callable[[Any], bool]

    def with_parts(self, cls: type[T], **parts: Any) -> T:
        """Returns the description with the further functions of a class of it."""
        return cls(**vars(self), **parts)
