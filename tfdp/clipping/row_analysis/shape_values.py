"""Sizes of tensors, followed through the operations that compute shapes."""

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfdp.clipping.row_analysis.states import BatchSize, Public, Rows, Size, Sizes, State


def known(tensor: tf.Tensor, state: State) -> Sizes:
    """Returns what is known of the entries of a scalar or a vector of integers.

    Also of paddings, `[axes, 2]`, and their columns, `[axes, 1]`: axis by axis.
    """
    if not isinstance(state, BatchSize | Public):
        return None
    if state.values is not None:
        return state.values
    if not isinstance(state, Public) or not tensor.dtype.is_integer:
        return None
    if not (_is_short(tensor) or _is_table(tensor)):
        return None
    value = tf.get_static_value(tensor)
    if value is not None:
        return tuple(int(entry) for entry in np.ravel(value))
    count = tensor.shape.num_elements()
    return None if count is None else (Public(),) * count


def _is_short(tensor: tf.Tensor) -> bool:
    """Returns whether it may be a shape, or one size: a scalar or a short vector."""
    rank = tensor.shape.rank
    return rank == 0 or (rank == 1 and (tensor.shape[0] or 0) <= 16)


def _is_table(tensor: tf.Tensor) -> bool:
    """Returns whether it may be paddings, or a column of them: `[axes, 2]` or `[axes, 1]`."""
    shape = tensor.shape
    return shape.rank == 2 and shape[1] in (1, 2) and (shape[0] or 17) <= 16


def shape_of(tensor: tf.Tensor, state: State) -> Sizes:
    """Returns the shape of a tensor whose `state` is known."""
    if tensor.shape.rank is None:
        return None
    other = Public() if isinstance(state, Rows | Public) else None
    sizes: list[Size] = [other if size is None else size for size in tensor.shape]
    if isinstance(state, Rows):
        sizes[state.axis] = None if state.interleaved else Rows(0, state.each)
    return tuple(sizes)


def are_public(sizes: Iterable[Size]) -> bool:
    """Returns whether no size depends on the number of examples."""
    return all(isinstance(size, int | Public) for size in sizes)


def product(sizes: Iterable[Size]) -> Size:
    """Returns the product of sizes."""
    number: int = 1
    rows: Rows | None = None
    public = False
    for size in sizes:
        if isinstance(size, int):
            number *= size
        elif isinstance(size, Public):
            public = True
        elif size is None or rows is not None:
            return None
        else:
            rows = size
    if rows is None:
        return Public() if public else number
    if number < 1:
        return None
    return Rows(0, None if public or rows.each is None else rows.each * number)


