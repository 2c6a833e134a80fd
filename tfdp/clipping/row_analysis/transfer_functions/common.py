"""Functions that several transfer functions need."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp.clipping.row_analysis.analysis import Transfer, has_one_distribution, transfers, unproven
from tfdp.clipping.row_analysis.states import BatchSize, Public, Rows, State

ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Angle AsString Asin Asinh Atan Atan2 Atanh "  # noqa: SIM905
    "BitwiseAnd BitwiseOr Bucketize Cast Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj "
    "Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod "
    "Greater GreaterEqual Identity Imag Inv IsFinite IsInf IsNan LeakyRelu LeftShift Less "
    "LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan "
    "Ndtri Neg NotEqual OnesLike Pow PreventGradient Real RealDiv Reciprocal RegexFullMatch "
    "RegexReplace Relu Relu6 RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin "
    "Sinh Snapshot Softplus Softsign Sqrt Square SquaredDifference StaticRegexFullMatch "
    "StaticRegexReplace StopGradient StringJoin StringLength StringLower StringStrip "
    "StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber "
    "StringUpper Sub Substr Tan Tanh TruncateDiv UnicodeTranscode Xdivy Xlog1py Xlogy "
    "ZerosLike".split()
)


def of_rows(*types: str, index: int = 0, sized: bool = False) -> Callable:
    """Registers a transfer function for operations on one tensor that holds the examples.

    Args:
      *types: Types of operations.
      index: Their input that holds the examples. All others must be public.
      sized: Whether the function itself looks at others that depend on the size of the batch.

    Returns:
      A decorator for functions of the operation, of that input's `Rows` and of all states.
    """

    def register(function: Callable[[tf.Operation, Rows, list[State]], State]) -> Callable:
        @transfers(*types)
        def transfer(op: tf.Operation, inputs: list[State]) -> State:
            state, tensor = inputs[index], op.inputs[index]
            if not isinstance(state, Rows) or tensor.shape.rank is None:
                return unproven(op, f"{tensor.name} is not proven to hold the examples")
            allowed = (Public, BatchSize) if sized else Public
            for i, (other, its) in enumerate(zip(op.inputs, inputs, strict=True)):
                if i != index and not isinstance(its, allowed):
                    return unproven(op, f"{other.name} depends on the batch")
            return function(op, state, inputs)

        return transfer

    return register


def aligned(op: tf.Operation, inputs: list[State], rank: int) -> State:
    """Returns the state of an elementwise result.

    All inputs hold the examples on the same axis, counted from the end.

    Args:
      op: The operation. Its inputs have known ranks.
      inputs: The states of its inputs, or of the first ones if it only works on those.
      rank: Rank of the result.
    """
    tensors = list(op.inputs)[: len(inputs)]
    positions: set[Rows] = set()
    lengths: set[int | None] = set()
    for tensor, state in zip(tensors, inputs, strict=True):
        if isinstance(state, BatchSize):
            return unproven(op, "its values depend on the size of the batch")
        if isinstance(state, Rows):
            positions.add(moved(state, rank - tensor.shape.rank))
            lengths.add(tensor.shape[state.axis])
    if len(positions) != 1:
        return unproven(op, f"its inputs hold the examples differently: {positions}")
    rows = positions.pop()
    for tensor, state in zip(tensors, inputs, strict=True):
        own = rows.axis - (rank - tensor.shape.rank)
        if not isinstance(state, Public) or own < 0:
            continue
        if not any(constant_along(tensor, own, length) for length in lengths):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return rows


def constant_along(tensor: tf.Tensor, axis: int, length: int | None) -> bool:
    """Returns whether a public tensor has the same values, or distribution, in all rows.

    Args:
      tensor: The tensor.
      axis: Its axis that meets the rows.
      length: Number of rows, None if that is not known statically. A public tensor of
        several rows cannot go with batches of any size, only a single row can.
    """
    if tensor.shape.rank is None:
        return False
    return tensor.shape[axis] == 1 or (
        length is not None and tensor.shape[axis] == length and _is_constant(tensor, axis)
    )


def _is_constant(tensor: tf.Tensor, axis: int) -> bool:
    value = tf.get_static_value(tensor)
    if value is not None:
        return bool(np.all(value == np.take(value, [0], axis)))
    op, rank = tensor.op, tensor.shape.rank
    if has_one_distribution(op):
        return True
    if op.type not in ELEMENTWISE or any(t.shape.rank not in (0, rank) for t in op.inputs):
        return False
    return all(t.shape.rank == 0 or t.shape[axis] == 1 or _is_constant(t, axis) for t in op.inputs)


def axes_of(op: tf.Operation, index: int, rank: int) -> list[int] | None:
    """Returns the static axes that an input names, counted from 0."""
    value = tf.get_static_value(op.inputs[index])
    return None if value is None else [int(axis) % rank for axis in np.ravel(value)]


def moved(rows: Rows, by: int) -> Rows:
    """Returns rows whose axis is moved by `by`."""
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
