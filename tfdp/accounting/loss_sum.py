"""The sum of the privacy losses of all releases, with certified errors.

**Tilt.** The sum of the losses is not computed under the upper distribution, where the tail that
decides on delta is lost in rounding, but under the one whose density is larger by e^(theta loss),
up to a constant. With theta near the best Renyi order minus 1 the losses near epsilon are then the
likely ones. A delta of 1e-15 is known as precisely as one of 0.1.

**Errors** are added to delta, or subtracted: what falls out of the window of the discrete Fourier
transform (by Chernoff's inequality; it returns on the other side), roundings of the transforms and
of their powers (in the 2-norm), of the probabilities, and of sums.

References:
  Koskela, Jaelkoe, Honkela 2020, "Computing Tight Differential Privacy Guarantees Using FFT".
"""

import math
from typing import Any

import numpy as np
import scipy.fft

from tfdp.accounting.dominating_pairs import Direction
from tfdp.accounting.loss_grid import Discrete, discretize, grid, sums_from

_EPS = float(np.finfo(float).eps)
# Approximate relative difference between the bounds.
_PRECISION = 5e-4
# Smaller epsilons are as good as zero: the grid is not made finer for them.
_LEAST_EPSILON = 3e-4
# Largest tilted probability that a sum of losses is outside of the window.
_OUTSIDE = 1e-14
_MOST_POINTS = 2**21
# Intervals, for a lower bound, in the range of nine tenths of the losses of a release.
_CELLS_OF_SPREAD = 16
# Share of delta for losses that are too large for the grid.
_LEFT_OUT = 1e-4
# Share of delta that needs not be known.
_UNLIKELY = 1e-5
# The tilted characteristic function^count is neglected below e^-60, far below all roundings.
_NEGLIGIBLE = 60.0
# Stride between the tilts of Chernoff's inequality that are tried first.
_STRIDE = 4

Directions = list[tuple[Direction, int]]

# Scale-free knots, to choose theta and the interval.
_ROUGH = np.geomspace(1e-12, 1e4, 900)
_ROUGH = np.concatenate([-_ROUGH[::-1], [0.0], _ROUGH])
_TILTS = np.geomspace(1e-3, 1e8, 110)


