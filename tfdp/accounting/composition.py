"""Epsilon of composed releases, from above and from below, with certified errors.

**Grid.** The privacy losses of each release are moved to knots on a grid of losses. Upper bound:
the mass of each cell goes to the knots at its two ends so that both its probabilities, by the upper
and by the lower distribution, stay what they are. This replaces the hockey-stick divergence, which
is convex in e^epsilon, by its chords: never below it, and above it by the square of the interval.
Lower bound: the polygon with the same knots is lowered at each knot until it is below all
extensions of the neighbouring chords, which a convex function never crosses. Knots are multiples of
the interval; far from 0 they are sparse, a thousandth of the loss apart.

**Tilt.** The sum of the losses is not computed under the upper distribution, where the tail that
decides on delta is lost in rounding, but under the one whose density is larger by e^(theta loss),
up to a constant. With theta near the best Renyi order minus 1 the losses near epsilon are then the
likely ones. A delta of 1e-15 is known as precisely as one of 0.1.

**Errors** are added to delta, or subtracted: what falls out of the window of the discrete Fourier
transform (by Chernoff's inequality; it returns on the other side), roundings of the transforms and
of their powers (in the 2-norm), of the probabilities, and of sums.

References:
  Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots" (the upper polygon).
  Koskela, Jaelkoe, Honkela 2020, "Computing Tight Differential Privacy Guarantees Using FFT".
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.fft

from tfdp.accounting.dominating_pairs import Direction, Pair

_EPS = float(np.finfo(float).eps)
# The bounds differ by about so much, relatively.
_PRECISION = 5e-4
# Epsilons below are as good as zero: the grid is not made finer for them.
_LEAST_EPSILON = 3e-4
# Losses of more than so many intervals have knots 1 / _DENSE of themselves apart.
_DENSE = 1024
# Tilted probability, at most, that a sum of losses is outside of the window.
_OUTSIDE = 1e-14
_MOST_POINTS = 2**21
# Below, epsilon counts as infinite.
_LEAST_DELTA = 1e-250
# Above, delta counts as that at this epsilon.
_MOST_EPSILON = 1e4
# Intervals, for a lower bound, in the range of nine tenths of the losses of a release.
_CELLS_OF_SPREAD = 16
# Where the errors are a larger share of delta, smaller tilts are tried, too.
_LARGE_ERROR, _TILT_SHARES = 1e-3, (0.5, 0.2, 0.05)
# Share of delta for losses that are too large for the grid.
_LEFT_OUT = 1e-4
# Of delta, each at most the square of the one before.
_MOST_GUESSES = 7
# Above, e^-loss vanishes, and rounding up costs a thousandth at most.
_HUGE_LOSS = 300.0
# Relative, of sums of a few terms.
_ROUNDING = 1e-13
# Of log(tilted characteristic function^count): e^-60 is far below all roundings.
_NEGLIGIBLE = 60.0

Parts = Sequence[tuple[Pair, int]]


def epsilon(parts: Parts, delta: float) -> float:
    """Returns an upper bound on the smallest epsilon of a composition at `delta`.

    Args:
      parts: The dominating pairs of the releases, and how often each is made.
      delta: In (0, 1).

    Example:
      >>> from tfdp.accounting import dominating_pairs
      >>> round(epsilon([(dominating_pairs.sampled_gaussian(0.01, 1.0), 1000)], 1e-5), 4)
      1.8283
    """
    if delta < _LEAST_DELTA and parts:
        return math.inf
    with _overflows_allowed():
        return max((_epsilon(d, delta) for d in _directions(parts, delta)), default=0.0)


def least_epsilon(parts: Parts, delta: float) -> float:
    """Returns a lower bound on the smallest epsilon of a composition at `delta`: see `epsilon`.

    Example:
      >>> from tfdp.accounting import dominating_pairs
      >>> round(least_epsilon([(dominating_pairs.sampled_gaussian(0.01, 1.0), 1000)], 1e-5), 4)
      1.8281
    """
    delta = max(delta, _LEAST_DELTA)
    with _overflows_allowed():
        return max((_least_epsilon(d, delta) for d in _directions(parts, delta)), default=0.0)


def _epsilon(directions: "_Directions", delta: float) -> float:
    bound, near = math.inf, None
    for _ in range(_MOST_GUESSES):
        whole = _Sum(directions, False, delta, near)
        bound = min(bound, whole.epsilon(delta))
        # The Renyi bound that the tilt was chosen by is much too large if few large losses decide.
        if bound >= 0.9 * whole.near or bound == 0:
            break
        near = bound
    if whole.error_share > _LARGE_ERROR:
        for share in _TILT_SHARES:
            near = min(bound, whole.near)
            bound = min(bound, _Sum(directions, False, delta, near, share).epsilon(delta))
    return bound


def _least_epsilon(directions: "_Directions", delta: float) -> float:
    near = min(_epsilon(directions, delta), _MOST_EPSILON)
    whole = _Sum(directions, True, delta, near)
    bound = whole.epsilon(delta)
    if whole.error_share > _LARGE_ERROR:
        for share in _TILT_SHARES:
            bound = max(bound, _Sum(directions, True, delta, near, share).epsilon(delta))
    return bound


def delta(parts: Parts, epsilon: float) -> float:
    """Returns an upper bound on the smallest delta of a composition at `epsilon`: see `epsilon`."""
    epsilon = min(epsilon, _MOST_EPSILON)
    with _overflows_allowed():
        return max((_delta(d, epsilon) for d in _directions(parts)), default=0.0)


def _delta(directions: "_Directions", epsilon: float) -> float:
    guess, bound = 0.1, 1.0
    for _ in range(_MOST_GUESSES):
        bound = min(bound, _Sum(directions, False, guess, epsilon).delta(epsilon))
        if bound > guess / 10:
            break
        guess = max(bound, guess**2)
    return bound


def _overflows_allowed() -> np.errstate:
    """Far from epsilon exponentials overflow or vanish; the code says what counts then."""
    return np.errstate(all="ignore")


_Directions = list[tuple[Direction, int]]


def _directions(parts: Parts, delta: float = 0.0) -> list[_Directions]:
    """The two directions of a composition; none if nothing is released, or epsilon is 0 anyway."""
    if not parts or delta >= 1:
        return []
    return [[(pair.add, n) for pair, n in parts], [(pair.remove, n) for pair, n in parts]]


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Privacy losses at knots.

    Attributes:
      losses: Increasing.
      mass: Probabilities by the upper distribution.
      infinite: Probability of an infinite loss.
    """

    losses: np.ndarray
    mass: np.ndarray
    infinite: float

    def log_moments(self, tilts: np.ndarray) -> np.ndarray:
        """Logs of the means of e^(tilt loss)."""
        used = self.mass > 0
        if not used.any():
            return np.full(len(tilts), -np.inf)
        exponents = np.log(self.mass[used]) + np.multiply.outer(tilts, self.losses[used])
        peak = exponents.max(axis=1, keepdims=True)
        result = np.log(np.exp(exponents - peak).sum(axis=1)) + peak[:, 0]
        return np.where(np.isnan(result), np.inf, result)


