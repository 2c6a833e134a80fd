"""Recording of a training by an audit: noisy sums, and the coordinates that they moved."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from scipy import stats

from tfdp._tf.plain_variables import plain_variables

if TYPE_CHECKING:
    from tfdp.optimizers.base import PrivateOptimizerMixin

# Steps whose noise is compared with that of all others, at most.
_COMPARED = 2000


@dataclasses.dataclass(frozen=True)
class StepSetting:
    """Public parameters of one step.

    Attributes:
      clip: The clip.
      stddev: Standard deviation of the noise on the sum.
      learning_rate: The learning rate; None where it follows from the number of the step.
    """

    clip: float
    stddev: float
    learning_rate: float | None


@dataclasses.dataclass
class Recording:
    """The steps of one training, at the coordinates of the canaries.

    Attributes:
      sums: The noisy sum of each step, `[canaries]`.
      coordinates: The variable after each step, `[canaries]`.
      settings: What each step was made with.
      sign: Sign of a canary's gradient.
      first_step: Number of steps that the optimizer had taken before.
    """

    sums: list[np.ndarray] = dataclasses.field(default_factory=list)
    coordinates: list[np.ndarray] = dataclasses.field(default_factory=list)
    settings: list[StepSetting] = dataclasses.field(default_factory=list)
    sign: float = 1.0
    first_step: int = 0

    def noise_units(self) -> np.ndarray:
        """Returns the sums, in units of their noise (of the clip, without noise): `[steps, n]`."""
        units = [s.stddev or s.clip for s in self.settings]
        return self.sign * np.stack(self.sums).astype(np.float64) / np.array(units)[:, np.newaxis]

    def scores(self, sampling_probability: float, steps: int | None = None) -> np.ndarray:
        """Returns for each canary the logarithm of how much likelier the sums are if it is in.

        A step's sum is normal, with mean 0 or, if the canary was sampled, the clip.

        Args:
          sampling_probability: Probability q that an example is in a batch.
          steps: How many of the steps the attacker saw; None: all.
        """
        sums, settings = self.noise_units()[:steps], self.settings[:steps]
        if not all(setting.stddev for setting in settings):
            return sums.sum(axis=0)
        signal = np.array([s.clip / s.stddev for s in settings])[:, np.newaxis]
        with np.errstate(divide="ignore"):  # At q = 1.
            absent, present = np.log1p(-sampling_probability), np.log(sampling_probability)
        return np.logaddexp(absent, present + signal * sums - signal**2 / 2).sum(axis=0)


def noise_p_value(noise: np.ndarray) -> float:
    """Bounds the probability that noise of variance 1, or more, is so small in some step.

    Args:
      noise: Sums at coordinates that no example has moved, in units of the noise, `[steps, n]`.
    """
    if not noise.size:
        return 1.0
    squares = np.sum(noise**2, axis=1)
    count = noise.shape[1]
    each = stats.chi2.cdf(squares, count).min()
    all_steps = stats.chi2.cdf(squares.sum(), count * len(squares))
    return float(min(1.0, (len(squares) + 1) * min(each, all_steps)))


def repetition_p_value(noise: np.ndarray) -> tuple[float, float]:
    """Finds the two steps whose noise is most alike.

    Args:
      noise: See `noise_p_value`.

    Returns:
      The largest correlation, in absolute value; and a bound on the probability of one so large
      between independent steps.
    """
    noise = noise[-_COMPARED:]
    steps, count = noise.shape
    if steps < 2 or count < 2:
        return 0.0, 1.0
    lengths = np.linalg.norm(noise, axis=1, keepdims=True)
    correlations = np.abs((noise / np.maximum(lengths, 1e-300)) @ (noise / lengths).T)
    np.fill_diagonal(correlations, 0)
    largest = float(min(correlations.max(), 1.0))
    # The square of the cosine between independent directions has this distribution.
    chance = stats.beta.sf(largest**2, 0.5, (count - 1) / 2)
    return largest, float(min(1.0, steps * (steps - 1) / 2 * chance))


def learning_rate(optimizer: Any) -> float | None:
    """Returns the learning rate that a training may change on the way; None of a schedule."""
    rate = optimizer._get_hyper("learning_rate")
    if isinstance(rate, tf.Variable):
        return float(rate.numpy())
    return float(rate) if isinstance(rate, float) else None


def deviation_of_updates(recording: Recording, optimizer: "PrivateOptimizerMixin") -> float:
    """Measures how far the updates are from those that follow from the noisy sums alone.

    The base optimizer is fed with the noisy sums, divided by the expected batch size, anew. What
    else gets into an update, such as the momentum of a rejected one, shows as a difference.

    Args:
      recording: What the audit saw.
      optimizer: The optimizer.

    Returns:
      The root mean square of the differences, over that of the updates.
    """
    from tfdp.optimizers.base import PrivateOptimizerMixin  # Which needs Keras 2.

    replay: Any = type(optimizer).from_config(optimizer.get_config())
    replay._was_dp_gradients_called = True  # TF-Privacy asks for it.
    divisor = optimizer.clipping.num_microbatches or optimizer.expected_batch_size
    with plain_variables():
        variable = tf.Variable(tf.zeros_like(recording.sums[0]), name="replayed")

    @tf.function
    def update(total: tf.Tensor) -> None:
        gradient = replay._transform_private_gradient(total / float(divisor))
        super(PrivateOptimizerMixin, replay).apply_gradients(
            [(gradient, variable)], experimental_aggregate_gradients=False
        )

    update.get_concrete_function(tf.TensorSpec(variable.shape, tf.float32))
    replay.iterations.assign(recording.first_step)
    expected = []
    for total, setting in zip(recording.sums, recording.settings, strict=True):
        if setting.learning_rate is not None:
            replay.learning_rate = setting.learning_rate
        update(tf.constant(total, tf.float32))
        expected.append(variable.numpy())
    zeros = np.zeros_like(expected[:1])
    moves, replayed = (
        np.diff(np.concatenate([zeros, np.stack(where)]), axis=0)
        for where in (recording.coordinates, expected)
    )
    scale = np.sqrt(np.mean(replayed**2))
    return float(np.sqrt(np.mean((moves - replayed) ** 2)) / (scale or 1.0))
