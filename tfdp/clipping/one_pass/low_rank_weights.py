"""Weights that are computed as a product with a variable, such as low-rank adapters (LoRA).

Weights W = W0 + s A B have the rank of A and B at most, and so have their gradients by A and B:
where W's is `sum_t a[t] outer g[t]`, A's is `sum_t a[t] outer s B g[t]`, and B's is
`sum_t s A^T a[t] outer g[t]`. Nothing of the size of W is made for an example.

References:
  - Hu et al., 2021, LoRA (https://arxiv.org/abs/2106.09685).
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tfdp.clipping.loss_graph import copying, custom_gradients
from tfdp.clipping.one_pass.per_example_gradients import (
    Contribution,
    Lookups,
    OuterProducts,
    widen,
)
from tfdp.clipping.one_pass.weight_uses import View, follows_from, merged_axes
from tfdp.clipping.row_analysis.transfer_functions.products import transposes

_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})
_COSTLY = _PRODUCTS | {"Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}


@dataclasses.dataclass(frozen=True)
class _Product:
    """Weights that are `variable @ other`, or `other @ variable`, and a public sum.

    Attributes:
      other: The other matrix, `[r, k]` or `[..., r]`.
      is_first: Whether the variable is the first factor.
      rank: Length r of the axis that is summed over.
      width: Length k of the last axis of the product.
      scales: Scalars that the product is multiplied by.
    """

    other: tf.Tensor
    is_first: bool
    rank: int
    width: int
    scales: tuple[tf.Tensor, ...] = ()

    def matrix(self, dtype: tf.DType) -> tf.Tensor:
        """Computes the other matrix times the scales, `[r, k]` or `[-1, r]`."""
        target = tf.compat.v1.get_default_graph()
        scaled = tf.cast(copying.bring(self.other, target), dtype)
        for scale in self.scales:
            scaled *= tf.reshape(tf.cast(copying.bring(scale, target), dtype), [])
        return tf.reshape(scaled, [self.rank, -1] if self.is_first else [-1, self.rank])


def of_variable(part: Contribution, view: View, shape: Sequence[int]) -> Contribution | None:
    """Returns the gradients of a variable, from those of weights that are a product with it.

    Args:
      part: Gradients of the weights.
      view: Steps from the variable to the weights: it has an `end`.
      shape: Shape of the variable.

    Returns:
      None if the weights are computed in another way.
    """
    if not isinstance(part, OuterProducts | Lookups) or 0 in shape or 0 in part.shape:
        return None
    end = view.end
    if isinstance(part, OuterProducts):
        part, end = _of_transposed(part, view)
        part = _with_last_axis_last(part)
    product = _find_product(view, end)
    if product is None or not (product.is_first or len(shape) == 2):
        return None
    if isinstance(part, Lookups):
        if part.shape != [part.shape[0], product.width] or len(shape) != 2:
            return None
        return _lookups_of(part, product, shape)
    if part.fan_out % product.width:
        return None
    in_order = part.order == sorted(part.order)
    # All axes but the last, and their order in a and g: there the last one must be the last.
    leading, order = part.shape[:-1], part.order[:-1]
    if in_order:  # However the axes are grouped.
        leading, order = [part.fan_in, part.fan_out // product.width], [0, 1]
    elif part.order[-1] != len(order) or part.shape[-1] != product.width:
        return None
    if not product.is_first:
        return _of_second(part, product, leading, order)
    if not in_order and list(shape[:-1]) != leading:
        return None
    return _of_first(part, product, shape, list(range(len(shape))) if in_order else part.order)


def _of_transposed(part: OuterProducts, view: View) -> tuple[OuterProducts, Any]:
    """Returns the gradients of what is transposed to weights, and the tensor that it is.

    Axes may be merged after a transpose, as `tf.einsum` does: they are told apart again.
    """
    order, shape, end = part.order, list(part.shape), cast(Any, view.end)
    found, found_end = part, end
    while (
        view.caller is None
        and end is not view.handle
        and end.op.type in ("Identity", "Transpose", "Reshape")
    ):
        if custom_gradients.is_replaced(end.op):
            break
        if end.op.type == "Reshape":
            groups = merged_axes(end.op.inputs[0].shape, shape)
            if groups is None:
                break
            order = [axis for merged in order for axis in groups[merged]]
        if end.op.type == "Transpose":
            axes = tf.get_static_value(end.op.inputs[1])
            if axes is None or not end.op.inputs[0].shape.is_fully_defined():
                break
            order = [int(axes[axis]) for axis in order]
        end, is_transposed = end.op.inputs[0], end.op.type == "Transpose"
        shape = end.shape.as_list() if end.shape.is_fully_defined() else shape
        if is_transposed:  # What is merged alone needs nothing: the axes are in order.
            found, found_end = copy.copy(part), end
            found.order, found.shape = order, shape
    return found, found_end


def _with_last_axis_last(part: OuterProducts) -> OuterProducts:
    """Returns gradients with a and g in each other's place, if that puts the last axis into g.

    Transposed weights are `sum_t g[t] outer a[t]`: the products are the same.
    """
    end = part.order.index(len(part.shape) - 1) + 1
    if part.expand is not None or math.prod(part.shape[i] for i in part.order[:end]) != part.fan_in:
        return part
    return OuterProducts(
        part.tensors[1],
        part.tensors[0],
        part.shape,
        part.positions,
        part.fan_out,
        part.fan_in,
        part.name.split(",")[0],
        order=[*part.order[end:], *part.order[:end]],
    )


def _of_first(
    part: OuterProducts, product: _Product, shape: Sequence[int], order: Sequence[int]
) -> Contribution:
    """Returns gradients of A in A B: in the place of each g stands B g."""
    g = _rows_of(tf.cast(widen(part.tensors[1]), part.dtype), product.width)
    return OuterProducts(
        part.tensors[0],
        tf.matmul(g, product.matrix(part.dtype), transpose_b=True),
        shape,
        part.positions,
        part.fan_in,
        part.fan_out // product.width * product.rank,
        _name(part),
        expand=part.expand,
        order=order,
    )


def _of_second(
    part: OuterProducts, product: _Product, leading: Sequence[int], order: Sequence[int]
) -> Contribution:
    """Returns gradients of B in A B: in the place of each a stands A^T a."""
    rank, others = product.rank, part.fan_out // product.width
    matrix = tf.reshape(product.matrix(part.dtype), [*leading, rank])
    matrix = tf.transpose(matrix, [*order, len(order)])
    matrix = tf.reshape(matrix, [part.fan_in, others * rank])
    expand = part.expand

    def projected(a: tf.Tensor) -> tf.Tensor:
        a = tf.cast(widen(a), matrix.dtype)
        a = _rows_of(a if expand is None else expand(a), part.fan_in)
        return _rows_of(tf.matmul(a, matrix), rank)

    a = part.tensors[0]
    return OuterProducts(
        projected(a) if expand is None else a,
        part.tensors[1],
        [rank, product.width],
        None if part.positions is None else part.positions * others,
        rank,
        product.width,
        _name(part),
        expand=None if expand is None else projected,
    )


def _lookups_of(part: Lookups, product: _Product, shape: Sequence[int]) -> Contribution:
    """Returns gradients of A or B in a table A B."""
    indices, g = part.tensors
    if product.is_first:
        g = tf.cast(widen(g), part.dtype)
        g = tf.matmul(g, product.matrix(part.dtype), transpose_b=True)
        found = Lookups(indices, g, shape)
        found.name = f"{_name(part)}, norms by comparing tokens"
        return found
    indices = tf.cast(indices, tf.int64)
    known = (indices >= 0) & (indices < part.shape[0])
    rows = tf.gather(product.matrix(part.dtype), tf.where(known, indices, 0))
    bad = tf.constant(math.nan, rows.dtype)  # As `Lookups` has it.
    rows = tf.where(known[..., tf.newaxis], rows, bad)
    positions = indices.shape[1]
    return OuterProducts(rows, g, shape, positions, product.rank, product.width, _name(part))


def _name(part: Contribution) -> str:
    return f"{part.name.split(',')[0]} of low-rank weights"


def _rows_of(tensor: tf.Tensor, width: int) -> tf.Tensor:
    """Arranges `[n, ...]` as `[n, -1, width]`."""
    return tf.reshape(tensor, tf.concat([tf.shape(tensor)[:1], [-1, width]], 0))


def has_product(view: View) -> bool:
    """Returns whether weights are computed by a product with the variable."""
    pending: list[Any] = [view.end]
    seen: set[Any] = set()
    while pending:
        tensor = pending.pop()
        if tensor is view.handle or tensor.ref() in seen or not follows_from(tensor, view):
            continue
        seen.add(tensor.ref())
        if tensor.op.type in _COSTLY:
            return True
        pending += _before(tensor, view)
    return False


def _before(tensor: tf.Tensor, view: View) -> list[tf.Tensor]:
    """Returns what a tensor is computed from, that of the caller for arguments of a function."""
    if tensor.graph is not view.handle.graph and tensor.op.type == "Placeholder":
        return [view.caller.inputs[i] for i, t in enumerate(tensor.graph.inputs) if t is tensor]
    return list(tensor.op.inputs)


def _find_product(view: View, end: Any) -> _Product | None:
    """Returns the product that a tensor is, which the weights of a view follow from, or None."""
    if view.caller is not None:
        return None
    tensor = end
    scales: list[tf.Tensor] = []
    found: _Product | None = None
    while tensor is not view.handle:
        op = tensor.op
        path = [i for i, t in enumerate(op.inputs) if t is view.handle or follows_from(t, view)]
        if len(path) != 1 or custom_gradients.is_replaced(op):
            return None
        own = op.inputs[path[0]]
        same_shape = own.shape.is_fully_defined() and own.shape == tensor.shape
        if op.type in _PRODUCTS and found is None:
            found = _factor(op, is_first=path == [0])
            if found is None:
                return None
        elif op.type == "Mul" and same_shape and op.inputs[1 - path[0]].shape.num_elements() == 1:
            scales.append(op.inputs[1 - path[0]])
        elif op.type == "AddV2" and same_shape:
            pass  # What is added is public.
        elif op.type in ("Reshape", "ExpandDims", "Squeeze") and path == [0]:
            if found is not None and (not own.shape.rank or own.shape[-1:] != tensor.shape[-1:]):
                return None  # The axis that is summed over, or that which is last, is another one.
        elif op.type == "Cast":
            if not (own.dtype.is_floating and tensor.dtype.is_floating):
                return None
        elif op.type not in ("Identity", "ReadVariableOp"):
            return None
        tensor = own
    return None if found is None else dataclasses.replace(found, scales=tuple(scales))


def _factor(op: tf.Operation, is_first: bool) -> _Product | None:
    """Returns the product of a variable with a public matrix."""
    left, right = op.inputs
    if any(transposes(op)) or not all(t.shape.is_fully_defined() for t in (left, right)):
        return None
    if any(size != 1 for size in right.shape[:-2]):  # One matrix for all that is on its left.
        return None
    return _Product(right if is_first else left, is_first, *right.shape[-2:])
