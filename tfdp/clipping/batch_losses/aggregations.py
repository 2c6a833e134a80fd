"""Clipping and aggregation of the gradients of a loss with a batch-wise term.

The loss is `(1/B) sum_i f(x_i) + g(X)`, see `TwoTermLoss`. All aggregations return B times the
update, with the scale of its noise.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.validation import error, is_number, positive_integer
from tfdp.clipping.batch_losses.example_groups import clipped_group_sum, draw_groups_of_replica
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss, split_key
from tfdp.clipping.clipping_rules import LEAST_CLIP
from tfdp.clipping.engine import (
    REPLACE_ONE,
    ZERO_OUT,
    ClippedSum,
    ClippingEngine,
    check_clip,
    check_relation,
)

LEAST_NOISE = "least_noise"

# Aggregations without arguments, by their names in configs; those of `tfdp.contrib`.
NAMED: dict[str, type[Aggregation]] = {}


@dataclasses.dataclass(frozen=True)
class Sensitivities:
    """Sensitivities of two sums: the l2 distances by which one example moves them.

    Attributes:
      sample_wise: Sensitivity of the sum of the examples' clipped gradients of f.
      batch_wise: Sensitivity of the sum of the groups' clipped gradients of g.
    """

    sample_wise: float
    batch_wise: float


@dataclasses.dataclass(frozen=True)
class TermWiseAggregation(Aggregation):
    """Aggregation that clips each example's gradient of f and each group's gradient of g.

    With the clip C1 of the optimizer, groups X_1 .. X_m and S2 = 2 C2, an update is

        (1/B) (sum_i clip_C1(grad f(x_i)) + N(0, (sigma_s C1)^2))
          + (1/m) (sum_j clip_C2(grad g(X_j)) + N(0, (sigma_b S2)^2)).

    The two sums see the same Poisson batch. Together, in units of their sensitivities, they are one
    Gaussian mechanism with noise multiplier sigma, `1/sigma^2 = 1/sigma_s^2 + 1/sigma_b^2`: that of
    the optimizer, which is what its ledger records. The split of sigma does not affect epsilon.

    Formal guarantees, for neighbors under zero-out (see `sensitivities` for others):
      * An example moves the first sum by at most C1.
      * It moves the second sum by at most 2 C2: its group's clipped gradient can swing from one
        point of the ball of radius C2 to the opposite one. It moves no other example to another
        group.
      * Under a `tf.distribute.MirroredStrategy` both hold for the sums over all replicas: groups
        are drawn from the examples of all, and each is clipped by one replica.

    Args:
      batch_clip: Largest l2 norm C2 of a group's gradient of g, in gradient units.
      num_groups: Number of groups m, a public constant. More groups mean less
        noise; with fewer groups, g sees more examples at once.
      split: "least_noise": sigma_s and sigma_b such that the expected squared norm of the noise of
        an update is the least, see `split_noise`; or the share of the sample-wise term in
        `1/sigma^2`, strictly between 0 and 1 (0.5: both multipliers are sqrt(2) sigma).
      group_capacity: Largest number of examples of a group that count; by default the mean, B / m,
        plus three standard deviations. It does not affect the sensitivity.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import tfdp
      >>> aggregation = tfdp.clipping.TermWiseAggregation(batch_clip=0.5, num_groups=16)
      >>> aggregation.sensitivities(l2_norm_clip=1.0)
      Sensitivities(sample_wise=1.0, batch_wise=1.0)

    References:
      - Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation,
        Algorithm 1. (There, S2 = C2, half of the sensitivity; and the two sums are accounted for as
        two mechanisms.)
    """

    batch_clip: float
    num_groups: int = 16
    split: float | str = LEAST_NOISE
    group_capacity: int | None = None

    def __post_init__(self) -> None:
        _check_positive("batch_clip", self.batch_clip)
        positive_integer("num_groups", self.num_groups)
        if self.group_capacity is not None:
            positive_integer("group_capacity", self.group_capacity)
        named = isinstance(self.split, str) and self.split == LEAST_NOISE
        if not (named or _is_share(self.split)):
            raise error(
                "split", f"'{LEAST_NOISE}' or a number strictly between 0 and 1", self.split
            )

    def sensitivities(self, l2_norm_clip: float, relation: str = ZERO_OUT) -> Sensitivities:
        """Returns how far one example moves the two sums.

        Args:
          l2_norm_clip: The clip C1 of examples.
          relation: "zero_out", "add_or_remove_one" or "replace_one".

        Returns:
          C1, or 2 C1 where an example is replaced; and 2 C2 in every relation: groups are drawn
          without looking at examples, so that the new example takes the group of the old one.

        Raises:
          ValueError: `relation` is not one of these, or `l2_norm_clip` is no clip.
        """
        check_clip("l2_norm_clip", l2_norm_clip)
        check_relation(relation)
        samples = l2_norm_clip * (2 if relation == REPLACE_ONE else 1)
        return Sensitivities(samples, 2 * self.batch_clip)

    def capacity(self, expected_batch_size: int) -> int:
        """Returns the largest number of examples of a group that count."""
        if self.group_capacity is not None:
            return self.group_capacity
        mean = expected_batch_size / self.num_groups
        return math.ceil(mean + 3 * math.sqrt(mean))

    def is_shared(self, loss: TwoTermLoss) -> bool:
        """See `Aggregation.is_shared`: groups are of all replicas, and each has some of them."""
        return True

    def clipped_sum(
        self,
        loss: TwoTermLoss,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None,
    ) -> ClippedSum:
        """See `TwoTermLoss.clipped_sum`."""
        row_seed, group_seed, rule_seed = split_key(seed, 3)
        rows = loss.with_draws(row_seed)
        samples = clipped_sample_sum(loss, rows, engine, variables, rule_seed, most_rows)
        if loss.batch_wise is None:
            return samples
        capacity = self.capacity(expected_batch_size)
        batch, mask = draw_groups_of_replica(rows, loss.mask, group_seed, self.num_groups, capacity)
        groups = clipped_group_sum(loss.batch_wise, batch, mask, variables, self.batch_clip)
        weight = expected_batch_size / self.num_groups
        moved = self.sensitivities(engine.l2_norm_clip)
        scales = self._noise_scales(
            moved.sample_wise,
            weight * moved.batch_wise,
            [s is not None for s in samples.gradients],
            [g is not None for g in groups],
            variables,
        )
        gradients = [
            _sum([s, None if g is None else weight * g])
            for s, g in zip(samples.gradients, groups, strict=True)
        ]
        return dataclasses.replace(samples, gradients=gradients, noise_scales=scales)

    def _noise_scales(
        self,
        samples: float,
        groups: float,
        in_samples: Sequence[bool],
        in_groups: Sequence[bool],
        variables: Sequence[tf.Variable],
    ) -> list[float]:
        """Returns the standard deviation of each variable's noise, for a noise multiplier of 1.

        Args:
          samples: Sensitivity of the sample-wise sum.
          groups: Sensitivity of the batch-wise sum, times its weight in the update.
          in_samples: For each variable, whether it has a sample-wise gradient.
          in_groups: For each variable, whether it has a batch-wise one.
          variables: The trainable variables.
        """
        sizes = [v.shape.num_elements() for v in variables]
        sample_size = sum(n for n, there in zip(sizes, in_samples, strict=True) if there)
        group_size = sum(n for n, there in zip(sizes, in_groups, strict=True) if there)
        of_samples, of_groups = split_noise(
            1.0, self.split, samples * math.sqrt(sample_size), groups * math.sqrt(group_size)
        )
        return [
            math.hypot(of_samples * samples if s else 0.0, of_groups * groups if g else 0.0)
            for s, g in zip(in_samples, in_groups, strict=True)
        ]


def split_noise(
    noise_multiplier: float, split: float | str, sample_wise: float, batch_wise: float
) -> tuple[float, float]:
    """Splits the noise of one Gaussian mechanism between two sums that are released together.

    With shares u and 1 - u of `1 / sigma^2`, they are `sigma / sqrt(u)` and `sigma / sqrt(1 - u)`.
    If the noise of the two sums adds `a sigma_s` and `b sigma_b` to an update, as root mean squared
    norms, then `(a sigma_s)^2 + (b sigma_b)^2` is the least, `sigma^2 (a + b)^2`, for
    `u = a / (a + b)`. (By Cauchy and Schwarz: `(a^2/u + b^2/(1-u)) (u + 1-u) >= (a + b)^2`.)

    Args:
      noise_multiplier: Noise multiplier of the joint mechanism, sigma.
      split: "least_noise", or the share u of the sample-wise sum.
      sample_wise: a: the sensitivity of the sample-wise sum, times its weight in the update, times
        the square root of the number of coordinates that it has.
      batch_wise: b, likewise. 0 if there is no such sum: all is left to the other.

    Returns:
      sigma_s and sigma_b.

    Example:
      >>> from tfdp.clipping.batch_losses.aggregations import split_noise
      >>> split_noise(1.0, "least_noise", 3.0, 1.0)
      (1.15..., 2.0)
    """
    if batch_wise == 0:
        return noise_multiplier, math.inf
    if sample_wise == 0:
        return math.inf, noise_multiplier
    if split != LEAST_NOISE:
        share = float(split)
        return noise_multiplier / math.sqrt(share), noise_multiplier / math.sqrt(1 - share)
    # Clips may be infinite, where there is no noise.
    ratio = 1.0 if math.isinf(batch_wise) else batch_wise / sample_wise
    return noise_multiplier * math.sqrt(1 + ratio), noise_multiplier * math.sqrt(1 + 1 / ratio)


def clipped_sample_sum(
    loss: TwoTermLoss,
    rows: Sequence[Any],
    engine: ClippingEngine,
    variables: Sequence[tf.Variable],
    seed: tf.Tensor,
    most_rows: int | None,
) -> ClippedSum:
    """Returns the clipped sum of the sample-wise term."""
    found: dict[str, ClippedSum] = {}

    def compute(total: tf.Tensor, seed: tf.Tensor) -> tuple:
        clipped = engine.clipped_sum(total, variables, seed, most_rows=most_rows)
        check_mask(clipped.mask is not None, loss)
        found["clipped"] = clipped
        return clipped.gradients, clipped.regularizer_gradients, clipped.within_clip

    gradients, regularizer_gradients, within = loss.in_function_of_rows(rows, compute, seed)
    return dataclasses.replace(
        found["clipped"],
        gradients=gradients,
        regularizer_gradients=regularizer_gradients,
        within_clip=within,
        batch=loss.data,
        mask=loss.data_mask,
    )


def check_mask(is_masked: bool, loss: TwoTermLoss) -> None:
    """Makes sure that rows that the mask excludes count for nothing."""
    if loss.mask is not None and not is_masked:
        raise ValueError(
            "Argument `sample_wise` must return all that depends on the rows, so that `mask` "
            "applies to it. Received a loss with a part that does not follow the mask."
        )


def _sum(parts: list) -> tf.Tensor | None:
    """Returns the sum of those that are not None."""
    present = [part for part in parts if part is not None]
    return tf.add_n(present) if present else None


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


def _check_positive(name: str, value: Any) -> None:
    if not (is_number(value) and value >= LEAST_CLIP):
        raise error(name, f"a positive number, at least {LEAST_CLIP}", value)
