"""Clipped sums of the rows of tables that a batch looks up, and clipped counts of these rows.

Nothing has the size of a table: a sum has a row for each row of the table that the batch touches.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.engine import TouchedRows
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Lookups, widen
from tfdp.clipping.one_pass.weight_uses import View

# More than the rounding of an example's weight in float64, times the root of its number of rows.
_SLACK = 1 - 2.0**-40


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rule for the tables whose gradients are summed by touched rows, with counts.

    Guarantee: an example adds to the counts of all these tables together a vector of l2 norm at
    most `count_clip`, which depends on that example alone.

    Args:
      count_clip: Largest l2 norm of what an example adds to the counts, in float64.
      min_rows: Rows of the smallest such table.
    """

    count_clip: float
    min_rows: int

    def of(self, contributions: Sequence[Contribution | None]) -> list[Contribution | None]:
        """Returns the same gradients, those of such tables as sums over touched rows.

        A table is one that is looked up as it is, and used in no other way.

        Raises:
          ValueError: There is no such table.
        """
        found = [self._by_rows(c) for c in contributions]
        if not any(isinstance(c, RowSums) for c in found):
            raise ValueError(
                "Argument `sparse_embeddings` must be given for models with an embedding table of "
                f"at least min_rows={self.min_rows} rows that is looked up alone: a table that is "
                "also multiplied with (tied embeddings), reshaped or computed gets gradients in "
                "all rows. Received a model without such a table, whose gradients come from: "
                f"{', '.join(c.name for c in contributions if c is not None)}. Leave the argument "
                "out, or lower `min_rows`."
            )
        return found

    def _by_rows(self, c: Contribution | None) -> Contribution | None:
        # Of a view, casts are left: the rows and their order are the variable's.
        if type(c) is not Lookups or c.view.key != () or c.view.negates:
            return c
        return RowSums(c) if c.shape[0] >= self.min_rows else c

    def touched(
        self, contributions: Sequence[Contribution | None], counts: tf.Tensor
    ) -> list[TouchedRows | None]:
        """Counts the examples that touch each row.

        Args:
          contributions: What `of` returned.
          counts: Mask of the examples that count, bool `[n]`.

        Returns:
          For each contribution the rows that the batch touches; None if it is of no such table.
        """
        tables = [c for c in contributions if isinstance(c, RowSums)]
        firsts = [tf.cast(c.first_lookups(), tf.float64) for c in tables]
        rows_of = tf.add_n([tf.reduce_sum(first, axis=1) for first in firsts])  # Of each example.
        weights = tf.minimum(
            tf.ones([], tf.float64), self.count_clip / tf.sqrt(tf.maximum(rows_of, 1.0))
        )
        weights = tf.where(counts, weights * _SLACK, 0.0)[:, tf.newaxis]
        added = {id(c): first * weights for c, first in zip(tables, firsts, strict=True)}
        return [c.touched(added[id(c)]) if isinstance(c, RowSums) else None for c in contributions]


class RowSums(Lookups):
    """Gradients of a table whose sum is that of its touched rows, `[touched, ...]`.

    Args:
      lookups: The gradients, of all examples.
    """

    def __init__(self, lookups: Lookups):
        indices, gradients = lookups.tensors
        super().__init__(indices, gradients, lookups.shape)
        self.name = f"{self.name}, sums by touched rows"
        self.view = View()
        rows = tf.cast(indices, tf.int64)
        # An example that looks up something else counts nowhere.
        self._rows = tf.where((rows >= 0) & (rows < self.shape[0]), rows, 0)
        self._ids, slots = tf.unique(tf.reshape(self._rows, [-1]))
        self._slots = tf.reshape(slots, tf.shape(rows))

    def first_lookups(self) -> tf.Tensor:
        """Returns which of an example's lookups are the first of their row, bool `[n, T]`."""
        same = self._rows[:, :, tf.newaxis] == self._rows[:, tf.newaxis]
        earlier = tf.linalg.band_part(tf.cast(same, tf.int8), -1, 0)
        return tf.reduce_sum(earlier, axis=2) == 1

    def touched(self, added: tf.Tensor) -> TouchedRows:
        """Returns the touched rows, and the sum over examples of what they add to each.

        Args:
          added: What each lookup adds, float64 `[n, T]`.
        """
        counts = tf.math.unsorted_segment_sum(
            tf.reshape(added, [-1]), tf.reshape(self._slots, [-1]), tf.size(self._ids)
        )
        return TouchedRows(self._ids, counts, self.shape[0])

    def total(
        self, tensors: Sequence[tf.Tensor], factors: tf.Tensor, wide: bool = False
    ) -> tf.Tensor:
        """See `Contribution`; of all examples, and of the touched rows: `[touched, ...]`."""
        g = widen(tensors[1])
        g = g * tf.cast(factors, g.dtype)[:, tf.newaxis, tf.newaxis]
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(g, [-1, self.width]), tf.reshape(self._slots, [-1]), tf.size(self._ids)
        )
        return tf.reshape(rows, [-1, *self.shape[1:]])
