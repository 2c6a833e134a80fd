"""Record of which private optimizers have changed which variables of this process.

A release is a fact about variables, not about the optimizer object that made it: `compile` with a
new optimizer, a second optimizer, or a copy of a model do not undo it. So every variable that a
private optimizer trains is recorded here for as long as it exists, with the releases that went into
it. An optimizer's ledger covers those of all variables that it trains or that its loss reads.

Values may outlive their variable. Whenever one of these variables is read outside of a graph (by
`get_weights`, `numpy`, a checkpoint, `save`, ...), a hash of its values is noted, with what they
had cost until then. A variable that gets such values, also in another floating-point type, or has
them when it is first trained, read by a loss or asked about, has cost what they had. Files hold the
hashes of the values in them: see `saved_lineage`.

Found by this: optimizers that follow each other or alternate, frozen layers, copies, weights of
earlier steps, and files that tfdp has seen written and read.

What such a variable gets from other code, such as training on public data, has cost what it had
before.

Not found: values in other variables that were computed from trained ones (averages, rounded or
pruned weights, parts of a variable), except by Keras's `quantize`; one round number; copies that a
`tf.function` made of a variable which was trained further before anybody looked; weights that came
by other files, such as NumPy's; and data made by a privately trained model. Give their ledger as
`prior`.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfdp.base.tf import variable_access
from tfdp.step import known_values
from tfdp.step.record import record_table


class Lineage:
    """Lineage of one variable: what went into it.

    Attributes:
      records: The records of the optimizers that train it.
      past: Rows of what its values had cost when it got them.
    """

    def __init__(self, handle: Any):
        self._handle = weakref.ref(handle)
        self.kind = _type_of(handle)
        self.records: list[Any] = []
        self.past: list[np.ndarray] = []
        self._noted: Any = None
        self._recognised: Any = None

    @property
    def was_trained(self) -> bool:
        """Returns whether an optimizer trains it, or its values have cost something."""
        return bool(self.past or self.records)

    def rows(self) -> list[np.ndarray]:
        """Returns tables of all releases that went into the variable."""
        return [*self.past, *(table for r in connected(self.records) for table in r.tables())]

    def cost(self, releases: "Releases | None" = None) -> np.ndarray:
        """Returns the rows of `rows` that count anything, `[rows, COLUMNS]`.

        Args:
          releases: What its records say, if they have been read.
        """
        releases = releases or Releases(self.records)
        rows = record_table.union([*self.past, releases.rows])
        return rows[rows[:, record_table.COUNTS].any(axis=1)]

    def value(self) -> tf.Tensor | None:
        """Returns the values; None if there are none, or they are no real numbers."""
        handle = self._handle()
        if handle is None or self.kind is None:
            return None
        with tf.init_scope():
            if not tf.raw_ops.VarIsInitializedOp(resource=handle):
                return None
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.kind[0])

    def inherit(self, rows: np.ndarray, releases: "Releases | None" = None) -> None:
        """Takes over the cost of values that the variable has got; for `releases` see `cost`."""
        known = {row[record_table.UID]: row for row in self.cost(releases)}
        counts = record_table.COUNTS
        new = [
            row
            for row in rows
            if row[record_table.UID] not in known
            or np.any(row[counts] > known[row[record_table.UID]][counts])
        ]
        if new:
            self.past = [record_table.union([*self.past, np.array(new)])]
            changed()

    def note(
        self, values: tf.Tensor, hashed: int | None, releases: "Releases | None" = None
    ) -> None:
        """Notes which values the variable has, and what they have cost.

        Args:
          values: They.
          hashed: Their `digest`.
          releases: See `cost`. They must have been read after the values: a thread may take a step
            meanwhile.
        """
        if not self.was_trained:
            return
        releases = releases or Releases(self.records)
        # Values may change without a step of ours, and a thread may read them before a step ends.
        now = hashed, releases.counts
        if now == self._recognised or (_changes, now) == self._noted:
            return
        # Under a test seed, equal values may be those of a repeated training.
        if self.past or releases.hidden:
            known.note(known_values.digests(values), self.cost(releases))
        self._noted = _changes, now

    def recognised(self, hashed: int | None) -> None:
        """Says that it is noted already what the variable's values have cost.

        Args:
          hashed: Their `digest`.
        """
        self._recognised = hashed, Releases(self.records).counts


class Releases:
    """Releases that records state; each record is read once, for all its variables.

    Args:
      records: The records.
    """

    def __init__(self, records: Iterable[Any]):
        self._records = list(records)

    @functools.cached_property
    def counts(self) -> tuple[bytes, ...]:
        """What changes with each step that may have changed the values."""
        return tuple(record.own_counts() for record in connected(self._records))

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """All releases that went into the values, `[rows, COLUMNS]`."""
        tables = (table for record in connected(self._records) for table in record.tables())
        return record_table.union(tables)

    @functools.cached_property
    def hidden(self) -> bool:
        """Whether there are any with noise that nobody knows."""
        return any(record.has_steps() and not record.fixed_seed for record in self._records)


_lineages: dict[int, Lineage] = {}
known = known_values.KnownValues()
_changes = 0
_count_of_changes = itertools.count(1)


def changed() -> None:
    """Says that other releases are known of than before."""
    global _changes
    _changes = next(_count_of_changes)


def is_any_known() -> bool:
    """Returns whether any values of this process have cost something, or are being trained."""
    return bool(known) or any(lineage.was_trained for lineage in list(_lineages.values()))


def of(variables: Iterable[Any]) -> list[Lineage]:
    """Returns the lineages of variables, or of their handles; looks for originals of copies."""
    handles = [handle for variable in variables for handle in _handles(variable)]
    found = [_of(handle) for handle in handles if _type_of(handle) is not None]
    # Includes originals that no one has read since they were trained. The records are read after
    # all values: then they count at least what the values have cost.
    trained = [lineage for lineage in list(_lineages.values()) if lineage.was_trained]
    looked_at = {id(lineage): lineage for lineage in [*found, *trained]}
    values = {
        key: value for key, lineage in looked_at.items() if (value := lineage.value()) is not None
    }
    hashes = {key: known_values.digest(value) for key, value in values.items()}
    releases: dict[tuple[int, ...], Releases] = {}
    of_each = {}
    for key in values:
        records = looked_at[key].records
        alike = tuple(map(id, records))
        of_each[key] = releases.setdefault(alike, Releases(records))
        looked_at[key].note(values[key], hashes[key], of_each[key])
    for key in map(id, found):
        if (hashed := hashes.get(key)) is not None:
            if (rows := known.rows_of(hashed)) is not None:
                looked_at[key].inherit(rows, of_each[key])
            elif not len(looked_at[key].cost(of_each[key])):
                known.note_free(hashed)
    return found


# Reads and writes outside of graphs.


# Hashes of values, none of a round number, and rows of what they have cost, if anything.
Read = tuple[list[int], np.ndarray | None]


class _Derivations(threading.local):
    """What is being computed from variables in a thread: one entry each, the innermost last."""

    def __init__(self) -> None:
        self.reads: list[list[Read]] = []
        self.inherited: list[bool] = []


_derivations = _Derivations()


@contextlib.contextmanager
def deriving(
    inherited: bool = False,
) -> Iterator[list[Read]]:
    """Collects the variables that are read within, outside of graphs, in this thread.

    Args:
      inherited: Whether the variables that are assigned within have cost what these have.

    Yields:
      A list, to which each read adds hashes of the values, and rows of what they have cost.
    """
    _derivations.reads.append([])
    _derivations.inherited.append(inherited)
    try:
        yield _derivations.reads[-1]
    finally:
        reads = _derivations.reads.pop()
        if _derivations.inherited.pop() and any(_derivations.inherited):
            _derivations.reads[-1].extend(reads)


def cost_of(handle: Any, values: Any) -> Read:
    """Returns hashes of the values of a variable, and rows of what they have cost.

    Args:
      handle: Handle of the variable.
      values: Its values.
    """
    hashes = known_values.digests(values)
    hashed = hashes[0] if hashes else None
    lineage = _lineages.get(id(handle))
    rows = known.rows_of(hashed)
    if lineage is not None and not known.is_free(hashed) and len(own := lineage.cost()):
        rows = own if rows is None else record_table.union([own, rows])
    return hashes, rows


def cost_of_variable(variable: Any) -> list[Read]:
    """Returns what `cost_of` says of the values of a variable, on each device."""
    found = []
    for handle in _handles(variable):
        if _type_of(handle) is not None and (values := Lineage(handle).value()) is not None:
            found.append(cost_of(handle, values))
    return found


def derived(values: Any) -> list[Read]:
    """Returns what values have cost that were computed in the innermost `deriving`.

    Args:
      values: A tensor or an array.

    Returns:
      Hashes and rows, as `deriving` yields them; nothing if they are those of a variable.
    """
    if not _derivations.reads or not tf.as_dtype(values.dtype).is_floating:
        return []
    reads = _derivations.reads[-1]
    tables = [rows for _, rows in reads if rows is not None]
    if not tables or (hashes := known_values.digests(values)) in [one for one, _ in reads]:
        return []
    return [(hashes, record_table.union(tables))]


def _on_read(handle: Any, values: tf.Tensor) -> None:
    lineage = _lineages.get(id(handle))
    if lineage is not None and lineage.kind is not None and lineage.was_trained:
        lineage.note(values, known_values.digest(values))
    if _derivations.reads and _type_of(handle) is not None:
        _derivations.reads[-1].append(cost_of(handle, values))


def _on_write(handle: Any) -> None:
    inherited = any(_derivations.inherited)
    if not (known or inherited) or (kind := _type_of(handle)) is None:
        return
    hashed = known_values.digest(tf.raw_ops.ReadVariableOp(resource=handle, dtype=kind[0]))
    if (rows := known.rows_of(hashed)) is not None:
        _of(handle).inherit(rows)
        _of(handle).recognised(hashed)
    if inherited:
        reads = [rows for one in _derivations.reads for _, rows in one]
        found = [rows for rows in reads if rows is not None]
        _of(handle).inherit(record_table.union(found))


variable_access.notify(_on_read, _on_write)


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
    if isinstance(inner, tf.Variable):  # A variable of Keras 3.
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
