"""Noise that is correlated from step to step, so that later steps take back some of it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import scipy.signal

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers
from tfdp.accounting.sampling import UNPADDED_TRUNCATION_PROBABILITY
from tfdp.base import validation
from tfdp.base.validation import error

__all__ = ["BandedNoise", "CorrelatedNoisePlan", "calibrate_correlated_noise"]

MOST_BANDS = 512
_MOST_STEPS = 10**6  # Largest number of steps whose error is computed.


@dataclasses.dataclass(frozen=True)
class BandedNoise:
    """Noise of which each step takes back a part of that of the steps before.

    Independent noise adds up in the weights: after t steps its variance there is t times that of
    one. Correlated noise x has C x = z, where z is independent noise of the `noise_multiplier`, and
    C the lower triangular Toeplitz matrix with b bands of `coefficients`, whose l2 norm is 1.

    Guarantees: let each example have one chance to be sampled in any b steps in a row, as with
    `tfdp.data.poisson_batches(..., cycle_length=c)` of c >= b. Then T steps cost what
    ceil(T / c) Poisson-sampled Gaussian mechanisms cost, with q = c B / N and the
    `noise_multiplier`, under zero-out. (Multiply the noisy gradients by C: an example
    that is sampled once in c steps adds its gradient times a column of C, of norm 1, to independent
    noise; and the columns of two of its steps have no rows in common.) The ledger counts them.

    Give it to an optimizer as `noise_correlation`. `calibrate_correlated_noise` finds what is best
    for a budget.

    Args:
      coefficients: The bands c_0 > 0, c_1, ..., at most 512, scaled to norm 1. The noise must not
        grow without end: all roots of c_0 x^(b-1) + ... + c_{b-1} have absolute values of at most
        1, such as of bands that are positive and fall.

    Raises:
      ValueError: `coefficients` is something else.

    Example:
      >>> import tfdp
      >>> noise = tfdp.BandedNoise.optimal(bands=4, steps=100)
      >>> [round(c, 3) for c in noise.coefficients]
      [0.683, 0.483, 0.414, 0.359]
      >>> round(noise.standard_error(100) / tfdp.BandedNoise([1.0]).standard_error(100), 3)
      0.551

    References:
      - Choquette-Choo et al., 2023, (Amplified) Banded Matrix Factorization: A unified approach to
        private training (https://arxiv.org/abs/2306.08153), Theorem 4: the guarantee with cyclic
        Poisson sampling.
      - McKenna, 2024, Scaling up the Banded Matrix Factorization Mechanism for Differentially
        Private ML (https://arxiv.org/abs/2405.15913): banded Toeplitz matrices.
    """

    coefficients: Sequence[float]

    def __post_init__(self) -> None:
        requirement = (
            f"a sequence of 1 to {MOST_BANDS} numbers, of which the first is positive, and with "
            "which noise does not grow without end"
        )
        given = self.coefficients
        numbers = validation.elements("coefficients", given, requirement)
        if not (
            1 <= len(numbers) <= MOST_BANDS
            and all(validation.is_number(c) and math.isfinite(c) for c in numbers)
            and numbers[0] > 0
            and np.all(np.abs(np.roots(numbers)) <= 1 + 1e-9)
        ):
            raise error("coefficients", requirement, given)
        values = np.array(numbers, float)
        if not 1 - 1e-9 < np.linalg.norm(values) <= 1:  # Else it was scaled before.
            values /= np.max(np.abs(values))
            # At most 1, rounded: an example moves the noisy sums by a column of this norm.
            values *= (1 - 1e-12) / np.linalg.norm(values)
        object.__setattr__(self, "coefficients", tuple(map(float, values)))

    @property
    def bands(self) -> int:
        """The number of bands b."""
        return len(self.coefficients)

    @classmethod
    def optimal(cls, *, bands: int, steps: int, momentum: float = 0.0) -> "BandedNoise":
        """Returns the coefficients of the least `standard_error`.

        Args:
          bands: Number of bands b.
          steps: Steps of the training.
          momentum: Momentum of gradient descent, in [0, 1), as in Keras.

        Raises:
          ValueError: An argument is out of its range.
        """
        bands = _bands(bands)
        workload = _Workload.of(steps, momentum)
        if bands == 1:
            return cls((1.0,))
        # The square root of the matrix of prefix sums, with its bands cut off.
        k = np.arange(1, bands)
        first = np.cumprod((2 * k - 1) / (2 * k))
        found = scipy.optimize.minimize(workload.log_error, first, jac=True, method="L-BFGS-B")
        return cls((1.0, *found.x))

    def standard_error(self, steps: int, momentum: float = 0.0) -> float:
        """Returns how far the noise moves a weight: the root mean square over the steps.

        Args:
          steps: Steps of gradient descent with learning rate 1.
          momentum: Its momentum, in [0, 1).

        Returns:
          The error in units of the noise of z in one step.
        """
        return math.sqrt(_Workload.of(steps, momentum).error(np.array(self.coefficients)))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this noise again."""
        return {"coefficients": list(self.coefficients)}


class CorrelatedNoisePlan(NamedTuple):
    """The best correlated noise for a budget.

    Attributes:
      cycle_length: Argument of `tfdp.data.poisson_batches`.
      noise_multiplier: Argument of an optimizer.
      noise_correlation: Likewise; None if independent noise is best.
      standard_error: How far the noise moves a weight: the root mean square over the steps, with
        learning rate 1, in units of the clip over the expected batch size.
      independent_error: The same of independent noise of the same privacy, on Poisson batches.
    """

    cycle_length: int
    noise_multiplier: float
    noise_correlation: BandedNoise | None
    standard_error: float
    independent_error: float


def calibrate_correlated_noise(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    dataset_size: int,
    expected_batch_size: int,
    momentum: float = 0.0,
    cycle_length: int | None = None,
    most_bands: int = 64,
    truncation_probability: float = UNPADDED_TRUNCATION_PROBABILITY,
    prior: Ledgers | None = None,
) -> CorrelatedNoisePlan:
    """Returns the noise that moves the weights least within a privacy budget.

    Guarantees: a ledger with these steps (after the releases of `prior`), on the batches of one
    `poisson_batches(..., cycle_length=plan.cycle_length)`, reports an epsilon of at most
    `target_epsilon`.

    More bands take back more noise, but need longer cycles, with which sampling hides less. So the
    cycle lengths 1, 2, 4, ... and N / B are tried, with as many bands. At small epsilons
    independent noise is best; at large ones, and in few epochs, whole passes.

    Args:
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N.
      momentum: Momentum of gradient descent, in [0, 1).
      cycle_length: The cycle length, at most N / B, such as N / B for passes over the data without
        sampling; None: the best.
      most_bands: Bands to try, at most; the optimizer holds so much noise in memory.
      truncation_probability: See `calibrate_noise_multiplier`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.

    Raises:
      ValueError: An argument is out of its range, or the budget is spent.

    Example:
      >>> plan = calibrate_correlated_noise(
      ...     target_epsilon=8, delta=1e-5, steps=160, dataset_size=10000, expected_batch_size=500)
      >>> plan.cycle_length, round(plan.noise_multiplier, 2)
      (8, 1.33)
      >>> round(plan.standard_error / plan.independent_error, 2)
      0.74
    """
    left = Budget.check(target_epsilon, delta, prior, dataset_size=dataset_size)
    steps = validation.positive_integer("steps", steps)
    size = validation.positive_integer("dataset_size", dataset_size)
    batch = validation.positive_integer("expected_batch_size", expected_batch_size)
    if batch > size:
        raise error("expected_batch_size", f"at most dataset_size={size}", batch)
    tau = validation.small_probability("truncation_probability", truncation_probability)
    most = _bands(most_bands, "most_bands")
    _Workload.of(steps, momentum)
    longest = size // batch
    lengths = sorted({*(2**i for i in range(longest.bit_length())), longest})
    if cycle_length is not None:
        lengths = [1, validation.positive_integer("cycle_length", cycle_length)]
        if cycle_length > longest:
            raise error("cycle_length", f"at most N / B = {longest}", cycle_length)
    plans = []
    for length in lengths:
        cycles, q = -(-steps // length), length * batch / size
        releases = functools.partial(_releases, q, cycles, length * tau)
        sigma = left.least_noise(releases)
        noise = BandedNoise.optimal(bands=min(length, most, steps), steps=steps, momentum=momentum)
        plans.append((sigma * noise.standard_error(steps, momentum), length, sigma, noise))
    best, length, sigma, noise = (
        min(plans, key=lambda plan: plan[0]) if cycle_length is None else plans[-1]
    )
    correlation = noise if noise.bands > 1 else None
    return CorrelatedNoisePlan(length, sigma, correlation, best, plans[0][0])


def _releases(q: float, count: int, truncation: float, noise: float) -> list[Release]:
    return [Release(event_codec.sampled_gaussian(q, noise), count, truncation)]


def get(noise_correlation: Any) -> BandedNoise | None:
    """Returns correlated noise from itself, or from what `get_config` returned."""
    if isinstance(noise_correlation, dict) and set(noise_correlation) == {"coefficients"}:
        return BandedNoise(**noise_correlation)
    if noise_correlation is None or type(noise_correlation) is BandedNoise:
        return noise_correlation
    raise error("noise_correlation", "a `tfdp.BandedNoise` or None", noise_correlation)


@dataclasses.dataclass(frozen=True)
class _Workload:
    """Steps of gradient descent with momentum: what sums of gradients the weights are."""

    steps: int
    momentum: float

    @classmethod
    def of(cls, steps: Any, momentum: Any) -> "_Workload":
        steps = validation.positive_integer("steps", steps)
        if steps > _MOST_STEPS:
            raise error("steps", f"at most {_MOST_STEPS}", steps)
        if not (validation.is_number(momentum) and 0 <= momentum < 1):
            raise error("momentum", "in [0, 1)", momentum)
        return cls(steps, float(momentum))

    def error(self, coefficients: np.ndarray) -> float:
        """Returns the mean over the steps of the variance of a weight."""
        moves = self._moves(coefficients)
        left = np.arange(self.steps, 0, -1)
        return float(np.sum(coefficients**2) * np.sum(left * moves**2) / self.steps)

    def log_error(self, rest: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the logarithm of the error of the bands (1, *rest), and its gradient."""
        coefficients = np.array([1.0, *rest])
        with np.errstate(over="ignore", invalid="ignore"):
            moves = self._moves(coefficients)
            weighted = np.arange(self.steps, 0, -1) * moves
            total, norm = np.sum(weighted * moves), np.sum(coefficients**2)
            if not np.isfinite(total):
                return math.inf, np.zeros_like(rest)
            # The derivative of 1 / c by c_k is -1 / c^2, k places later.
            derivative = scipy.signal.lfilter([1.0], coefficients, moves)
            shifted = [
                np.dot(weighted[k:], derivative[: self.steps - k]) for k in range(1, len(rest) + 1)
            ]
        return math.log(norm * total), 2 * rest / norm - 2 * np.array(shifted) / total

    def _moves(self, coefficients: np.ndarray) -> np.ndarray:
        """Returns how far the independent noise of a step has moved a weight after t more steps."""
        impulse = np.zeros(self.steps)
        impulse[0] = 1.0
        optimizer = np.convolve([1.0, -1.0], [1.0, -self.momentum])
        return scipy.signal.lfilter([1.0], np.convolve(optimizer, coefficients), impulse)


def _bands(bands: Any, name: str = "bands") -> int:
    bands = validation.positive_integer(name, bands)
    if bands > MOST_BANDS:
        raise error(name, f"at most {MOST_BANDS}", bands)
    return bands
