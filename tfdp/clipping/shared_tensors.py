"""Tensors that the operations of a graph share: a graph of many variables needs few of them."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

T = TypeVar("T")

# The attribute of a graph that holds them: kept elsewhere, they would keep the graph alive.
_SHARED = "_tfdp_shared_tensors"


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """Returns what the graph being built has for a key: tensors; makes it if there is nothing."""
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _SHARED):
        setattr(graph, _SHARED, {})
    known = getattr(graph, _SHARED)
    if key not in known:
        known[key] = make()
    return known[key]


def constant(value: float | Sequence[int] | np.ndarray, dtype: tf.DType = tf.int32) -> tf.Tensor:
    """Returns a constant of the graph being built, the same for equal arguments.

    Args:
      value: A number, or a shape.
      dtype: Its type.
    """
    if tf.executing_eagerly():
        return tf.constant(value, dtype)
    array = np.asarray(value, dtype.as_numpy_dtype)

    def make() -> tf.Tensor:
        with tf.control_dependencies(None):  # Nor may it wait for what its first user waits for.
            return tf.constant(array, dtype)

    return shared((array.tobytes(), array.shape, dtype), make)


def sizes_of(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Returns the sizes of a tensor of known rank: numbers where they are static, else scalars."""
    static = tensor.shape.as_list()
    if None not in static:
        return static
    sizes = tf.shape(tensor)
    return [sizes[axis] if size is None else size for axis, size in enumerate(static)]


def product(sizes: Sequence[int | tf.Tensor]) -> int | tf.Tensor:
    """Returns the product of sizes: a number if all are static, or else a scalar, int64."""
    return math.prod(tf.cast(size, tf.int64) if tf.is_tensor(size) else size for size in sizes)


def reshaped(tensor: tf.Tensor, shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Reshapes a tensor to given sizes, of which each may be a scalar tensor.

    Args:
      tensor: The tensor.
      shape: Its new shape.
    """
    if not tf.executing_eagerly() and tensor.op.type == "ExpandDims":
        tensor = tensor.op.inputs[0]  # The order in memory is the same.
    if any(tf.is_tensor(size) for size in shape[1:]):
        if len({size.dtype for size in shape if isinstance(size, tf.Tensor)}) > 1:
            shape = [tf.cast(size, tf.int64) for size in shape]
        return tf.reshape(tensor, tf.stack(list(shape)))
    rest = [int(size) for size in shape[1:]]
    if not len(shape):
        return tf.reshape(tensor, constant([]))
    is_any = tf.is_tensor(shape[0]) or shape[0] == -1
    static = tensor.shape.as_list() if tensor.shape.rank else []
    if is_any and -1 not in rest and len(static) == len(shape) and static[1:] == rest:
        return tensor
    if not tf.is_tensor(shape[0]):
        return tf.reshape(tensor, constant([int(shape[0]), *rest]))
    if -1 not in rest and 0 not in rest:
        return tf.reshape(tensor, constant([-1, *rest]))
    return tf.reshape(tensor, tf.concat([[shape[0]], rest], 0))
