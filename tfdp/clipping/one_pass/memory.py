"""Estimates of the memory that the backward pass of an example takes."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.one_pass import loop_recordings
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import Rows

# Where a size is not static: steps of a loop, entries of an axis.
_UNKNOWN = 64

# Calls of functions, and how often what they return they keep inside, where that is not looked at:
# in layers such as LSTM.
_OPAQUE = 12

# What gradients of operations need in the backward pass; of others, inputs and outputs.
_SAME_MEMORY = {"Reshape", "Identity", "ExpandDims", "Squeeze"}
_NEED_NOTHING = {
    *_SAME_MEMORY,
    *("BiasAdd", "Add", "AddV2", "AddN", "Sub", "Neg", "Cast", "Transpose", "Pad", "PadV2"),
    *("ConcatV2", "Split", "SplitV", "Pack", "Unpack", "Slice", "StridedSlice", "Sum", "Mean"),
    *("AvgPool", "Shape", "ZerosLike", "OnesLike"),
}
_NEED_INPUTS = {
    *("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum", "Mul", "RealDiv", "GatherV2"),
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "ResourceGather"),
}
_NEED_OUTPUTS = {
    *("Relu", "Relu6", "Elu", "Selu", "Tanh", "Sigmoid", "Softmax", "LogSoftmax"),
    *("Exp", "Sqrt", "Rsqrt"),
}


def bytes_per_row(analysis: RowAnalysis, handles: Sequence[tf.Tensor]) -> int:
    """Estimates the bytes that the backward pass of one example takes.

    What follows from trained variables is kept until the backward pass, as far as gradients need
    it, and so is what it is computed from. The gradients of what may use weights are kept until the
    norms are known. Loops keep a copy of each tensor of each step, and its gradient. Of all other
    tensors, such as those of a frozen base, only the largest operation counts.

    Args:
      analysis: Analysis of where the tensors of the model hold the examples.
      handles: The handles of the trained variables, in the graph of the loss.
    """
    trained = _that_follow_from(handles, analysis)
    total = _kept(analysis, trained)
    for name, inner in analysis.inner.items():
        if name not in trained:
            continue
        op = analysis.operations[name]
        if op.type in op_types.LOOPS:
            steps = loop_recordings.number_of_steps(op, inner.graph)
            # Twice: what is recorded for the rules is taken in a loop of its own.
            total += 2 * (steps if isinstance(steps, int) else _UNKNOWN) * _all(inner)
        else:
            total += _kept(inner, inner.operations)
    return total


def largest_operation(operations: Iterable[tf.Operation]) -> int:
    """Estimates the bytes of an example's part of the tensors of the largest operation.

    Args:
      operations: Operations of a model, in which the first axis of the examples is open.
    """
    return max((sum(map(_open_bytes, [*op.inputs, *op.outputs])) for op in operations), default=0)


def _open_bytes(tensor: tf.Tensor) -> int:
    """Returns about how many bytes an example has of a tensor, if its first axis is open."""
    shape = tensor.shape
    if not shape.rank or shape[0] is not None or not tensor.dtype.size:
        return 0
    return math.prod(_UNKNOWN if size is None else size for size in shape[1:]) * tensor.dtype.size


def _that_follow_from(handles: Sequence[tf.Tensor], analysis: RowAnalysis) -> set[str]:
    """Returns the names of the operations whose outputs follow from variables."""
    reached = {handle.ref() for handle in handles}
    names = set()
    for name, op in analysis.operations.items():  # Inputs come before outputs.
        if any(tensor.ref() in reached for tensor in op.inputs):
            names.add(name)
            reached.update(tensor.ref() for tensor in op.outputs)
    return names


def _kept(analysis: RowAnalysis, trained: Collection[str]) -> int:
    """Returns the bytes of an example's part of all tensors that a backward pass keeps."""
    values: dict = {}  # Sizes of tensors, by the memory that they are in.
    gradients = largest = 0
    for name, op in analysis.operations.items():
        tensors = [*op.inputs, *op.outputs]
        largest = max(largest, sum(_bytes(tensor, analysis) for tensor in tensors))
        if name not in trained or op.type in _NEED_NOTHING:
            continue
        if op.type in op_types.CALLS and name not in analysis.inner:
            gradients += _OPAQUE * sum(_bytes(tensor, analysis) for tensor in op.outputs)
        if op.type in _NEED_OUTPUTS:
            tensors = op.outputs
        else:  # It may use weights.
            gradients += sum(_bytes(tensor, analysis) for tensor in op.outputs)
            tensors = op.inputs if op.type in _NEED_INPUTS else tensors
        values.update({_memory_of(tensor): _bytes(tensor, analysis) for tensor in tensors})
    return largest + sum(values.values()) + gradients


def _all(analysis: RowAnalysis) -> int:
    """Returns the bytes of an example's part of all tensors, and of the gradients of outputs."""
    times: dict = {}
    for op in analysis.operations.values():
        times.update({tensor.ref(): 2 for tensor in op.outputs})
        for tensor in op.inputs:
            times.setdefault(tensor.ref(), 1)
    return sum(n * _bytes(ref.deref(), analysis) for ref, n in times.items())


def _memory_of(tensor: tf.Tensor) -> Any:
    """Returns a key for the memory of a tensor, which operations that only reshape share."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[0]
    return tensor.ref()


def _bytes(tensor: tf.Tensor, analysis: RowAnalysis) -> int:
    """Returns about how many bytes of a tensor belong to an example."""
    state = analysis.state(tensor)
    if not isinstance(state, Rows):
        return 0
    sizes = [_UNKNOWN if size is None else size for size in tensor.shape]
    sizes[state.axis] = state.each or _UNKNOWN
    return math.prod(sizes) * tensor.dtype.size
