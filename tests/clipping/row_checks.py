"""Checks that what is proven of a graph holds when it is evaluated."""

import numpy as np
import tensorflow as tf

from tfdp.clipping.loss_graph import clamps, loss_reader
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import (
    BatchSize,
    Public,
    Ragged,
    Rows,
    Statistics,
    Unproven,
)

N = 4  # Rows of the batch, where it is left open.
# Shapes of vectors, matrices, sequences and images.
V, M, T, I = (None, 6), (None, 2, 3), (None, None, 6), (None, 4, 4, 2)  # noqa: E741


def integers(x):
    return tf.cast(x > 0, tf.int32)


def keeps(op, inputs):
    """Transfer function that claims that outputs have the rows of the first input that has any."""
    return next(state for state in inputs if isinstance(state, Rows))


class Disproved(AssertionError):
    """A state that does not hold."""


class Traced:
    """A function of a batch, what is proven of it, and whether that holds."""

    def __init__(self, function, *shapes):
        specs = [tf.TensorSpec(shape) for shape in shapes]

        def run(*batch):
            outputs = tf.nest.flatten(function(*batch))
            clamps.resolve(outputs)
            operations = operations_of(outputs, batch)
            analysis = RowAnalysis(operations, list(batch))
            self.state = analysis.state(outputs[0])
            self.random = any(op.op_def.is_stateful and "Random" in op.type for op in operations)
            found = [t for op in operations for t in op.outputs if t.dtype.is_numpy_compatible]
            self.states = {t.name: analysis.state(t) for t in found if t.dtype.name != "resource"}
            claims = [t for t in found if not isinstance(analysis.state(t), Unproven | Statistics)]
            return {t.name: t for t in claims}

        self._run = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
        self.open = all(shape[0] is None for shape in shapes)
        self.shapes = shapes

    def check(self, seed: int = 0, count: int | None = None) -> None:
        random = np.random.default_rng(seed)
        count = count or self.shapes[0][0] or N
        shapes = [[count, *[5 if d is None else d for d in shape[1:]]] for shape in self.shapes]
        data, other = ([2 * random.normal(size=shape) for shape in shapes] for _ in range(2))
        values = self.values(data)
        order = np.roll(np.arange(count), 1)
        self._compare(values, self.values([d[order] for d in data]), order, np.arange(count))
        for row in {0, count // 2, count - 1}:
            rest = np.arange(count) != row
            changed = [np.copy(d) for d in data]
            for d, o in zip(changed, other, strict=True):
                d[row] = o[row]
            self._compare(values, self.values(changed), rest, rest)
            if self.open and count > 1:
                less = self.values([d[rest] for d in data])
                self._compare(values, less, rest, np.ones(count - 1, bool), sizes_differ=True)

    def values(self, data):
        return {
            k: np.asarray(v.numpy())
            for k, v in self._run(*[tf.constant(d, "float32") for d in data]).items()
        }

    def _compare(self, before, after, rows_before, rows_after, sizes_differ=False):
        for name, a in before.items():
            b, state = after[name], self.states[name]
            if isinstance(state, Ragged):
                a = joined(self._ragged(before, name, len(rows_before)), rows_before)
                b = joined(self._ragged(after, name, len(rows_after)), rows_after)
            elif isinstance(state, Rows):
                a = of_examples(a, state, len(rows_before))[rows_before]
                b = of_examples(b, state, len(rows_after))[rows_after]
            elif isinstance(state, BatchSize) and sizes_differ:
                continue
            if isinstance(state, Public) and not may_be(state.values, a):
                raise Disproved(f"{name} is {a}, not {state}")
            if a.shape != b.shape or not (self.random or almost_equal(a, b)):
                raise Disproved(f"{name} is not {state}")

    def _ragged(self, values, name, count):
        """The entries of each example in a part of a ragged tensor: `count` arrays."""
        state, array = self.states[name], values[name]
        if state.part == "shape":
            if array[0] != count:
                raise Disproved(f"{name} is {array} for {count} examples")
            return [array[:0]] * count
        if state.part == "values":
            of_source = [Ragged(part, state.source) for part in ("ids", "indices", "splits")]
            name = next(n for n, its in self.states.items() if its in of_source)
        lengths = row_lengths(self.states[name].part, values[name], count)
        if state.part == "values":
            if len(array) != sum(lengths):
                raise Disproved(f"{len(array)} values for rows of {lengths}: not {state}")
            return np.split(array, np.cumsum(lengths)[:-1])
        return [np.array([length]) for length in lengths]


def row_lengths(part, array, count):
    """Returns the number of entries of each of `count` examples, by a part of a ragged tensor."""
    if part in ("ids", "indices"):
        ids = array[:, 0] if part == "indices" else array
        if list(ids) != sorted(ids) or not all(0 <= i < count for i in ids):
            raise Disproved(f"{array} are no {part} of {count} rows")
        return [np.sum(ids == i) for i in range(count)]
    start = {"lengths": None, "ends": [0], "splits": []}[part]
    lengths = list(array if start is None else np.diff([*start, *array]))
    if len(lengths) != count or (part == "splits" and array[0] != 0):
        raise Disproved(f"{array} are no {part} of {count} rows")
    return lengths


def joined(arrays, rows):
    found = [arrays[i] for i in np.arange(len(arrays))[rows]]
    return np.concatenate(found) if found else np.zeros(0)


def may_be(values, array):
    """Returns whether what is known of the entries of a public array is true."""
    if values is None:
        return True
    entries = np.ravel(array)
    pairs = zip(values, entries, strict=False)
    return len(values) == len(entries) and all(isinstance(v, Public) or v == e for v, e in pairs)


def operations_of(outputs, batch):
    graph = outputs[0].graph
    within = {op.name for op in loss_reader.cone(outputs, {t.ref() for t in batch})[0]}
    return [op for op in graph.get_operations() if op.name in within]


def of_examples(values, state, count):
    """`[count, each, ...]` of an array that holds examples so."""
    if state.axis >= values.ndim:
        raise Disproved(f"an array of {values.ndim} axes is not {state}")
    values = np.moveaxis(values, state.axis, 0)
    each, remainder = divmod(len(values), count)
    if remainder or state.each not in (None, each):
        raise Disproved(f"{len(values)} rows for {count} examples: not {state}")
    if state.interleaved:
        return values.reshape(each, count, *values.shape[1:]).swapaxes(0, 1)
    return values.reshape(count, each, *values.shape[1:])


def almost_equal(a, b):
    if a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
