"""Operations that move entries: reshapes, transposes, slices, concatenations, gathers."""

import math

import numpy as np
import tensorflow as tf

from tfdp.clipping.rows import mixes, transfers, unproven
from tfdp.clipping.states import BatchSize, Filled, Public, Rows, State
from tfdp.clipping.transfers.common import aligned, axes_of, moved, of_rows


@of_rows("Reshape")
def reshape(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Reshape keeps the order in memory, in which the examples lie one after the other."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    if not new.rank:
        return unproven(op, "its result is a scalar, or of unknown rank")
    if rows.interleaved or any(d != 1 for d in old[: rows.axis]):
        return unproven(op, "the examples do not lie one after the other")
    known = inputs[1].values if isinstance(inputs[1], BatchSize | Public) else None
    known = known or (None,) * new.rank
    dims = [k if d is None else d for d, k in zip(new, known, strict=True)]
    axis = 0
    if old[rows.axis] != 1:  # Otherwise the batch is a single row, and any axis would do.
        axis = next((a for a, d in enumerate(dims) if d != 1), new.rank - 1)
    lead = dims[axis]
    if isinstance(lead, Rows):
        return Rows(axis, lead.each)
    old_rest = [d for d in old[rows.axis + 1 :] if d is not None]
    new_rest = [d for d in dims[axis + 1 :] if isinstance(d, int)]
    static = len(old_rest) == old.rank - rows.axis - 1 and len(new_rest) == new.rank - axis - 1
    if static and rows.each is not None:
        each, remainder = divmod(rows.each * math.prod(old_rest), math.prod(new_rest))
        if remainder:
            return unproven(op, "a row of its result holds parts of several examples")
        return Rows(axis, each)
    if len(new_rest) == new.rank - axis - 1 and _is_suffix(new_rest, old[rows.axis + 1 :]):
        same = len(new_rest) == old.rank - rows.axis - 1
        return Rows(axis, rows.each if same else None)
    return unproven(op, f"from shape {old} to {new}, the rows of the examples are not known")


def _is_suffix(short: list[int], shape: tf.TensorShape) -> bool:
    return len(short) <= shape.rank and shape[shape.rank - len(short) :].as_list() == short


@of_rows("ExpandDims")
def expand_dims(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """One more axis, of length 1."""
    axes = axes_of(op, 1, op.inputs[0].shape.rank + 1)
    if axes is None:
        return unproven(op, "the axis is not static")
    return moved(rows, axes[0] <= rows.axis)


@of_rows("Squeeze")
def squeeze(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Fewer axes of length 1."""
    shape = op.inputs[0].shape
    axes = [axis % shape.rank for axis in op.get_attr("squeeze_dims")]
    if not axes:
        if not shape.is_fully_defined():
            return unproven(op, "the axes are not static")
        axes = [a for a, d in enumerate(shape) if d == 1]
    if rows.axis in axes:
        return unproven(op, "it removes the axis of the examples")
    return moved(rows, -sum(a < rows.axis for a in axes))


@of_rows("Transpose")
def transpose(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Axes in another order."""
    order = tf.get_static_value(op.inputs[1])
    if order is None and isinstance(inputs[1], Public) and inputs[1].values is not None:
        order = inputs[1].values
    if order is None:
        return unproven(op, "the order of the axes is not static")
    return moved(rows, list(order).index(rows.axis) - rows.axis)


@transfers("Pack")
def pack(op: tf.Operation, inputs: list[State]) -> State:
    """Tensors along a new axis."""
    state = aligned(op, inputs, op.inputs[0].shape.rank)
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    return moved(state, axis <= state.axis) if isinstance(state, Rows) else state


@of_rows("Unpack")
def unpack(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """The slices along another axis."""
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    if axis == rows.axis:
        raise mixes(op, "it takes the batch apart")
    return moved(rows, -(axis < rows.axis))


@of_rows("SplitV")
def split_v(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Pieces along another axis."""
    return _split(op, rows, axes_of(op, 2, op.inputs[0].shape.rank))


@of_rows("Split", index=1)
def split(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Equal pieces along another axis."""
    return _split(op, rows, axes_of(op, 0, op.inputs[1].shape.rank))


def _split(op: tf.Operation, rows: Rows, axes: list[int] | None) -> State:
    if axes is None:
        return unproven(op, "the axis is not static")
    if rows.axis in axes:
        raise mixes(op, "it takes the batch apart")
    return rows


@transfers("ConcatV2")
def concatenate(op: tf.Operation, inputs: list[State]) -> State:
    """Tensors one after the other, along another axis."""
    rank = op.outputs[0].shape.rank
    axes = axes_of(op, len(op.inputs) - 1, rank) if rank else None
    states = {state for state in inputs[:-1] if not isinstance(state, Filled)}
    rows = states.pop() if len(states) == 1 else None
    if axes is None or not isinstance(rows, Rows):
        return unproven(op, "its inputs hold the examples differently, or the axis is not static")
    if rows.axis in axes:
        return unproven(op, "it concatenates along the batch")
    return rows


@of_rows("StridedSlice")
def strided_slice(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Slices of other axes than that of the examples, which is taken whole."""
    strides = tf.get_static_value(op.inputs[3])
    if strides is None:
        return unproven(op, "what it slices is not static")
    mask = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rank = op.inputs[0].shape.rank
    named = sum(not (mask["new_axis"] | mask["ellipsis"]) >> i & 1 for i in range(len(strides)))
    axis = place = 0
    for i in range(len(strides)):
        bit = 1 << i
        if axis > rows.axis:
            break
        if mask["ellipsis"] & bit:
            axis, place = axis + rank - named, place + rank - named
        elif mask["new_axis"] & bit:
            place += 1
        elif axis == rows.axis:
            if not _takes_whole_axis(op, i, mask, strides[i]):
                raise mixes(op, "it takes some rows of the batch")
            return moved(rows, place - rows.axis)
        else:
            axis, place = axis + 1, place + (0 if mask["shrink_axis"] & bit else 1)
    return moved(rows, place - axis)


def _takes_whole_axis(op: tf.Operation, i: int, mask: dict[str, int], stride: int) -> bool:
    begin = tf.get_static_value(op.inputs[1])
    starts = mask["begin"] >> i & 1 or (begin is not None and begin[i] == 0)
    ends = mask["end"] >> i & 1
    return bool(starts and ends and stride == 1 and not mask["shrink_axis"] >> i & 1)


@of_rows("Slice")
def slice_(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """A slice of other axes than that of the examples."""
    begin, size = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
    if begin is None or size is None:
        return unproven(op, "what it slices is not static")
    if begin[rows.axis] != 0 or size[rows.axis] not in (-1, op.inputs[0].shape[rows.axis]):
        raise mixes(op, "it takes some rows of the batch")
    return rows


@of_rows("Pad", "PadV2", "MirrorPad", keeps_filled=False)
def pad(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Padding of other axes than that of the examples."""
    amounts = tf.get_static_value(op.inputs[1])
    if amounts is None or any(amounts[rows.axis]):
        return unproven(op, "it may pad the batch")
    return rows


@of_rows("Tile")
def tile(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Repetition along other axes than that of the examples."""
    times = tf.get_static_value(op.inputs[1])
    if times is None or times[rows.axis] != 1:
        return unproven(op, "it may repeat the batch")
    return rows


@of_rows("BroadcastTo")
def broadcast_to(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Repetition along axes of length 1."""
    shape = inputs[1]
    axis = rows.axis + op.outputs[0].shape.rank - op.inputs[0].shape.rank
    values = shape.values if isinstance(shape, BatchSize | Public) else None
    if values is None or not isinstance(values[axis], Rows):
        return unproven(op, "it may repeat the batch")
    return moved(rows, axis - rows.axis)


@of_rows("OneHot", keeps_filled=False)
def one_hot(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Unit vectors along a new axis."""
    axis = op.get_attr("axis") % (op.inputs[0].shape.rank + 1)
    return moved(rows, axis <= rows.axis)


@transfers("GatherV2")
def gather(op: tf.Operation, inputs: list[State]) -> State:
    """Rows of a public table; or entries along another axis than that of the examples."""
    params, indices = inputs[0], inputs[1]
    rank, axis = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[2])
    index_rank = op.inputs[1].shape.rank
    if rank is None or axis is None or index_rank is None:
        return unproven(op, "its axis is not static")
    axis, batch_dims = int(axis) % rank, op.get_attr("batch_dims") % max(1, index_rank)
    if isinstance(params, Public) and isinstance(indices, Rows) and batch_dims == 0:
        return moved(indices, axis)
    if not isinstance(params, Rows):
        return unproven(op, "what it gathers from is not proven")
    if batch_dims > params.axis:
        return params if indices == params else unproven(op, "it may gather from other examples")
    if params.axis == axis:
        raise mixes(op, "it gathers rows of the batch")
    if not isinstance(indices, Public):
        return unproven(op, "it may gather from other examples")
    return moved(params, index_rank - batch_dims - 1 if axis < params.axis else 0)


@transfers("ResourceGather")
def resource_gather(op: tf.Operation, inputs: list[State]) -> State:
    """Rows of a variable."""
    if isinstance(inputs[1], Rows) and op.get_attr("batch_dims") == 0:
        return inputs[1]
    return unproven(op, "its indices do not hold the examples")


@of_rows("SpaceToBatchND", "BatchToSpaceND", keeps_filled=False)
def space_and_batch(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Pixels become rows, and back: how dilated convolutions are computed."""
    block = tf.get_static_value(op.inputs[1])
    size = int(np.prod(block)) if block is not None else 0
    inside = Rows(0, size, interleaved=size > 1)
    if op.type == "SpaceToBatchND" and rows == Rows() and size:
        return inside
    if op.type == "BatchToSpaceND" and rows == inside:
        return Rows()
    return unproven(op, "what it moves is not proven")
