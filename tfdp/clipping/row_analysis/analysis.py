"""Proof of which rows of the tensors of a loss belong to which example.

The sum of the losses of a batch has one gradient with respect to the output of a layer. Its rows
are the per-example gradients only if no operation lets one example's row into another's. The proof
goes through the graph, operation by operation: from the batch, whose rows are the examples, to the
losses. Each operation has a transfer function that says where its outputs hold the examples, given
where its inputs do (`transfer_functions`). An operation without one is not proven; one that is
known to mix examples is an error.
"""

import collections
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from tfdp.clipping.loss_graph import copying, custom_gradients, data_flow
from tfdp.clipping.row_analysis import shape_values
from tfdp.clipping.row_analysis.states import (
    BatchSize,
    Public,
    Ragged,
    RepeatedAxes,
    RowList,
    Rows,
    Size,
    Sizes,
    State,
    Statistics,
    Unproven,
)

# Maps an operation and the states of its inputs to the states of its outputs.
Transfer: TypeAlias = Callable[[tf.Operation, list[State]], State | list[State]]

_TRANSFERS: dict[str, Transfer] = {}
_LIST_TRANSFERS: dict[str, Transfer] = {}
# Transfer functions of operations that call a function. They also return its analysis.
_FUNCTIONS: dict[str, Callable] = {}
_RAGGED_TRANSFERS: dict[str, Transfer] = {}
_DRAWING_TYPES = frozenset(
    {"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"}
)
_STATELESS_TYPES = frozenset(
    {
        "StatelessRandomUniform",
        "StatelessRandomUniformV2",
        "StatelessRandomUniformIntV2",
        "StatelessRandomNormal",
        "StatelessRandomNormalV2",
        "StatelessTruncatedNormalV2",
    }
)
_MAKE_LISTS = frozenset({"EmptyTensorList", "TensorListReserve"})
# The operations that may use what others have made for them.
_USERS: dict[type, frozenset[str]] = {
    RepeatedAxes: frozenset({"Sum"}),
    Statistics: frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"}),
}
# Stateful operations whose result cannot depend on an example. (Another check refuses what the
# model writes into variables.)
PUBLIC_STATEFUL_TYPES = _DRAWING_TYPES | {
    "If",
    "ParameterizedTruncatedNormal",
    "RandomGammaV2",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "RngReadAndSkip",
    "StatefulPartitionedCall",
    "VarHandleOp",
    "VarIsInitializedOp",
    "VariableShape",
    "While",
}


_REMEDY = (
    "Compute each example's output from that example alone: statistics over features, time or "
    "pixels instead of over the batch (LayerNormalization, GroupNormalization). A loss over "
    "the batch, such as a contrastive loss or the load balance of a router, is the "
    "`batch_wise` term of a `tfdp.clipping.TwoTermLoss`, which `optimizer.minimize` takes."
)
_REMEDIES: dict[str, str] = collections.defaultdict(
    lambda: _REMEDY,
    All=(
        "Keras's hinge losses ask whether all labels of the batch are 0 or 1: with labels -1 and "
        "1, the loss is `lambda y, p: tf.maximum(1 - y * p, 0)`."
    ),
    Max=(
        f"{_REMEDY} Keras's RandAugment and Equalization count the pixels of all images: apply "
        "them to single images, by `poisson_batches(..., transform=lambda x, y: (layer(x), y))`."
    ),
)


def mixes(op: tf.Operation, how: str) -> ValueError:
    """Returns the error for an operation that is known to mix examples."""
    return ValueError(
        f"The operation '{op.name}' ({op.type}) mixes examples: {how}. No gradient then belongs to "
        f"one example, and clipping it would not make the training private. {_REMEDIES[op.type]}"
    )


def transfers(*types: str) -> Callable[[Transfer], Transfer]:
    """Registers the transfer function of operations of `types`."""

    def register(function: Transfer) -> Transfer:
        for op_type in types:
            if op_type in _TRANSFERS:
                raise ValueError(f"Argument `types` must be new. Received again: {op_type!r}.")
            _TRANSFERS[op_type] = function
        return function

    return register


def list_transfers(*types: str) -> Callable[[Transfer], Transfer]:
    """Registers the transfer function of operations that make, or work on, a `RowList`."""

    def register(function: Transfer) -> Transfer:
        _LIST_TRANSFERS.update(dict.fromkeys(types, function))
        return function

    return register


def function_transfers(*types: str) -> Callable[[Callable], Callable]:
    """Registers what gives the states of operations that call a function.

    Args:
      *types: Types of operations.

    Returns:
      A decorator for functions of the operation and of its inputs' states that return the states of
      its outputs, and the `RowAnalysis` of the function that it calls, or None.
    """

    def register(function: Callable) -> Callable:
        _FUNCTIONS.update(dict.fromkeys(types, function))
        return function

    return register