def compute(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    """Returns what an operation makes of sizes; None where that is not known."""
    # Takes integers of 64 and 32 bits alone, which no shape overflows, and short tensors alone:
    # most matrices have no `values`.
    tensors = [*op.inputs, *op.outputs]
    function = (_OF_TABLES if any(map(_is_table, tensors)) else _FUNCTIONS).get(op.type)
    if function is None or any(t.dtype not in (tf.int32, tf.int64) for t in tensors):
        return None
    if not all(_is_short(t) or _is_table(t) for t in tensors):
        return None
    result = function(op, inputs)
    fits = result is not None and op.outputs[0].shape.num_elements() == len(result)
    return result if fits else None


def offsets(inputs: list[Sizes]) -> list[Sizes]:
    """Returns where the parts of a concatenation begin, from its axis and their shapes."""
    (axis,), shapes = inputs[0] or (None,), inputs[1:]
    result: list[Sizes] = []
    begin: int | None = 0
    for shape in shapes:
        if shape is None or not isinstance(axis, int) or begin is None:
            return [None] * len(shapes)
        result.append(tuple(begin if i == axis % len(shape) else 0 for i in range(len(shape))))
        length = shape[axis]
        begin = begin + length if isinstance(length, int) else None
    return result


def _same(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return inputs[0]


def _concatenate(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    result: list[Size] = []
    for piece in inputs[:-1] if op.type == "ConcatV2" else inputs:
        if piece is None:
            return None
        result.extend(piece)
    return tuple(result)


def _gather(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    sizes, indices = inputs[0], inputs[1]
    if sizes is None or indices is None:
        return None
    result: list[Size] = []
    for i in indices:
        if not isinstance(i, int) or not 0 <= i < len(sizes):
            return None
        result.append(sizes[i])
    return tuple(result)


def _slice(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    sizes, *limits = inputs
    numbers = [limit[0] if limit and len(limit) == 1 else None for limit in limits]
    begin, end, stride = (n if isinstance(n, int) else None for n in numbers)
    if sizes is None or begin is None or not stride:
        return None
    if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
        return None
    if op.get_attr("shrink_axis_mask"):
        return (sizes[begin],) if -len(sizes) <= begin < len(sizes) else None
    if end is None and not op.get_attr("end_mask"):
        return None
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return sizes[first:last:stride]


def _tf_slice(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    sizes, begin, size = (i or (None,) for i in inputs)
    if inputs[0] is None or not isinstance(begin[0], int) or not isinstance(size[0], int):
        return None
    return sizes[begin[0] :] if size[0] == -1 else sizes[begin[0] : begin[0] + size[0]]


def _multiply(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    factors = [inputs[0]] if op.type == "Prod" else inputs
    if op.type == "Mul" and any(i is None or len(i) != 1 for i in inputs):
        return None
    if any(i is None for i in factors):
        return None
    return (product(size for i in factors for size in i or ()),)


def _divide(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    numbers = [i[0] if i is not None and len(i) == 1 else None for i in inputs]
    whole = [number for number in numbers if isinstance(number, int)]
    return (whole[0] // whole[1],) if len(whole) == 2 and whole[1] else None


def _add(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return _entry_by_entry(inputs, lambda a, b: a + b)


def _subtract(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return _entry_by_entry(inputs, lambda a, b: a - b, equal=lambda rows: 0)


def _remainder(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return _entry_by_entry(inputs, lambda a, b: a % b if b else None)


def _larger(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return _entry_by_entry(inputs, max, equal=lambda rows: rows)


def _smaller(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return _entry_by_entry(inputs, min, equal=lambda rows: rows)


def _entry_by_entry(
    inputs: list[Sizes],
    function: Callable[[int, int], int | None],
    equal: Callable[[Rows], Size] = lambda rows: None,
) -> Sizes:
    """Returns a function of numbers at the same place, one of which may stand for all.

    Args:
      inputs: The sizes of both arguments.
      function: The function.
      equal: Its value for two lengths that are as many times as long as the batch.
    """
    first, second = inputs
    if first is None or second is None or not (first and second):
        return None
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        return None
    length = max(len(first), len(second))
    result: list[Size] = []
    for a, b in zip(first * (length // len(first)), second * (length // len(second)), strict=True):
        number: Size = None
        if isinstance(a, int) and isinstance(b, int):
            number = function(a, b)
        elif are_public((a, b)):
            number = Public()
        elif isinstance(a, Rows) and a == b and a.each is not None:
            number = equal(a)
        if number is None:
            return None
        result.append(number)
    return tuple(result)


def _columns_side_by_side(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    *pieces, axis = inputs
    if axis not in ((1,), (-1,)) or any(piece is None for piece in pieces):
        return None
    tables = zip(list(op.inputs)[:-1], pieces, strict=True)
    rows = [list(zip(*[iter(piece or ())] * t.shape[1], strict=True)) for t, piece in tables]
    return tuple(size for row in zip(*rows, strict=True) for part in row for size in part)


def _rows_of_table(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return None if op.get_attr("axis") != 0 else _concatenate(op, inputs)


def _part_of_table(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    table, begin = inputs[:2]
    whole, shape = op.inputs[0].shape, op.outputs[0].shape
    if table is None or begin is None or whole.rank != 2 or not shape.is_fully_defined():
        return None
    first, left = begin
    if not isinstance(first, int) or not isinstance(left, int):
        return None
    return tuple(
        table[row * whole[1] + column]
        for row in range(first, first + shape[0])
        for column in range(left, left + shape[1])
    )


def _stitch(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    half = len(inputs) // 2
    entries: dict[int, Size] = {}
    for indices, values in zip(inputs[:half], inputs[half:], strict=True):
        if indices is None or values is None or len(indices) != len(values):
            return None
        for index, value in zip(indices, values, strict=True):
            if not isinstance(index, int):
                return None
            entries[index] = value  # Later ones replace earlier ones.
    if sorted(entries) != list(range(len(entries))):
        return None
    return tuple(entries[index] for index in range(len(entries)))


_FUNCTIONS = {
    "AddV2": _add,
    "Cast": _same,
    "ConcatV2": _concatenate,
    "DynamicStitch": _stitch,
    "FloorDiv": _divide,
    "FloorMod": _remainder,
    "GatherV2": _gather,
    "Identity": _same,
    "Maximum": _larger,
    "Minimum": _smaller,
    "Mul": _multiply,
    "Pack": _concatenate,
    "Prod": _multiply,
    "Reshape": _same,
    "Slice": _tf_slice,
    "StridedSlice": _slice,
    "Sub": _subtract,
}
# Functions for operations on paddings, some of whose inputs or outputs are tables.
_OF_TABLES: dict[str, Callable[[tf.Operation, list[Sizes]], Sizes]] = {
    "ConcatV2": _columns_side_by_side,
    "Identity": _same,
    "Pack": _rows_of_table,
    "Reshape": _same,
    "Slice": _part_of_table,
}
