"""The noisy test by which DPSUR keeps or drops an update."""

import dataclasses
import math

import tensorflow as tf

from tfdp.accounting.sampling import MOST_EXAMPLES
from tfdp.base.random.rounded_gaussian import rounded_normals
from tfdp.base.validation import error, integer, is_number
from tfdp.step.noise import add_gaussian_noise
from tfdp.step.secure_noise import STEPS

# Stands for a non-finite loss: far beyond any clip, and finite in sums.
_WORST_LOSS = 1e30
# What float32 can hold, the noise included.
_LEAST_CLIP, _LARGEST_CLIP = 1e-20, 1e20
# For the proof of `_is_below_threshold`.
_LEAST_NOISE, _LARGEST_NOISE, _LARGEST_THRESHOLD = 0.125, 2.0**14, 1000.0


@dataclasses.dataclass(frozen=True)
class ValidationTest:
    """Noisy test of whether an update lowers the loss on a validation batch.

    Formal guarantee: on every data set and for every update, the probability of acceptance is in
    [A, B], with A = Phi((threshold - 1) / (2 noise_multiplier)) and
    B = Phi((threshold + 1) / (2 noise_multiplier)).

    Attributes:
      batch_size: Expected number of examples in a validation batch, B_v.
      noise_multiplier: sigma_v: the noise on the clipped difference, over its range 2 C_v.
      clip: C_v: the mean difference of losses is clipped to [-C_v, C_v].
      threshold: beta: an update is accepted if the noisy difference is below beta * C_v.
      secure_noise: Whether that holds for floating-point numbers as well, up to a total variation
        of 2^-180 (docs/noise.md).

    Raises:
      ValueError: An attribute is out of its range.

    Source: Fu et al., DPSUR, Algorithm 2, lines 9 to 18.
    """

    batch_size: int
    noise_multiplier: float
    clip: float
    threshold: float
    secure_noise: bool = False

    def __post_init__(self) -> None:
        integer("validation_batch_size", self.batch_size, 1, MOST_EXAMPLES)
        if not (is_number(self.noise_multiplier) and 0 < self.noise_multiplier < math.inf):
            raise error(
                "validation_noise_multiplier", "a positive, finite number", self.noise_multiplier
            )
        if not (is_number(self.clip) and _LEAST_CLIP <= self.clip <= _LARGEST_CLIP):
            raise error(
                "validation_clip", f"a number from {_LEAST_CLIP:g} to {_LARGEST_CLIP:g}", self.clip
            )
        if not (is_number(self.threshold) and math.isfinite(self.threshold)):
            raise error("threshold", "a finite number", self.threshold)
        if not self.secure_noise:
            return
        if not _LEAST_NOISE <= self.noise_multiplier <= _LARGEST_NOISE:
            raise error(
                "validation_noise_multiplier",
                f"from {_LEAST_NOISE} to {_LARGEST_NOISE:g} with `secure_noise`",
                self.noise_multiplier,
            )
        if abs(self.threshold) > _LARGEST_THRESHOLD:
            raise error(
                "threshold",
                f"from -{_LARGEST_THRESHOLD:g} to {_LARGEST_THRESHOLD:g} with `secure_noise`",
                self.threshold,
            )

    def accepts(
        self, old: "ValidationLoss", new: "ValidationLoss", mask: tf.Tensor, key: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether to keep the update: a scalar bool tensor.

        Args:
          old: The loss before the update, on a fresh Poisson batch.
          new: The loss after it, on the same batch.
          mask: Mask of the rows that are examples, bool `[rows]`.
          key: Secret key, int64 `[5]` or `[2]`, used for nothing else.
        """
        clipped = self.clipped_difference(old, new, mask)
        if self.secure_noise:
            return self._is_below_threshold(clipped, key)
        (noise,) = add_gaussian_noise([tf.zeros([])], 2 * self.clip * self.noise_multiplier, key)
        return clipped + tf.convert_to_tensor(noise) < self.threshold * self.clip

    def _is_below_threshold(self, clipped: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Returns whether the clipped difference, on a grid and with noise, is below the threshold.

        In steps of the grid, k + round(y) < t just where y < ceil(t) - 1/2 - k. As |k| stays one
        step below the clip, that is in the range for which A and B hold, whatever k is.
        """
        step = 2.0 ** (math.frexp(self.clip)[1] - 1) / STEPS
        most = math.floor(self.clip / step) - 1
        steps = tf.round(tf.cast(clipped, tf.float64) / step)
        steps = tf.clip_by_value(steps, -most, most)
        (noise,) = tf.unstack(rounded_normals(key, 1, 2 * self.clip * self.noise_multiplier / step))
        return steps + noise < self.threshold * self.clip / step

    def clipped_difference(
        self, old: "ValidationLoss", new: "ValidationLoss", mask: tf.Tensor
    ) -> tf.Tensor:
        """Returns the mean difference of the losses, clipped to [-C_v, C_v]; 0 for an empty batch.

        A non-finite loss counts as the worst one. An example that is broken before and after the
        update changes nothing, and an update that breaks the model counts against it.
        """
        examples = tf.reduce_sum(tf.cast(mask, tf.float32))
        differences = _finite(new.rows) - _finite(old.rows)
        differences = tf.where(mask, differences, tf.zeros_like(differences))
        mean = tf.math.divide_no_nan(tf.reduce_sum(differences), examples)
        mean += _finite(new.regularizer) - _finite(old.regularizer)
        mean = tf.where(examples > 0, mean, tf.zeros_like(mean))
        clipped = tf.clip_by_value(mean, -self.clip, self.clip)
        # Whatever the losses were: no other number may decide about acceptance.
        return tf.where(tf.abs(clipped) <= self.clip, clipped, self.clip)


@dataclasses.dataclass(frozen=True)
class ValidationLoss:
    """The loss of a model on a validation batch.

    Attributes:
      rows: Losses of the rows, `[rows]`.
      regularizer: Term that the model adds to the mean of the losses, a scalar.
    """

    rows: tf.Tensor
    regularizer: tf.Tensor


def _finite(losses: tf.Tensor) -> tf.Tensor:
    losses = tf.cast(losses, tf.float32)
    worst = tf.fill(tf.shape(losses), _WORST_LOSS)
    losses = tf.where(tf.math.is_finite(losses), losses, worst)
    return tf.clip_by_value(losses, -_WORST_LOSS, _WORST_LOSS)