def ragged_transfers(*types: str) -> Callable[[Transfer], Transfer]:
    """Registers the transfer function of operations with some `Ragged` input."""

    def register(function: Transfer) -> Transfer:
        _RAGGED_TRANSFERS.update(dict.fromkeys(types, function))
        return function

    return register


class RowAnalysis:
    """Analysis of where the tensors that a loss is computed from hold the examples.

    Args:
      operations: The operations that compute the losses from the batch, in the order of the graph.
      batch: The tensors of the batch, first dimension the example.
      special: Transfer functions of single operations, by name: they come before those of types.
      given: States of other tensors that the operations begin with, by reference.

    Attributes:
      operations: The operations, by name.
      graph: The graph that they are in; None if there are none.
      inner: For operations that call a function, by name: the analysis of the function.

    Raises:
      ValueError: An operation mixes examples.
    """

    def __init__(
        self,
        operations: list[tf.Operation],
        batch: list[tf.Tensor],
        special: dict[str, Transfer] | None = None,
        given: dict | None = None,
    ):
        self.operations = {op.name: op for op in operations}
        self.graph: Any = operations[0].graph if operations else None
        self.inner: dict[str, RowAnalysis] = {}
        self._states: dict = {**{tensor.ref(): Rows() for tensor in batch}, **(given or {})}
        self._special = special or {}
        for op in operations:
            self._visit(op)

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the state of a tensor; of one that was not visited: public."""
        return self._states.get(tensor.ref(), Public())

    def _visit(self, op: tf.Operation) -> None:
        inputs = [self.state(tensor) for tensor in op.inputs]
        result = self._transfer(op, inputs)
        states = result if isinstance(result, list) else [result] * len(op.outputs)
        for tensor, state in zip(op.outputs, states, strict=True):
            self._states.setdefault(tensor.ref(), state)

    def _transfer(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        found = next((state for state in inputs if isinstance(state, Unproven)), None)
        if found is not None:
            return found
        for kind, users in _USERS.items():
            if op.type not in users and any(isinstance(state, kind) for state in inputs):
                return unproven(op, "it uses what was made for a gradient")
        if op.type in _MAKE_LISTS or any(isinstance(state, RowList) for state in inputs):
            return self._of_lists(op, inputs)
        if any(isinstance(state, Ragged) for state in inputs):
            transfer = _RAGGED_TRANSFERS.get(op.type)
            if transfer is None or has_own_gradient(op):
                return unproven(op, "no rule says what it does to examples of different lengths")
            return transfer(op, inputs)
        if op.type == "ShapeN":
            pairs = zip(op.inputs, inputs, strict=True)
            return [_of_sizes(shape_values.shape_of(*pair)) for pair in pairs]
        if not any(isinstance(state, Rows) for state in inputs):
            return _without_examples(op, inputs)
        if op.type == "Shape":
            return _of_sizes(shape_values.shape_of(op.inputs[0], inputs[0]))
        if op.type == "Size":
            shape = shape_values.shape_of(op.inputs[0], inputs[0])
            return _of_sizes(None if shape is None else (shape_values.product(shape),))
        if op.type == "Rank":
            rank = op.inputs[0].shape.rank
            return Public(None if rank is None else (rank,))
        if op.name in self._special:
            return self._special[op.name](op, inputs)
        if custom_gradients.is_custom(op):
            return self._custom_gradient(op, inputs)
        if op.type in _FUNCTIONS and not has_own_gradient(op):
            return self._of_function(op, inputs)
        transfer = _TRANSFERS.get(op.type)
        if transfer is None and op.type.startswith("CudnnRNN"):
            return unproven(op, "give the layer use_cudnn=False, whose operations have rules")
        if transfer is None:
            return unproven(op, "no rule says what it does to examples")
        if has_own_gradient(op):
            return unproven(op, "its gradient was replaced by another")
        return transfer(op, inputs)

    def _of_lists(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        if op.type in _FUNCTIONS and not has_own_gradient(op):
            return self._of_function(op, inputs)
        transfer = _LIST_TRANSFERS.get(op.type)
        if transfer is None:
            return unproven(op, "no rule says what it does to lists of examples")
        return transfer(op, inputs)

    def _of_function(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        states, inner = _FUNCTIONS[op.type](op, inputs)
        if inner is not None:
            self.inner[op.name] = inner
        return states

    def _custom_gradient(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        """Handles `tf.custom_gradient`, an identity whose gradient must keep examples apart."""
        traced = custom_gradients.trace(op)
        for tensor, state in zip(traced.arriving, inputs, strict=True):
            # What arrives at a public tensor is a sum over the batch.
            summed = Unproven(f"'{op.name}' ({op.type}): the gradient of a public tensor")
            self._states[tensor.ref()] = state if isinstance(state, Rows) else summed
        pairs = [
            (gradient, state)
            for gradient, state in zip(traced.gradients, inputs, strict=True)
            if gradient is not None and isinstance(state, Rows)
        ]
        added, _ = copying.cone([gradient for gradient, _ in pairs], set(self._states))
        needed = {other.name for other in added}
        for other in data_flow.in_order(op.graph.get_operations()):
            if other.name in needed:
                if other.type == "Placeholder" and other.outputs[0].dtype != tf.resource:
                    return unproven(op, f"its gradient uses '{other.name}'")
                self._visit(other)
        if any(self.state(gradient) != state for gradient, state in pairs):
            return unproven(op, "its gradient is not proven to keep the examples apart")
        return list(inputs)


def _without_examples(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Returns the state of what is computed from the size of the batch, and from public values."""
    public = all(isinstance(state, Public) for state in inputs)
    if op.op_def.is_stateful and op.type not in PUBLIC_STATEFUL_TYPES:
        return unproven(op, "what it returns may have been stored by examples")
    if op.type == "RngReadAndSkip":  # How far it skips does not matter to what it returns.
        return Public()
    if not public:
        rows = _repeated(op, inputs)
        if rows is not None:
            return rows
    if op.type == "Shape":
        return _of_sizes(shape_values.shape_of(op.inputs[0], inputs[0]))
    known = [shape_values.known(t, state) for t, state in zip(op.inputs, inputs, strict=True)]
    if op.type == "BroadcastGradientArgs" and not public:
        return _repeated_axes(op, known)
    if op.type == "ConcatOffset":
        return [_of_sizes(values) for values in shape_values.offsets(known)]
    state = _of_sizes(shape_values.compute(op, known))
    return Public() if public and isinstance(state, BatchSize) else state


