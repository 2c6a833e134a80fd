"""Lookup tables whose entries are fixed."""

import tensorflow as tf

from tfdp.clipping.batch_state import captured


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
