"""Recording of a training by an audit: noisy sums, and the coordinates that they moved."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from scipy import special, stats

from tfdp.base.tf.plain_variables import plain_variables

if TYPE_CHECKING:
    from tfdp.keras2.base import PrivateOptimizerMixin

# Steps whose noise is compared with that of all others, at most.
_COMPARED = 2000


@dataclasses.dataclass(frozen=True)
class StepSetting:
    """Public parameters of one step.

    Attributes:
      clip: The clip.
      stddev: Standard deviation of the noise on the sum.
      learning_rate: The learning rate; None where it follows from the number of the step.
      trained: Which coordinates the step trains, by public numbers, bool `[canaries]` or a scalar.
      source: Number of the object that drew the batch.
      sequence: Number of the batch among those of this source.
    """

    clip: float
    stddev: float
    learning_rate: float | None
    trained: Any = True
    source: int = 0
    sequence: int = 0


@dataclasses.dataclass
class Recording:
    """The steps of one training, at the coordinates of the canaries.

    Attributes:
      sums: The noisy sum of each step, `[canaries]`.
      coordinates: The variable after each step, `[canaries]`.
      settings: What each step was made with.
      sign: Sign of a canary's gradient.
      first_step: Number of steps that the optimizer had taken before.
      kept: Which coordinates were kept after the noise, bool `[canaries]` for each step; empty if
        all were.
      bands: Coefficients of the correlation of the noise, from the first.
      renewal: Before each draw whose number is a multiple of this, the noise begins anew; None: it
        does not.
      cycle_length: Steps in which a canary has one chance to be sampled.
      signs: Whether signs alone are released: the attacker sees no more.
      weight_clip: Bound on the variable's absolute values after each step; None: there is none.
    """

    sums: list[np.ndarray] = dataclasses.field(default_factory=list)
    coordinates: list[np.ndarray] = dataclasses.field(default_factory=list)
    settings: list[StepSetting] = dataclasses.field(default_factory=list)
    sign: float = 1.0
    first_step: int = 0
    kept: list[np.ndarray] = dataclasses.field(default_factory=list)
    bands: Sequence[float] = (1.0,)
    renewal: int | None = None
    cycle_length: int = 1
    signs: bool = False
    weight_clip: float | None = None

    def noise_units(self) -> np.ndarray:
        """Returns the sums, in units of their noise (of the clip, without noise): `[steps, n]`.

        Correlated sums are multiplied by the stated matrix C, after which the noise of each step is
        independent, if C is the right one.
        """
        units = [s.stddev or s.clip for s in self.settings]
        sums = self.sign * np.stack(self.sums).astype(np.float64)
        places, independent = self._places(), self.bands[0] * sums
        for k, coefficient in enumerate(self.bands[1:], 1):
            later = np.flatnonzero(places >= k)
            independent[later] += coefficient * sums[later - k]
        return independent / np.array(units)[:, np.newaxis]

    def _places(self) -> np.ndarray:
        """Returns for each step how many before it have noise that it may take back.

        As in `NoiseMemory`: a step takes back noise if its draw follows that of the step before.
        """
        places = np.zeros(len(self.settings), int)
        for i in range(1, len(places)):
            before, now = self.settings[i - 1], self.settings[i]
            ends = self.renewal is not None and now.sequence % self.renewal == 0
            if not ends and (before.source, before.sequence + 1) == (now.source, now.sequence):
                places[i] = places[i - 1] + 1
        return places

    def scores(self, sampling_probability: float, steps: int | None = None) -> np.ndarray:
        """Returns for each canary the logarithm of how much likelier the sums are if it is in.

        In units of the noise, a step's sum is normal, with mean 0 or, if the canary was sampled,
        the clip. Where noise is correlated, a canary that was sampled adds the clip times a column
        of C to the sums of its step and the next ones. (Columns of buffered noise have rows in
        common, which scores leave out: they are then near the logarithms.) Steps that do not train
        a coordinate say nothing. With cyclic sampling, the attacker does not know which set a
        canary is in.

        Args:
          sampling_probability: Probability q that an example is in a batch (of its set).
          steps: How many of the steps the attacker saw; None: all.
        """
        sums, settings = self.noise_units()[:steps], self.settings[:steps]
        trained = np.stack([np.broadcast_to(s.trained, sums.shape[1]) for s in settings])
        if not all(setting.stddev for setting in settings):
            return np.where(trained, sums, 0).sum(axis=0)
        places, matched = self._places()[: len(sums)], np.zeros_like(sums)
        squares = np.zeros([len(sums), 1])
        for k, coefficient in enumerate(self.bands):
            steps_of = np.flatnonzero(places >= k) - k  # Those that step `steps_of + k` follows.
            matched[steps_of] += coefficient * sums[steps_of + k]
            squares[steps_of] += coefficient**2
        signal = np.array([s.clip / s.stddev for s in settings])[:, np.newaxis]
        with np.errstate(divide="ignore"):  # At q = 1.
            absent, present = np.log1p(-sampling_probability), np.log(sampling_probability)
        if self.signs:
            seen = np.where(sums >= 0, signal, -signal)
            loss = special.log_ndtr(seen) - special.log_ndtr(0.0)
        else:
            loss = signal * matched - signal**2 * squares / 2
        ratios = np.logaddexp(absent, present + loss)
        return self._of_any_set(np.where(trained, ratios, 0))

    def _of_any_set(self, ratios: np.ndarray) -> np.ndarray:
        """Returns the logarithms of likelihood ratios of all steps, from those of each.

        An example's set is random, and another one for each object that draws batches.
        """
        if self.cycle_length == 1:
            return ratios.sum(axis=0)
        settings = self.settings[: len(ratios)]
        sources = np.array([s.source for s in settings])
        sets = np.array([s.sequence % self.cycle_length for s in settings])
        total = np.zeros(ratios.shape[1])
        for source in np.unique(sources):
            each = [
                ratios[(sources == source) & (sets == number)].sum(axis=0)
                for number in range(self.cycle_length)
            ]
            total += special.logsumexp(each, axis=0) - np.log(self.cycle_length)
        return total

    def gradients(self, divisor: float, remembers: bool) -> list[np.ndarray]:
        """Returns what the base optimizer must get in each step, if it follows from the sums alone.

        Of what is kept after the noise, only the number of coordinates is taken from the training:
        they must be the largest.

        Args:
          divisor: What the sums are divided by.
          remembers: Whether what is left out is added to the next step's gradient.
        """
        found, left = [], np.zeros_like(self.sums[0])
        for i, (total, setting) in enumerate(zip(self.sums, self.settings, strict=True)):
            gradient = total / np.asarray(divisor, total.dtype)
            if self.kept:
                gradient = gradient + left
                least = np.min(np.abs(gradient), where=self.kept[i], initial=np.inf)
                kept = self.kept[i] | (np.abs(gradient) > least * (1 + 1e-5))
                if remembers:
                    left = np.where(kept, 0, gradient)
                gradient = np.where(kept, gradient, 0)
            found.append(np.where(setting.trained, gradient, 0))
        return found


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

    The base optimizer is fed with the noisy sums, divided by the expected batch size, anew;
    compressed, if it compresses, by public masks or by the size of the noisy coordinates. What else
    gets into an update, such as the momentum of a rejected one, or a choice of coordinates by
    gradients without noise, shows as a difference.

    Args:
      recording: What the audit saw.
      optimizer: The optimizer.

    Returns:
      The root mean square of the differences, over that of the updates.
    """
    from tfdp.keras2.base import PrivateOptimizerMixin  # Which needs Keras 2.

    replay: Any = type(optimizer).from_config(optimizer.get_config())
    replay._was_dp_gradients_called = True  # TF-Privacy asks for it.
    divisor = optimizer.clipping.num_microbatches or optimizer.expected_batch_size
    with plain_variables():
        variable = tf.Variable(tf.zeros_like(recording.sums[0]), name="replayed")

    @tf.function
    def update(gradient: tf.Tensor) -> None:
        gradient = replay._transform_private_gradient(gradient)
        super(PrivateOptimizerMixin, replay).apply_gradients(
            [(gradient, variable)], experimental_aggregate_gradients=False
        )
        if (bound := recording.weight_clip) is not None:
            variable.assign(tf.clip_by_value(variable, -bound, bound))

    update.get_concrete_function(tf.TensorSpec(variable.shape, tf.float32))
    replay.iterations.assign(recording.first_step)
    expected = []
    remembers = optimizer.compression is not None and optimizer.compression.has_memory
    gradients = recording.gradients(float(divisor), remembers)
    for gradient, setting in zip(gradients, recording.settings, strict=True):
        if setting.learning_rate is not None:
            replay.learning_rate = setting.learning_rate
        update(tf.constant(gradient, tf.float32))
        expected.append(variable.numpy())
    zeros = np.zeros_like(expected[:1])
    moves, replayed = (
        np.diff(np.concatenate([zeros, np.stack(where)]), axis=0)
        for where in (recording.coordinates, expected)
    )
    scale = np.sqrt(np.mean(replayed**2))
    return float(np.sqrt(np.mean((moves - replayed) ** 2)) / (scale or 1.0))