_NOTHING = Discrete(np.zeros(1), np.ones(1), 0.0)  # As if nothing was released.


def discretize(direction: Direction, losses: np.ndarray, below: bool = False) -> Discrete:
    """Returns a distribution of losses on knots that dominates `direction`, or is dominated by it.

    Args:
      direction: A direction of a dominating pair.
      losses: The knots, increasing; the first and the last beyond the range of losses.
      below: Whether the result is dominated.
    """
    masses = direction.masses(losses)
    sign = -1.0 if below else 1.0
    upper = np.maximum(masses.upper + sign * masses.upper_error, 0.0)
    inner, low, width = upper[1:-1], losses[:-1], np.diff(losses)
    # What goes to the upper knot, so that the lower distribution keeps its mass, too.
    scale = np.exp(np.minimum(low, _HUGE_LOSS))
    share = -np.expm1(-width)
    moved = (masses.upper[1:-1] - masses.lower[1:-1] * scale) / share
    error = masses.upper_error[1:-1] + scale * masses.lower_error[1:-1]
    moved += sign * (error + 4 * _EPS * masses.upper[1:-1]) / share
    moved = np.where(low > _HUGE_LOSS, 0.0 if below else inner, np.clip(moved, 0.0, inner))
    mass = np.zeros(len(losses))
    mass[:-1] += inner - moved
    mass[1:] += moved
    if below:
        return _lowered(Discrete(losses, mass, 0.0))
    mass[0] += upper[0]
    return Discrete(losses, mass, float(upper[-1]))


