"""Importance sampling (DPIS), as a clipping rule."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from tfdp.clipping.clipping_rules import LEAST_CLIP, NAMED, Clip, FlatClipping


@dataclasses.dataclass(frozen=True)
class ImportanceSamplingClipping(FlatClipping):
    """Importance sampling (DPIS): an example's probability grows with its gradient.

    With probability `p = min(1, ||g|| / C)` a gradient g is kept, and counts as `C * g / ||g||`;
    otherwise it counts as zero: its norm is rounded at random to 0 or C. On average over the
    rounding that is the flat-clipped gradient, `min(1, C / ||g||) * g`.

    This is DPIS with a public K. DPIS at an expected batch size B has example i in a batch with
    probability `B ||c_i|| / K`, where c_i is its flat-clipped gradient, and weights it by the
    inverse, so that every contribution to the update has the same norm `K / (N B)`. Uniform
    sampling at `B' = B N C / K` and keeping with probability `||c_i|| / C` is the same
    distribution, and `C / B'` the same norm. B' is the optimizer's `expected_batch_size` here; of
    these examples `B' sum ||c_i|| / (N C)` are kept on average. K only sets B': it need not be the
    sum of the `||c_i||`, nor a bound on it.

    Formal guarantees:
      * Privacy is that of `FlatClipping` at the same `expected_batch_size`, clip and noise; the
        ledger holds. Say that every example of the data set draws its number before the batch is
        drawn. Given these, its contribution is a function of it and the weights, no longer than C,
        and the noisy sum is a Poisson-sampled Gaussian mechanism. The release is a mixture of
        these, with weights that do not depend on the data. As hockey-stick divergences are jointly
        convex, its privacy is at least theirs. This requires secret numbers: they belong to rows,
        and if they were known, an added example would move all later examples to other numbers.
        Engines draw them from the secret seed of the step.
      * No better privacy is claimed: gradients of norm C are always kept, so that the worst case is
        that of `FlatClipping`.
      * It is never better than `FlatClipping` at the same privacy, by the variance of the sum. Its
        expected value is the same; an example that is sampled with probability q adds `q C ||c|| -
        q^2 ||c||^2` instead of `q ||c||^2 - q^2 ||c||^2`: more by `q ||c|| (C - ||c||)`, where
        `||c|| (C - ||c||)` is the variance of the rounding. The noise is the same. Only the number
        of gradients in the sum is smaller. (This saves no time here: all gradients of the batch are
        computed to know their norms.)

    The private K of the paper is not implemented: it depends on the gradients of all examples, and
    costs budget to be released with noise. The ledger covers no such release: B' must be chosen
    without looking at the data.

    With `num_microbatches`, the mean gradients of microbatches are rounded. Gradients shorter than
    1e-15, whose norms float32 does not tell, count as zero.

    References:
      - Wei et al., 2022, DPIS: An Enhanced Mechanism for Differentially Private SGD with Importance
        Sampling (https://arxiv.org/abs/2210.09634).
    """

    is_random: ClassVar[bool] = True

    def random_factors(self, norms: tf.Tensor, clip: Clip, uniforms: tf.Tensor) -> tf.Tensor:
        """See `ClippingRule.random_factors`; a factor is 0 or `C / ||g||`."""
        # 1 - u is in (0, 1]: long gradients are always kept, and those that no u can tell from
        # zero, never. With u in its place, one of 1e-9 C would be kept once in 2^23 times.
        threshold = (1 - uniforms[:, tf.newaxis]) * clip
        keep = tf.logical_and(norms >= threshold, norms >= LEAST_CLIP)
        kept = tf.where(keep, clip / tf.where(keep, norms, 1.0), 0.0)
        return tf.where(tf.math.is_inf(tf.cast(clip, norms.dtype)), tf.ones_like(norms), kept)


NAMED["importance_sampling"] = ImportanceSamplingClipping
