"""Convolutions, poolings, losses and normalisations, which know of a batch themselves."""

import tensorflow as tf

from tfdp.clipping.rows import mixes, transfers, unproven
from tfdp.clipping.states import Filled, Public, Rows, State, Unproven
from tfdp.clipping.transfers.common import constant_along, of_rows

# Operations that work on every entry of the first axis alone; and which inputs may hold examples.
_BATCH_FIRST = {
    **dict.fromkeys(
        "AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace DepthwiseConv2dNative "  # noqa: SIM905
        "ExtractImagePatches ExtractVolumePatches LRN MaxPool MaxPool3D ResizeArea ResizeBicubic "
        "ResizeBilinear ResizeNearestNeighbor SpaceToDepth".split(),
        (0,),
    ),
    "Conv2DBackpropInput": (2,),
    "Conv3DBackpropInputV2": (2,),
    "SoftmaxCrossEntropyWithLogits": (0, 1),
    "SparseSoftmaxCrossEntropyWithLogits": (0, 1),
}


@transfers(*_BATCH_FIRST)
def batch_first(op: tf.Operation, inputs: list[State]) -> State:
    """Layers and losses that are functions of each entry of the first axis."""
    allowed = _BATCH_FIRST[op.type]
    found: set[Rows] = set()
    for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
        if isinstance(state, Rows):
            if state.axis != 0 or index not in allowed:
                return unproven(op, f"{tensor.name} holds the examples where it should not")
            found.add(state)
        elif isinstance(state, Filled) and index not in allowed:
            return unproven(op, f"the shape of {tensor.name} may depend on the batch")
        elif isinstance(state, Public) and index in allowed and not constant_along(tensor, 0):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return found.pop() if len(found) == 1 else unproven(op, "its inputs differ in their examples")


@of_rows("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm", keeps_filled=False)
def fused_batch_norm(op: tf.Operation, rows: Rows, inputs: list[State]) -> State | list[State]:
    """Statistics over all but the channels: of single rows only where those are the channels."""
    channel = 1 if op.get_attr("data_format") == b"NCHW" else 3
    if op.get_attr("is_training") and rows.axis != channel:
        raise mixes(op, "it takes the mean and the variance over the batch")
    for tensor, parameters in zip(op.inputs[1:], inputs[1:], strict=True):
        if rows.axis == channel and parameters == Rows(0, rows.each):
            continue
        if not isinstance(parameters, Public | Filled):
            return unproven(op, f"{tensor.name} depends on the batch")
        constant = isinstance(parameters, Filled) or not tensor.shape.num_elements()
        if rows.axis == channel and not (constant or constant_along(tensor, 0)):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    statistics = Unproven(f"'{op.name}' ({op.type}): its statistics")
    return [rows, *[statistics] * (len(op.outputs) - 1)]