def _lowered(above: Discrete) -> Discrete:
    """Lowers the polygon through a convex function at the knots, to a polygon below the function.

    Over a cell the convex function is above the chords of both neighbouring cells, extended. So it
    is below its own chord by at most a triangle. Any line above the triangle says how far to lower
    the polygon at both ends of the cell. It is level where both knots have the same mass, and
    an edge of the triangle where one has more than twice the mass of the other. Where the result is
    not convex its lower hull is.
    """
    losses, mass = above.losses, above.mass
    growth = np.expm1(np.diff(losses))
    # The edges of the triangle rise to these heights over the whole cell.
    rise, fall = growth * mass[:-1], growth / (1 + growth) * mass[1:]
    top = np.maximum(rise + fall, 1e-300)
    slope = np.clip(fall - rise, -fall, rise)
    left, right = fall / top * (rise - slope), rise / top * (fall + slope)
    lowered = np.maximum(np.append(left, 0.0), np.append(0.0, right))
    slopes = np.diff(lowered) / growth
    # Slopes in e^epsilon, times e^loss of the knot, so that their changes are probabilities.
    changed = mass + np.append(0.0, slopes * (1 + growth)) - np.append(slopes, 0.0)
    # Where it would get below zero, or below the line that it begins with, it ends a knot before.
    nearer = np.exp(losses) * np.cumsum(mass * np.exp(-losses))
    further = np.exp(losses) * _sums_from(mass * np.exp(-losses))[1:]
    over_line = np.append(0.0, np.cumsum(growth * nearer[:-1]))
    over_zero = _sums_from(growth * further[:-1])
    start = max(
        np.flatnonzero(lowered >= over_line * (1 - _ROUNDING))[-1],
        np.flatnonzero(np.append(True, lowered > over_line * (1 + _ROUNDING)))[-1],
    )
    end = min(
        np.flatnonzero(lowered >= over_zero * (1 - _ROUNDING))[0],
        np.flatnonzero(np.append(lowered > over_zero * (1 + _ROUNDING), True))[0] - 1,
    )
    if end - start < 3:
        return _NOTHING
    first = over_line[start + 1] - lowered[start + 1]
    last = over_zero[end - 1] - lowered[end - 1]
    changed[start] = first / growth[start]
    changed[start + 1] = nearer[start + 1] - slopes[start + 1] - first * (1 + 1 / growth[start])
    changed[end - 1] = further[end - 1] + mass[end - 1] + slopes[end - 2] * (1 + growth[end - 2])
    changed[end - 1] -= last / growth[end - 1]
    changed[end] = last * (1 + 1 / growth[end - 1])
    losses, mass = losses[start : end + 1], changed[start : end + 1]
    while (mass < 0).any():
        kept, dropped = np.flatnonzero(mass >= 0), np.flatnonzero(mass < 0)
        place = np.searchsorted(kept, dropped)
        if place.min() == 0 or place.max() == len(kept):
            return _NOTHING
        low, high = kept[place - 1], kept[place]
        share = np.expm1(losses[low] - losses[dropped]) / np.expm1(losses[low] - losses[high])
        merged = mass[kept]
        np.add.at(merged, place - 1, mass[dropped] * (1 - share))
        np.add.at(merged, place, mass[dropped] * share)
        losses, mass = losses[kept], merged
    return Discrete(losses, mass, 0.0)


def _knots(low: float, high: float) -> np.ndarray:
    """Integers, sparse far from 0, with three below `low` and three above `high`."""
    furthest = max(-low, high)
    pieces = [np.arange(_DENSE)]
    while pieces[-1][-1] <= 4 * furthest + 4 * _DENSE:
        step = 2 ** (len(pieces) - 1)
        pieces.append(step * np.arange(_DENSE, 2 * _DENSE))
    positive = np.concatenate(pieces)
    knots = np.concatenate([-positive[:0:-1], positive])
    first, last = np.searchsorted(knots, [low, high])
    return knots[max(first - 3, 0) : last + 3]


