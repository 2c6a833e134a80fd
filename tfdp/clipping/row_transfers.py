"""What each operation does to the rows of examples: the transfer functions of `rows`.

A transfer function may only be registered here if the operation, used so, computes the entries of
an example from the entries of that example and from public values.
"""

import math

import numpy as np
import tensorflow as tf

from tfdp.clipping.recurrent import RecurrentCall
from tfdp.clipping.rows import RANDOM_TYPES, Transfer, mixes, transfers, unproven
from tfdp.clipping.states import BatchSize, Filled, Public, Rows, State, Unproven

ELEMENTWISE = frozenset(
    (
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr Cast Ceil "
    "CheckNumerics ClipByValue Cos Cosh Digamma DivNoNan Div Elu EnsureShape Equal Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv InvGrad IsFinite IsInf "
    "IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum "
    "Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal "
    "Relu Relu6 Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu Sigmoid SigmoidGrad Sign Sin Sinh "
    "Snapshot Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad "
    "TruncateDiv Xdivy Xlogy Xlog1py ZerosLike"
    ).split()
)


def _aligned(op: tf.Operation, inputs: list[State], rank: int) -> State:
    """The state of an elementwise result: all examples on the same axis, counted from the end."""
    positions = set()
    for tensor, state in zip(op.inputs, inputs, strict=True):
        if isinstance(state, BatchSize):
            return unproven(op, "its values depend on the size of the batch")
        if isinstance(state, Rows):
            positions.add((state.axis + rank - tensor.shape.rank, state.each, state.interleaved))
    if not positions:
        return _filled(op, inputs)
    if len(positions) > 1:
        return unproven(op, f"its inputs hold the examples differently: {sorted(positions)}")
    axis, each, interleaved = positions.pop()
    for tensor, state in zip(op.inputs, inputs, strict=True):
        own = axis - (rank - tensor.shape.rank)
        if isinstance(state, Public) and own >= 0 and not _constant_along(tensor, own):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return Rows(axis, each, interleaved)


def _filled(op: tf.Operation, inputs: list[State]) -> State:
    """Of constants and random numbers of one value or law throughout, together with scalars."""
    scalars = all(
        isinstance(state, Filled) or tensor.shape.rank == 0
        for tensor, state in zip(op.inputs, inputs, strict=True)
    )
    return Filled() if scalars else unproven(op, "it fills a tensor that may differ by row")


def _constant_along(tensor: tf.Tensor, axis: int) -> bool:
    """Whether a public tensor has the same values, or law, at all positions of an axis."""
    if tensor.shape[axis] == 1:
        return True
    value = tf.get_static_value(tensor)
    if value is not None:
        return bool(np.all(value == np.take(value, [0], axis)))
    op = tensor.op
    if op.type in RANDOM_TYPES:
        return True
    alike = op.type in ELEMENTWISE and all(t.shape.rank in (0, tensor.shape.rank) for t in op.inputs)
    return alike and all(t.shape.rank == 0 or _constant_along(t, axis) for t in op.inputs)


@transfers(*ELEMENTWISE)
def _elementwise(op: tf.Operation, inputs: list[State]) -> State:
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return unproven(op, "the rank of an input is unknown")
    if op.type == "Select" and len(set(ranks)) > 1:  # A vector condition chooses whole rows.
        return unproven(op, "its condition has another rank")
    return _aligned(op, inputs, max(ranks))


# Layers whose first axis is the batch, and which work on every entry of it alone.
_BATCH_FIRST = (
    "AvgPool AvgPool3D BiasAdd Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 CropAndResize "
    "DepthToSpace DepthwiseConv2dNative ExtractImagePatches ExtractVolumePatches FractionalMaxPool "
    "LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear "
    "ResizeNearestNeighbor SpaceToDepth SparseSoftmaxCrossEntropyWithLogits "
    "SoftmaxCrossEntropyWithLogits"
).split()
# Which of their inputs may hold examples; all by default.
_DATA_INPUTS = {
    **dict.fromkeys(
        "AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthwiseConv2dNative MaxPool".split(), (0,)
    ),
    "Conv2DBackpropInput": (2,),
    "Conv3DBackpropInputV2": (2,),
}


