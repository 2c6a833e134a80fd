"""Record of which private optimizers have changed which variables of this process.

A release is a fact about variables, not about the optimizer object that made it: `compile` with a
new optimizer, a second optimizer, or a copy of a model do not undo it. So every variable that a
private optimizer trains is recorded here for as long as it exists, with the releases that went into
it. An optimizer's ledger covers those of all variables that it trains or that its loss reads.

Found by this: optimizers that follow each other or alternate, frozen layers, and copies of
variables whose values are still those of the original when the copy is first trained, read by a
loss or asked about.

Not found: weights that were saved without their optimizer and loaded in another process, copies
whose original has changed or is gone, and data made by a privately trained model. Give their
ledger as `prior`.
"""

import functools
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfdp.optimizers import record_table


class Lineage:
    """Lineage of one variable: what went into it.

    Attributes:
      records: The records of the optimizers that train it.
      past: Rows of what its original had cost when it was copied.
    """

    def __init__(self, handle: Any):
        self._handle = weakref.ref(handle)
        self.kind = _type_of(handle)
        self.records: list[Any] = []
        self.past: list[np.ndarray] = []

    def rows(self) -> list[np.ndarray]:
        """Returns tables of all releases that went into the variable."""
        return [*self.past, *(table for r in connected(self.records) for table in r.tables())]

    def digest(self) -> bytes | None:
        """Returns a hash of the values, or None where no values identify it."""
        handle = self._handle()
        if handle is None or self.kind is None:
            return None
        with tf.init_scope():
            if not tf.raw_ops.VarIsInitializedOp(resource=handle):
                return None
            values = tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.kind[0]).numpy()
        if values.size < 2 or np.all(values == values.flat[0]):
            return None
        return hashlib.sha256(values.tobytes()).digest()


_lineages: dict[int, Lineage] = {}


def of(variables: Iterable[Any]) -> list[Lineage]:
    """Returns the lineages of variables, or of their handles; looks for originals of copies."""
    handles = [handle for variable in variables for handle in _handles(variable)]
    found = [_of(handle) for handle in handles if _type_of(handle) is not None]
    # Under a test seed, equal values may be those of a repeated training.
    counts = functools.cache(lambda record: record.has_steps() and not record.fixed_seed)
    kinds = {lineage.kind for lineage in found}
    originals: dict[Any, list[Lineage]] = {}
    for lineage in [known for known in list(_lineages.values()) if known.kind in kinds]:
        if lineage.past or any(map(counts, lineage.records)):
            originals.setdefault(lineage.kind, []).append(lineage)
    digest = functools.cache(Lineage.digest)
    for lineage in found:
        for other in originals.get(lineage.kind, []):
            known = not other.past and all(record in lineage.records for record in other.records)
            if not known and digest(lineage) is not None and digest(lineage) == digest(other):
                lineage.past = [record_table.union([*lineage.past, *other.rows()])]
    return found


def connected(records: Iterable[Any]) -> list[Any]:
    """Returns the records, and those of all variables that went into what they released."""
    found: dict[int, Any] = {}
    waiting = list(records)
    while waiting:
        record = waiting.pop()
        if id(record) not in found:
            found[id(record)] = record
            waiting += [other for lineage in record.lineages for other in lineage.records]
    return list(found.values())


def value_of(variable: Any) -> np.ndarray:
    """Returns the values of a variable, outside of graphs."""
    with tf.init_scope():
        return variable.numpy()


def captured_variables() -> Iterator[Any]:
    """Yields the handles of all variables that the graph being built has read so far."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        for outer, _ in graph.captures:
            if outer.dtype == tf.resource and tf.is_tensor(outer) and hasattr(outer, "numpy"):
                yield outer
        graph = graph.outer_graph


def _handles(variable: Any) -> list[Any]:
    """Returns the handles of a variable: of each device, if it is mirrored."""
    inner = getattr(variable, "value", None)
    if isinstance(inner, tf.Variable):  # Of a variable of Keras 3.
        variable = inner
    if isinstance(variable, tf.distribute.DistributedValues):
        return [part.handle for part in variable.values]
    return [getattr(variable, "handle", variable)]


def _of(handle: Any) -> Lineage:
    if id(handle) not in _lineages:
        _lineages[id(handle)] = Lineage(handle)
        weakref.finalize(handle, _lineages.pop, id(handle), None).atexit = False
    return _lineages[id(handle)]


def _type_of(handle: Any) -> tuple[tf.DType, tuple] | None:
    """Returns type and shape of a floating-point variable; None if `handle` is another's."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    shape = tf.TensorShape(data.shape_and_type[0].shape)
    if not dtype.is_floating or not shape.is_fully_defined():
        return None
    return dtype, tuple(shape)
