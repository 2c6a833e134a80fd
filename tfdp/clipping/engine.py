"""Interface of the clipping engines: a clipped sum of gradients and its sensitivity."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.validation import error, integer, is_number, one_of
from tfdp.clipping import clipping_rules
from tfdp.clipping.clipping_rules import LARGEST_CLIP, LEAST_CLIP, ClippingRule
from tfdp.clipping.loss_graph import random_streams
from tfdp.clipping.norms import in_float32

if TYPE_CHECKING:
    from tfdp.clipping.one_pass.table_rows import TableRows

# Relations of the batches of neighbors: an example is there or not, and the rest is equal. With
# constant parameters, zero-out and add-or-remove-one look alike to a batch.
ZERO_OUT = "zero_out"
ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"
RELATIONS = (ZERO_OUT, ADD_OR_REMOVE_ONE, REPLACE_ONE)

# Uses of one seed.
_PARTS, _UNIFORMS, _PERTURBATIONS = range(3)


def check_relation(relation: str) -> None:
    """Raises a ValueError if there is no such neighboring relation."""
    one_of("relation", relation, RELATIONS)


def check_clip(name: str, clip: float) -> None:
    """Raises a ValueError if an argument is not a clip that float32 can compute with."""
    if not (is_number(clip) and clip >= LEAST_CLIP):
        raise error(name, f"a positive number, at least {LEAST_CLIP}", clip)
    if LARGEST_CLIP < clip < math.inf:
        raise error(name, f"at most {LARGEST_CLIP:g}, or infinite for no clipping", clip)


@dataclasses.dataclass(frozen=True)
class TouchedRows:
    """The rows of a table that a batch looks up. Private until noise is added.

    Attributes:
      ids: Their numbers, each once: int64 `[touched]`.
      counts: How many examples touch each, with weights that are clipped: float64 `[touched]`.
      rows: Number of rows of the table.
    """

    ids: tf.Tensor
    counts: tf.Tensor
    rows: int


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The result of one pass of an engine over a batch.

    Attributes:
      gradients: For each variable the sum over examples (or microbatches) of their clipped
        gradients, shaped as the variable; None where the loss of an example does not depend on
        the variable. Private until noise is added.
      regularizer_gradients: For each variable the gradient of the part of the loss that does not
        depend on data (weight regularizers), or None. It is public, and not clipped.
      within_clip: Number of examples whose gradient is at most as long as the clip, minus half the
        number of examples, a float32 scalar. With microbatches, it counts microbatches. It is
        private as well: an example changes it by 1/2.
      batch: The tensors of the batch that the sum was computed from.
      mask: Mask of the rows that are examples, bool `[rows]`: one of `batch`; or None.
      noise_scales: For each variable the standard deviation of the noise at a noise multiplier of
        1; None if it is the engine's `sensitivity()` for all of them.
      error: With an engine of `wide_sums`, a bound on the l2 distance of `gradients` from the sum
        in exact arithmetic, in units of the clip: a float64 scalar, which follows from shapes
        alone. None otherwise.
      touched: With `ClippingEngine.table_rows`, for each variable the rows of a table to which its
        sum belongs, `[touched, ...]`; None where the sum is shaped as the variable. None
        otherwise.
    """

    gradients: list[tf.Tensor | None]
    regularizer_gradients: list[tf.Tensor | None]
    within_clip: tf.Tensor
    batch: list[tf.Tensor]
    mask: tf.Tensor | None
    noise_scales: list[float | tf.Tensor] | None = None
    error: tf.Tensor | None = None
    touched: Sequence[TouchedRows | None] | None = None

    def unless(self, empty: tf.Tensor | None) -> "ClippedSum":
        """Returns the sum over no examples if `empty`, a scalar bool, is true; else this one."""
        if empty is None:
            return self

        counts = [rows.counts for rows in self.touched or [] if rows is not None]
        sums = [self.within_clip, *counts, *[g for g in self.gradients if g is not None]]
        found = tf.cond(  # Nothing is copied where there are examples.
            empty, lambda: [tf.zeros_like(total) for total in sums], lambda: list(sums)
        )
        within, *rest = tf.nest.flatten(found)
        left = iter(rest)
        touched = self._with_counts(lambda _: next(left))
        gradients = [None if g is None else next(left) for g in self.gradients]
        return dataclasses.replace(self, gradients=gradients, within_clip=within, touched=touched)

    def _with_counts(
        self, function: Callable[[tf.Tensor], tf.Tensor]
    ) -> list[TouchedRows | None] | None:
        """Returns the touched rows, with what a function makes of their counts."""
        if self.touched is None:
            return None
        return [
            None if rows is None else dataclasses.replace(rows, counts=function(rows.counts))
            for rows in self.touched
        ]

    def after(self, operation: tf.Operation) -> "ClippedSum":
        """Returns the same sum, which is there only once `operation` has run without an error."""

        def later(tensor: tf.Tensor | None) -> tf.Tensor | None:
            return None if tensor is None else tf.identity(tensor)

        with tf.control_dependencies([operation]):
            return dataclasses.replace(
                self,
                gradients=[later(g) for g in self.gradients],
                regularizer_gradients=[later(g) for g in self.regularizer_gradients],
                within_clip=later(self.within_clip),
                error=later(self.error),
                touched=self._with_counts(tf.identity),
            )


