"""Replacement of sizes that are clamped to one value.

Keras counts categories with `tf.math.bincount(ids, minlength=n, maxlength=n)`. TensorFlow computes
the number of bins as `minimum(n, maximum(n, largest id of the batch + 1))`: it is n, but the graph
says that it follows from all examples.
"""

from collections.abc import Iterable

import tensorflow as tf

from tfdp.clipping.loss_graph.copying import cone


def resolve(tensors: Iterable[tf.Tensor]) -> None:
    """Makes the operations that compute tensors use the limits of clamps that have one value.

    No value changes: of integers, `minimum(a, maximum(b, x))` is a wherever a is at most b.

    Args:
      tensors: Tensors of one graph.
    """
    operations = cone(tensors)[0]
    limits = {}
    for op in operations:
        limit = _only_value(op)
        if limit is not None:
            limits[op.outputs[0].ref()] = limit
    for op in operations if limits else []:
        for index, tensor in enumerate(op.inputs):
            if tensor.ref() in limits:
                op._update_input(index, limits[tensor.ref()])


def _only_value(op: tf.Operation) -> tf.Tensor | None:
    """Returns the scalar that an operation's output always equals, or None if there is none."""
    if op.type != "Minimum" or not op.outputs[0].dtype.is_integer:
        return None
    for limit, clamped in (op.inputs, reversed(op.inputs)):
        if limit.shape.rank != 0 or clamped.shape.rank != 0 or clamped.op.type != "Maximum":
            continue
        if any(_at_most(limit, floor) for floor in clamped.op.inputs):
            return limit
    return None


def _at_most(a: tf.Tensor, b: tf.Tensor) -> bool:
    """Returns whether a scalar is at most another, for certain."""
    if a is b:
        return True
    known = tf.get_static_value(a), tf.get_static_value(b)
    return all(value is not None for value in known) and bool(known[0] <= known[1])
