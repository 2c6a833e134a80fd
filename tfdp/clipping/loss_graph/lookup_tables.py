"""Lookup tables whose entries are fixed, and the shapes of what is looked up or counted."""

from collections.abc import Iterable

import tensorflow as tf

from tfdp.clipping.loss_graph.batch_state import captured
from tfdp.clipping.loss_graph.copying import cone

# Operations whose shape Python code sets.
_WITHOUT_SHAPE = frozenset({"LookupTableFindV2", "RaggedBincount"})


def is_static(handle: tf.Tensor) -> bool:
    """Returns whether a resource is a table of one value for each key, which nothing changes."""
    while tf.is_symbolic_tensor(handle):
        outer = captured(handle.graph).get(handle.ref())
        if outer is None:
            return False
        handle = outer
    # TensorFlow notes the table when it makes the resource.
    table = getattr(handle, "_parent_trackable", lambda: None)()
    return isinstance(table, tf.lookup.StaticHashTable)


def keep_shapes(tensors: Iterable[tf.Tensor]) -> None:
    """Makes the shapes of what is looked up or counted part of the graph.

    TensorFlow does not infer them: Python code sets them, and copies of the operations lose them.

    Args:
      tensors: Tensors of one graph, whose operations are changed.
    """
    for op in cone(tensors)[0]:
        found = op.outputs[0] if op.type in _WITHOUT_SHAPE else None
        if found is None or found.shape.rank is None or found.shape.is_fully_defined():
            continue
        uses = [(c, i) for c in found.consumers() for i, t in enumerate(c.inputs) if t is found]
        if any(consumer.type == "EnsureShape" for consumer, _ in uses):
            continue
        with found.graph.as_default():
            shaped = tf.raw_ops.EnsureShape(input=found, shape=found.shape)
        for consumer, index in uses:
            consumer._update_input(index, shaped)
