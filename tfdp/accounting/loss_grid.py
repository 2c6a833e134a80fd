"""Privacy losses at knots: grids of losses that dominate those of a release, or are dominated.

Upper bound: the mass of each cell goes to the knots at its two ends so that both its probabilities,
by the upper and by the lower distribution, stay what they are. This replaces the hockey-stick
divergence, which is convex in e^epsilon, by its chords: never below it, and above it by the square
of the interval. Lower bound: the polygon with the same knots is lowered at each knot until it is
below all extensions of the neighbouring chords, which a convex function never crosses. Knots are
multiples of the interval; far from 0 they are sparse, a thousandth of the loss apart.

References:
  Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots" (the upper polygon).
"""

import dataclasses

import numpy as np

from tfdp.accounting.dominating_pairs import Direction

_EPS = float(np.finfo(float).eps)
# Losses of more than so many intervals have knots 1 / _DENSE of themselves apart.
_DENSE = 1024
# Above, e^-loss vanishes, and rounding up costs a thousandth at most.
HUGE_LOSS = 300.0
# Relative, of sums of a few terms.
_ROUNDING = 1e-13


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


def grid(direction: Direction, interval: float, tail: float, below: bool) -> Discrete:
    """Returns the losses of `direction` on multiples of `interval`; see `discretize`.

    Args:
      direction: A direction of a dominating pair.
      interval: Of the grid.
      tail: Probability of losses that are too large for the grid, and so count as infinite.
      below: Whether the result is dominated.
    """
    low, high = direction.range(tail)
    if below:  # What is left out leaves less to tell.
        low, high = max(low, -HUGE_LOSS), min(high, HUGE_LOSS)
    result = discretize(direction, interval * _knots(low / interval, high / interval), below)
    return result if result.mass.any() else Discrete(np.zeros(1), np.ones(1), result.infinite)


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
    scale = np.exp(np.minimum(low, HUGE_LOSS))
    share = -np.expm1(-width)
    moved = (masses.upper[1:-1] - masses.lower[1:-1] * scale) / share
    error = masses.upper_error[1:-1] + scale * masses.lower_error[1:-1]
    moved += sign * (error + 4 * _EPS * masses.upper[1:-1]) / share
    moved = np.where(low > HUGE_LOSS, 0.0 if below else inner, np.clip(moved, 0.0, inner))
    mass = np.zeros(len(losses))
    mass[:-1] += inner - moved
    mass[1:] += moved
    if below:
        above = Discrete(losses, mass, 0.0)
        return _lowered(above, _NOTHING if direction.complete else _of_totals(above))
    mass[0] += upper[0]
    return Discrete(losses, mass, float(upper[-1]))


def _of_totals(above: Discrete) -> Discrete:
    """A loss at a knot, so that nobody can tell more than from the two total probabilities."""
    upper, lower = above.mass.sum(), above.mass @ np.exp(-above.losses)
    place = np.searchsorted(above.losses, np.log(upper / lower) - _ROUNDING) - 1
    if not upper > 0 or place < 0:
        return Discrete(above.losses[:1], np.zeros(1), 0.0)
    return Discrete(above.losses[place : place + 1], np.array([upper]), 0.0)


def _lowered(above: Discrete, coarse: Discrete) -> Discrete:
    """Lowers the polygon through a convex function at the knots, to a polygon below the function.

    Over a cell the convex function is above the chords of both neighbouring cells, extended. So it
    is below its own chord by at most a triangle. Any line above the triangle says how far to lower
    the polygon at both ends of the cell. It is level where both knots have the same mass, and
    an edge of the triangle where one has more than twice the mass of the other. Where the result is
    not convex its lower hull is. Where there are too few knots for any of this, it is `coarse`.
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
    further = np.exp(losses) * sums_from(mass * np.exp(-losses))[1:]
    over_line = np.append(0.0, np.cumsum(growth * nearer[:-1]))
    over_zero = sums_from(growth * further[:-1])
    start = max(
        np.flatnonzero(lowered >= over_line * (1 - _ROUNDING))[-1],
        np.flatnonzero(np.append(True, lowered > over_line * (1 + _ROUNDING)))[-1],
    )
    end = min(
        np.flatnonzero(lowered >= over_zero * (1 - _ROUNDING))[0],
        np.flatnonzero(np.append(lowered > over_zero * (1 + _ROUNDING), True))[0] - 1,
    )
    if end - start < 3:
        return coarse
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
            return coarse
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


def sums_from(values: np.ndarray) -> np.ndarray:
    """The sums of the values from each index on, and 0 at the end [values + 1]."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