class ClippingEngine(abc.ABC):
    """Engine that computes sums of clipped gradients and their sensitivity.

    Formal guarantee: for two batches that are neighbors, the l2 distance of the two
    `clipped_sum(...).gradients` (all variables together) is at most `sensitivity(relation)`,
    whatever the model, the loss and the data. (For a random rule, this holds given the random
    numbers of the examples that both batches have; these numbers do not depend on the data.)

    Args:
      l2_norm_clip: Largest l2 norm, over all variables together, that an example's gradient (a
        microbatch's, with `num_microbatches`) keeps: from 1e-15 to 1e10, or infinite for no
        clipping. Norms are computed in float32, and raised by the largest possible rounding error
        (`tfdp.clipping.norms`). Gradients longer than 1.8e19, whose squares overflow, contribute
        nothing.
      num_microbatches: Number of microbatches that a batch is split into; the mean gradient of each
        microbatch is clipped. None: every example is clipped by itself.
      clipping_rule: A `ClippingRule`, or the name of one.

    Attributes:
      wide_sums: Whether the sums are computed and returned in float64, of gradients that are
        clipped with a margin for the rounding of their factors. Then the computed sums of
        neighbors are at most `sensitivity(relation)` apart, plus `ClippedSum.error` twice. To be
        set before tracing.
      usual_rows: Number of rows for which memory is planned, and which few batches exceed; None:
        the largest possible number. To be set before tracing.
      streams: Keys of the random numbers that the model draws; layers then use them instead of
        their own seeds. None: layers use their own seeds. To be set before tracing.
      rows_per_example: Consecutive rows of the batch that make up one example, whose mean gradient
        is clipped: augmented copies of it, or the examples of one user. To be set before tracing.
      table_rows: Which tables get sums of their touched rows alone, with counts
        (`ClippedSum.touched`), by the one-pass engine; None: no table. To be set before tracing.
    """

    wide_sums = False
    rows_per_example = 1
    usual_rows: int | None = None
    streams: KeyStream | None = None
    table_rows: "TableRows | None" = None

    def __init__(
        self,
        l2_norm_clip: float,
        num_microbatches: int | None = None,
        clipping_rule: ClippingRule | str = "flat",
    ):
        check_clip("l2_norm_clip", l2_norm_clip)
        integer("num_microbatches", num_microbatches, 1, optional=True)
        self.l2_norm_clip = l2_norm_clip
        self.num_microbatches = num_microbatches
        self.clipping_rule = clipping_rules.get(clipping_rule)

    def sensitivity(self, relation: str = ZERO_OUT) -> float:
        """Returns the largest l2 distance of the clipped sums of two neighboring batches.

        One example on its own adds a vector of norm at most C. An example that joins a
        microbatch changes its mean gradient, whose clipped value can swing from one point of the
        ball of radius C to the opposite one: 2C.

        Args:
          relation: "zero_out", "add_or_remove_one" or "replace_one".

        Returns:
          The sensitivity, in the units of the gradient.

        Raises:
          ValueError: `relation` is not one of these.
        """
        check_relation(relation)
        alone = self.num_microbatches is None
        return self.l2_norm_clip * (1 if alone and relation != REPLACE_ONE else 2)

    @property
    def clips(self) -> bool:
        """True unless the clip is infinite."""
        return math.isfinite(self.l2_norm_clip)

    @abc.abstractmethod
    def clipped_sum(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        clip: tf.Tensor | None = None,
        most_rows: int | None = None,
        masks: Sequence[tf.Tensor] | None = None,
    ) -> ClippedSum:
        """Sums the clipped gradients of a batch.

        Args:
          loss: Losses of the rows, `[rows]`, a symbolic tensor of the graph being built; or a
            scalar that is provably their sum or mean, plus terms that do not depend on data. A row
            is an example, unless `rows_per_example` says otherwise.
          variables: The trainable variables.
          seed: Secret key, int64 `[5]` or `[2]`, used in this step only, from which examples draw
            their microbatch and the numbers of a random rule.
          clip: The clip to use in this step instead of `l2_norm_clip`, a public scalar.
          most_rows: Largest number of rows that the batch can have, if it is known. Engines use it
            for their memory and for bounds, which must not depend on the private number of rows.
            None: the number of rows of this batch.
          masks: For each variable what multiplies each example's gradient before it is clipped: 0
            and 1, scalars or tensors shaped as the variable, which must not depend on the batch.
            None: gradients are clipped as they are.

        Returns:
          The clipped sum and what belongs to it.

        Raises:
          ValueError: `loss` is not such a tensor, or its examples cannot be told apart.
        """

    def _examples_of(self, rows: tf.Tensor, keeps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of examples, and which of them count: those with a row that does.

        Args:
          rows: Number of rows.
          keeps: Mask of the rows that count, bool `[rows]`.
        """
        each = self.rows_per_example
        if each == 1:
            return rows, keeps
        return rows // each, tf.reduce_any(tf.reshape(keeps, [-1, each]), axis=1)

    def draw_secretly(self, loss: tf.Tensor) -> None:
        """Makes the model draw the random numbers for a loss from `streams`.

        Args:
          loss: A tensor of the graph being built.

        Raises:
          ValueError: Random numbers are drawn in a way that no secret key can be given to.
        """
        random_streams.hide_counts(loss.graph)
        if self.streams is not None:
            random_streams.make_secret(loss, self.streams)

    def _needs_gradients(self, masks: Sequence[tf.Tensor] | None) -> str | None:
        """Returns why each example's gradient must be formed; None if norms and sums suffice."""
        if self.clipping_rule.perturbation and self.clips:
            return "Noise on each gradient needs the vectorized engine."
        if any(mask.shape.rank != 0 for mask in masks or []):
            return "Masks of coordinates need the vectorized engine."
        return None

    def _draw_perturbation_keys(self, count: tf.Tensor | int, seed: tf.Tensor) -> tf.Tensor:
        """Draws secret keys for the noise that the rule adds to gradients, int64 `[count, 2]`."""
        words = chacha.random_words(seed, 4 * count, _PERTURBATIONS)
        return tf.bitcast(tf.reshape(words, [-1, 2, 2]), tf.int64)

    def _blocks(self, variables: Sequence[tf.Variable]) -> list[int]:
        """Returns which variables the rule clips together."""
        return self.clipping_rule.blocks([variable.name for variable in variables])

    def _draw_uniforms(self, count: tf.Tensor | int, seed: tf.Tensor) -> tf.Tensor:
        """Draws the random number of each gradient for a random rule, `[count]`; else zeros."""
        if not self.clipping_rule.is_random:
            return tf.zeros([count])
        words = chacha.random_words(seed, count, _UNIFORMS)
        return tf.cast(tf.bitwise.right_shift(words, tf.constant(8, tf.uint32)), tf.float32) / 2**24

    def _factors(
        self,
        squares: Sequence[tf.Tensor],
        block_of: Sequence[int],
        keep: tf.Tensor,
        clip: tf.Tensor | None,
        uniforms: tf.Tensor,
    ) -> "Factors":
        """Computes the clip factors of per-example gradients.

        Args:
          squares: Squared norms of the gradients of each variable, `[n]`.
          block_of: The block of each variable: those of a block are clipped together.
          keep: Mask of the gradients that count at all, bool `[n]`.
          clip: See `clipped_sum`.
          uniforms: See `_draw_uniforms`.
        """
        parts: list[list[tf.Tensor]] = [[] for _ in range(max(block_of) + 1)]
        for square, block in zip(squares, block_of, strict=True):
            parts[block].append(in_float32(square))
        zero = tf.zeros_like(keep, tf.float32)
        norms = tf.sqrt(tf.stack([tf.add_n([zero, *part]) for part in parts], axis=1))
        finite = tf.reduce_all(tf.math.is_finite(norms), axis=1)
        limit = self.l2_norm_clip if clip is None else clip
        factors = tf.ones_like(norms)
        if self.clips:
            factors = self.clipping_rule.random_factors(norms, limit, uniforms)
            # A rule that divides by zero gives infinity, and infinity times zero is not zero.
            finite = finite & tf.reduce_all(tf.math.is_finite(factors), axis=1)
            if self.wide_sums:
                factors *= 1 - rounding_margin(len(squares))
        within = tf.where(tf.logical_and(finite, tf.norm(norms, axis=1) <= limit), 0.5, -0.5)
        return Factors(
            by_block=tf.where(tf.logical_and(finite, keep)[:, tf.newaxis], factors, 0.0),
            bad=tf.logical_not(finite),
            within_clip=tf.reduce_sum(tf.where(keep, within, 0.0)),
            block_of=list(block_of),
        )


def rounding_margin(terms: int) -> float:
    """Returns the share by which a clip factor is lowered, so that rounding makes it no too large.

    The sum of `terms` squares is too low by at most `terms` units of rounding of float32, its root
    by half as many. The root, the clip, the rule and the factor are rounded at most 14 times.
    """
    return 2.0**-24 * (16 + terms / 2)


def sum_error(additions: int | tf.Tensor, rows: int | tf.Tensor, share: float) -> tf.Tensor:
    """Bounds the rounding of a weighted sum of gradients in float64, as an l2 norm.

    A sum of n terms is wrong by at most `n u / (1 - n u)` times the sum of their absolute values,
    in whatever order they are added, with u = 2^-53 (Higham, 2002, section 4.2).

    Args:
      additions: Terms of the sum of a coordinate; 2^16 more cover the rounding of the terms and
        the addition of parts. See `sum_error_of_chunks`.
      rows: Examples.
      share: For each example, a bound on the l2 norm of its terms' absolute values, added up, in
        units of the clip.

    Returns:
      The bound in units of the clip, a float64 scalar.
    """
    additions = tf.cast(additions, tf.float64) + 2.0**16
    return 1.01 * 2.0**-53 * share * additions * tf.cast(rows, tf.float64)


def sum_error_of_chunks(error: tf.Tensor, chunks: int | tf.Tensor) -> tf.Tensor:
    """Bounds the rounding of a sum of several sums, from the sum of their bounds.

    Each of the bounds holds for 2^16 additions more, and so for a share of itself for each.
    """
    return error * (1 + tf.cast(chunks, tf.float64) * 2.0**-16)


def random_parts(seed: tf.Tensor, count: tf.Tensor | int, num_parts: int) -> tf.Tensor:
    """Draws the part of a random partition that each row is in, independently of other rows.

    Args:
      seed: Secret key, int64 `[5]` or `[2]`.
      count: Number of rows.
      num_parts: Number of parts: of microbatches, or of groups of a batch-wise term.

    Returns:
      int32 `[count]`.
    """
    words = tf.cast(chacha.random_words(seed, count, _PARTS), tf.int64)
    return tf.cast(words % num_parts, tf.int32)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Per-example clip factors of `n` examples.

    Attributes:
      by_block: Factors by block of variables, `[n, blocks]`; zero for examples that do not count.
      bad: Mask of the gradients that are non-finite, bool `[n]`.
      within_clip: See `ClippedSum`.
      block_of: The block of each variable: those of a block are clipped together.
    """

    by_block: tf.Tensor
    bad: tf.Tensor
    within_clip: tf.Tensor
    block_of: list[int]

    def __post_init__(self) -> None:
        # Unstacks once for all variables, in the graph in which the factors were computed.
        object.__setattr__(self, "_columns", tf.unstack(self.by_block, axis=1))

    def of_variable(self, index: int) -> tf.Tensor:
        """Returns the factors for one variable, `[n]`."""
        return self.of_block(self.block_of[index])

    def of_block(self, block: int) -> tf.Tensor:
        """Returns the factors for the variables of one block, `[n]`."""
        return self._columns[block]  # type: ignore[attr-defined]
