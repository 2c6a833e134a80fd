"""Proves which rows of the tensors of a loss belong to which example.

The sum of the losses of a batch has one gradient with respect to the output of a layer. Its rows
are the gradients of the examples only if no operation lets one example's row into another's. The
proof goes through the graph, operation by operation: from the batch, whose rows are the examples,
to the losses. Each operation has a transfer function that says where its outputs hold the
examples, given where its inputs do (`tfdp.clipping.row_transfers`). What has none is not proven;
what is known to mix examples is an error.
"""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from tfdp.clipping import sizes
from tfdp.clipping.states import BatchSize, Filled, Public, Rows, State, Unproven

# From an operation and the states of its inputs to those of its outputs.
Transfer: TypeAlias = Callable[[tf.Operation, list[State]], State | list[State]]

_TRANSFERS: dict[str, Transfer] = {}
RANDOM_TYPES = frozenset(
    {
        "Fill",
        "RandomUniform",
        "RandomStandardNormal",
        "TruncatedNormal",
        "StatelessRandomUniform",
        "StatelessRandomUniformV2",
        "StatelessRandomNormal",
        "StatelessRandomNormalV2",
        "StatelessTruncatedNormalV2",
    }
)


def mixes(op: tf.Operation, how: str) -> ValueError:
    """The error for an operation that is known to mix examples."""
    return ValueError(
        f"The operation '{op.name}' ({op.type}) mixes examples: {how}. No gradient then belongs to "
        "one example, and clipping it would not make the training private. Compute each example's "
        "output from that example alone: statistics over features, time or pixels instead of over "
        "the batch (LayerNormalization, GroupNormalization)."
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


class RowAnalysis:
    """Where the tensors that a loss is computed from hold the examples.

    Args:
      operations: The operations that compute the losses from the batch, in the order of the graph.
      batch: The tensors of the batch, first dimension the example.
      special: Transfer functions of single operations, by name: they come before those of types.

    Raises:
      ValueError: An operation mixes examples.
    """

    def __init__(
        self,
        operations: list[tf.Operation],
        batch: list[tf.Tensor],
        special: dict[str, Transfer] | None = None,
    ):
        self._states: dict = {tensor.ref(): Rows() for tensor in batch}
        self._special = special or {}
        self.unproven: list[str] = []
        for op in operations:
            self._visit(op)

    def state(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; of one that was not visited: public."""
        return self._states.get(tensor.ref(), Public())

    def _visit(self, op: tf.Operation) -> None:
        inputs = [self.state(tensor) for tensor in op.inputs]
        result = self._transfer(op, inputs)
        states = result if isinstance(result, list) else [result] * len(op.outputs)
        news = [s for s in states if isinstance(s, Unproven)]
        if news and not any(isinstance(s, Unproven) for s in inputs):
            self.unproven.append(news[0].reason)
        for tensor, state in zip(op.outputs, states, strict=True):
            self._states.setdefault(tensor.ref(), state)

    def _transfer(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        if all(isinstance(state, Public) for state in inputs):
            computed = any(_values(state) for state in inputs)
            return self._of_sizes(op, inputs) if computed else Public()
        unproven = next((state for state in inputs if isinstance(state, Unproven)), None)
        if unproven is not None:
            return unproven
        if op.type == "Shape":
            rows = inputs[0] if isinstance(inputs[0], Rows) else None
            return BatchSize(sizes.shape_of(op.inputs[0], rows))
        if op.type in ("Size", "Rank"):
            return BatchSize()
        has_rows = any(isinstance(state, Rows) for state in inputs)
        if not has_rows and not any(isinstance(state, Filled) for state in inputs):
            return self._of_sizes(op, inputs)
        transfer = self._special.get(op.name) or _TRANSFERS.get(op.type)
        if transfer is None:
            return Unproven(f"no rule says what '{op.name}' ({op.type}) does to examples")
        return transfer(op, inputs)

    def _of_sizes(self, op: tf.Operation, inputs: list[State]) -> State:
        """The state of what is computed from the size of the batch, and from public values."""
        known = [
            _values(state) or (sizes.static_values(tensor) if isinstance(state, Public) else None)
            for tensor, state in zip(op.inputs, inputs, strict=True)
        ]
        public = all(isinstance(state, Public) for state in inputs)
        if op.type in RANDOM_TYPES:
            first = known[0][0] if known[0] else None
            return Public() if public else first if isinstance(first, Rows) else Filled()
        values = sizes.compute(op, known)
        numbers = tuple(value for value in values or () if isinstance(value, int))
        if values is not None and len(numbers) == len(values):
            return Public(numbers)
        return Public() if public else BatchSize(values)


def _values(state: State) -> sizes.Sizes:
    return state.values if isinstance(state, Public | BatchSize) else None


def unproven(op: tf.Operation, why: str) -> Unproven:
    """The state of the outputs of an operation of which the proof fails."""
    return Unproven(f"'{op.name}' ({op.type}): {why}")
