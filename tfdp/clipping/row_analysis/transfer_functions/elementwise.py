"""Elementwise operations and reductions."""

import tensorflow as tf

from tfdp.clipping.row_analysis.analysis import mixes, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, RepeatedAxes, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import (
    ELEMENTWISE,
    aligned,
    axes_of,
    moved,
    of_rows,
)

# Gradients of elementwise functions, of two tensors of the same shape.
_SAME_SHAPE = (
    "EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad "  # noqa: SIM905
    "SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad".split()
)


@transfers(*sorted(ELEMENTWISE))
def elementwise(op: tf.Operation, inputs: list[State]) -> State:
    """Functions of the entries at the same place, with broadcasting."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return unproven(op, "the rank of an input is unknown")
    if op.type == "Select" and len(set(ranks)) > 1:  # A vector condition chooses whole rows.
        return unproven(op, "its condition has another rank")
    return aligned(op, inputs, max(ranks))


@transfers("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm")
def reduce(op: tf.Operation, inputs: list[State]) -> State:
    """Reductions over other axes than that of the examples."""
    state, rank = inputs[0], op.inputs[0].shape.rank
    if isinstance(state, Rows) and isinstance(inputs[1], RepeatedAxes):
        return _sum_of_repeated(op, state, inputs[1])
    axes = axes_of(op, 1, rank) if rank else None
    if not isinstance(state, Rows) or not isinstance(inputs[1], Public) or axes is None:
        return unproven(op, "what it reduces, or over which axes, is not proven")
    if state.axis in axes:
        raise mixes(op, "it reduces over the batch")
    return state if op.get_attr("keep_dims") else moved(state, -sum(a < state.axis for a in axes))


def _sum_of_repeated(op: tf.Operation, rows: Rows, axes: RepeatedAxes) -> State:
    """Handles the gradient of a tensor that an operation repeated along some axes."""
    if len(axes.kept) != op.inputs[0].shape.rank or not op.get_attr("keep_dims"):
        return unproven(op, "which axes it reduces is not proven")
    kept = axes.kept[rows.axis]
    if kept is True:
        raise mixes(op, "it sums the gradients of what all examples share")
    if isinstance(kept, Rows):  # Summed over if its length is 1: then that of `rows` is, too.
        safe = rows.each is not None and kept.each == rows.each and not rows.interleaved
    else:
        safe = isinstance(kept, int) and kept > 1
    return rows if safe else unproven(op, "it may reduce over the batch")


@transfers(*_SAME_SHAPE)
def gradient(op: tf.Operation, inputs: list[State]) -> State:
    """Handles gradients of elementwise functions: of the entries at the same place."""
    first, second = (tensor.shape for tensor in op.inputs)
    if first.rank is None or first.rank != second.rank:
        return unproven(op, "the rank of an input is unknown, or another")
    state = aligned(op, inputs, first.rank)
    if isinstance(state, Rows) and not state.leads:
        # The kernels take the entries in the order of memory, whatever the shapes.
        others = [axis for axis in range(first.rank) if axis != state.axis]
        if any(first[axis] is None or first[axis] != second[axis] for axis in others):
            return unproven(op, "its inputs may have different shapes")
    return state


@of_rows("ArgMax", "ArgMin")
def arg(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Returns the place of the largest entry along another axis."""
    axes = axes_of(op, 1, op.inputs[0].shape.rank)
    if axes is None:
        return unproven(op, "the axis is not static")
    if rows.axis in axes:
        raise mixes(op, "it searches over the batch")
    return moved(rows, -(axes[0] < rows.axis))


@of_rows("Softmax", "LogSoftmax", "TopKV2", sized=True)
def last_axis(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Functions of all entries along the last axis."""
    if rows.axis == op.inputs[0].shape.rank - 1:
        raise mixes(op, "it works over the batch")
    if not all(isinstance(state, Public) for state in inputs[1:]):
        return unproven(op, "how many it takes depends on the batch")
    return rows


@of_rows("Cumsum", "Cumprod", "ReverseV2", "Roll")
def along_axis(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Functions of all entries along given axes, which are the last input."""
    axes = axes_of(op, len(op.inputs) - 1, op.inputs[0].shape.rank)
    if axes is None:
        return unproven(op, "the axis is not static")
    if rows.axis in axes:
        raise mixes(op, "it works along the batch")
    return rows


# Number of last axes over which each Fourier transform works.
_FOURIER = {
    f"{kind}{dimensions}": int(dimensions[:1] or 1)
    for kind in ("FFT", "IFFT", "RFFT", "IRFFT")
    for dimensions in ("", "2D", "3D")
}


@of_rows(*_FOURIER)
def fourier(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Handles Fourier transforms of the last axes."""
    if rows.axis >= op.inputs[0].shape.rank - _FOURIER[op.type]:
        raise mixes(op, "it transforms over the batch")
    return rows
