"""Random allocation: one epoch in which each example is in one of t steps, at random.

Each example (or user) draws its step by itself, uniformly and in secret, anew for each epoch. With
independent Gaussian noise, the t releases of an epoch are together one mechanism: its dominating
pair is a Gaussian of t dimensions whose mean is a random unit vector of the axes, against one of
mean zero, whatever later gradients do with earlier releases. docs/random_allocation.md has the
proofs. Its likelihood ratio R is the mean of t independent lognormal numbers:

- privacy losses: `tfdp.accounting.allocation_ratio` computes a distribution that is larger than R
  in convex order, and so a dominating pair.
- RDP: E[R^k], for integers k, is a coefficient of a power of a series with positive terms; between
  integers log E[R^k] is convex. E[R^-b], in the other direction, is the mean of a convex function.

On a Poisson sample of rate q the ratio is 1 - q + q R.
"""

import functools
import math

import attr
import dp_accounting
import numpy as np
from scipy import special

from tfdp.accounting import allocation_ratio, dominating_pairs, mechanisms
from tfdp.base import validation

_EPS = float(np.finfo(float).eps)
# With less noise, or more, an epoch has the price of one step.
_LEAST_NOISE, _MOST_NOISE = 0.1, 1e4
# More steps count as so many, which cost more.
_MOST_STEPS = 10**5
# Larger orders have the Gaussian's price.
LARGEST_ORDER = 256
# E[R^-b] is bounded by the geometric mean of the Y_i where that is so far below its own mean.
_DEVIATIONS = (4.0, 8.0, 12.0, 20.0)
# Absolute error of terms that cancel.
_CANCELLATION = 1e-12


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomAllocationDpEvent(dp_accounting.GaussianDpEvent):
    """An epoch of Gaussian mechanisms, in exactly one of which each example takes part.

    The step of each example is drawn uniformly, independently of all others, in secret, and anew
    for each epoch; noise is independent. The first steps of an epoch alone cost no more. Whatever
    has no price for it takes the event for one `GaussianDpEvent`, which costs more.

    Attributes:
      noise_multiplier: Standard deviation of the noise over the sensitivity (the l2 norm).
      steps: Steps of the epoch, t.

    Raises:
      ValueError: `steps` is not a positive integer (when it is recorded or priced).

    Source: docs/random_allocation.md. The sampling: Chua et al., 2025, "Balls-and-Bins Sampling for
    DP-SGD"; Feldman and Shenfeld, 2025, "Privacy Amplification by Random Allocation".

    Example:
      >>> from tfdp.accounting import PrivacyLedger
      >>> ledger = PrivacyLedger()
      >>> ledger.record(RandomAllocationDpEvent(1.0, steps=100), count=10)
      >>> round(ledger.epsilon(1e-5).epsilon, 2)
      1.7
    """

    steps: int = 1


def rdp(q: float, noise_multiplier: float, steps: int, orders: tuple[float, ...]) -> np.ndarray:
    """Bounds the RDP of one epoch, in both directions.

    Args:
      q: Probability that an example takes part in the epoch at all, in [0, 1].
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      steps: Steps of the epoch.
      orders: Renyi orders > 1 [orders].

    Source: docs/random_allocation.md.

    Example:
      >>> rdp(1.0, 1.0, 100, (2.0,)).round(4)  # log(1 + (e - 1) / 100)
      array([0.017])
    """
    return _rdp(q, noise_multiplier, steps, tuple(orders)).copy()


@functools.lru_cache(maxsize=256)
def _rdp(q: float, noise: float, steps: int, orders: tuple[float, ...]) -> np.ndarray:
    grid = np.asarray(orders, float)
    if q == 0:
        return np.zeros(len(grid))
    gaussian = grid / 2 / max(noise, 1e-150) ** 2  # The price of one step.
    if not _LEAST_NOISE <= noise <= _MOST_NOISE:
        return np.where(noise > 0, gaussian, np.inf)
    steps = min(steps, _MOST_STEPS)
    with_above_without = _interpolated(_log_moments(q, noise, steps), grid)
    without_above_with = _reverse_log_moments(q, noise, steps, grid - 1)
    found = np.maximum(with_above_without, without_above_with) + _CANCELLATION
    return np.minimum(found / (grid - 1), gaussian)


