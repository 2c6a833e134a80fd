"""Upper bounds on norms that hold despite underflow, overflow and rounding.

A norm that is too low clips too little. Every squared norm here is therefore raised by the most
that its computation can have lost:
  * Underflow. A product or a square below `TINY`, the smallest normal number of float32, may be
    flushed to zero, as may a number that is not normal: each operation loses at most `TINY`.
  * Rounding. A sum of k products of one sign loses at most a share of itself (`_rounding`).
    Where terms of both signs cancel, the loss is a share of the sum of their absolute values.

What overflows float32 becomes infinite or NaN, and such an example contributes nothing: gradients
(and factors of outer products) of a norm above 1.8e19, whose squares do.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping.shared_tensors import constant

# The smallest normal number of float32: processors and compilers may flush what is below it.
TINY = 2.0**-126
# Where terms cancel, the sum of their absolute values is at most so many times the norm's bound:
# that has a share of its square, of at least 13 units of rounding (`_guard`).
MOST_CANCELLED = 1200.0


def _rounding(terms: int | tf.Tensor) -> float | tf.Tensor:
    """Returns the share by which a sum of so many products of one sign may come out too low.

    A scalar tensor, float32, of a number of terms that is one.

    At worst it is `terms` units of rounding, for sums one after the other. Libraries add up blocks:
    for equal terms, which are the worst, the loss of matrix products was found to be a quarter of
    that at up to 300 terms and 4.3 times the square root beyond (x86, Eigen, oneDNN, XLA); this is
    a little more.
    """
    if tf.is_tensor(terms):
        terms = tf.cast(terms, tf.float32)
        return 2.0**-24 * (4 + tf.minimum(terms / 2, 5 * tf.sqrt(terms)))
    return 2.0**-24 * (4 + min(terms / 2, 5 * math.sqrt(terms)))


def of_rows(flat: tf.Tensor, size: int) -> tf.Tensor:
    """Bounds the squared norms of the rows of `[n, size]`, in one pass over memory: `[n]`."""
    if devices.compiled_by_xla():  # It makes one pass of the two, and has no EuclideanNorm.
        squares = tf.reduce_sum(tf.square(flat), axis=constant([1]))
    else:
        squares = tf.square(tf.raw_ops.EuclideanNorm(input=flat, axis=constant([1])))
    return raised(squares, size)


def of_slices(stacked: tf.Tensor, size: int) -> tf.Tensor:
    """Bounds the squared norms of the slices of `[n, ...]`, of `size` numbers, in float32."""
    squares = tf.square(tf.cast(stacked, tf.float32))
    squares = tf.reduce_sum(squares, axis=list(range(1, stacked.shape.rank)))
    return raised(squares, size)


def raised(squares: tf.Tensor, size: int) -> tf.Tensor:
    """Raises sums of `size` squares to upper bounds.

    Where products are rounded to fewer digits (TF32), also by what the weighted sums of the
    gradients, which are such products, may add.
    """
    # No more than the measured loss of sums over all of a row: a quarter of that of products.
    share = _rounding(size) / 4 + 2.0**-22 + 8 * devices.product_rounding()
    least = constant(size * TINY, squares.dtype)
    return squares * constant(1 + share, squares.dtype) + least


def of_outer_products(a: tf.Tensor, g: tf.Tensor, fan_in: int, fan_out: int) -> tf.Tensor:
    """Bounds the squared norms of `a[i] outer g[i]`, of `[n, fan_in]` and `[n, fan_out]`: `[n]`.

    A factor of zero times an infinite one is infinite here, not NaN; either is bad.
    """
    return of_rows(a, fan_in) * of_rows(g, fan_out) + TINY


class GramSums(NamedTuple):
    """Sums over the positions t of examples, `[n]` each, from which a squared norm follows.

    Attributes:
      products: `sum_ts A[t, s] B[t, s]`, of the Gram matrices of inputs and output gradients.
      lengths: `sum_t |a_t| |g_t|`.
      of_a: `sum_t |a_t|`.
      of_g: `sum_t |g_t|`.
      fan_in: Length p of each a.
      fan_out: Length d of each g.
      positions: Number T of positions, a scalar tensor where it is not static.
    """

    products: tf.Tensor
    lengths: tf.Tensor
    of_a: tf.Tensor
    of_g: tf.Tensor
    fan_in: int
    fan_out: int
    positions: int | tf.Tensor


def gram_sums(
    a: tf.Tensor, g: tf.Tensor, fan_in: int, fan_out: int, positions: int | tf.Tensor
) -> GramSums:
    """Computes what `of_gram_sums` needs of `sum_t a[i, t] outer g[i, t]`.

    Args:
      a: Inputs, `[n, T, p]`.
      g: Output gradients, `[n, T, d]`.
      fan_in: p.
      fan_out: d.
      positions: T, a scalar tensor where it is not static.
    """
    grams = tf.matmul(a, a, transpose_b=True) * tf.matmul(g, g, transpose_b=True)
    of_a, of_g = _lengths(a, fan_in), _lengths(g, fan_out)
    return GramSums(
        tf.reduce_sum(grams, axis=constant([1, 2])),
        tf.reduce_sum(of_a * of_g, axis=constant([1])),
        tf.reduce_sum(of_a, axis=constant([1])),
        tf.reduce_sum(of_g, axis=constant([1])),
        fan_in,
        fan_out,
        positions,
    )


def of_gram_sums(sums: Sequence[GramSums]) -> list[tf.Tensor]:
    """Bounds the squared norms of `sum_t a[i, t] outer g[i, t]` by Gram matrices: `[n]` each.

    With computed products `A[t, s]` of the a and `B[t, s]` of the g, the squared norm is `sum A B`.
    Each A is wrong by at most `r |a_t| |a_s| + 2 p TINY`, each B likewise with d, and their product
    by one more TINY, so that the sum is wrong by at most

        R (sum_t |a_t| |g_t|)^2 + 3 TINY (p (sum_t |g_t|)^2 + d (sum_t |a_t|)^2) + 4 T^2 TINY.

    Args:
      sums: Sums of any number of such gradients of the same examples; all are worked on together.
    """
    if not sums:
        return []
    products, lengths, of_a, of_g = (
        tf.stack(list(tensors), axis=1) for tensors in list(zip(*sums, strict=True))[:4]
    )

    def each(value: Callable[[GramSums], float | tf.Tensor]) -> tf.Tensor:
        values = [value(s) for s in sums]
        if any(tf.is_tensor(v) for v in values):
            return tf.stack([tf.cast(v, products.dtype) for v in values])
        return tf.constant(values, products.dtype)

    lost = each(lambda s: _guard(s.fan_in, s.fan_out, s.positions)) * tf.square(lengths)
    # Roots first: squares of the sums might overflow.
    lost += tf.square(each(lambda s: math.sqrt(3 * TINY * s.fan_in)) * of_g)
    lost += tf.square(each(lambda s: math.sqrt(3 * TINY * s.fan_out)) * of_a)
    lost += each(lambda s: 4 * TINY * _float(s.positions) ** 2)
    return tf.unstack(tf.maximum(products, 0.0) + lost, num=len(sums), axis=1)


def of_sums_of_outer_products(
    a: tf.Tensor, g: tf.Tensor, fan_in: int, fan_out: int, positions: int
) -> tf.Tensor:
    """Bounds the squared norms of one gradient, `[n]`: see `gram_sums` and `of_gram_sums`."""
    return of_gram_sums([gram_sums(a, g, fan_in, fan_out, positions)])[0]


def of_lookups(same: tf.Tensor, g: tf.Tensor, width: int) -> tf.Tensor:
    """Bounds the squared norms of gradients of a table, from what was looked up: `[n]`.

    Args:
      same: Whether two positions looked up the same row, 0 or 1, `[n, T, T]`.
      g: Gradients of what was looked up, `[n, T, d]`.
      width: d.
    """
    products = same * tf.matmul(g, g, transpose_b=True)
    positions = g.shape[1] or tf.shape(g)[1]
    lost = tf.cast(_guard(0, width, positions), g.dtype) * tf.square(
        tf.reduce_sum(_lengths(g, width), axis=1)
    )
    lost += 3 * width * TINY * tf.square(tf.cast(tf.shape(g)[1], g.dtype))
    return tf.maximum(tf.reduce_sum(products, axis=[1, 2]), 0.0) + lost


def tied_sums(
    same: tf.Tensor,
    at_rows: tf.Tensor,
    g: tf.Tensor,
    a: tf.Tensor,
    b: tf.Tensor,
    size: int,
    width: int,
    positions: int | tf.Tensor,
) -> GramSums:
    """Computes what `of_gram_sums` needs of `sum_t e[i_t] outer g[t] + sum_s a[s] outer b[s]`.

    The Gram matrix of the unit vectors e and the vectors a is made of `same`, `at_rows` and that of
    the a. The first two are exact.

    Args:
      same: Whether two lookups are of the same row, 0 or 1, `[n, T, T]`.
      at_rows: The entries `a[s, i_t]`, `[n, S, T]`.
      g: Gradients of what was looked up, `[n, T, d]`.
      a: Output gradients, `[n, S, V]`.
      b: Inputs of the product, `[n, S, d]`.
      size: V.
      width: d.
      positions: T + S, a scalar tensor where it is not static.
    """
    of_lookups = same * tf.matmul(g, g, transpose_b=True)
    across = at_rows * tf.matmul(b, g, transpose_b=True)
    products = gram_sums(a, b, size, width, positions)
    of_g = tf.reduce_sum(_lengths(g, width), axis=constant([1]))
    lookups = tf.cast(tf.shape(g)[1], g.dtype)
    return GramSums(
        tf.reduce_sum(of_lookups, axis=constant([1, 2]))
        + 2 * tf.reduce_sum(across, axis=constant([1, 2]))
        + products.products,
        of_g + products.lengths,
        lookups + products.of_a,
        of_g + products.of_g,
        size,
        width,
        positions,
    )


def in_float32(squares: tf.Tensor) -> tf.Tensor:
    """Returns upper bounds in float32 of squared norms of any type."""
    if squares.dtype == tf.float32:
        return squares
    return tf.cast(squares, tf.float32) * (1 + 2.0**-22) + TINY


def _float(number: int | tf.Tensor) -> int | tf.Tensor:
    """Returns a number that is static, or a scalar tensor of float32."""
    return tf.cast(number, tf.float32) if tf.is_tensor(number) else number


def _guard(fan_in: int, fan_out: int, positions: int | tf.Tensor) -> float | tf.Tensor:
    """Returns the share of `(sum_t |a_t| |g_t|)^2` by which a norm by Gram matrices may be too low.

    With products of u digits, the norm's square loses 4u of it; and the gradients that are summed
    (again in products) are longer by 2u of its root, which is at most 5u of it in the square.
    """
    share = _rounding(fan_in) + _rounding(fan_out) + _rounding(positions)
    return share + 10 * devices.product_rounding()


def _lengths(vectors: tf.Tensor, size: int) -> tf.Tensor:
    """Bounds the norms of the vectors of `[n, T, size]` from above: `[n, T]`."""
    squares = tf.reduce_sum(tf.square(vectors), axis=constant([2]))
    return tf.sqrt(squares + constant(size * TINY, squares.dtype))
