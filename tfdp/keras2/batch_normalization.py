"""Replacement of BatchNormalization, which mixes examples, in a Keras model."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.keras2.front_end import KERAS_2
from tfdp.keras2.keras_2 import check_is_model
from tfdp.training import batch_normalization


def replace_batch_normalization(model: tf.keras.Model, by: str = "group") -> tf.keras.Model:
    """Returns a copy of a model without statistics of the batch.

    With BatchNormalization, each example's output depends on the other examples, so per-example
    gradients do not exist. The copy has the weights of the model and is not compiled. Layers that
    already use their moving statistics in training are left unchanged: those with
    `trainable=False`, and those that are called with `training=False`, also within a nested model.

    Args:
      model: A functional or sequential model; models nested in it must be of these kinds as well.
      by: "group": GroupNormalization, which computes statistics over the positions and a group of
        channels of one example. The number of groups is the largest divisor of the number of
        channels that is at most 32 and leaves 4 channels to a group; it is 1 where the inputs are
        `[batch, channels]` or there is no such divisor. Scale and shift are kept, and moving
        statistics are dropped: a trained model must be trained further. "frozen":
        BatchNormalization with `trainable=False`, which uses its moving statistics and trains
        neither them nor scale and shift. Epsilon does not cover these numbers: they must come from
        public data.

    Returns:
      The new model.

    Raises:
      ValueError: An argument is out of its range, or a layer cannot be replaced.

    Example:
      >>> import tensorflow as tf, tfdp
      >>> layers = tf.keras.layers
      >>> model = tf.keras.Sequential([
      ...     layers.Conv2D(16, 3, input_shape=[8, 8, 1]), layers.BatchNormalization()])
      >>> tfdp.replace_batch_normalization(model).layers[1].groups
      4

    References:
      - Wu and He, 2018, Group Normalization (https://arxiv.org/abs/1803.08494).
    """
    check_is_model(model)
    return batch_normalization.replace(_FRONT_END, model, by)


def _copy(layer: Any) -> Any:
    return type(layer).from_config(layer.get_config())


def _clone(model: Any, copy_layer: Callable[[Any], Any]) -> Any:
    new = tf.keras.models.clone_model(model, clone_function=copy_layer)
    new._name = model.name
    return new


_FRONT_END = KERAS_2.with_parts(batch_normalization.FrontEnd, copy=_copy, clone=_clone)
