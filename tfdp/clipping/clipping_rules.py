"""Clipping rules, which limit the norm of an example's gradient to the clip."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import tensorflow as tf

from tfdp.base.named import Named
from tfdp.base.validation import error, is_number, non_negative, positive

Clip: TypeAlias = float | tf.Tensor
# The squares of shorter gradients vanish in float32: their norms are not known.
LEAST_CLIP = 1e-15
# With it, neither factors nor what they multiply overflow.
LARGEST_CLIP = 1e10


def within_range(clip: tf.Tensor) -> tf.Tensor:
    """Returns the nearest clip that float32 can compute with; the least one if `clip` is NaN."""
    clip = tf.where(tf.math.is_nan(clip), LEAST_CLIP, clip)
    return tf.clip_by_value(clip, LEAST_CLIP, LARGEST_CLIP)


@dataclasses.dataclass(frozen=True)
class ClippingRule(abc.ABC):
    """Rule that computes the clip factor of each per-example gradient.

    Formal guarantee: a clipped gradient, all variables together, has an l2 norm of at most
    the clip C, whatever the gradient.

    Attributes:
      is_random: Whether factors are random. If so, engines ask for `random_factors`, with
        numbers that they draw from the step's secret seed.
    """

    is_random: ClassVar[bool] = False

    @property
    def perturbation(self) -> float:
        """Standard deviation of noise on each gradient before the clip, in units of the clip.

        If it is positive, engines form each example's gradient, and add independent noise to each
        of its coordinates.
        """
        return 0.0

    def blocks(self, names: Sequence[str]) -> list[int]:
        """Returns for each variable the number of its block, from 0; a block is clipped together.

        Args:
          names: Names of the variables.
        """
        return [0] * len(names)

    @abc.abstractmethod
    def factors(self, norms: tf.Tensor, clip: Clip) -> tf.Tensor:
        """Returns the factors for gradients of given norms.

        Args:
          norms: Norms of the gradients of `n` examples, by block of variables: `[n, blocks]`.
          clip: The clip C, a scalar; infinite for no clipping.

        Returns:
          The factors, `[n, blocks]`; for a random rule, their expected values.
        """

    def random_factors(self, norms: tf.Tensor, clip: Clip, uniforms: tf.Tensor) -> tf.Tensor:
        """Returns the factors of one step; most rules are not random.

        Args:
          norms: See `factors`.
          clip: See `factors`.
          uniforms: For each example an independent number, uniform in [0, 1): `[n]`.

        Returns:
          The factors, `[n, blocks]`.
        """
        return self.factors(norms, clip)


@dataclasses.dataclass(frozen=True)
class FlatClipping(ClippingRule):
    """Flat clipping, which scales gradients longer than C down: `g / max(1, ||g|| / C)`.

    References:
      - Abadi et al., 2016, Deep Learning with Differential Privacy
        (https://arxiv.org/abs/1607.00133).
    """

    def factors(self, norms: tf.Tensor, clip: Clip) -> tf.Tensor:
        """See `ClippingRule.factors`."""
        return 1 / tf.maximum(1.0, norms / clip)


@dataclasses.dataclass(frozen=True)
class PerLayerClipping(ClippingRule):
    """Per-layer clipping: each of L layers to `C / sqrt(L)`, and so all together to C.

    Variables belong to the same layer if their names have the same part before the last slash, as
    Keras names them. The norm of one layer does not affect the clip factor of another.

    References:
      - McMahan et al., 2018, Learning Differentially Private Recurrent Language Models, section 3
        (https://arxiv.org/abs/1710.06963).
    """

    def blocks(self, names: Sequence[str]) -> list[int]:
        """See `ClippingRule.blocks`."""
        layers = [name.rpartition("/")[0] for name in names]
        order = list(dict.fromkeys(layers))
        return [order.index(layer) for layer in layers]

    def factors(self, norms: tf.Tensor, clip: Clip) -> tf.Tensor:
        """See `ClippingRule.factors`."""
        layers = tf.cast(tf.shape(norms)[1], norms.dtype)
        return 1 / tf.maximum(1.0, norms * tf.sqrt(layers) / clip)


@dataclasses.dataclass(frozen=True)
class AutomaticClipping(ClippingRule):
    """Normalization of gradients: `C * g / (||g|| + stability)`. Short gradients are lengthened.

    The clip becomes a factor of the learning rate, so there is no clip to tune.

    Args:
      stability: The positive constant gamma, in gradient units, from 1e-15 to 1e10. Much shorter
        gradients stay short, so well-fitted examples contribute little.

    Raises:
      ValueError: `stability` is out of its range.

    References:
      - Bu et al., 2023, Automatic Clipping: Differentially Private Deep Learning Made Easier and
        Stronger (https://arxiv.org/abs/2206.07136).
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not (is_number(self.stability) and LEAST_CLIP <= self.stability <= LARGEST_CLIP):
            raise error(
                "stability", f"a number from {LEAST_CLIP} to {LARGEST_CLIP:g}", self.stability
            )

    def factors(self, norms: tf.Tensor, clip: Clip) -> tf.Tensor:
        """See `ClippingRule.factors`."""
        return clip / (norms + self.stability)


@dataclasses.dataclass(frozen=True)
class AdaptiveQuantileClipping(FlatClipping):
    """Flat clipping with a clip that follows a quantile of the norms, privately.

    The clip C begins at `l2_norm_clip`, and stays between 1e-15 and 1e10. After each step, the
    share b of the batch's gradients that were at most as long as C is released with noise, and `C
    <- C * exp(-learning_rate * (b - target_quantile))`. The sum of gradients and the count are one
    Gaussian mechanism. With noise of `s_g * C` on the sum and of `s_b` on the count (centerd, so
    that an example moves it by 1/2), its noise multiplier z has `1 / z^2 = 1 / s_g^2 + 1 / (2
    s_b)^2`. The optimizer's `noise_multiplier` is this z, which the ledger records; s_g is a little
    larger.

    Args:
      target_quantile: Share of the gradients that should not be clipped, in [0, 1].
      learning_rate: Positive step size of the logarithm of C.
      count_noise: Standard deviation s_b of the noise on the count, in examples: more than half of
        `noise_multiplier`. None: a twentieth of `expected_batch_size`, but at least
        `noise_multiplier`.

    Raises:
      ValueError: An argument is out of its range.

    References:
      - Andrew et al., 2021, Differentially Private Learning with Adaptive Clipping, Algorithm 1 and
        Theorem 1 (https://arxiv.org/abs/1905.03871).
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.target_quantile) and 0 <= self.target_quantile <= 1):
            raise error("target_quantile", "in [0, 1]", self.target_quantile)
        positive("learning_rate", self.learning_rate)
        if self.count_noise is not None:
            non_negative("count_noise", self.count_noise)

    def noise(self, noise_multiplier: float, expected_batch_size: int) -> tuple[float, float]:
        """Returns how the noise is divided between the two parts of the mechanism.

        Args:
          noise_multiplier: Noise multiplier z of both together.
          expected_batch_size: Expected number of examples in a batch.

        Returns:
          The noise multiplier of the sum of gradients, and the standard deviation of the noise on
          the count.

        Raises:
          ValueError: `count_noise` is so small that the count alone costs more than z allows.
        """
        if noise_multiplier == 0:
            return 0.0, self.count_noise or 0.0
        count_noise = self.count_noise
        if count_noise is None:
            count_noise = max(expected_batch_size / 20, noise_multiplier)
        if 2 * count_noise <= noise_multiplier:
            raise error(
                "count_noise",
                f"more than half of the optimizer's noise multiplier {noise_multiplier}",
                self.count_noise,
            )
        inverse = noise_multiplier**-2 - (2 * count_noise) ** -2
        return inverse**-0.5, count_noise

    def next_clip(self, clip: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """Returns the clip after a step in which about `share` of the gradients were not clipped.

        It stays between 1e-15 and 1e10, and is unchanged if `share` is non-finite.
        """
        moved = clip * tf.exp(-self.learning_rate * (share - self.target_quantile))
        return within_range(tf.where(tf.math.is_finite(share), moved, clip))


# By their names in configs; `tfdp.contrib` adds its own.
NAMED: dict[str, type[ClippingRule]] = {
    "flat": FlatClipping,
    "per_layer": PerLayerClipping,
    "automatic": AutomaticClipping,
    "adaptive_quantile": AdaptiveQuantileClipping,
}


_RULES: Named[ClippingRule] = Named(
    "clipping_rule",
    ClippingRule,  # type: ignore[type-abstract]
    NAMED,
    "a `tfdp.clipping.ClippingRule`",
    more="tfdp.contrib",
)
get, serialize = _RULES.get, _RULES.serialize
