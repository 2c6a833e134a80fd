"""Estimates of the memory that the backward pass of an example takes."""

import math
from collections.abc import Collection, Sequence

import tensorflow as tf

from tfdp.clipping.one_pass import loop_recordings
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import Rows

# Where a size is not static: steps of a loop, entries of an axis.
_UNKNOWN = 64


def bytes_per_row(analysis: RowAnalysis, handles: Sequence[tf.Tensor]) -> int:
    """Estimates the bytes that the backward pass of one example takes.

    Tensors that follow from trained variables are kept until the backward pass, and have gradients.
    What they are computed from is kept as well. Other tensors, such as those of a frozen base, are
    freed at once: of them only the largest operation counts.

    Args:
      analysis: Analysis of where the tensors of the model hold the examples.
      handles: The handles of the trained variables, in the graph of the loss.
    """
    trained = _that_follow_from(handles, analysis)
    total = _kept(analysis, trained)
    for name, inner in analysis.inner.items():
        if name not in trained:
            continue
        op, steps = analysis.operations[name], 1
        if op.type in loop_recordings.LOOP_TYPES:
            known = loop_recordings.number_of_steps(op, inner.graph)
            steps = known if isinstance(known, int) else _UNKNOWN
        total += steps * _kept(inner, inner.operations)
    return total


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
    times: dict = {}
    largest = 0
    for name, op in analysis.operations.items():
        tensors = [*op.inputs, *op.outputs]
        if name not in trained:
            largest = max(largest, sum(_bytes(tensor, analysis) for tensor in tensors))
            continue
        times.update({tensor.ref(): 2 for tensor in op.outputs})
        for tensor in op.inputs:
            times.setdefault(tensor.ref(), 1)
    return largest + sum(n * _bytes(ref.deref(), analysis) for ref, n in times.items())


def _bytes(tensor: tf.Tensor, analysis: RowAnalysis) -> int:
    """Returns about how many bytes of a tensor belong to an example."""
    state = analysis.state(tensor)
    if not isinstance(state, Rows):
        return 0
    sizes = [_UNKNOWN if size is None else size for size in tensor.shape]
    sizes[state.axis] = state.each or _UNKNOWN
    return math.prod(sizes) * tensor.dtype.size
