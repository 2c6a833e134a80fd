"""Constants that the operations of a graph share: a graph of many variables needs few of them."""

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def constant(value: float | Sequence[int], dtype: tf.DType = tf.int32) -> tf.Tensor:
    """Returns a constant of the graph being built, the same for equal arguments.

    Args:
      value: A number, or a shape.
      dtype: Its type.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly():
        return tf.constant(value, dtype)
    known = _made.setdefault(graph, {})
    key = (np.asarray(value).tobytes(), np.shape(value), np.asarray(value).dtype.str, dtype)
    if key not in known:
        with tf.control_dependencies(None):  # Nor may it wait for what its first user waits for.
            known[key] = tf.constant(value, dtype, shape=np.shape(value))
    return known[key]


def reshaped(tensor: tf.Tensor, shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Reshapes a tensor to sizes of which the first may be any number: a scalar tensor.

    Args:
      tensor: The tensor.
      shape: Its new shape; only the first size may be a tensor.
    """
    rest = [int(size) for size in shape[1:]]
    if not len(shape):
        return tf.reshape(tensor, constant(np.zeros([0], np.int32)))
    if not tf.is_tensor(shape[0]):
        return tf.reshape(tensor, constant([int(shape[0]), *rest]))
    if -1 not in rest and 0 not in rest:
        return tf.reshape(tensor, constant([-1, *rest]))
    return tf.reshape(tensor, tf.concat([[shape[0]], rest], 0))