@transfers(*[name for name in _BATCH_FIRST if name not in ("CropAndResize", "FractionalMaxPool")])
def _batch_first(op: tf.Operation, inputs: list[State]) -> State:
    allowed = _DATA_INPUTS.get(op.type, range(len(inputs)))
    found: set[Rows] = set()
    for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
        if isinstance(state, Rows):
            if state.axis != 0 or index not in allowed:
                return unproven(op, f"{tensor.name} holds the examples where it should not")
            found.add(state)
        elif index in allowed and len(allowed) > 1 and isinstance(state, Public):
            if tensor.shape.rank and not _constant_along(tensor, 0):
                return unproven(op, f"the public {tensor.name} may differ from row to row")
        elif isinstance(state, Filled) and index not in allowed:
            return unproven(op, f"the shape of {tensor.name} may depend on the batch")
    return found.pop() if len(found) == 1 else unproven(op, "its inputs differ in their examples")


def _axes(op: tf.Operation, index: int, rank: int) -> list[int] | None:
    """The static axes that an input names, counted from 0."""
    value = tf.get_static_value(op.inputs[index])
    return None if value is None else [int(axis) % rank for axis in np.ravel(value)]


@transfers("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm")
def _reduce(op: tf.Operation, inputs: list[State]) -> State:
    state = inputs[0]
    if isinstance(state, Filled):
        return BatchSize()
    if not isinstance(state, Rows) or op.inputs[0].shape.rank is None:
        return unproven(op, "what it reduces is not proven")
    axes = _axes(op, 1, op.inputs[0].shape.rank)
    if axes is None:
        return unproven(op, "the axes are not static")
    if state.axis in axes:
        raise mixes(op, "it reduces over the batch")
    if op.get_attr("keep_dims"):
        return state
    return Rows(state.axis - sum(a < state.axis for a in axes), state.each, state.interleaved)


@transfers("ArgMax", "ArgMin")
def _arg(op: tf.Operation, inputs: list[State]) -> State:
    state, rank = inputs[0], op.inputs[0].shape.rank
    axes = _axes(op, 1, rank) if rank else None
    if not isinstance(state, Rows) or axes is None:
        return unproven(op, "the axis is not static")
    if state.axis in axes:
        raise mixes(op, "it searches over the batch")
    return Rows(state.axis - (axes[0] < state.axis), state.each, state.interleaved)


