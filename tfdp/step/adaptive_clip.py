"""The clip of an optimizer that follows a quantile of the norms of gradients."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.clipping.clipping_rules import AdaptiveQuantileClipping, within_range
from tfdp.step import replicas
from tfdp.step.noise import add_gaussian_noise, at_stage
from tfdp.step.secure_noise import add_secure_noise, add_secure_noise_to_count


class AdaptiveClip:
    """The current clip C, and the noise with which it is learned; see `AdaptiveQuantileClipping`.

    Formal guarantee: `step` is one Gaussian mechanism of the step's noise multiplier, whose
    results are the noisy sum and the next clip.

    Args:
      rule: Clipping rule by which the clip moves.
      l2_norm_clip: The first clip.
      noise_multipliers: Noise multiplier of the sum and the count together, in each stage.
      expected_batch_size: Expected number of examples in a logical batch.
    """

    def __init__(
        self,
        rule: AdaptiveQuantileClipping,
        l2_norm_clip: float,
        noise_multipliers: Sequence[float],
        expected_batch_size: int,
    ):
        self._rule, self._first = rule, l2_norm_clip
        self._expected_batch_size = expected_batch_size
        noises = [rule.noise(noise, expected_batch_size) for noise in noise_multipliers]
        self.sum_noises, self.count_noises = zip(*noises, strict=True)
        self._clip: tf.Variable | None = None

    def create(self, add_weight: Callable[..., tf.Variable]) -> list[tf.Variable]:
        """Creates the variable with the `add_weight` of an optimizer, which tracks it."""
        first = tf.constant(self._first, tf.float32)
        self._clip = add_weight(
            "l2_norm_clip",
            shape=[],
            dtype=tf.float32,
            trainable=False,
            initializer=lambda shape, dtype=None, **_: first,
        )
        return [self._clip]

    def value(self) -> tf.Tensor:
        """Returns the current clip, a scalar.

        The clip is public: it follows from noisy quantities alone.

        It is in the range of valid clips, whatever the variable was assigned (from a file, say).
        """
        if self._clip is None:
            return tf.constant(self._first)
        return within_range(self._clip.read_value())

    def step(
        self,
        sums: list[tf.Tensor | None],
        within_clip: tf.Tensor,
        clip: tf.Tensor,
        key: tf.Tensor,
        stage: tf.Tensor | None = None,
        digest: tf.Tensor | None = None,
    ) -> list[tf.Tensor | None]:
        """Adds noise to the sums, and moves the clip by a noisy count.

        Args:
          sums: Sums of gradients that were clipped to `clip`.
          within_clip: See `tfdp.clipping.ClippedSum`.
          clip: What `value` returned for these sums; the variable may have changed since.
          key: Secret key, int64 `[5]` or `[2]`, used for nothing else.
          stage: Stage of the noise's schedule, if there is one.
          digest: See `replicas.total`.

        Returns:
          The noisy sums.
        """
        sum_noise = at_stage(self.sum_noises, stage, tf.float32)
        stddevs = [sum_noise * clip] * len(sums) + [at_stage(self.count_noises, stage)]
        *noisy, count = add_gaussian_noise([*sums, within_clip], stddevs, key, digest=digest)
        self._move(clip, tf.convert_to_tensor(count), noisy)
        return noisy

    def secure_step(
        self,
        sums: list[tf.Tensor | None],
        within_clip: tf.Tensor,
        clip: tf.Tensor,
        error: tf.Tensor,
        key: tf.Tensor,
        dtypes: Sequence[tf.DType],
        stage: tf.Tensor | None = None,
        digest: tf.Tensor | None = None,
    ) -> list[tf.Tensor | None]:
        """Takes the step of `step`, with the noise of `add_secure_noise`.

        Args:
          sums: Float64 sums of gradients that were clipped to `clip`.
          within_clip: See `tfdp.clipping.ClippedSum`.
          clip: See `step`.
          error: See `tfdp.clipping.ClippedSum`.
          key: Secret key, int64 `[5]` or `[2]`, used for nothing else.
          dtypes: To which types the noisy sums are rounded.
          stage: Stage of the noise's schedule, if there is one.
          digest: See `replicas.total`.

        Returns:
          The noisy sums.
        """
        sum_noise, count_noise = (
            at_stage(noises, stage) for noises in (self.sum_noises, self.count_noises)
        )
        noisy = add_secure_noise(sums, clip, sum_noise, error, key, dtypes, digest)
        self._move(clip, add_secure_noise_to_count(within_clip, count_noise, key), noisy)
        return noisy

    def _move(self, clip: tf.Tensor, count: tf.Tensor, noisy: list[tf.Tensor | None]) -> None:
        """Moves the clip that was used by a noisy count."""
        variable = self._clip
        if variable is None:
            raise RuntimeError("The clip has no variable yet. Call `build` first.")
        share = count / self._expected_batch_size + 0.5

        def move(clips: Sequence, shares: Sequence, *used: Sequence) -> None:
            with tf.control_dependencies(tf.nest.flatten(used)):
                variable.assign(self._rule.next_clip(clips[0], shares[0]))

        replicas.once(move, clip, share, *(s for s in noisy if s is not None))
