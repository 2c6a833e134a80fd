"""The signs of a Gaussian mechanism: what they cost less than its numbers.

A step of sign descent releases s_i = sign(x_i + noise_i) alone, for each coordinate i. In units of
the noise an example shifts x by a vector of norm at most 1 / noise multiplier. All bounds follow
from two facts about one sign, with margin m and shift d, whose k-th moment is

    M_k(m, d) = E[(p_shifted(s) / p(s))^k] = Phi(m)^(1-k) Phi(m+d)^k + Phi(-m)^(1-k) Phi(-m-d)^k:

1. log M_k(m, d) <= v R(sqrt(2 v)) with v = k (k - 1) d^2 / 2, the log moment of the Gaussian
   itself, and R the table below, which rises from 2 / pi to 1.
2. Moments of independent coordinates multiply. R rises, so that the sum of the log moments over all
   coordinates is at most v R(sqrt(2 v)) of the whole shift, however it is split.

docs/sign_accounting.md proves these and what follows from them for Poisson samples, in both
directions. `python -m experiments.accounting.sign_certificate` proves the table.
"""

import functools
import math

import attr
import dp_accounting
import numpy as np
from scipy import special

from tfdp.accounting import dominating_pairs, mechanisms
from tfdp.accounting.accountants import sampled_rdp

# R at sqrt(2 v) = FIRST * RATIO^i, times 10^5; linear between these points, constant before the
# first, and 1 after the last. From `python -m experiments.accounting.sign_certificate --make`.
FIRST, RATIO = 0.02, 1.08
# fmt: off
TABLE = (
    63701, 63701, 63701, 63701, 63702, 63702, 63702, 63702, 63702, 63703, 63703, 63703,
    63704, 63704, 63705, 63705, 63706, 63707, 63708, 63709, 63711, 63712, 63714, 63717,
    63719, 63722, 63726, 63730, 63735, 63741, 63748, 63755, 63765, 63775, 63788, 63802,
    63819, 63839, 63862, 63889, 63921, 63958, 64001, 64052, 64111, 64181, 64263, 64358,
    64471, 64603, 64759, 64943, 65161, 65418, 65724, 66087, 66519, 67035, 67652, 68391,
    69273, 70323, 71561, 72996, 74620, 76395, 78259, 80137, 81963, 83690, 85296, 86774,
    88125, 89357, 90476, 91491, 92409, 93238, 93985, 94656, 95259, 95800, 96283, 96715,
    97100, 97444, 97749, 98021, 98262, 98475, 98665, 98832, 98980, 99111, 99227, 99328,
    99418, 99497, 99567,
)
# fmt: on
# R is proven for integer moments up to this one. Larger ones get the Gaussian's own price.
LARGEST_MOMENT = 1024
# Relative error of the logarithms of moments, at most: sums of up to 1024 terms, each known to
# 1e-11.
_ROUNDING = 1e-9
# Absolute error of terms that cancel.
_CANCELLATION = 1e-15
# Ratios below which outcomes count as rare, and orders of the moments that bound them.
_RARE = np.arange(0.2, 0.96, 0.05)[:, np.newaxis]
_RARE_ORDERS = np.unique(np.round(np.geomspace(1, LARGEST_MOMENT - 1, 60)))


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SignedGaussianDpEvent(dp_accounting.GaussianDpEvent):
    """The signs of a Gaussian mechanism with independent noise: one of two for each coordinate.

    Zero must have one of the two signs, always the same. Whatever has no price for signs takes the
    event for a `GaussianDpEvent`, which costs more: signs are post-processing.

    Attributes:
      noise_multiplier: Standard deviation of the noise over the sensitivity (the l2 norm).

    Example:
      >>> from tfdp.accounting import PrivacyLedger
      >>> ledger = PrivacyLedger()
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, SignedGaussianDpEvent(1.0))
      >>> ledger.record(step, count=1000)
      >>> round(ledger.epsilon(1e-5).epsilon, 2)
      1.65
    """


def log_moment(orders: np.ndarray | float, noise_multiplier: float) -> np.ndarray:
    """Bounds log E[(ratio of probabilities)^k] of the signs of all coordinates, without sampling.

    Args:
      orders: k: integers from 0 to `LARGEST_MOMENT` [orders].
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.

    Example:
      >>> float(log_moment(2.0, 1.0).round(3))  # The Gaussian's is 1.
      0.662
    """
    k = np.asarray(orders, float)
    doubled = k * (k - 1) / noise_multiplier / noise_multiplier
    return doubled / 2 * share_of_gaussian(np.sqrt(doubled))


def share_of_gaussian(t: np.ndarray) -> np.ndarray:
    """Returns R(t): a sign's log moment over that of the Gaussian, t^2 / 2, at most."""
    return np.interp(t, _NODES, _SHARES, right=1.0)


_NODES = FIRST * RATIO ** np.arange(len(TABLE))
_SHARES = np.array(TABLE) / 1e5


def rdp(q: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """Computes the RDP of the signs of one Poisson-sampled Gaussian, in both directions.

    Args:
      q: Sampling probability, in [0, 1].
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      orders: Renyi orders > 1 [orders].

    Source: docs/sign_accounting.md.

    Example:
      >>> rdp(1.0, 1.0, (2.0,)).round(3)  # The Gaussian's is 1.
      array([0.662])
    """
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise_multiplier))
    return np.minimum(sampled_rdp(event, orders), _rdp_of_signs(q, noise_multiplier, orders))