@transfers("Softmax", "LogSoftmax", "TopKV2", "InTopKV2")
def _last_axis(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    state = inputs[0]
    if not isinstance(state, Rows) or any(isinstance(s, Rows) for s in inputs[1:]):
        return unproven(op, "its first input does not hold the examples")
    if state.axis == op.inputs[0].shape.rank - 1:
        raise mixes(op, "it works over the batch")
    return state


@transfers("Cumsum", "Cumprod", "ReverseV2")
def _along_axis(op: tf.Operation, inputs: list[State]) -> State:
    state = inputs[0]
    axes = _axes(op, 1, op.inputs[0].shape.rank) if isinstance(state, Rows) else None
    if axes is None:
        return unproven(op, "the axis is not static")
    if state.axis in axes:
        raise mixes(op, "it works along the batch")
    return state


# Shapes.


@transfers("Reshape")
def _reshape(op: tf.Operation, inputs: list[State]) -> State:
    state, old, new = inputs[0], op.inputs[0].shape, op.outputs[0].shape
    if isinstance(state, Filled):
        return state
    if not isinstance(state, Rows) or old.rank is None or not new.rank:
        return unproven(op, "ranks are not known, or it makes a scalar")
    if state.interleaved or any(d != 1 for d in old[: state.axis]):
        return unproven(op, "the examples do not lie one after the other")
    known = inputs[1].values if isinstance(inputs[1], BatchSize | Public) else None
    known = known or (None,) * new.rank
    dims = [k if d is None else d for d, k in zip(new, known, strict=True)]
    axis = next((a for a, d in enumerate(dims) if d != 1), new.rank - 1)
    if isinstance(dims[axis], Rows):
        return Rows(axis, dims[axis].each)
    old_rest = old[state.axis + 1 :].as_list()
    new_rest = [d if isinstance(d, int) else None for d in dims[axis + 1 :]]
    if None not in [*old_rest, *new_rest] and state.each is not None:
        each, remainder = divmod(state.each * math.prod(old_rest), math.prod(new_rest))
        return unproven(op, "a row holds parts of several examples") if remainder else Rows(axis, each)
    if _is_suffix(new_rest, old_rest):
        same = len(new_rest) == len(old_rest)
        return Rows(axis, state.each if same else None)
    return unproven(op, f"from shape {old} to {new}, the rows of the examples are not known")


def _is_suffix(short: list, long: list) -> bool:
    if None in short or len(short) > len(long):
        return False
    return not short or long[-len(short) :] == short


@transfers("ExpandDims", "Squeeze")
def _unit_axes(op: tf.Operation, inputs: list[State]) -> State:
    state, old, new = inputs[0], op.inputs[0].shape, op.outputs[0].shape
    if isinstance(state, Filled):
        return state
    if not isinstance(state, Rows) or old.rank is None or new.rank is None:
        return unproven(op, "ranks are not known")
    if op.type == "ExpandDims":
        axes = _axes(op, 1, old.rank + 1)
        if axes is None:
            return unproven(op, "the axis is not static")
        return Rows(state.axis + (axes[0] <= state.axis), state.each, state.interleaved)
    axes = [axis % old.rank for axis in op.get_attr("squeeze_dims")]
    if not axes:
        if not old.is_fully_defined():
            return unproven(op, "the axes are not static")
        axes = [a for a, d in enumerate(old) if d == 1]
    if state.axis in axes:
        return unproven(op, "it removes the axis of the examples")
    return Rows(state.axis - sum(a < state.axis for a in axes), state.each, state.interleaved)


@transfers("Transpose")
def _transpose(op: tf.Operation, inputs: list[State]) -> State:
    state, order = inputs[0], tf.get_static_value(op.inputs[1])
    if isinstance(state, Filled):
        return state
    rank = op.inputs[0].shape.rank
    if order is None and isinstance(inputs[1], Public) and rank == 1:
        return state
    if order is None or not isinstance(state, Rows):
        return unproven(op, "the order of the axes is not static")
    return Rows(list(order).index(state.axis), state.each, state.interleaved)


@transfers("Pack")
def _pack(op: tf.Operation, inputs: list[State]) -> State:
    state = _aligned(op, inputs, op.inputs[0].shape.rank)
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    if isinstance(state, Rows):
        return Rows(state.axis + (axis <= state.axis), state.each, state.interleaved)
    return state


@transfers("Unpack", "Split", "SplitV")
def _split(op: tf.Operation, inputs: list[State]) -> State:
    index = 1 if op.type == "Split" else 0
    state, rank = inputs[index], op.inputs[index].shape.rank
    if isinstance(state, Filled):
        return state
    if not isinstance(state, Rows) or rank is None:
        return unproven(op, "what it splits is not proven")
    if op.type == "Unpack":
        axes: list[int] | None = [op.get_attr("axis") % rank]
    else:
        axes = _axes(op, 0 if op.type == "Split" else 2, rank)
    if axes is None:
        return unproven(op, "the axis is not static")
    if state.axis in axes:
        raise mixes(op, "it takes the batch apart")
    shift = op.type == "Unpack" and axes[0] < state.axis
    return Rows(state.axis - shift, state.each, state.interleaved)


@transfers("ConcatV2")
def _concatenate(op: tf.Operation, inputs: list[State]) -> State:
    rank = op.outputs[0].shape.rank
    axes = _axes(op, len(op.inputs) - 1, rank) if rank else None
    if axes is None:
        return unproven(op, "the axis is not static")
    states = {state for state in inputs[:-1] if not isinstance(state, Filled)}
    if len(states) != 1 or not isinstance(state := states.pop(), Rows):
        return unproven(op, "its inputs hold the examples differently")
    if state.axis in axes:
        return unproven(op, "it concatenates along the batch")
    return state


@transfers("StridedSlice")
def _strided_slice(op: tf.Operation, inputs: list[State]) -> State:
    """Slices of other axes than that of the examples, which is taken whole."""
    state = inputs[0]
    begin, end, strides = (tf.get_static_value(op.inputs[i]) for i in (1, 2, 3))
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if isinstance(state, Filled):
        return state
    if not isinstance(state, Rows) or strides is None or op.inputs[0].shape.rank is None:
        return unproven(op, "what it slices is not static")
    axis, new_axis = 0, 0
    for i in range(len(strides)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            named = sum(not masks["new_axis"] & (1 << j) for j in range(len(strides))) - 1
            skipped = op.inputs[0].shape.rank - named
            if axis <= state.axis < axis + skipped:
                return Rows(new_axis + state.axis - axis, state.each, state.interleaved)
            axis, new_axis = axis + skipped, new_axis + skipped
        elif masks["new_axis"] & bit:
            new_axis += 1
        elif axis == state.axis:
            starts = masks["begin"] & bit or (begin is not None and begin[i] == 0)
            ends = masks["end"] & bit or (end is not None and end[i] == op.inputs[0].shape[axis])
            if masks["shrink_axis"] & bit or not (starts and ends and strides[i] == 1):
                raise mixes(op, "it takes some rows of the batch")
            return Rows(new_axis, state.each, state.interleaved)
        else:
            axis, new_axis = axis + 1, new_axis + (0 if masks["shrink_axis"] & bit else 1)
    return Rows(new_axis + state.axis - axis, state.each, state.interleaved)


@transfers("Slice")
def _slice(op: tf.Operation, inputs: list[State]) -> State:
    state = inputs[0]
    begin, size = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
    if not isinstance(state, Rows) or begin is None or size is None:
        return unproven(op, "what it slices is not static")
    whole = size[state.axis] in (-1, op.inputs[0].shape[state.axis])
    if begin[state.axis] != 0 or not whole:
        raise mixes(op, "it takes some rows of the batch")
    return state


@transfers("Pad", "PadV2", "MirrorPad")
def _pad(op: tf.Operation, inputs: list[State]) -> State:
    state, amounts = inputs[0], tf.get_static_value(op.inputs[1])
    if not isinstance(state, Rows) or amounts is None or any(amounts[state.axis]):
        return unproven(op, "it may pad the batch")
    return state


@transfers("Tile", "BroadcastTo")
def _repeat(op: tf.Operation, inputs: list[State]) -> State:
    state, old = inputs[0], op.inputs[0].shape
    if isinstance(state, Filled):
        return state
    if not isinstance(state, Rows):
        return unproven(op, "what it repeats is not proven")
    if op.type == "Tile":
        times = tf.get_static_value(op.inputs[1])
        if times is None or times[state.axis] != 1:
            return unproven(op, "it may repeat the batch")
        return state
    axis = state.axis + op.outputs[0].shape.rank - old.rank
    if isinstance(inputs[1], BatchSize) and old[state.axis] != 1:
        return Rows(axis, state.each, state.interleaved)
    return unproven(op, "it may repeat the batch")


@transfers("OneHot")
def _one_hot(op: tf.Operation, inputs: list[State]) -> State:
    state, rank = inputs[0], op.outputs[0].shape.rank
    if not isinstance(state, Rows) or rank is None:
        return unproven(op, "its indices do not hold the examples")
    axis = op.get_attr("axis") % rank
    return Rows(state.axis + (axis <= state.axis), state.each, state.interleaved)


@transfers("GatherV2")
def _gather(op: tf.Operation, inputs: list[State]) -> State:
    params, indices = inputs[0], inputs[1]
    rank, axis = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[2])
    batch_dims = op.get_attr("batch_dims")
    if rank is None or axis is None or op.inputs[1].shape.rank is None:
        return unproven(op, "its axis is not static")
    axis, batch_dims = int(axis) % rank, batch_dims % max(1, op.inputs[1].shape.rank)
    added = op.inputs[1].shape.rank - batch_dims - 1
    if isinstance(params, Public) and isinstance(indices, Rows) and batch_dims == 0:
        return Rows(axis + indices.axis, indices.each, indices.interleaved)
    if not isinstance(params, Rows):
        return unproven(op, "what it gathers from is not proven")
    if batch_dims > params.axis:
        return params if indices == params else unproven(op, "it may gather from other examples")
    if params.axis == axis:
        raise mixes(op, "it gathers rows of the batch")
    if not isinstance(indices, Public):
        return unproven(op, "it may gather from other examples")
    return Rows(params.axis + (added if axis < params.axis else 0), params.each, params.interleaved)


@transfers("ResourceGather")
def _resource_gather(op: tf.Operation, inputs: list[State]) -> State:
    indices = inputs[1]
    if isinstance(indices, Rows) and op.get_attr("batch_dims") == 0:
        return indices
    return unproven(op, "its indices do not hold the examples")


@transfers("SpaceToBatchND", "BatchToSpaceND")
def _space_and_batch(op: tf.Operation, inputs: list[State]) -> State:
    state, block = inputs[0], tf.get_static_value(op.inputs[1])
    if not isinstance(state, Rows) or block is None or state.axis != 0:
        return unproven(op, "what it moves is not proven")
    size = math.prod(int(b) for b in block)
    if op.type == "SpaceToBatchND" and state == Rows():
        return Rows(0, size, interleaved=size > 1)
    if op.type == "BatchToSpaceND" and state == Rows(0, size, interleaved=size > 1):
        return Rows()
    return unproven(op, "what it moves is not proven")


# Products.


@transfers("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(op: tf.Operation, inputs: list[State]) -> State:
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rank = max(tensor.shape.rank for tensor in op.inputs)
    found = set()
    for side, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
        if isinstance(state, Rows):
            axis = state.axis + rank - tensor.shape.rank
            if axis >= rank - 2:
                swapped = op.get_attr(names[side])
                axis = rank - 2 + (axis - rank + 2) ^ 1 if swapped else axis
                if axis != (rank - 2, rank - 1)[side]:
                    raise mixes(op, "it sums over the batch")
            found.add((axis, state.each, state.interleaved))
        elif not isinstance(state, Public):
            return unproven(op, f"{tensor.name} depends on the size of the batch")
    if len(found) > 1:
        if all(axis >= rank - 2 for axis, _, _ in found):
            raise mixes(op, "it compares all examples with all")
        return unproven(op, "its inputs hold the examples differently")
    axis, each, interleaved = found.pop()
    for tensor, state in zip(op.inputs, inputs, strict=True):
        own = axis - (rank - tensor.shape.rank)
        if isinstance(state, Public) and 0 <= own and axis < rank - 2 and tensor.shape[own] != 1:
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    both = all(isinstance(state, Rows) for state in inputs)
    if both and axis >= rank - 2:
        raise mixes(op, "it compares all examples with all")
    return Rows(axis, each, interleaved)


@transfers("Einsum")
def _einsum(op: tf.Operation, inputs: list[State]) -> State:
    equation = einsum_labels(op)
    if equation is None:
        return unproven(op, "its equation repeats a label")
    terms, result = equation
    found = set()
    for labels, tensor, state in zip(terms, op.inputs, inputs, strict=True):
        if isinstance(state, Rows):
            found.add((labels[state.axis], state.each, state.interleaved))
        elif not isinstance(state, Public):
            return unproven(op, f"{tensor.name} may depend on the size of the batch")
    if len(found) > 1:
        if len({label for label, _, _ in found}) > 1:
            raise mixes(op, "it combines all examples with all")
        return unproven(op, "its inputs hold the examples differently")
    label, each, interleaved = found.pop()
    if label not in result:
        raise mixes(op, "it sums over the batch")
    for labels, tensor, state in zip(terms, op.inputs, inputs, strict=True):
        if label in labels and isinstance(state, Public):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return Rows(result.index(label), each, interleaved)


def einsum_labels(op: tf.Operation) -> tuple[list[str], str] | None:
    """The labels of the inputs and of the result, an ellipsis spelled out; None if one repeats."""
    left, result = op.get_attr("equation").decode().replace(" ", "").split("->")
    terms = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in left + result]
    counts = [
        tensor.shape.rank - len(term.replace("...", "")) if "..." in term else 0
        for term, tensor in zip(terms, op.inputs, strict=True)
    ]
    most = max(counts)
    terms = [
        term.replace("...", "".join(free[most - count : most]))
        for term, count in zip(terms, counts, strict=True)
    ]
    result = result.replace("...", "".join(free[:most]))
    repeated = any(len(set(labels)) < len(labels) for labels in [*terms, result])
    return None if repeated else (terms, result)


@transfers("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")
def _fused_batch_norm(op: tf.Operation, inputs: list[State]) -> list[State] | State:
    """Statistics over all but the channels: of single rows only where those are the channels."""
    state = inputs[0]
    if not isinstance(state, Rows):
        return unproven(op, "what it normalises is not proven")
    channel = 1 if op.get_attr("data_format") == b"NCHW" else 3
    if op.get_attr("is_training") and state.axis != channel:
        raise mixes(op, "it takes the mean and the variance over the batch")
    other = [Unproven(f"'{op.name}' ({op.type}): its statistics")] * (len(op.outputs) - 1)
    for tensor, parameters in zip(op.inputs[1:], inputs[1:], strict=True):
        own = isinstance(parameters, Rows) and state.axis == channel
        if own and (parameters.axis, parameters.each) == (0, state.each):
            continue
        if not isinstance(parameters, Public | Filled):
            return unproven(op, f"{tensor.name} depends on the batch")
        constant = isinstance(parameters, Filled) or not tensor.shape.num_elements()
        if state.axis == channel and not (constant or _constant_along(tensor, 0)):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return [state, *other]


def recurrent_transfer(call: RecurrentCall) -> Transfer:
    """The transfer function of a call of a recurrent layer's function."""

    def transfer(op: tf.Operation, inputs: list[State]) -> State | list[State]:
        sequence = Rows(1 if call.time_major else 0)
        weights = (call.kernel, call.recurrent_kernel, call.bias)
        for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
            expected = sequence if index in (call.x, call.mask) else Rows()
            public = index in weights or (index in call.states and _is_constant(tensor, state))
            if state != expected and not (public and not isinstance(state, Rows)):
                return unproven(op, f"{tensor.name} does not hold the examples as expected")
        unknown = Unproven(f"'{op.name}' ({op.type}): one of its other outputs")
        known: list[State] = [Rows(), sequence, *[Rows() for _ in call.states]]
        return [*known, *[unknown] * (len(op.outputs) - len(known))]

    return transfer


def _is_constant(tensor: tf.Tensor, state: State) -> bool:
    return isinstance(state, Filled) or _constant_along(tensor, 0)
