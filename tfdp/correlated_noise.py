"""Noise that is correlated from step to step, so that later steps take back some of it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import numpy as np
import scipy.optimize
import scipy.signal
import scipy.special

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers
from tfdp.accounting.sampling import UNPADDED_TRUNCATION_PROBABILITY, PoissonSampling
from tfdp.base import validation
from tfdp.base.validation import error

__all__ = ["BandedNoise", "BufferedNoise", "CorrelatedNoisePlan", "calibrate_correlated_noise"]

MOST_BANDS = 512
MOST_BUFFERS = 16
_USUAL_BUFFERS = 4  # More gain less than 0.1%.
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
    counts_sampling: ClassVar[bool] = True  # The ledger counts what sampling hides.
    renewal: ClassVar[None] = None  # The noise does not begin anew.

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

    @property
    def vectors(self) -> int:
        """The vectors of noise that an optimizer holds in memory."""
        return self.bands - 1

    def check_sampling(self, sampling: PoissonSampling | None) -> None:
        """Raises a ValueError if the guarantee does not cover batches that are sampled so."""
        length = 0 if sampling is None else sampling.cycle_length
        if length < self.bands:
            raise ValueError(
                f"Argument `noise_correlation` of {self.bands} bands must be given with `sampling` "
                "of batches in which each example is sampled at most once in so many steps: "
                f"`tfdp.data.poisson_batches(..., cycle_length={self.bands})`, or more. "
                f"Received: {f'cycle_length={length}' if length else 'sampling=None'}."
            )

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


@dataclasses.dataclass(frozen=True)
class BufferedNoise:
    """Noise of which each step takes back a part of that of all steps before, from a few buffers.

    A buffered linear Toeplitz (BLT) matrix C. As with `BandedNoise`, correlated noise x has C x =
    z, where z is independent noise of the `noise_multiplier`. The first column of C never ends:

        c_0 = scale,    c_t = scale (w_1 d_1^(t-1) + ... + w_n d_n^(t-1)),  t >= 1,

    with n `weights` w and `decays` d. So an optimizer holds n vectors of noise, however long the
    cycle. Use it for passes over the data: cycles of c = N / B steps.

    Guarantees: let the batches be those of `tfdp.data.poisson_batches(..., cycle_length=c)`, with
    this `cycle_length`. Then T steps cost what ceil(T / c) Gaussian mechanisms with the
    `noise_multiplier` cost, under zero-out, and no more if an example is sampled less often. No
    sampling is taken into account. (Multiply the noisy gradients by C. In the c steps that begin
    with its chance number m + 1, an example adds at most what m + 1 gradients of one direction
    add, of which the norm is P_m. P_m does not fall, and `scale` makes the mean of its squares over
    the `cycles` 1. So the first m cycles cost at most m Gaussians. After the last, the noise begins
    anew.) The ledger counts them. `docs/correlated_noise.md` has the proof.

    Give it to an optimizer as `noise_correlation`. `calibrate_correlated_noise` finds what is best
    for a budget.

    Args:
      weights: 1 to 16 weights w >= 0, with which noise does not grow without end: the eigenvalues
        of diag(d) - 1 w^T have absolute values below 1. That is so if their sum is below 1.
      decays: As many decays d in [0, 1), which are rounded to float32: steps compute with them.
      cycle_length: Steps c of a cycle, at least 2, in which an example has one chance to be
        sampled.
      cycles: Cycles after which the noise begins anew. `cycle_length * cycles` is at most 10^6.

    Raises:
      ValueError: An argument is something else.

    Example:
      >>> import tfdp
      >>> noise = tfdp.BufferedNoise.optimal(cycle_length=100, cycles=1, buffers=2)
      >>> [round(decay, 2) for decay in noise.decays]
      [0.97, 0.66]
      >>> all_bands = tfdp.BandedNoise.optimal(bands=100, steps=100)
      >>> round(noise.standard_error(100) / all_bands.standard_error(100), 3)
      1.001

    References:
      - McMahan, Xu, Zhang, 2024, A Hassle-free Algorithm for Strong Differential Privacy in
        Federated Learning Systems (https://arxiv.org/abs/2408.08868): BLTs for several passes.
      - Dvijotham, McMahan, Pillutla, Steinke, Thakurta, 2024, Efficient and Near-Optimal Noise
        Generation for Streaming Differential Privacy (https://arxiv.org/abs/2404.16706).
    """

    weights: Sequence[float]
    decays: Sequence[float]
    cycle_length: int
    cycles: int
    counts_sampling: ClassVar[bool] = False

    def __post_init__(self) -> None:
        most = f"a sequence of 1 to {MOST_BUFFERS} numbers"
        requirement = f"{most} >= 0, with which noise does not grow without end"
        weights = validation.elements("weights", self.weights, requirement)
        if not (
            1 <= len(weights) <= MOST_BUFFERS
            and all(validation.is_number(w) and 0 <= w < math.inf for w in weights)
        ):
            raise error("weights", requirement, self.weights)
        number = f"{len(weights)} numbers in [0, 1), one for each weight"
        decays = validation.elements("decays", self.decays, number)
        if len(decays) != len(weights) or not all(
            validation.is_number(d) and 0 <= d < 1 and np.float32(d) < 1 for d in decays
        ):
            raise error("decays", number, self.decays)
        object.__setattr__(self, "weights", tuple(map(float, weights)))
        object.__setattr__(self, "decays", tuple(float(np.float32(d)) for d in decays))
        if not np.all(np.abs(self._poles) < 1):
            raise error("weights", requirement, self.weights)
        length = validation.integer("cycle_length", self.cycle_length, 2, _MOST_STEPS)
        cycles = validation.integer("cycles", self.cycles, 1, _MOST_STEPS // length)
        object.__setattr__(self, "cycle_length", length)
        object.__setattr__(self, "cycles", cycles)

    @property
    def vectors(self) -> int:
        """The vectors of noise that an optimizer holds in memory."""
        return len(self.weights)

    @property
    def renewal(self) -> int:
        """The steps after which the noise begins anew: all cycles."""
        return self.cycle_length * self.cycles

    @functools.cached_property
    def scale(self) -> float:
        """The first coefficient c_0."""
        squares = np.square(_added_up(self._column(), self.cycles))
        # The ledger's cost is an upper bound also with coefficients that are rounded to float32.
        return (1 - 1e-6) / math.sqrt(np.sum(squares) / self.cycles)

    @property
    def coefficients(self) -> np.ndarray:
        """The first column of C, until the noise begins anew."""
        return self.scale * self._column()

    @classmethod
    def optimal(
        cls,
        *,
        cycle_length: int,
        cycles: int,
        buffers: int = _USUAL_BUFFERS,
        momentum: float = 0.0,
        steps: int | None = None,
    ) -> "BufferedNoise":
        """Returns noise of nearly the least `standard_error`.

        Args:
          cycle_length: Steps c of a cycle.
          cycles: Cycles of the training.
          buffers: Number of weights and decays. More than four gain next to nothing.
          momentum: Momentum of gradient descent, in [0, 1), as in Keras.
          steps: Steps of the training; None: all of its cycles.

        Raises:
          ValueError: An argument is out of its range.
        """
        buffers = validation.integer("buffers", buffers, 1, MOST_BUFFERS)
        whole = cls([0.0], [0.0], cycle_length, cycles)  # Checks them.
        workload = whole._workload(whole.renewal if steps is None else steps, momentum)
        # The logits of a decay, a zero of C, a smaller decay, ...: the first, and logarithms of the
        # differences. Decays and zeros that take turns are those of positive weights.
        length = math.log(whole.renewal)
        bounds = [(-5.0, min(length + 3.0, 14.0)), *[(-5.0, 2.0)] * (2 * buffers - 1)]
        found = []
        for share in (0.5, 0.75, 1.0):
            logits = np.linspace(share * length + 1, -2, 2 * buffers)
            first = [logits[0], *np.log(-np.diff(logits))]
            one = scipy.optimize.minimize(
                workload.log_buffered_error,
                first,
                args=(whole.cycle_length, whole.cycles),
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
            )
            found.append((one.fun, *_alternating(one.x)))
        _, decays, zeros = min(found, key=lambda one: one[0])
        weights = []
        for j, decay in enumerate(decays):
            others = np.delete(decays, j)
            rest = np.prod((decay - np.delete(zeros, j)) / (decay - others))
            weights.append((decay - zeros[j]) * rest)
        return cls(weights, decays.tolist(), cycle_length, cycles)

    def standard_error(self, steps: int, momentum: float = 0.0) -> float:
        """Returns how far the noise moves a weight: the root mean square over the steps.

        Args:
          steps: Steps of gradient descent with learning rate 1, at most `cycle_length * cycles`.
          momentum: Its momentum, in [0, 1).

        Returns:
          The error in units of the noise of z in one step.
        """
        workload = self._workload(steps, momentum)
        moves = workload.moves_of_independent()
        for decay, pole in zip(sorted(self.decays), sorted(self._poles), strict=True):
            moves = scipy.signal.lfilter([1.0, -decay], [1.0, -pole], moves)
        return math.sqrt(workload.mean_square(moves)) / self.scale

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this noise again."""
        lists = {"weights": list(self.weights), "decays": list(self.decays)}
        return {**lists, "cycle_length": self.cycle_length, "cycles": self.cycles}

    def check_sampling(self, sampling: PoissonSampling | None) -> None:
        """Raises a ValueError if the guarantee does not cover batches that are sampled so."""
        length = 0 if sampling is None else sampling.cycle_length
        if length != self.cycle_length:
            raise ValueError(
                f"Argument `noise_correlation` with cycle_length={self.cycle_length} must be given "
                "with `sampling` of batches in which each example is sampled at most once in so "
                f"many steps: `tfdp.data.poisson_batches(..., cycle_length={self.cycle_length})`. "
                f"Received: {f'cycle_length={length}' if length else 'sampling=None'}."
            )

    @property
    def _poles(self) -> np.ndarray:
        """The numbers whose powers the coefficients of the inverse of C are made of."""
        # The eigenvalues of diag(d) - 1 w^T, to which this matrix is similar.
        roots = np.sqrt(self.weights)
        return np.linalg.eigvalsh(np.diag(self.decays) - np.outer(roots, roots))

    def _column(self) -> np.ndarray:
        """Returns the first column of C, until the noise begins anew, divided by `scale`."""
        column = _impulse(self.renewal)
        for weight, decay in zip(self.weights, self.decays, strict=True):
            column += weight * _powers_later(decay, _impulse(self.renewal))
        return column

    def _workload(self, steps: Any, momentum: Any) -> "_Workload":
        validation.integer("steps", steps, 1, self.renewal)
        return _Workload.of(steps, momentum)


CorrelatedNoise = BandedNoise | BufferedNoise


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
    noise_correlation: CorrelatedNoise | None
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
    cycle lengths 1, 2, 4, ... and N / B are tried, with as many bands, and N / B also with a
    `BufferedNoise` of four buffers. At small epsilons independent noise is best; at large ones, and
    in few epochs, whole passes.

    Args:
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N.
      momentum: Momentum of gradient descent, in [0, 1).
      cycle_length: The cycle length, at most N / B, such as N / B for passes over the data without
        sampling; None: the best.
      most_bands: Bands to try, at most. The optimizer holds one vector of noise less in memory;
        buffers take no more than that.
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
        sampled = functools.partial(event_codec.sampled_gaussian, q)
        noises: list[tuple[CorrelatedNoise, Callable[[float], dp_accounting.DpEvent]]] = [
            (
                BandedNoise.optimal(bands=min(length, most, steps), steps=steps, momentum=momentum),
                sampled,
            )
        ]
        buffers = min(_USUAL_BUFFERS, most - 1)  # In no more memory than the bands.
        if length == longest > 1 and buffers > 0 and length * cycles <= _MOST_STEPS:
            buffered = BufferedNoise.optimal(
                cycle_length=length, cycles=cycles, buffers=buffers, momentum=momentum, steps=steps
            )
            noises.append((buffered, dp_accounting.GaussianDpEvent))
        for noise, event in noises:
            sigma = left.least_noise(functools.partial(_releases, event, cycles, length * tau))
            plans.append((sigma * noise.standard_error(steps, momentum), length, sigma, noise))
    allowed = plans if cycle_length is None else [plan for plan in plans if plan[1] == cycle_length]
    best, length, sigma, noise = min(allowed, key=lambda plan: plan[0])
    correlation = noise if noise.vectors > 0 else None
    return CorrelatedNoisePlan(length, sigma, correlation, best, plans[0][0])


def _releases(
    event: Callable[[float], dp_accounting.DpEvent], count: int, truncation: float, noise: float
) -> list[Release]:
    return [Release(event(noise), count, truncation)]


def get(noise_correlation: Any) -> CorrelatedNoise | None:
    """Returns correlated noise from itself, or from what `get_config` returned."""
    if isinstance(noise_correlation, dict):
        for cls in (BandedNoise, BufferedNoise):
            if set(noise_correlation) == {field.name for field in dataclasses.fields(cls)}:
                return cls(**noise_correlation)
    if noise_correlation is None or type(noise_correlation) in (BandedNoise, BufferedNoise):
        return noise_correlation
    raise error(
        "noise_correlation",
        "a `tfdp.BandedNoise`, a `tfdp.BufferedNoise` or None",
        noise_correlation,
    )


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
        return float(np.sum(coefficients**2)) * self.mean_square(self._moves(coefficients))

    def mean_square(self, moves: np.ndarray) -> float:
        """Returns the mean over the steps of the variance of a weight.

        Args:
          moves: How far the independent noise of a step has moved it after t more steps.
        """
        return float(np.sum(np.arange(self.steps, 0, -1) * moves**2) / self.steps)

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

    def log_buffered_error(
        self, logits: np.ndarray, cycle_length: int, cycles: int
    ) -> tuple[float, np.ndarray]:
        """Returns the logarithm of the error of a `BufferedNoise`, and its gradient.

        Args:
          logits: See `_alternating`.
          cycle_length: Steps of a cycle.
          cycles: Cycles after which the noise begins anew.
        """
        column, moves = _impulse(cycle_length * cycles), self.moves_of_independent()
        decays, zeros = _alternating(logits)
        for decay, zero in zip(decays, zeros, strict=True):
            column = scipy.signal.lfilter([1.0, -zero], [1.0, -decay], column)
            moves = scipy.signal.lfilter([1.0, -decay], [1.0, -zero], moves)
        sums = _added_up(column, cycles)
        weighted = np.arange(self.steps, 0, -1) * moves
        total, norm = np.dot(weighted, moves), np.sum(sums**2)
        by_logit = []
        for decay, zero in zip(decays, zeros, strict=True):
            for number, sign in ((decay, 1), (zero, -1)):
                longer = _added_up(_powers_later(number, column), cycles)
                smaller = np.dot(weighted, _powers_later(number, moves))
                slope = 2 * sign * (np.sum(sums * longer) / norm - smaller / total)
                by_logit.append(slope * number * (1 - number))
        # A logit is the first less all differences before it.
        following = np.cumsum(by_logit[::-1])[::-1]
        gradient = np.array([following[0], *(-np.exp(logits[1:]) * following[1:])])
        return math.log(norm / cycles * total / self.steps), gradient

    def moves_of_independent(self) -> np.ndarray:
        """Returns how far the noise of a step has moved a weight after t more steps, on its own."""
        return self._moves(np.ones(1))

    def _moves(self, coefficients: np.ndarray) -> np.ndarray:
        """Returns how far the independent noise of a step has moved a weight after t more steps."""
        optimizer = np.convolve([1.0, -1.0], [1.0, -self.momentum])
        column = np.convolve(optimizer, coefficients)
        return scipy.signal.lfilter([1.0], column, _impulse(self.steps))


def _impulse(length: int) -> np.ndarray:
    impulse = np.zeros(length)
    impulse[0] = 1.0
    return impulse


def _powers_later(number: float, values: np.ndarray) -> np.ndarray:
    """Returns at each t the sum over u < t of number^(t - 1 - u) values_u."""
    return scipy.signal.lfilter([0.0, 1.0], [1.0, -number], values)


def _added_up(column: np.ndarray, cycles: int) -> np.ndarray:
    """Returns the sum of the first m + 1 cycles of a column, for each m: `[cycles, steps]`."""
    return np.cumsum(column.reshape(cycles, -1), axis=0)


def _alternating(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns falling numbers in (0, 1), in turns: decays, and zeros of C.

    Args:
      logits: The logit of the first, and the logarithm of how much less each next logit is.
    """
    values = logits[0] - np.concatenate([[0.0], np.cumsum(np.exp(logits[1:]))])
    numbers = scipy.special.expit(values)
    return numbers[0::2], numbers[1::2]


def _bands(bands: Any, name: str = "bands") -> int:
    bands = validation.positive_integer(name, bands)
    if bands > MOST_BANDS:
        raise error(name, f"at most {MOST_BANDS}", bands)
    return bands
