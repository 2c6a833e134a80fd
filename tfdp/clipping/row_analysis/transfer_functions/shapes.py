"""Operations that move entries: reshapes, transposes, slices, concatenations, gathers."""

import contextlib
import math

import numpy as np
import tensorflow as tf

from tfdp.clipping.row_analysis import shape_values
from tfdp.clipping.row_analysis.analysis import mixes, ragged_transfers, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, Size, State
from tfdp.clipping.row_analysis.transfer_functions.common import aligned, axes_of, moved, of_rows


@of_rows("Reshape", sized=True)
def reshape(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles a reshape, which keeps the order in memory; there examples lie one by one."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    if not new.rank:
        return unproven(op, "its result is a scalar, or of unknown rank")
    if rows.interleaved:
        return unproven(op, "the examples do not lie one after the other")
    known = shape_values.known(op.inputs[1], inputs[1]) or (None,) * new.rank
    # TensorFlow does not follow sizes as far: gradients are reshaped by its static shapes.
    op.outputs[0].set_shape([k if isinstance(k, int) and k != -1 else None for k in known])
    # A size of -1 is whatever is left.
    dims: list[Size] = [
        d if d is not None else None if k == -1 else k for d, k in zip(new, known, strict=True)
    ]
    start = _after_as_many(old[: rows.axis], dims)
    if start is None:
        return unproven(op, "the examples do not lie one after the other")
    axis = start
    if old[rows.axis] != 1:  # Otherwise the batch is a single row, and any axis would do.
        axis = next((a for a, d in enumerate(dims) if a >= start and d != 1), new.rank - 1)
    lead, rest = dims[axis], dims[axis + 1 :]
    if isinstance(lead, Rows):
        # The sizes of an example's part are public together; so each is, if all but one are.
        public = sum(not isinstance(d, int | Public) for d in rest) <= 1
        return Rows(axis, lead.each) if public else unproven(op, "sizes depend on the batch")
    return _rows_by_count(op, rows, axis, rest)


def _after_as_many(lead: tf.TensorShape, dims: list[Size]) -> int | None:
    """Returns the first axis that has as many entries in front of it as there are in `lead`."""
    if None in lead or 0 in lead:
        return None
    number, axis = lead.num_elements(), 0
    while number > 1:
        size = dims[axis] if axis < len(dims) else None
        if not isinstance(size, int) or size < 1 or number % size:
            return None
        number, axis = number // size, axis + 1
    return axis if axis < len(dims) else None


def _rows_by_count(op: tf.Operation, rows: Rows, axis: int, rest: list[Size]) -> State:
    """Handles a reshape by how many of the result's rows, of shape `rest`, an example makes."""
    old, new = op.inputs[0].shape, op.outputs[0].shape
    old_rest = [d for d in old[rows.axis + 1 :] if d is not None]
    new_rest = [d for d in rest if isinstance(d, int)]
    if old[rows.axis] is None and new[axis] is not None:
        # Not an error of TensorFlow's for other batches, if it has optimized the operation away.
        return unproven(op, "it is for batches of one size only")
    if len(new_rest) == len(rest) and 0 not in [*new_rest, *old_rest]:
        if len(old_rest) == old.rank - rows.axis - 1 and rows.each is not None:
            each, remainder = divmod(rows.each * math.prod(old_rest), math.prod(new_rest))
            if remainder:
                return unproven(op, "a row of its result holds parts of several examples")
            return Rows(axis, each)
        if _is_suffix(new_rest, old[rows.axis + 1 :]):
            same = len(new_rest) == old.rank - rows.axis - 1
            return Rows(axis, rows.each if same else None)
    return unproven(op, f"from shape {old} to {new}, the rows of the examples are not known")


def _is_suffix(short: list[int], shape: tf.TensorShape) -> bool:
    return len(short) <= shape.rank and shape[shape.rank - len(short) :].as_list() == short


@transfers("EnsureShape")
@ragged_transfers("EnsureShape")
def ensure_shape(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the same entries, of a shape that TensorFlow may not have known."""
    rank = op.outputs[0].shape.rank
    if rank is None or (isinstance(inputs[0], Rows) and inputs[0].axis >= rank):
        return unproven(op, "the rank of its result is unknown")
    return inputs[0]


@of_rows("ExpandDims")
def expand_dims(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles one more axis, of length 1."""
    axes = axes_of(op, 1, op.inputs[0].shape.rank + 1)
    if axes is None:
        return unproven(op, "the axis is not static")
    return moved(rows, axes[0] <= rows.axis)


@of_rows("Squeeze")
def squeeze(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles fewer axes of length 1."""
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
    """Handles axes in another order."""
    order = shape_values.known(op.inputs[1], inputs[1])
    if order is None or set(order) != set(range(len(order))):
        return unproven(op, "the order of the axes is not static")
    return moved(rows, order.index(rows.axis) - rows.axis)


@transfers("Pack")
def pack(op: tf.Operation, inputs: list[State]) -> State:
    """Handles tensors along a new axis."""
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return unproven(op, "the rank of an input is unknown")
    state = aligned(op, inputs, op.inputs[0].shape.rank)
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    return moved(state, axis <= state.axis) if isinstance(state, Rows) else state


@of_rows("Unpack")
def unpack(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Returns the slices along another axis."""
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    if axis == rows.axis:
        return _taken_apart(op)
    return moved(rows, -(axis < rows.axis))


@of_rows("SplitV")
def split_v(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Pieces along another axis."""
    return _split(op, rows, axes_of(op, 2, op.inputs[0].shape.rank))


@of_rows("Split", index=1)
def split(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles equal pieces along another axis."""
    return _split(op, rows, axes_of(op, 0, op.inputs[1].shape.rank))


def _split(op: tf.Operation, rows: Rows, axes: list[int] | None) -> State:
    if axes is None:
        return unproven(op, "the axis is not static")
    return _taken_apart(op) if rows.axis in axes else rows


def _taken_apart(op: tf.Operation) -> State:
    if len(op.outputs) > 1:
        raise mixes(op, "it takes the batch apart")
    return unproven(op, "it takes the batch apart, of which there is one part")


@transfers("ConcatV2")
def concatenate(op: tf.Operation, inputs: list[State]) -> State:
    """Handles tensors one after the other, along another axis."""
    rank = op.outputs[0].shape.rank
    axes = axes_of(op, len(op.inputs) - 1, rank) if rank else None
    if axes is None or any(tensor.shape.rank != rank for tensor in list(op.inputs)[:-1]):
        return unproven(op, "its axis is not static, or the rank of an input")
    state = aligned(op, inputs[:-1], rank)
    if isinstance(state, Rows) and state.axis in axes:
        return unproven(op, "it concatenates along the batch")
    return state


@of_rows("StridedSlice", sized=True)
def strided_slice(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Slices of other axes than that of the examples, which is taken whole."""
    return _sliced(op, rows, op.inputs[0].shape, inputs)


@of_rows("StridedSliceGrad", index=4, sized=True)
def strided_slice_grad(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles a slice that is put back, between zeros: of a gradient."""
    sizes = shape_values.known(op.inputs[0], inputs[0])
    if sizes is None or rows.interleaved or rows.each is None:
        return unproven(op, "what it puts back is not proven")
    shape = tf.TensorShape([d if isinstance(d, int) else None for d in sizes])
    length = op.inputs[4].shape[rows.axis]
    for axis, size in enumerate(sizes):
        others = [d for a, d in enumerate(sizes) if a != axis]
        as_long = size == Rows(0, rows.each) or (length is not None and size == length)
        if not as_long or not shape_values.are_public(others):
            continue
        before = Rows(axis, rows.each)
        with contextlib.suppress(ValueError):  # It would take rows of the batch.
            if _sliced(op, before, shape, inputs) == rows:
                return before
    return unproven(op, "where it puts the examples is not proven")


def _sliced(op: tf.Operation, rows: Rows, shape: tf.TensorShape, inputs: list[State]) -> State:
    """Returns the state of a slice of a tensor of some shape that holds the examples."""
    strides = tf.get_static_value(op.inputs[3])
    if strides is None:
        return unproven(op, "what it slices is not static")
    begin, end = (
        shape_values.known(op.inputs[i], inputs[i]) or (None,) * len(strides) for i in (1, 2)
    )
    mask = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rank = shape.rank
    named = sum(not (mask["new_axis"] | mask["ellipsis"]) >> i & 1 for i in range(len(strides)))
    axis = place = 0
    result = None
    for i in range(len(strides)):
        limits = [
            None if mask[name] >> i & 1 else (value,)
            for name, value in (("begin", begin[i]), ("end", end[i]))
        ]
        shrinks = bool(mask["shrink_axis"] >> i & 1)
        if mask["ellipsis"] >> i & 1:
            if axis <= rows.axis < axis + rank - named:
                result = place + rows.axis - axis
            axis, place = axis + rank - named, place + rank - named
        elif mask["new_axis"] >> i & 1:
            place += 1
        elif axis == rows.axis:
            length = shape[axis]
            if shrinks or strides[i] != 1 or not _is_whole(op, rows, length, *limits):
                return _some_rows(op, rows, length, limits[0], int(strides[i]), shrinks)
            result = place
            axis, place = axis + 1, place + 1
        else:
            if shrinks:  # The end does not matter, but the mask of the beginning does not either.
                limits = [(begin[i],)]
            if not shape_values.are_public(limit[0] for limit in limits if limit is not None):
                return unproven(op, "how much it takes may depend on the batch")
            axis, place = axis + 1, place + (not shrinks)
    return moved(rows, (place - axis) if result is None else result - rows.axis)


def _is_whole(
    op: tf.Operation,
    rows: Rows,
    length: int | None,
    begin: tuple[Size] | None,
    end: tuple[Size] | None,
) -> bool:
    """Returns whether a slice takes the whole axis of the examples; a limit of None is none."""
    if begin is not None and begin[0] != 0:
        return False
    if end is None:
        return True
    last = end[0]
    if isinstance(last, Rows):
        return last.each is not None and last.each == rows.each
    return isinstance(last, int) and length is not None and last >= length


def _some_rows(
    op: tf.Operation,
    rows: Rows,
    length: int | None,
    begin: tuple[Size] | None,
    stride: int,
    shrinks: bool,
) -> State:
    """Returns what becomes of a slice that may not take the whole axis of the examples."""
    starts_later = begin is not None and isinstance(begin[0], int) and begin[0] != 0
    if length != 1 and (shrinks or stride != 1 or starts_later):
        raise mixes(op, "it takes some rows of the batch")
    return unproven(op, "it may take some rows of the batch only")


@of_rows("Slice", sized=True)
def slice_(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Returns a slice of other axes than that of the examples."""
    begin, size = (shape_values.known(op.inputs[i], inputs[i]) for i in (1, 2))
    if begin is None or size is None or not shape_values.are_public(begin):
        return unproven(op, "what it slices is not static")
    length = op.inputs[0].shape[rows.axis]
    end = None if size[rows.axis] == -1 else (size[rows.axis],)
    if not _is_whole(op, rows, length, (begin[rows.axis],), end):
        return _some_rows(op, rows, length, (begin[rows.axis],), 1, False)
    if not shape_values.are_public(d for axis, d in enumerate(size) if axis != rows.axis):
        return unproven(op, "how much it takes may depend on the batch")
    return rows


@of_rows("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", sized=True)
def pad(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles padding of other axes than that of the examples, and what a gradient undoes of it."""
    amounts = shape_values.known(op.inputs[1], inputs[1])
    if amounts is None or amounts[2 * rows.axis : 2 * rows.axis + 2] != (0, 0):
        return unproven(op, "it may pad the batch")
    if not shape_values.are_public(amounts) or not all(isinstance(i, Public) for i in inputs[2:]):
        return unproven(op, "how it pads may depend on the batch")
    return rows


@of_rows("Tile", sized=True)
def tile(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles repetition along other axes than that of the examples."""
    times = shape_values.known(op.inputs[1], inputs[1])
    if times is None or times[rows.axis] != 1 or not shape_values.are_public(times):
        return unproven(op, "it may repeat the batch, or as often as the batch is long")
    return rows


@of_rows("BroadcastTo", sized=True)
def broadcast_to(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles repetition along axes of length 1."""
    shape = shape_values.known(op.inputs[1], inputs[1])
    if shape is None:
        return unproven(op, "it may repeat the batch")
    axis = rows.axis + len(shape) - op.inputs[0].shape.rank
    length = shape[axis]
    if isinstance(length, Rows):
        same = length.each is not None and length.each == rows.each
    else:
        same = isinstance(length, int) and length == op.inputs[0].shape[rows.axis]
    if not same or not shape_values.are_public([*shape[:axis], *shape[axis + 1 :]]):
        return unproven(op, "it may repeat the batch, or as often as the batch is long")
    return moved(rows, axis - rows.axis)


@of_rows("OneHot")
def one_hot(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles unit vectors along a new axis."""
    axis = op.get_attr("axis") % (op.inputs[0].shape.rank + 1)
    return moved(rows, axis <= rows.axis)


@transfers("GatherV2")
def gather(op: tf.Operation, inputs: list[State]) -> State:
    """Handles rows of a public table, or entries along an axis other than the examples'."""
    params, indices = inputs[0], inputs[1]
    rank, axis = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[2])
    index_rank = op.inputs[1].shape.rank
    if rank is None or axis is None or index_rank is None:
        return unproven(op, "its axis is not static")
    axis, batch_dims = int(axis) % rank, op.get_attr("batch_dims")
    batch_dims += index_rank if batch_dims < 0 else 0
    if isinstance(params, Public) and isinstance(indices, Rows) and batch_dims == 0:
        return moved(indices, axis)
    if not isinstance(params, Rows):
        return unproven(op, "what it gathers from is not proven")
    if batch_dims > params.axis:
        return params if indices == params else unproven(op, "it may gather from other examples")
    if params.axis == axis:
        if isinstance(indices, Public) and op.inputs[0].shape[axis] != 1:
            raise mixes(op, "it gathers rows of the batch")
        return unproven(op, "it may gather rows of the batch")
    if not isinstance(indices, Public):
        return unproven(op, "it may gather from other examples")
    return moved(params, index_rank - batch_dims - 1 if axis < params.axis else 0)


@transfers("ResourceGather")
def resource_gather(op: tf.Operation, inputs: list[State]) -> State:
    """Handles rows of a variable."""
    if (
        isinstance(inputs[0], Public)
        and isinstance(inputs[1], Rows)
        and op.get_attr("batch_dims") == 0
    ):
        return inputs[1]
    return unproven(op, "its indices do not hold the examples")


@of_rows("SpaceToBatchND", "BatchToSpaceND")
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