class LossSum:
    """The sum of the losses of all releases, in one direction.

    Args:
      directions: The releases, and how often each is made.
      below: Whether bounds are lower ones.
      delta: About the delta at which the sum is to be precise.
      epsilon: The epsilon, if it is known.
      typical: Whether the sum is to be precise where it is likely, rather than at this epsilon.
    """

    def __init__(
        self,
        directions: Directions,
        below: bool,
        delta: float,
        epsilon: float | None = None,
        typical: bool = False,
    ):
        self._sign, self.error_share = -1.0 if below else 1.0, 1.0
        counts = np.array([n for _, n in directions], dtype=float)
        # Losses beyond count as infinite, or as none.
        tail = _LEFT_OUT * delta / float(counts.sum())
        theta, self.near, spread = _tilt(directions, tail, delta, epsilon)
        # Moving losses by x on average moves epsilon by counts * (theta + 1) * x^2 / 2.
        precision = _PRECISION * max(self.near, _LEAST_EPSILON) / (counts.sum() * (theta + 1))
        interval = math.sqrt(precision)
        if typical:
            theta = _tilt(directions, tail, delta, 0.0)[0]
        if below:
            # A lower polygon is far off where the interval is of the size of most losses. Where all
            # are much smaller, their mean decides.
            interval = min(interval / 2, (spread or math.inf) / _CELLS_OF_SPREAD)
        for _ in range(2):
            # No small tilt tells pieces apart.
            pieces = [grid(d, interval, tail, below, max(theta, 1.0)) for d, _ in directions]
            low, high = _window(pieces, counts, theta)
            if not high - low > interval * (_MOST_POINTS - 4):
                break
            interval = 1.01 * (high - low) / (_MOST_POINTS - 4)
        offset = float(sum(n * p.offset for p, n in zip(pieces, counts, strict=True)))
        low, high = low - offset, high - offset
        size = scipy.fft.next_fast_len(math.ceil((high - low) / interval) + 4, real=True)
        start = math.floor(low / interval) - 1
        log_moments = _log_moments(pieces, theta)
        tilted = _tilted_sum(pieces, counts, interval, theta, log_moments, size)
        tilted = np.maximum(np.roll(tilted, -(start % size)), 0.0)
        # Relative to the middle of the window, so that little overflows.
        self._middle = interval * (start + size // 2) + offset
        self._knots = interval * (np.arange(size) - size // 2)
        self._theta, self._log_scale = theta, float(counts @ log_moments) - theta * self._middle
        weighted = tilted * np.exp(-theta * self._knots)
        self._upper = sums_from(weighted)
        self._lower = sums_from(weighted * np.exp(-self._knots))
        self._infinite = -math.expm1(
            math.fsum(
                n * (math.log1p(-p.infinite) if p.infinite < 1 else -math.inf)
                for p, n in zip(pieces, counts, strict=True)
            )
        )
        # A loss x above epsilon adds e^(-theta x) (1 - e^-x) to delta: at most 1 / (1 + theta), and
        # over all knots this in the 2-norm, with 1 - e^-x <= min(x, 1).
        ratio, rest = math.exp(-2 * theta * interval), -math.expm1(-2 * theta * interval)
        norm = min(1.0, interval * math.sqrt(1 + ratio) / rest) / math.sqrt(rest)
        self._outside = _OUTSIDE / (1 + theta) + norm * _fft_error(counts.sum(), size)
        self.largest_loss = max(float(np.abs(p.losses).max()) for p in pieces)
        largest = max(theta, 1.0) * self.largest_loss
        largest += float(np.abs(log_moments).max())
        self._relative = _EPS * (float(counts.sum()) * (1000 + largest) + 100)
        self._log_totals = [float(counts @ _log_moments(pieces, order)) for order in (0.0, -1.0)]
        self._loss_error = math.fsum(n * d.loss_error for d, n in directions)
        self._loss_error += 4 * _EPS * float(counts @ np.abs([p.offset for p in pieces]))

    def epsilon(self, delta: float) -> float:
        """Returns a bound on the smallest epsilon at `delta`."""
        left = delta - max(self._sign, 0.0) * self._infinite
        if left <= 0:
            return math.inf
        log_target = math.log(left) - self._sign * self._relative - self._log_scale
        target = math.exp(min(log_target, 700.0))
        # Epsilon is between the last knot where delta is too large and the next one.
        last = self._last_above(target)
        if last < 0:
            return self._shifted(self._knots[0]) if self._sign > 0 else 0.0
        self.error_share = self._error(self._knots[last], last) / target
        if last == len(self._knots) - 1:
            return math.inf if self._sign > 0 else self._shifted(self._knots[last])
        error = self._error(self._knots[last], last)
        excess = self._upper[last + 1] + self._sign * error - target
        lower = self._lower[last + 1]
        inside = float(np.log(excess) - np.log(lower)) if excess > 0 else -math.inf
        if math.isinf(lower) and self._sign > 0 and excess > 0:
            inside = math.inf  # Nothing is known of an overflow.
        return self._shifted(float(np.clip(inside, self._knots[last], self._knots[last + 1])))

    def _last_above(self, target: float) -> int:
        """Returns the last knot where delta, over e^log_scale, is too large; -1 if it is nowhere.

        An overflow, to the far left, is as good as no knowledge.
        """
        if self._sign < 0:
            every = np.arange(len(self._knots))
            large = np.flatnonzero(self._deltas(self._knots, every) > target)
            return int(large[-1]) if len(large) else -1
        low, high = -1, len(self._knots)
        while high - low > 1:
            middle = (low + high) // 2
            if self._deltas(self._knots[middle], middle) <= target:
                high = middle
            else:
                low = middle
        return low

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on the smallest delta at `epsilon`."""
        place = np.array(epsilon - 1e-13 * epsilon - self._loss_error - self._middle)
        above = np.searchsorted(self._knots, place)
        deltas = self._deltas(place, above)
        self.error_share = float(self._error(place, above) / deltas)
        log_finite = self._log_scale + self._relative + float(np.log(deltas))
        return min(1.0, math.exp(min(log_finite, 0.0)) + self._infinite)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Bounds on delta at any epsilons, also below 0, but for the errors of the losses."""
        first = self._knots[0]
        places = np.maximum(epsilons - self._middle, first)
        known = self._deltas(places, np.searchsorted(self._knots, places))
        # No bound is made smaller by an underflow.
        known = np.log(np.maximum(known, 1e-300 if self._sign > 0 else 0.0))
        known = np.exp(known + self._log_scale + self._sign * self._relative)
        known = np.where(np.isnan(known), max(self._sign, 0.0), np.clip(known, 0.0, 1.0))
        if self._sign < 0:
            upper, lower = self._log_totals
            paid = np.exp(epsilons + lower + self._relative)
            return np.maximum(known, math.exp(upper - self._relative) - paid)
        # Convex in e^epsilon: below the chord from 1 at e^epsilon = 0 to the first knot.
        known += -np.expm1(np.minimum(epsilons - self._middle - first, 0.0)) * (1 - known)
        return known + self._infinite

    def upper_deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Returns upper bounds on delta at several epsilons >= 0, as `delta` does at one."""
        return np.minimum(self.deltas(epsilons - 1e-13 * epsilons - self._loss_error), 1.0)

    def _deltas(self, places: Any, above: Any) -> np.ndarray:
        """Bounds on delta at `places`, over e^log_scale, given the indices of the knots above."""
        upper, paid = self._upper[above], np.exp(places) * self._lower[above]
        # Nothing is known of an overflow, nor of one times zero.
        paid = np.where(np.isfinite(paid), paid, 0.0 if self._sign > 0 else upper)
        return np.maximum(upper - paid, 0.0) + self._sign * self._error(places, above)

    def _error(self, places: Any, above: Any) -> Any:
        # Both sums are rounded, and the one that is subtracted is the smaller.
        sums = 2 * len(self._knots) * _EPS * self._upper[above]
        return self._outside * np.exp(-self._theta * places) + sums

    def _shifted(self, place: float) -> float:
        """Epsilon at `place`, the errors of the losses included."""
        epsilon = float(place + self._middle)
        return max(0.0, epsilon + self._sign * (1e-13 * abs(epsilon) + self._loss_error))


def _tilt(
    directions: Directions, tail: float, delta: float, epsilon: float | None
) -> tuple[float, float, float]:
    """Nearly the best theta, about the epsilon that it leads to, and the least spread of losses."""
    log_moments, spread = -np.log1p(_TILTS), math.inf
    for direction, count in directions:
        low, high = direction.range(tail)
        first, last = np.searchsorted(_ROUGH, [low, high])
        rough = discretize(direction, _ROUGH[max(first - 2, 0) : last + 2])
        log_moments += count * rough.log_moments(_TILTS)
        cumulated = np.cumsum(rough.mass)
        first, last = np.searchsorted(cumulated, cumulated[-1] * np.array([0.05, 0.95]))
        spread = min(spread, float(rough.losses[last] - rough.losses[first]))
    if epsilon is None:
        # Canonne, Kamath, Steinke 2020, Proposition 12, at order 1 + tilt.
        values = (log_moments - math.log(delta)) / _TILTS + np.log(_TILTS / (1 + _TILTS))
    else:
        # The least theta, where all are unlikely enough: a larger one is less precise elsewhere.
        values = np.maximum(log_moments - _TILTS * epsilon, math.log(_UNLIKELY * delta))
    best = int(np.argmin(np.where(np.isnan(values), np.inf, values)))
    return float(_TILTS[best]), float(values[best]) if epsilon is None else epsilon, spread


def _log_moments(pieces: list[Discrete], tilt: float) -> np.ndarray:
    """Logs of the means of e^(tilt loss), for each piece."""
    return np.array([piece.log_moments(np.array([tilt]))[0] for piece in pieces])


def _window(pieces: list[Discrete], counts: np.ndarray, theta: float) -> tuple[float, float]:
    """Bounds that the tilted sum of losses exceeds with probability at most `_OUTSIDE`."""
    at_theta, variance = 0.0, 0.0
    for piece, count in zip(pieces, counts, strict=True):
        exponents = np.log(piece.mass) + theta * piece.losses
        weights = np.exp(exponents - exponents.max())
        weights /= weights.sum()
        mean = float(weights @ piece.losses)
        variance += count * float(weights @ (piece.losses - mean) ** 2)
        at_theta += count * float(piece.log_moments(np.array([theta]))[0])
    unlikely = math.log(_OUTSIDE / 2)
    largest = max(float(np.abs(p.losses).max()) for p in pieces) + _EPS
    best = math.sqrt(-2 * unlikely / max(variance, 1e-12 * largest**2))  # The best for a Gaussian.
    steps = np.geomspace(min(best, 1 / largest) / 8, 8 * best, 24)

    def least(sign: float) -> float:
        """Returns the least bound in one direction; they fall with the step, and then rise."""

        def bounds(some: np.ndarray) -> np.ndarray:
            tilts = theta + sign * some
            moments = sum(n * p.log_moments(tilts) for p, n in zip(pieces, counts, strict=True))
            return np.asarray((moments - at_theta - unlikely) / some)

        near = _STRIDE * int(np.argmin(bounds(steps[::_STRIDE])))
        return float(bounds(steps[max(near - _STRIDE + 1, 0) : near + _STRIDE]).min())

    return -least(-1.0), least(1.0)


def _tilted_sum(
    pieces: list[Discrete],
    counts: np.ndarray,
    interval: float,
    theta: float,
    log_moments: np.ndarray,
    size: int,
) -> np.ndarray:
    """Probabilities of the tilted sum of all losses, by multiples of the interval modulo `size`."""
    # All factors are at most 1: what one of them makes negligible needs no others.
    large = np.arange(size // 2 + 1)
    product, log_size = np.ones(len(large), dtype=complex), np.zeros(len(large))
    for piece, count, log_moment in zip(pieces, counts, log_moments, strict=True):
        tilted = np.exp(np.log(piece.mass) + theta * piece.losses - log_moment)
        places = np.rint((piece.losses - piece.offset) / interval).astype(np.int64) % size
        transform = scipy.fft.rfft(np.bincount(places, tilted, minlength=size))[large]
        log_size += count * np.log(transform.real**2 + transform.imag**2) / 2
        still = log_size > -_NEGLIGIBLE
        large, log_size = large[still], log_size[still]
        product = product[still] * _power(transform[still], int(count))
    result = np.zeros(size // 2 + 1, dtype=complex)
    result[large] = product
    return scipy.fft.irfft(result, size)


def _power(numbers: np.ndarray, exponent: int) -> np.ndarray:
    """Returns numbers to a power >= 1, by squaring."""
    result = None
    while True:
        if exponent % 2:
            result = numbers if result is None else result * numbers
        exponent //= 2
        if not exponent:
            return numbers if result is None else result
        numbers = numbers * numbers


def _fft_error(count: float, size: int) -> float:
    """Returns the error of `_tilted_sum`, at most, in the 2-norm.

    A transform is off by at most 8 eps log2(size) of its 2-norm (Higham 2002, "Accuracy and
    Stability of Numerical Algorithms", Theorem 24.2, with a margin), which is at most that of a
    probability vector, 1. In a product of `count` factors of absolute value at most 1 the errors
    add up; so do those of the multiplications, 2 eps each (Higham, Lemma 3.5; 10 are charged).
    """
    each = _EPS * (8 * math.log2(size) + 10)
    return each * (count + 1) * math.exp(min(count * each * math.sqrt(size), 50.0)) + 1e-20
