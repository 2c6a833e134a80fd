"""What several transfer functions need."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp.clipping.rows import RANDOM_TYPES, Transfer, transfers, unproven
from tfdp.clipping.states import BatchSize, Filled, Public, Rows, State

ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr Cast Ceil "  # noqa: SIM905
    "CheckNumerics ClipByValue Cos Cosh Digamma DivNoNan Div Elu EnsureShape Equal Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite IsInf IsNan "
    "LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod "
    "Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 "
    "Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt "
    "Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv Xdivy Xlogy Xlog1py "
    "ZerosLike".split()
)


def of_rows(*types: str, index: int = 0, keeps_filled: bool = True) -> Callable:
    """Registers a transfer function for operations on one tensor that holds the examples.

    Args:
      *types: Types of operations.
      index: Their input that holds the examples.
      keeps_filled: Whether what they make of a filled tensor is a filled tensor.

    Returns:
      A decorator for functions of the operation, of that input's `Rows` and of all states.
    """

    def register(function: Callable[[tf.Operation, Rows, list[State]], State]) -> Callable:
        @transfers(*types)
        def transfer(op: tf.Operation, inputs: list[State]) -> State:
            state = inputs[index]
            if isinstance(state, Filled) and keeps_filled:
                return state
            if not isinstance(state, Rows) or op.inputs[index].shape.rank is None:
                return unproven(op, f"{op.inputs[index].name} is not proven to hold the examples")
            return function(op, state, inputs)

        return function

    return register


def aligned(op: tf.Operation, inputs: list[State], rank: int) -> State:
    """The state of an elementwise result: all examples on the same axis, counted from the end."""
    positions: set[Rows] = set()
    for tensor, state in zip(op.inputs, inputs, strict=True):
        if isinstance(state, BatchSize):
            return unproven(op, "its values depend on the size of the batch")
        if isinstance(state, Rows):
            axis = state.axis + rank - tensor.shape.rank
            positions.add(Rows(axis, state.each, state.interleaved))
    if not positions:
        return _filled(op, inputs)
    if len(positions) > 1:
        return unproven(op, f"its inputs hold the examples differently: {positions}")
    rows = positions.pop()
    for tensor, state in zip(op.inputs, inputs, strict=True):
        own = rows.axis - (rank - tensor.shape.rank)
        if isinstance(state, Public) and own >= 0 and not constant_along(tensor, own):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return rows


def _filled(op: tf.Operation, inputs: list[State]) -> State:
    """Of constants and random numbers of one value or law throughout, together with scalars."""
    scalars = all(
        isinstance(state, Filled) or tensor.shape.rank == 0
        for tensor, state in zip(op.inputs, inputs, strict=True)
    )
    return Filled() if scalars else unproven(op, "it fills a tensor that may differ by row")


def constant_along(tensor: tf.Tensor, axis: int) -> bool:
    """Whether a public tensor has the same values, or law, at all positions of an axis."""
    if tensor.shape[axis] == 1:
        return True
    value = tf.get_static_value(tensor)
    if value is not None:
        return bool(np.all(value == np.take(value, [0], axis)))
    op, rank = tensor.op, tensor.shape.rank
    if op.type in RANDOM_TYPES:
        return True
    if op.type not in ELEMENTWISE or any(t.shape.rank not in (0, rank) for t in op.inputs):
        return False
    return all(t.shape.rank == 0 or constant_along(t, axis) for t in op.inputs)


def axes_of(op: tf.Operation, index: int, rank: int) -> list[int] | None:
    """The static axes that an input names, counted from 0."""
    value = tf.get_static_value(op.inputs[index])
    return None if value is None else [int(axis) % rank for axis in np.ravel(value)]


def moved(rows: Rows, by: int) -> Rows:
    """Rows on another axis."""
    return Rows(rows.axis + by, rows.each, rows.interleaved)


__all__ = [
    "ELEMENTWISE",
    "Transfer",
    "aligned",
    "axes_of",
    "constant_along",
    "moved",
    "of_rows",
]