# Scale-free knots, to choose theta and the interval.
_ROUGH = np.geomspace(1e-12, 1e4, 900)
_ROUGH = np.concatenate([-_ROUGH[::-1], [0.0], _ROUGH])
_TILTS = np.geomspace(1e-3, 1e8, 110)


class _Sum:
    """The sum of the losses of all releases, in one direction.

    Args:
      directions: The releases, and how often each is made.
      below: Whether bounds are lower ones.
      delta: About the delta at which the sum is to be precise.
      epsilon: The epsilon, if it is known.
      tilt_share: Share of the best theta, that of the Renyi bound, to use.
    """

    def __init__(
        self,
        directions: _Directions,
        below: bool,
        delta: float,
        epsilon: float | None = None,
        tilt_share: float = 1.0,
    ):
        self._sign, self.error_share = -1.0 if below else 1.0, 1.0
        counts = np.array([n for _, n in directions], dtype=float)
        # Losses beyond count as infinite, or as none.
        tail = _LEFT_OUT * delta / float(counts.sum())
        theta, self.near, spread = _tilt(directions, tail, delta, epsilon)
        theta *= tilt_share
        # Moving losses by x on average moves epsilon by counts * (theta + 1) * x^2 / 2.
        precision = _PRECISION * max(self.near, _LEAST_EPSILON) / (counts.sum() * (theta + 1))
        interval = math.sqrt(precision)
        if (
            below
        ):  # Where the grid is coarse for the mass of the losses, a lower polygon is far off.
            interval = min(interval / 2, (spread or math.inf) / _CELLS_OF_SPREAD)
        for _ in range(2):
            pieces = [_grid(direction, interval, tail, below) for direction, _ in directions]
            low, high = _window(pieces, counts, theta)
            if not high - low > interval * (_MOST_POINTS - 4):
                break
            interval = 1.01 * (high - low) / (_MOST_POINTS - 4)
        size = scipy.fft.next_fast_len(math.ceil((high - low) / interval) + 4, real=True)
        start = math.floor(low / interval) - 1
        log_moments = np.array([p.log_moments(np.array([theta]))[0] for p in pieces])
        tilted = _tilted_sum(pieces, counts, interval, theta, log_moments, size)
        tilted = np.maximum(np.roll(tilted, -(start % size)), 0.0)
        # Relative to the middle of the window, so that little overflows.
        self._middle = interval * (start + size // 2)
        self._knots = interval * (start + np.arange(size)) - self._middle
        self._theta, self._log_scale = theta, float(counts @ log_moments) - theta * self._middle
        weighted = tilted * np.exp(-theta * self._knots)
        self._upper = _sums_from(weighted)
        self._lower = _sums_from(weighted * np.exp(-self._knots))
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
        largest = max(float(np.abs(theta * p.losses).max()) for p in pieces)
        largest += float(np.abs(log_moments).max())
        self._relative = _EPS * (float(counts.sum()) * (1000 + largest) + 100)
        self._loss_error = math.fsum(n * d.loss_error for d, n in directions)

    def epsilon(self, delta: float) -> float:
        """A bound on the smallest epsilon at `delta`."""
        left = delta - max(self._sign, 0.0) * self._infinite
        if left <= 0:
            return math.inf
        log_target = math.log(left) - self._sign * self._relative - self._log_scale
        target = math.exp(min(log_target, 700.0))
        every = np.arange(len(self._knots))
        deltas = self._deltas(self._knots, every)
        # An overflow, to the far left, is as good as no knowledge.
        large = ~(deltas <= target) if self._sign > 0 else deltas > target
        if not large.any():
            return self._shifted(self._knots[0]) if self._sign > 0 else 0.0
        # Epsilon is between the last knot where delta is too large and the next one.
        last = int(np.flatnonzero(large)[-1])
        self.error_share = self._error(self._knots[last], last) / target
        if last == len(large) - 1:
            return math.inf if self._sign > 0 else self._shifted(self._knots[last])
        error = self._error(self._knots[last], last)
        excess = self._upper[last + 1] + self._sign * error - target
        inside = math.log(excess / self._lower[last + 1]) if excess > 0 else -math.inf
        return self._shifted(float(np.clip(inside, self._knots[last], self._knots[last + 1])))

    def delta(self, epsilon: float) -> float:
        """An upper bound on the smallest delta at `epsilon`."""
        place = np.array(epsilon - 1e-13 * epsilon - self._loss_error - self._middle)
        deltas = self._deltas(place, np.searchsorted(self._knots, place))
        log_finite = self._log_scale + self._relative + float(np.log(deltas))
        return min(1.0, math.exp(min(log_finite, 0.0)) + self._infinite)

    def _deltas(self, places: np.ndarray, above: np.ndarray) -> np.ndarray:
        """Bounds on delta at `places`, over e^log_scale, given the indices of the knots above."""
        upper, paid = self._upper[above], np.exp(places) * self._lower[above]
        # Nothing is known of an overflow times zero.
        paid = np.where(np.isnan(paid), 0.0 if self._sign > 0 else upper, paid)
        return np.maximum(upper - paid, 0.0) + self._sign * self._error(places, above)

    def _error(self, places: Any, above: Any) -> Any:
        # Both sums are rounded, and the one that is subtracted is the smaller.
        sums = 2 * len(self._knots) * _EPS * self._upper[above]
        return self._outside * np.exp(-self._theta * places) + sums

    def _shifted(self, place: float) -> float:
        """Epsilon at `place`, the errors of the losses included."""
        epsilon = float(place + self._middle)
        return max(0.0, epsilon + self._sign * (1e-13 * abs(epsilon) + self._loss_error))


def _grid(direction: Direction, interval: float, tail: float, below: bool) -> Discrete:
    low, high = direction.range(tail)
    if below:  # What is left out leaves less to tell.
        low, high = max(low, -_HUGE_LOSS), min(high, _HUGE_LOSS)
    result = discretize(direction, interval * _knots(low / interval, high / interval), below)
    return result if result.mass.any() else Discrete(np.zeros(1), np.ones(1), result.infinite)


def _tilt(
    directions: _Directions, tail: float, delta: float, epsilon: float | None
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
        values = log_moments - _TILTS * epsilon
    best = int(np.argmin(np.where(np.isnan(values), np.inf, values)))
    return float(_TILTS[best]), float(values[best]) if epsilon is None else epsilon, spread


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
    best = math.sqrt(-2 * unlikely / max(variance, 1e-12 * largest**2))  # Of a Gaussian.
    steps = np.geomspace(min(best, 1 / largest) / 8, 8 * best, 24)
    tilts = np.concatenate([theta + steps, theta - steps])
    moments = sum(n * p.log_moments(tilts) for p, n in zip(pieces, counts, strict=True)) - at_theta
    above, beneath = np.split((moments - unlikely) / np.concatenate([steps, steps]), 2)
    return -float(beneath.min()), float(above.min())


def _tilted_sum(
    pieces: list[Discrete],
    counts: np.ndarray,
    interval: float,
    theta: float,
    log_moments: np.ndarray,
    size: int,
) -> np.ndarray:
    """Probabilities of the tilted sum of all losses, by multiples of the interval modulo `size`."""
    log_transform = np.zeros(size // 2 + 1, dtype=complex)
    for piece, count, log_moment in zip(pieces, counts, log_moments, strict=True):
        tilted = np.exp(np.log(piece.mass) + theta * piece.losses - log_moment)
        places = np.rint(piece.losses / interval).astype(np.int64) % size
        transform = scipy.fft.rfft(np.bincount(places, tilted, minlength=size))
        log_transform += count * np.log(transform)
    large = log_transform.real > -_NEGLIGIBLE
    result = np.zeros(size // 2 + 1, dtype=complex)
    result[large] = np.exp(log_transform[large])
    return scipy.fft.irfft(result, size)


def _fft_error(count: float, size: int) -> float:
    """The error of `_tilted_sum`, at most, in the 2-norm.

    A transform is off by at most 8 eps log2(size) of its 2-norm (Higham 2002, "Accuracy and
    Stability of Numerical Algorithms", Theorem 24.2, with a margin), which is at most that of a
    probability vector, 1. In a product of `count` factors of absolute value at most 1 the errors
    add up; so do those of the logarithms, 10 eps each.
    """
    each = _EPS * (8 * math.log2(size) + 10)
    return each * (count + 1) * math.exp(min(count * each * math.sqrt(size), 50.0)) + 1e-20


def _sums_from(values: np.ndarray) -> np.ndarray:
    """The sums of the values from each index on, and 0 at the end [values + 1]."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