def _repeated_axes(op: tf.Operation, shapes: list[Sizes]) -> State | list[State]:
    """Returns along which axes a binary operation repeats its inputs, whose shapes are given."""
    first, second = shapes
    if first is None or second is None:
        return unproven(op, "the shapes that it compares are not known")
    rank = max(len(first), len(second))
    full = [(1,) * (rank - len(shape)) + shape for shape in (first, second)]

    def kept(own: Size, other: Size) -> Size | bool:
        if own == 1:
            return True if isinstance(other, int | Rows) and other != 1 else None
        return own if isinstance(own, int) or other == 1 or own == other else None

    return [
        RepeatedAxes(tuple(kept(*pair) for pair in zip(own, other, strict=True)))
        for own, other in (full, full[::-1])
    ]


def _of_sizes(values: Sizes) -> State:
    """Returns the state of a tensor of sizes."""
    if values is None or not shape_values.are_public(values):
        return BatchSize(values)
    found = tuple(value for value in values if isinstance(value, int | Public))
    return Public(found if any(isinstance(value, int) for value in found) else None)


def _repeated(op: tf.Operation, inputs: list[State]) -> Rows | None:
    """Returns the state of public values that are repeated, or drawn anew, for each row."""
    shape = 1 if op.type in ("BroadcastTo", "Tile") else 0
    if not (op.type in ("BroadcastTo", "Tile") or has_one_distribution(op)):
        return None
    if not all(isinstance(state, Public) for i, state in enumerate(inputs) if i != shape):
        return None
    lengths = shape_values.known(op.inputs[shape], inputs[shape])
    if lengths is None:
        return None
    found = [(axis, size) for axis, size in enumerate(lengths) if isinstance(size, Rows)]
    if len(found) != 1 or any(size is None for size in lengths):
        return None
    axis, size = found[0]
    if shape:
        own = op.inputs[0].shape
        if own.rank is None:
            return None
        place = axis - (len(lengths) - own.rank)
        if place >= 0 and own[place] != 1:
            return None
    return Rows(axis, size.each)


def has_one_distribution(op: tf.Operation) -> bool:
    """Returns whether all entries of what an operation makes of public inputs are alike.

    They are one value, or independent random numbers of one distribution. Random numbers that
    follow from a constant seed are neither: an example's would be those of its place in the batch.
    """
    if op.type in _STATELESS_TYPES:
        return any(_is_drawn(tensor) for tensor in op.inputs[1:3])
    return op.type == "Fill" or op.type in _DRAWING_TYPES


def _is_drawn(tensor: tf.Tensor) -> bool:
    """Returns whether a seed follows from some state, and not from constants alone."""
    pending, seen = [tensor.op], set()
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        if op.type in PUBLIC_STATEFUL_TYPES:
            return True
        seen.add(op.name)
        pending.extend(t.op for t in op.inputs)
    return False


def has_own_gradient(op: tf.Operation) -> bool:
    """Returns whether an operation's gradient was replaced (`tf.custom_gradient`)."""
    try:
        return bool(op.get_attr("_gradient_op_type"))
    except ValueError:
        return False


def unproven(op: tf.Operation, why: str) -> Unproven:
    """Returns the state of the outputs of an operation for which the proof fails."""
    return Unproven(f"'{op.name}' ({op.type}): {why}")
