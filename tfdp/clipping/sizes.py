"""Follows the sizes of tensors through the operations that compute shapes."""

import math
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp.clipping.states import Rows

# A number; the length of an axis that holds examples so; or unknown.
Size: TypeAlias = int | Rows | None
Sizes: TypeAlias = tuple[Size, ...] | None


def static_values(tensor: tf.Tensor) -> Sizes:
    """The entries of a constant scalar or vector of integers."""
    value = tf.get_static_value(tensor)
    if (
        value is None
        or np.ndim(value) > 1
        or not np.issubdtype(np.asarray(value).dtype, np.integer)
    ):
        return None
    return tuple(int(entry) for entry in np.ravel(value))


def shape_of(tensor: tf.Tensor, rows: Rows | None) -> Sizes:
    """The shape of a tensor that holds examples at `rows`."""
    if tensor.shape.rank is None:
        return None
    sizes: list[Size] = tensor.shape.as_list()
    if rows is not None:
        sizes[rows.axis] = rows if rows.leads else None
    return tuple(sizes)


def compute(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    """What an operation makes of sizes; None where that is not known."""
    function = _FUNCTIONS.get(op.type)
    if function is None or inputs[0] is None:
        return None
    return function(op, inputs)


def _same(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    return inputs[0]


def _concatenate(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    pieces = inputs[:-1] if op.type == "ConcatV2" else inputs
    if any(piece is None for piece in pieces):
        return None
    return tuple(size for piece in pieces for size in piece or ())


def _gather(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    sizes, indices = inputs[0], inputs[1]
    if sizes is None or indices is None or any(not isinstance(i, int) for i in indices):
        return None
    return tuple(sizes[i] for i in indices if isinstance(i, int))


def _slice(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    sizes, *limits = inputs
    numbers = [limit[0] if limit and len(limit) == 1 else None for limit in limits]
    begin, end, stride = (n if isinstance(n, int) else None for n in numbers)
    if sizes is None or begin is None or end is None or stride is None:
        return None
    if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
        return None
    if op.get_attr("shrink_axis_mask"):
        return (sizes[begin],)
    first = None if op.get_attr("begin_mask") else begin
    last = None if op.get_attr("end_mask") else end
    return sizes[first:last:stride]


def _multiply(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    factors = inputs[0] if op.type == "Prod" else [size for i in inputs for size in (i or (None,))]
    if op.type == "Mul" and any(i is None or len(i) != 1 for i in inputs):
        return None
    numbers = [f for f in factors or () if isinstance(f, int)]
    others = [f for f in factors or () if not isinstance(f, int)]
    if not others:
        return (math.prod(numbers),)
    if len(others) > 1 or not isinstance(others[0], Rows) or others[0].each is None:
        return (None,)
    return (Rows(others[0].axis, others[0].each * math.prod(numbers)),)


def _divide(op: tf.Operation, inputs: list[Sizes]) -> Sizes:
    numbers = [i[0] if i is not None and len(i) == 1 else None for i in inputs]
    whole = [number for number in numbers if isinstance(number, int)]
    return (whole[0] // whole[1],) if len(whole) == 2 and whole[1] else None


_FUNCTIONS = {
    "Cast": _same,
    "ConcatV2": _concatenate,
    "FloorDiv": _divide,
    "GatherV2": _gather,
    "Identity": _same,
    "Mul": _multiply,
    "Pack": _concatenate,
    "Prod": _multiply,
    "Reshape": _same,
    "StridedSlice": _slice,
}