@functools.lru_cache(maxsize=256)
def _rdp_of_signs(q: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    if q == 0:
        return np.zeros(len(orders))
    if noise_multiplier == 0:
        return np.full(len(orders), np.inf)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_moments = [
            max(direction(q, noise_multiplier, order) for direction in _DIRECTIONS)
            if order <= LARGEST_MOMENT
            else math.inf
            for order in orders
        ]
    found = np.array(log_moments) / (np.array(orders) - 1)
    return np.where(np.isnan(found), np.inf, found)


def _with_above_without(q: float, noise: float, order: float) -> float:
    """Bounds log E_P[(1 - q + q r)^order]: the mixture, with the example, over P without it.

    The logarithm of a moment is convex in its order: at others it is below the chord of integers.
    """
    below = math.floor(order)
    if order == below:
        return _integer_moment(q, noise, below)
    part = order - below
    low = _integer_moment(q, noise, below) if below > 1 else 0.0
    return (1 - part) * low + part * _integer_moment(q, noise, below + 1)


@functools.lru_cache(maxsize=4096)
def _integer_moment(q: float, noise: float, order: int) -> float:
    if q == 1:
        return float(log_moment(order, noise)) * (1 + _ROUNDING)
    j = np.arange(2, order + 1)
    logs = log_moment(j, noise)
    # The binomial weights of j = 0, ..., order add up to 1: sum of weights * (moment - 1).
    weights = special.gammaln(order + 1) - special.gammaln(j + 1) - special.gammaln(order - j + 1)
    weights = weights + j * math.log(q) + (order - j) * math.log1p(-q)
    excess = special.logsumexp(weights + logs + np.log(-np.expm1(-logs)))
    return float(np.logaddexp(0.0, excess)) * (1 + _ROUNDING)


def _without_above_with(q: float, noise: float, order: float) -> float:
    """Bounds log E_P[(1 - q + q r)^(1 - order)]: P over the mixture."""
    if q == 1:  # The pair the other way round, whose bound is the same.
        return _with_above_without(q, noise, order)
    n = order - 1
    spread = float(np.expm1(log_moment(2.0, noise) * (1 + _ROUNDING)))
    # (1 + y)^-n <= 1 - n y + c(z) y^2 for y >= -z, with c(z) = ((1 - z)^-n - 1 - n z) / z^2, and
    # y = q (r - 1), whose mean is 0. Below r0 the difference is at most a multiple of r^-s.
    most = _curvature(q, n)
    parts = _curvature(q * (1 - _RARE), n) / (1 - _RARE) ** 2
    s = _RARE_ORDERS
    difference = np.maximum(most - parts, 0) + 2 * _curvature_error(q, n)
    rare = difference * _largest_gap(_RARE, s) * np.exp(log_moment(s + 1, noise))
    apart = parts * spread + rare
    best = float(np.fmin(most * spread, np.where(np.isnan(apart), np.inf, apart).min()))
    return float(np.log1p(best)) * (1 + _ROUNDING)


def _curvature(z: np.ndarray | float, n: float) -> np.ndarray:
    """Returns (1 - z)^-n - 1 - n z, rounded up."""
    return np.expm1(-n * np.log1p(-z)) - n * z + _curvature_error(z, n)


def _curvature_error(z: np.ndarray | float, n: float) -> np.ndarray:
    return 4 * _CANCELLATION * np.expm1(-n * np.log1p(-z))


def _largest_gap(r0: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Returns the largest (1 - r)^2 (1 - r / r0) r^s for r in [0, r0]."""
    # The derivative of its logarithm is zero where (s + 3) r^2 - b r + s r0 = 0.
    b = s * (1 + r0) + 2 * r0 + 1
    r = 2 * s * r0 / (b + np.sqrt(b * b - 4 * (s + 3) * s * r0))
    return (1 - r) ** 2 * (1 - r / r0) * r**s * (1 + 1e-6)


_DIRECTIONS = (_with_above_without, _without_above_with)


class _Signs(mechanisms.PairedMechanism):
    """Prices signs by RDP; privacy losses are those of the Gaussian mechanism."""

    prices_samples = True
    best_at_integers = True

    def steps(self, event: dp_accounting.DpEvent) -> int:
        return 1

    def rdp(
        self, event: dp_accounting.DpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        return rdp(*_parameters(event), orders)

    def upper_pairs(
        self, event: dp_accounting.DpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...] | None:
        q, noise = _parameters(event)
        if q == 0:
            return ()
        return None if noise == 0 else (dominating_pairs.sampled_gaussian(q, noise),)

    def attained_pairs(
        self, event: dp_accounting.DpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...]:
        q, noise = _parameters(event)
        return () if q == 0 or noise == 0 else (_one_sign(q, noise),)


def _parameters(event: dp_accounting.DpEvent) -> tuple[float, float]:
    """Returns sampling probability and noise multiplier."""
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return event.sampling_probability, event.event.noise_multiplier
    return 1.0, event.noise_multiplier


def _one_sign(q: float, noise: float) -> dominating_pairs.Pair:
    """Returns the pair of an example that shifts one coordinate, which is 0 without it."""
    without = np.array([0.5, 0.5])
    shifted = special.ndtr(np.array([1.0, -1.0]) / noise)
    with_it = (1 - q) * without + q * shifted
    error = np.full(2, 1e-15)

    def direction(upper: np.ndarray, lower: np.ndarray) -> dominating_pairs.Atoms:
        keep = lower > 0
        infinite = float(upper[~keep].sum())
        return dominating_pairs.Atoms(upper[keep], lower[keep], error[keep], error[keep], infinite)

    added, removed = direction(without, with_it), direction(with_it, without)
    return dominating_pairs.Pair(add=added, remove=removed)


mechanisms.register(SignedGaussianDpEvent, _Signs())