def _interpolated(log_moments: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Returns log E[R^order], at most: it is convex in the order."""
    known = np.interp(orders, np.arange(len(log_moments)), log_moments)
    return np.where(orders <= len(log_moments) - 1, known, np.inf)


@functools.lru_cache(maxsize=256)
def _log_moments(q: float, sigma: float, steps: int) -> np.ndarray:
    """Bounds log E[(1 - q + q R)^k] for k from 0 to `LARGEST_ORDER` [orders]."""
    k = np.arange(LARGEST_ORDER + 1)
    factorials = special.gammaln(k + 1)
    # E[(Y_1 + ... + Y_t)^k] / k! is a coefficient of the power t of sum_k E[Y^k] z^k / k!.
    one = k * (k - 1) / 2 / sigma / sigma - factorials
    total = one
    for bit in bin(steps)[3:]:
        total = _log_product(total, total)
        if bit == "1":
            total = _log_product(total, one)
    moments = total + factorials - k * math.log(steps)
    size = 64 + np.abs(one) + factorials + k * math.log(steps)
    moments += 8 * _EPS * k * (1 + math.log2(steps)) * size
    moments[:2] = 0.0
    if q < 1:
        choose = factorials[:, np.newaxis] - factorials - factorials[np.abs(k[:, np.newaxis] - k)]
        terms = choose + (k[:, np.newaxis] - k) * math.log1p(-q) + k * math.log(q) + moments
        terms = np.where(k <= k[:, np.newaxis], terms, -np.inf)
        moments = special.logsumexp(terms, axis=1) + 8 * _EPS * (64 + factorials)
        moments[:2] = 0.0
    return np.maximum(moments, 0.0)


def _log_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the coefficients of a product of two series."""
    k = np.arange(len(a))
    difference = k[:, np.newaxis] - k
    terms = np.where(difference >= 0, a + b[np.maximum(difference, 0)], -np.inf)
    peak = terms.max(axis=1)
    return peak + np.log(np.exp(terms - peak[:, np.newaxis]).sum(axis=1))


def _reverse_log_moments(q: float, sigma: float, steps: int, powers: np.ndarray) -> np.ndarray:
    """Bounds log E[(1 - q + q R)^-b] for b > 0 [powers]."""
    # R is at least the geometric mean of the Y_i, whose logarithm is normal.
    middle, variance = 0.5 / sigma**2, 1 / sigma**2 / steps
    plain = powers * middle + powers**2 * variance / 2
    found = allocation_ratio.ratio(sigma, steps)
    with np.errstate(over="ignore"):
        bounds = [plain] + [_reverse(found, middle, variance, powers, z) for z in _DEVIATIONS]
    best = np.min(bounds, axis=0)
    if q < 1:  # A power is convex.
        # log(1 - q + q e^x), without overflow and with little rounding near 0.
        small = np.log1p(q * np.expm1(np.minimum(best, 1.0)))
        large = np.logaddexp(math.log1p(-q), math.log(q) + best)
        best = np.where(best > 1, large, small)
        logs = np.logaddexp(math.log1p(-q), math.log(q) + found.logs)
        mixed = np.log(found.mass) - np.multiply.outer(powers, logs)
        rest = math.log(found.zero) - powers * math.log1p(-q)
        mixed = np.logaddexp(special.logsumexp(mixed, axis=1), rest)
        best = np.minimum(best, mixed + powers * _EPS * 1e4)
    return np.maximum(best, 0.0)


def _reverse(
    found: allocation_ratio.Sum,
    middle: float,
    variance: float,
    powers: np.ndarray,
    deviations: float,
) -> np.ndarray:
    """Bounds log E[R^-b] by its tangent below a point, and by the geometric mean there."""
    deviation = math.sqrt(variance)
    # Under the distribution weighted by (geometric mean)^-b, its logarithm has this mean.
    point = -middle - powers * variance - deviations * deviation
    rest = powers * middle + powers**2 * variance / 2 + math.log(special.ndtr(-deviations)) + 1e-9
    below = np.minimum(found.logs - point[:, np.newaxis], 0.0)
    slope = np.log1p(powers[:, np.newaxis] * -np.expm1(below))
    values = -powers[:, np.newaxis] * np.maximum(found.logs, point[:, np.newaxis]) + slope
    body = special.logsumexp(np.log(found.mass) + values, axis=1)
    at_zero = math.log(found.zero) - powers * point + np.log1p(powers)
    total = special.logsumexp([body, rest, at_zero], axis=0)
    return total + powers * _EPS * (64 + float(np.abs(found.logs).max()))


@functools.lru_cache(maxsize=64)
def pair(q: float, noise_multiplier: float, steps: int) -> dominating_pairs.Pair:
    """Returns a pair that dominates one epoch in both directions.

    Args:
      q: Probability that an example takes part in the epoch at all, in (0, 1].
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      steps: Steps of the epoch.
    """
    if steps == 1 or not _LEAST_NOISE <= noise_multiplier <= _MOST_NOISE:
        return dominating_pairs.sampled_gaussian(q, noise_multiplier)
    steps = min(steps, _MOST_STEPS)
    found = allocation_ratio.ratio(noise_multiplier, steps)
    ratios, without = np.exp(found.logs), found.mass
    if q < 1:
        ratios = np.append(1 - q, 1 - q + q * ratios)
        without = np.append(found.zero, without)
    with_it = without * ratios
    # The logarithms of the ratios are rounded.
    error = 8 * _EPS * (8 + float(np.abs(found.logs).max()) + math.log(steps)) * with_it
    none = 4 * _EPS * without
    beyond = q * found.infinite / steps * (1 + 1e-9)
    zero = found.zero if q == 1 else 0.0
    return dominating_pairs.Pair(
        add=dominating_pairs.Atoms(without, with_it, none, error, zero),
        remove=dominating_pairs.Atoms(with_it, without, error, none, beyond),
    )


@functools.lru_cache(maxsize=64)
def pair_below(q: float, noise_multiplier: float, steps: int) -> dominating_pairs.Pair:
    """Returns a pair that an example attains whose gradient is the same in each step.

    Args:
      q: Probability that an example takes part in the epoch at all, in (0, 1].
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      steps: Steps of the epoch.
    """
    few = _LEAST_NOISE <= noise_multiplier <= _MOST_NOISE and steps <= _MOST_STEPS
    if steps == 1 or not few:  # The sum of all releases is enough.
        return dominating_pairs.sampled_gaussian(q, noise_multiplier * math.sqrt(steps))
    ratios, without = allocation_ratio.ratio_below(noise_multiplier, steps)
    with_it = without * (1 - q + q * ratios)
    share = 2e-11 * (steps + 10)
    none, some = share * without, share * with_it
    return dominating_pairs.Pair(
        add=dominating_pairs.Atoms(without, with_it, none, some),
        remove=dominating_pairs.Atoms(with_it, without, some, none),
    )


class _RandomAllocation(mechanisms.PairedMechanism):
    """Prices epochs, and epochs on a Poisson sample."""

    prices_samples = True
    best_at_integers = True

    def check(self, event: dp_accounting.DpEvent) -> None:
        epoch = event
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            epoch = event.event
        if not (validation.is_integer(epoch.steps) and epoch.steps > 0):
            raise validation.error("event", "of positive integer `steps`", event)

    def steps(self, event: dp_accounting.DpEvent) -> int:
        return _parameters(event)[2]

    def rdp(
        self, event: dp_accounting.DpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        return rdp(*_parameters(event), orders)

    def upper_pairs(
        self, event: dp_accounting.DpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...] | None:
        q, noise, steps = _parameters(event)
        if q == 0:
            return ()
        return None if noise == 0 else (pair(q, noise, steps),)

    def attained_pairs(
        self, event: dp_accounting.DpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...]:
        q, noise, steps = _parameters(event)
        return () if q == 0 or noise == 0 else (pair_below(q, noise, steps),)


def _parameters(event: dp_accounting.DpEvent) -> tuple[float, float, int]:
    """Returns the probability to take part, the noise multiplier and the steps."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return event.sampling_probability, event.event.noise_multiplier, event.event.steps
    return 1.0, event.noise_multiplier, event.steps


mechanisms.register(RandomAllocationDpEvent, _RandomAllocation())
