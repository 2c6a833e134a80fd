"""Convolutions, poolings, losses and normalizations, which know of a batch themselves."""

import tensorflow as tf

from tfdp.clipping.row_analysis import shape_values
from tfdp.clipping.row_analysis.analysis import mixes, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State, Statistics, Unproven
from tfdp.clipping.row_analysis.transfer_functions.common import constant_along

# Operations that work on every entry of the first axis alone; and which inputs may hold examples.
_BATCH_FIRST = {
    **dict.fromkeys(
        "AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace DepthwiseConv2dNative "  # noqa: SIM905
        "ExtractImagePatches ExtractVolumePatches LRN MaxPool MaxPool3D ResizeArea ResizeBicubic "
        "ResizeBilinear ResizeNearestNeighbor SpaceToDepth".split(),
        (0,),
    ),
    "AvgPoolGrad": (1,),
    "DepthwiseConv2dNativeBackpropInput": (2,),
    "InTopKV2": (0, 1),
    "MaxPoolGrad": (0, 1, 2),
    "Conv2DBackpropInput": (2,),
    "Conv3DBackpropInputV2": (2,),
    "SoftmaxCrossEntropyWithLogits": (0, 1),
    "SparseSoftmaxCrossEntropyWithLogits": (0, 1),
}


# Their attributes with an entry for each axis, that of the examples first, which must be 1.
_PER_AXIS = ("dilations", "ksize", "ksizes", "rates", "strides")


@transfers(*_BATCH_FIRST)
def batch_first(op: tf.Operation, inputs: list[State]) -> State:
    """Handles layers and losses that are functions of each entry of the first axis."""
    if _works_over_batch(op):
        raise mixes(op, "its windows reach over several rows of the batch")
    allowed = _BATCH_FIRST[op.type]
    found = {state for state in inputs if isinstance(state, Rows)}
    lengths = [t.shape[0] for t, s in zip(op.inputs, inputs, strict=True) if s in found]
    for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
        if isinstance(state, Rows):
            if state.axis != 0 or index not in allowed:
                return unproven(op, f"{tensor.name} holds the examples where it should not")
        elif index == 0 and index not in allowed:
            shape = shape_values.known(tensor, state)  # The input is the output's shape.
            if shape is None or not shape_values.are_public(shape[1:]):
                return unproven(op, f"{tensor.name} may depend on the batch")
            if op.type == "AvgPoolGrad" and shape[0] not in {*found, *lengths} - {None}:
                return unproven(op, f"{tensor.name} may not have a row for each example")
        elif not isinstance(state, Public):
            return unproven(op, f"{tensor.name} depends on the batch")
        elif index in allowed and not any(constant_along(tensor, 0, n) for n in lengths):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return found.pop() if len(found) == 1 else unproven(op, "its inputs differ in their examples")


def _works_over_batch(op: tf.Operation) -> bool:
    """Returns whether a convolution or pooling mixes the axis of the examples.

    It does where its windows extend over that axis, or its steps skip along it.

    TensorFlow's own kernels refuse these; XLA's do not.
    """
    attributes = op.node_def.attr
    return any(
        name in attributes and attributes[name].list.i and attributes[name].list.i[0] != 1
        for name in _PER_AXIS
    ) or any(attributes["explicit_paddings"].list.i[:2])


@transfers("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")
def fused_batch_norm(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Handles batch norm, which keeps rows apart only if the rows are the channels."""
    rows = inputs[0]
    if not isinstance(rows, Rows) or op.inputs[0].shape.rank is None:
        return unproven(op, f"{op.inputs[0].name} is not proven to hold the examples")
    first = op.get_attr("data_format").startswith(b"NC")
    channel = 1 if first else op.inputs[0].shape.rank - 1
    if op.get_attr("is_training") and rows.axis != channel:
        raise mixes(op, "it takes the mean and the variance over the batch")
    length = op.inputs[0].shape[rows.axis]
    for tensor, parameters in zip(op.inputs[1:], inputs[1:], strict=True):
        if rows.axis == channel and parameters == Rows(0, rows.each, rows.interleaved):
            continue
        if not isinstance(parameters, Public):
            return unproven(op, f"{tensor.name} depends on the batch")
        empty = tensor.shape.num_elements() == 0
        if rows.axis == channel and not (empty or constant_along(tensor, 0, length)):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return [rows, *[Statistics(op.name)] * (len(op.outputs) - 1)]


@transfers("FusedBatchNormGradV3", "FusedBatchNormGradV2", "FusedBatchNormGrad")
def fused_batch_norm_grad(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Handles the gradient of batch norm: as batch norm does, with its own statistics."""
    rows, arriving = inputs[1], inputs[0]
    if not isinstance(rows, Rows) or op.inputs[1].shape.rank is None:
        return unproven(op, f"{op.inputs[1].name} is not proven to hold the examples")
    first, training = op.get_attr("data_format").startswith(b"NC"), op.get_attr("is_training")
    channel = 1 if first else op.inputs[1].shape.rank - 1
    if training and rows.axis != channel:
        raise mixes(op, "it takes the mean and the variance over the batch")
    length = op.inputs[1].shape[rows.axis]
    if arriving != rows and not (
        isinstance(arriving, Public) and constant_along(op.inputs[0], rows.axis, length)
    ):
        return unproven(op, f"{op.inputs[0].name} holds the examples differently")
    op.outputs[0].set_shape(op.inputs[1].shape)  # Known better by now, see `shapes.reshape`.
    of_channels = Rows(0, rows.each, rows.interleaved)
    for tensor, state in zip(op.inputs[2:], inputs[2:], strict=True):
        if isinstance(state, Statistics):
            forward = op.graph.get_operation_by_name(state.source)
            same = forward.inputs[0] is op.inputs[1] and all(
                forward.get_attr(name) == op.get_attr(name)
                for name in ("data_format", "epsilon", "is_training")
            )
            if not same or tensor.op is not forward:
                return unproven(op, f"{tensor.name} is not of its own operation")
        elif rows.axis != channel:
            if not isinstance(state, Public):
                return unproven(op, f"{tensor.name} depends on the batch")
        elif state != of_channels and not (
            isinstance(state, Public) and constant_along(tensor, 0, length)
        ):
            return unproven(op, f"{tensor.name} holds the examples differently")
    sums = Unproven(f"'{op.name}' ({op.type}): the gradients of its parameters")
    return [rows, *[sums] * (len(op.outputs) - 1)]
