"""Sparsity-preserving private steps: noise on the rows of tables that enough examples touch."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.random import chacha
from tfdp.base.validation import error, integer, is_number, non_negative
from tfdp.clipping.clipping_rules import LARGEST_CLIP, LEAST_CLIP
from tfdp.clipping.engine import ClippedSum
from tfdp.clipping.one_pass.table_rows import TableRows
from tfdp.step import replicas
from tfdp.step.noise import at_stage, stand_in

# Uses of a step's key, besides the 0 and 1 of the noise on the sums.
_COUNTS, _GAPS = 2, 3
# More untouched rows than have room survive with at most the probability e^-70 < 2^-100.
_TAIL = 70.0


@dataclasses.dataclass(frozen=True)
class SparseEmbeddings:
    """Sparse updates of embedding tables: noise on the rows that enough examples of a batch touch.

    DP-SGD adds noise to each row of a table, also to the millions that no example of a batch has
    looked up. Here a step first counts the examples that touch each row, with noise. Rows whose
    noisy count is below `threshold` get neither gradient nor noise, and the inner optimizer leaves
    them and their moments as they are.

    Guarantee: each example adds to the counts of all tables together a vector of l2 norm at most
    C_1 = `count_clip`, and to the sum of gradients one of norm at most C = `l2_norm_clip`. The
    counts get noise of standard deviation s_1 C_1, and the sums of s_2 C. Both together are one
    Gaussian mechanism, whose noise multiplier z has `1 / z^2 = 1 / s_1^2 + 1 / s_2^2`. What is left
    out is chosen by the noisy counts, which is post-processing. The optimizer's `noise_multiplier`
    is this z, which the ledger records: docs/sparse_embeddings.md has the proof.

    Give it as `sparse_embeddings` to an optimizer of Keras 3: to `tfdp.keras3.DPSGD`, `DPAdam`, or
    a `DPOptimizer` of Keras's `SGD`, `Adam` or `Adagrad`. All tables that a model looks up, and
    uses in no other way, are updated so.

    Args:
      threshold: Least noisy count of a row that is updated, a positive number, in units of examples
        that look up one row each. A row that nobody touches survives with the probability that a
        normal number is above `threshold / (s_1 C_1)`: see `false_positives`.
      count_share: Share of the privacy cost `1 / z^2` that the counts have, in (0, 1): s_1 is z /
        sqrt(count_share), and s_2 is z / sqrt(1 - count_share).
      count_clip: Largest l2 norm C_1 of an example's counts, from 1e-15 to 1e10. An example that
        looks up k different rows adds min(1, C_1 / sqrt(k)) to each.
      min_rows: Rows of the smallest table that is updated so, at least 1. Smaller ones get noise in
        each row, and touching them is not counted.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import tfdp
      >>> sparse = tfdp.SparseEmbeddings(threshold=12.0, count_share=0.1)
      >>> [round(sigma, 3) for sigma in sparse.noise(1.0)]
      [3.162, 1.054]
      >>> round(sparse.false_positives(1.0, rows=10**6))
      74

    References:
      - Ghazi et al., 2023, Sparsity-Preserving Differentially Private Training of Large Embedding
        Models, Algorithm 1 (https://arxiv.org/abs/2311.08357).
    """

    threshold: float
    count_share: float = 0.1
    count_clip: float = 1.0
    min_rows: int = 1000

    def __post_init__(self) -> None:
        if not (is_number(self.threshold) and 0 < self.threshold < math.inf):
            raise error("threshold", "a positive, finite number", self.threshold)
        if not (is_number(self.count_share) and 0 < self.count_share < 1):
            raise error("count_share", "a number in (0, 1)", self.count_share)
        if not (is_number(self.count_clip) and LEAST_CLIP <= self.count_clip <= LARGEST_CLIP):
            raise error(
                "count_clip", f"a number from {LEAST_CLIP} to {LARGEST_CLIP:g}", self.count_clip
            )
        integer("min_rows", self.min_rows, 1)

    def noise(self, noise_multiplier: float) -> tuple[float, float]:
        """Returns the noise multipliers s_1 of the counts and s_2 of the sums of gradients.

        Args:
          noise_multiplier: That of both together.
        """
        non_negative("noise_multiplier", noise_multiplier)
        return (
            noise_multiplier / math.sqrt(self.count_share),
            noise_multiplier / math.sqrt(1 - self.count_share),
        )

    def false_positives(self, noise_multiplier: float, rows: int = 1) -> float:
        """Returns how many untouched rows are updated in a step, on average.

        Args:
          noise_multiplier: That of the optimizer.
          rows: Number of rows that no example of the batch touches.
        """
        integer("rows", rows, 1, 2**63 - 1)
        stddev = self.noise(noise_multiplier)[0] * self.count_clip
        return 0.0 if stddev == 0 else rows * math.erfc(self.threshold / stddev / 2**0.5) / 2

    @property
    def table_rows(self) -> TableRows:
        """The rule by which clipping engines sum and count touched rows."""
        return TableRows(float(self.count_clip), self.min_rows)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this object again."""
        return dataclasses.asdict(self)


def get(sparse: Any) -> SparseEmbeddings:
    """Returns sparse updates from themselves, or from their config.

    Raises:
      ValueError: It is something else.
    """
    if isinstance(sparse, SparseEmbeddings):
        return sparse
    names = {field.name for field in dataclasses.fields(SparseEmbeddings)}
    if not (isinstance(sparse, dict) and "threshold" in sparse and set(sparse) <= names):
        raise error("sparse_embeddings", "a `tfdp.SparseEmbeddings` or None", sparse)
    return SparseEmbeddings(**sparse)


class RowSelection:
    """Selection of the rows that a step updates, by noisy counts.

    Formal guarantee: the selected rows, and the sums of their gradients with noise of the noise
    multiplier s_2, are post-processing of one Gaussian mechanism of the step's noise multiplier.
    (See `SparseEmbeddings`. The sampling of untouched rows is off by at most 2^-100 in total
    variation in each step, and float64 rounds.)

    Args:
      sparse: The argument of the optimizer.
      noise_multipliers: Noise multiplier of counts and sums together, in each stage.
    """

    def __init__(self, sparse: SparseEmbeddings, noise_multipliers: Sequence[float]):
        self._sparse = sparse
        self.count_noises = [sparse.noise(z)[0] * sparse.count_clip for z in noise_multipliers]
        self._survival = [sparse.false_positives(z) for z in noise_multipliers]

    def select(
        self, total: ClippedSum, key: tf.Tensor, stage: tf.Tensor | None
    ) -> tuple[ClippedSum, list[tf.Tensor | None]]:
        """Selects rows by noisy counts.

        The noise of a row of which no example looks up anything decides alone whether it is
        selected. So these rows are drawn, and not their noise: each with the probability that a
        normal number is above the threshold, by the geometric gaps between them.

        Args:
          total: The clipped sum, with its touched rows.
          key: Secret key, int64 `[5]` or `[2]`; its uses 2 and 3 are drawn here.
          stage: Stage of the noise's schedule, if there is one.

        Returns:
          The sum, with the selected rows of each table in place of those that were touched: private
          until noise is added. And for each variable the numbers of its selected rows, int64 `[k]`,
          in rising order; None where all coordinates have a sum.

        Raises:
          ValueError: The step is one that cannot be taken so.
        """
        check_step(total)
        touched = list(total.touched or [])
        tables = [(i, rows) for i, rows in enumerate(touched) if rows is not None]
        counts = tf.concat([rows.counts for _, rows in tables], axis=0)
        noise = chacha.normals(key, tf.size(counts), _COUNTS)
        noisy = counts + noise * at_stage(self.count_noises, stage)
        survive = tf.split(
            noisy >= self._sparse.threshold,
            [tf.size(rows.ids) for _, rows in tables],
            num=len(tables),
        )
        drawn = self._drawn_rows([rows.rows for _, rows in tables], key, stage)
        gradients = list(total.gradients)
        ids: list[tf.Tensor | None] = [None] * len(gradients)
        for (i, rows), kept, others in zip(tables, survive, drawn, strict=True):
            others = _without(others, rows.ids)
            values = tf.boolean_mask(gradients[i], kept)
            zeros = tf.zeros([tf.size(others), *values.shape[1:]], values.dtype)
            numbers = tf.concat([tf.boolean_mask(rows.ids, kept), others], axis=0)
            order = tf.argsort(numbers)  # It must not tell which rows are touched.
            gradients[i] = tf.gather(tf.concat([values, zeros], axis=0), order)
            ids[i] = tf.gather(numbers, order)
        return dataclasses.replace(total, gradients=gradients, touched=None), ids

    def _drawn_rows(
        self, sizes: Sequence[int], key: tf.Tensor, stage: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Draws rows of tables, each with the probability that noise is above the threshold.

        The gap before the next of them is geometric: the floor of an exponential number.

        Args:
          sizes: Numbers of rows.
          key: See `select`.
          stage: See `select`.

        Returns:
          Numbers of rows of each table, int64.
        """
        rows = sum(sizes)
        room = max(_room(rows * p) for p in self._survival)
        rate = at_stage([-math.log1p(-p) for p in self._survival], stage)
        words = tf.reshape(chacha.random_words(key, 4 * room, _GAPS), [4, room])
        end = tf.constant(rows, tf.float64)
        never = tf.fill([room], end)
        gaps = never
        if any(self._survival):
            drawn = tf.floor(chacha.exponentials(words) / rate)
            gaps = tf.where(tf.cast(rate, tf.float64) > 0, tf.minimum(drawn, end), never)
        places = tf.cumsum(tf.cast(gaps, tf.int64) + 1) - 1
        found, start = [], 0
        for size in sizes:
            own = (places >= start) & (places < start + size)
            found.append(tf.boolean_mask(places, own) - start)
            start += size
        return found


def _room(mean: float) -> int:
    """Returns a number that a binomial number of this mean exceeds with probability e^-70 at most.

    By Bernstein's inequality, P(X >= m + k) <= exp(-k^2 / (2 (m + k / 3))).
    """
    third = _TAIL / 3
    return math.ceil(mean + third + math.sqrt(third**2 + 2 * _TAIL * mean)) + 1


def _without(rows: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Returns those of some rows that are not among others, int64 `[n]` and `[m]`."""
    others = tf.concat([tf.sort(others), [tf.int64.max]], axis=0)
    found = tf.gather(others, tf.searchsorted(others, rows))
    return tf.boolean_mask(rows, tf.not_equal(found, rows))


def check_step(total: ClippedSum) -> None:
    """Raises a ValueError if rows cannot be selected in the step that is being built."""
    for condition, why in (
        (replicas.count() > 1, "a step of several replicas, which touch different rows"),
        (
            devices.compiled_by_xla(),
            "a step that XLA compiles (`jit_compile=True`), whose numbers of rows must be known",
        ),
        (stand_in() is not None, "a step that an audit replays, with releases of its own"),
        (
            any(
                rows is not None and public is not None
                for rows, public in zip(
                    total.touched or [], total.regularizer_gradients, strict=False
                )
            ),
            "a table with an `embeddings_regularizer`, whose gradient is in all rows",
        ),
    ):
        if condition:
            raise ValueError(
                "Argument `sparse_embeddings` must be None where updates are not of the rows that "
                f"one batch touches. Received: {why}."
            )


def check_arguments(config: Any) -> None:
    """Raises a ValueError that names an option which sparse updates do not go with.

    Args:
      config: A `PrivacyConfig`.
    """
    for given, received in (
        (config.engine != "one_pass", f"engine={config.engine!r}"),
        (config.num_microbatches is not None, f"num_microbatches={config.num_microbatches}"),
        (
            config.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} (batches that are "
            "delivered in chunks)",
        ),
        (config.secure_noise, "secure_noise=True"),
        (config.noise_correlation is not None, f"noise_correlation={config.noise_correlation}"),
        (config.compression is not None, f"compression={config.compression}"),
        (config.clipping_rule.perturbation, f"clipping_rule={config.clipping_rule}"),
    ):
        if given:
            raise ValueError(
                "Argument `sparse_embeddings` must be None with options for which all rows of a "
                f"table have sums, noise or memory. Received: {received}."
            )


__all__ = ["RowSelection", "SparseEmbeddings", "check_arguments", "get"]
