"""Matrix products: Dense layers, also on sequences; einsums (attention, EinsumDense)."""

import math
import string
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct, OuterProducts
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.row_analysis.transfer_functions.products import einsum_labels, transposes


def positions_of(tensor: tf.Tensor, features: int = 1) -> int | None:
    """Returns the number of positions per example of `[rows, ..., features]`, if static."""
    middle = tensor.shape[1 : tensor.shape.rank - features]
    return middle.num_elements() if middle.is_fully_defined() else None


@register_op_gradients("MatMul", "SparseMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(use: Use) -> Contribution | None:
    """Handles `x @ w` for `x` of shape `[batch, ..., p]`; or one matrix per leading index."""
    x, (first, transposed) = use.data[0], transposes(use.op)
    if x is None or first:
        return None
    if len(use.shape) > 2:
        return _matrices(use, x, transposed)
    fan_out, fan_in = use.shape if transposed else use.shape[::-1]
    positions = positions_of(use.gradient)
    order = [1, 0] if transposed else [0, 1]
    return OuterProducts(
        x, use.gradient, use.shape, positions, fan_in, fan_out, "matmul", order=order
    )


def _matrices(use: Use, x: tf.Tensor, transposed: bool) -> Contribution | None:
    """Handles `x @ w` for `x` of shape `[..., batch, p]` and weights `[..., p, d]`."""
    rows, lead = use.rows[0], use.shape[:-2]
    if rows is None or rows.axis != len(lead) or x.shape[2:-1].as_list() != lead:
        return None
    labels = string.ascii_lowercase[: len(lead)]
    product = "YZ" if transposed else "ZY"

    def function(x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        return tf.einsum(f"ni{labels}Z,ni{labels}Y->n{labels}{product}", x, g)

    return Direct([x, use.gradient], use.shape, "matmuls, instantiated", function)


@register_op_gradients("SparseTensorDenseMatMul")
def sparse_matmul(use: Use) -> Contribution | None:
    """Handles a sparse matrix of weights times data: an entry's gradient is one product."""
    x = use.data[3]
    if x is None or use.op.get_attr("adjoint_a") or use.inside:
        return None
    places = use.op.inputs[0]

    def function(x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        g, x = tf.gather(g, places[:, 0], axis=2), tf.gather(x, places[:, 1], axis=2)
        return tf.reduce_sum(g * x, axis=1)

    name = "sparse matmul, instantiated"
    floats = 3 * tf.TensorShape(use.shape).num_elements() * (use.each or 1)
    return Direct([x, use.gradient], use.shape, name, function, floats)


@register_op_gradients("Einsum", weight=0)
@register_op_gradients("Einsum", weight=1)
def einsum(use: Use) -> Contribution | None:
    """Handles a product of data and weights that keeps the examples apart."""
    equation, x = einsum_labels(use.op), use.data[1 - use.weight]
    state = use.rows[1 - use.weight]
    if equation is None or x is None or state is None:
        return None
    terms, result = equation
    x_labels, w_labels = terms[1 - use.weight], terms[use.weight]
    row = x_labels[state.axis]
    # `by_example` has put the axis of the examples first, and split it into row and "each".
    each = next(c for c in string.ascii_letters if c not in x_labels + w_labels + result)
    x_order = row + each + x_labels.replace(row, "")
    g_order = row + each + result.replace(row, "")
    summed = [c for c in w_labels if c in x_labels and c not in result]
    kept = [c for c in w_labels if c in result and c not in x_labels]
    if len(summed) + len(kept) < len(w_labels):
        product = f"{x_order},{g_order}->{row}{w_labels}"
        if any(c not in x_labels + result for c in w_labels):
            return None
        return Direct(
            [x, use.gradient],
            use.shape,
            "einsum, instantiated",
            lambda x, g: tf.einsum(product, x, g),
        )
    return _einsum_as_products(use, x, x_order, g_order, summed, kept, w_labels)


def _einsum_as_products(
    use: Use,
    x: tf.Tensor,
    x_order: str,
    g_order: str,
    summed: Sequence[str],
    kept: Sequence[str],
    w_labels: Sequence[str],
) -> OuterProducts:
    """Turns an einsum into matrix products.

    Positions are the labels that data and result share, and the weights do not have.
    """
    dimension = dict(zip(w_labels, use.shape, strict=True))
    shared = [c for c in x_order[1:] if c in g_order]
    a = _arrange(x, x_order, [x_order[0], *shared, *summed])
    g = _arrange(use.gradient, g_order, [g_order[0], *shared, *kept])
    fan_in = math.prod(dimension[c] for c in summed)
    fan_out = math.prod(dimension[c] for c in kept)
    return OuterProducts(
        a,
        g,
        use.shape,
        positions_of(g, len(kept)),
        fan_in,
        fan_out,
        "einsum",
        order=[w_labels.index(c) for c in [*summed, *kept]],
    )


def _arrange(tensor: tf.Tensor, labels: str, order: list[str]) -> tf.Tensor:
    """Puts axes into another order, and sums over those that are not named."""
    dropped = [i for i, c in enumerate(labels) if c not in order]
    if dropped:
        tensor = tf.reduce_sum(tensor, axis=dropped)
        labels = "".join(c for c in labels if c in order)
    return tf.transpose(tensor, [labels.index(c) for c in order])
