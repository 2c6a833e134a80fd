"""Gradients of a table that examples look up and are multiplied by, such as a tied embedding.

Language models look tokens up in a table `E` and compute their outputs as `h E^T`. The gradient of
an example is a sum of outer products of both kinds, `[V, d]`:

    sum_t e[i_t] outer g[t] + sum_s a[s] outer b[s],

with unit vectors e, tokens i, gradients g of what was looked up, output gradients a, `[V]`, and
inputs b = h, `[d]`. Its squared norm follows from the inner products of all pairs of terms:

    sum_tt' [i_t = i_t'] <g_t, g_t'> + 2 sum_st a[s, i_t] <b_s, g_t>
        + sum_ss' <a_s, a_s'> <b_s, b_s'>.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping import norms
from tfdp.clipping.one_pass.per_example_gradients import (
    Contribution,
    Lookups,
    OuterProducts,
    widen,
)
from tfdp.clipping.shared_tensors import sizes_of

# Texts of open length are taken for texts of so many positions when the form is chosen. The Gram
# matrices of longer ones take more time than instantiated gradients, but less memory.
_USUAL_POSITIONS = 256
# Instantiating both gradients, adding them, and passing over the sum takes about as long as this
# many multiplications for each entry (AMD EPYC: 100 at d = 64, 340 at d = 768, V = 50,257).
_MULTIPLICATIONS_PER_ENTRY = 100


class TiedTable(Contribution):
    """Gradients of a table that is looked up and multiplied by, without instantiating them.

    An example with an index outside the table is bad, as in `Lookups`.

    Args:
      lookups: Gradients of the lookups.
      products: Gradients of the products.
      rows_first: Whether the first vectors of the products have an entry for each row of the table,
        and not the second ones.
      instantiated: The sum of both, instantiated.
    """

    factored = True

    def __init__(
        self,
        lookups: Lookups,
        products: OuterProducts,
        rows_first: bool,
        instantiated: Contribution,
    ):
        name = f"{lookups.name.split(',')[0]} and {products.name.split(',')[0]}"
        tensors = [*lookups.tensors, *products.tensors]
        super().__init__(tensors, instantiated.shape, f"{name}, norms by Gram matrices")
        self.lookups, self.products = lookups, products
        self._rows_first, self._instantiated = rows_first, instantiated
        self._size, self._width = lookups.shape[0], lookups.width
        self._sign = -1.0 if lookups.view.negates != products.view.negates else 1.0

    @property
    def positions(self) -> int | tf.Tensor:
        """Number of lookups and of products of an example; a scalar tensor if it is not static."""
        return sizes_of(self.lookups.tensors[0])[1] + self.products.number_of_positions()

    @property
    def floats_per_row(self) -> int | tf.Tensor:
        """See `Contribution`."""
        positions = self.lookups.tensors[0].shape[1] or _USUAL_POSITIONS
        vectors = self.lookups.width * positions + self.products.sum_floats_per_row
        narrow = any(t.dtype.size < 4 for t in self.products.tensors)
        return 3 * self.positions**2 + (2 * vectors if narrow else vectors)

    @property
    def work_per_row(self) -> int:
        """See `Contribution`."""
        return self.lookups.work_per_row + self.products.work_per_row

    @property
    def sum_floats_per_row(self) -> int | tf.Tensor:
        """See `Contribution`."""
        return self.lookups.sum_floats_per_row + self.products.sum_floats_per_row

    def flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`; large."""
        return self._instantiated.flat(tensors)

    def _vectors(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Returns the indices i, int64 `[n, T]`, and g, a and b, `[n, positions, ...]`."""
        g = tf.cast(widen(tensors[1]), self.dtype)
        first, second = (tf.cast(t, self.dtype) for t in self.products.pairs(tensors[2:]))
        a, b = (first, second) if self._rows_first else (second, first)
        return tf.cast(tensors[0], tf.int64), g, a, self._sign * b

    def squares(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`."""
        indices, g, a, b = self._vectors(tensors)
        known = self.lookups.in_table(indices)
        rows = tf.where(known[:, tf.newaxis], indices, 0)
        same = tf.cast(rows[:, :, tf.newaxis] == rows[:, tf.newaxis], g.dtype)
        at_rows = tf.gather(a, rows, axis=2, batch_dims=1)
        sums = norms.tied_sums(same, at_rows, g, a, b, self._size, self._width, self.positions)
        nan = tf.constant(float("nan"), g.dtype)
        return tf.where(known, norms.of_gram_sums([sums])[0], nan)

    def sum_terms(self) -> tuple[int | tf.Tensor, float]:
        """See `Contribution`."""
        return self.positions, norms.MOST_CANCELLED

    def total(
        self, tensors: Sequence[tf.Tensor], factors: tf.Tensor, wide: bool = False
    ) -> tf.Tensor:
        """See `Contribution`: one product, to which the lookups are added in place."""
        vectors = self._vectors(tensors)
        dtype = tf.float64 if wide else self.dtype
        indices, (g, a, b) = vectors[0], (tf.cast(t, dtype) for t in vectors[1:])
        factors = tf.cast(factors, dtype)[:, tf.newaxis, tf.newaxis]
        b, g = (tf.reshape(t * factors, [-1, self._width]) for t in (b, g))
        total = tf.matmul(tf.reshape(a, [-1, self._size]), b, transpose_a=True)
        total = tf.tensor_scatter_nd_add(total, tf.reshape(indices, [-1, 1]), g)
        return self.lookups.view.pull_back(tf.reshape(total, self.lookups.shape))


def is_cheaper(lookups: Lookups, products: OuterProducts) -> bool:
    """Returns whether `TiedTable` costs less than instantiating both gradients.

    It does in time, by measurement; or in memory, where the Gram matrices take no longer than the
    sum of the gradients.
    """
    T = lookups.tensors[0].shape[1] or _USUAL_POSITIONS
    S = products.positions or _USUAL_POSITIONS
    size, width = lookups.shape[0], lookups.width
    entries = size * width
    work = S**2 * size + (S + T) ** 2 * width
    return work < _MULTIPLICATIONS_PER_ENTRY * entries or (
        work <= S * entries and entries > 3 * (S + T) ** 2
    )
