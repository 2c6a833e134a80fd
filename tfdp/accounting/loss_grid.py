"""Privacy losses at knots: grids of losses that dominate those of a release, or are dominated.

Upper bound: the mass of each cell goes to the knots at its two ends so that both its probabilities,
by the upper and by the lower distribution, stay what they are. This replaces the hockey-stick
divergence, which is convex in e^epsilon, by its chords: never below it, and above it by the square
of the interval. Lower bound: outcomes around each knot are taken together, which cannot make them
easier to tell; of a polygon with these outcomes' losses, which are near the knots, another one with
the knots themselves is made that is never above it (`_dominated`). Knots are multiples of the
interval, for a lower bound moved so that the likeliest loss is one of them; far from 0 they are
sparse, a thousandth of the loss apart.

References:
  Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots" (the upper polygon).
"""

import dataclasses
import math

import numpy as np

from tfdp.accounting.dominating_pairs import Direction

_EPS = float(np.finfo(float).eps)
# Losses of more than so many intervals have knots 1 / _DENSE of themselves apart.
_DENSE = 1024
# For larger losses, e^-loss vanishes, and rounding up costs a thousandth at most.
HUGE_LOSS = 300.0
# Rounding errors of a few operations: absolute for small losses and relative for others.
_ROUNDINGS = 16 * _EPS
# Steps of an iteration.
_ANCHORINGS = 6
# Outcomes that are at most so many cells from the likeliest may be taken together with it.
_NEAR = (0, 4, 12)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Privacy losses at knots.

    Attributes:
      losses: Increasing.
      mass: Probabilities by the upper distribution.
      infinite: Probability of an infinite loss.
      offset: Losses of a grid are multiples of its interval plus this.
    """

    losses: np.ndarray
    mass: np.ndarray
    infinite: float
    offset: float = 0.0

    def log_moments(self, tilts: np.ndarray) -> np.ndarray:
        """Logs of the means of e^(tilt loss)."""
        used = self.mass > 0
        if not used.any():
            return np.full(len(tilts), -np.inf)
        exponents = np.log(self.mass[used]) + np.multiply.outer(tilts, self.losses[used])
        peak = exponents.max(axis=1, keepdims=True)
        result = np.log(np.exp(exponents - peak).sum(axis=1)) + peak[:, 0]
        return np.where(np.isnan(result), np.inf, result)


# Has nearly no outcome: the logarithms of its moments are finite.
_NO_OUTCOME = Discrete(np.zeros(1), np.full(1, np.finfo(float).tiny), 0.0)


def grid(
    direction: Direction, interval: float, tail: float, below: bool, tilt: float = 1.0
) -> Discrete:
    """Returns the losses of `direction` on multiples of `interval`; see `discretize`.

    Args:
      direction: A direction of a dominating pair.
      interval: Interval of the grid.
      tail: Probability of losses that are too large for the grid, and so count as infinite.
      below: Whether the result is dominated. Its losses are then multiples plus `offset`.
      tilt: Exponent: of several dominated results, the one with the largest mean of e^(tilt loss)
        is returned.
    """
    low, high = direction.range(tail)
    if below:  # What is left out leaves less to tell.
        low, high = max(low, -HUGE_LOSS), min(high, HUGE_LOSS)
    knots = interval * _knots(low / interval, high / interval)
    if below:
        pieces = [_all_together(direction)]
        farther = 0.0
        for near in _NEAR if len(knots) > 1 else ():  # All losses may be huge.
            if farther <= near:
                piece, farther = _anchored(direction, knots, near)
                pieces.append(piece)
        moments = [float(piece.log_moments(np.array([tilt]))[0]) for piece in pieces]
        best = int(np.argmax(moments))
        return pieces[best] if moments[best] > -np.inf else _NO_OUTCOME
    result = discretize(direction, knots)
    return result if result.mass.any() else Discrete(np.zeros(1), np.ones(1), result.infinite)


def discretize(direction: Direction, losses: np.ndarray, below: bool = False) -> Discrete:
    """Returns a distribution of losses on knots that dominates `direction`, or is dominated by it.

    Args:
      direction: A direction of a dominating pair.
      losses: The knots, increasing; the first and the last beyond the range of losses.
      below: Whether the result is dominated.
    """
    if below:
        return _dominated(*_cells(direction, (losses[1:] + losses[:-1]) / 2), losses)
    masses = direction.masses(losses)
    upper = masses.upper + masses.upper_error
    inner, low, width = upper[1:-1], losses[:-1], np.diff(losses)
    # What goes to the upper knot, so that the lower distribution keeps its mass, too.
    scale = np.exp(np.minimum(low, HUGE_LOSS))
    share = -np.expm1(-width)
    moved = (masses.upper[1:-1] - masses.lower[1:-1] * scale) / share
    error = masses.upper_error[1:-1] + scale * masses.lower_error[1:-1]
    moved += (error + 4 * _EPS * masses.upper[1:-1]) / share
    moved = np.where(low > HUGE_LOSS, inner, np.clip(moved, 0.0, inner))
    mass = np.zeros(len(losses))
    mass[:-1] += inner - moved
    mass[1:] += moved
    mass[0] += upper[0]
    return Discrete(losses, mass, float(upper[-1]))


def _cells(direction: Direction, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities between edges, by the upper distribution at least, by the lower at most."""
    masses = direction.masses(edges)
    upper = np.maximum(masses.upper - masses.upper_error, 0.0)
    return upper, masses.lower + masses.lower_error


def _all_together(direction: Direction) -> Discrete:
    """Returns the two total probabilities: no knots are too far apart for them."""
    upper, lower = (values.sum() for values in _cells(direction, np.zeros(1)))
    if not upper > 0:
        return Discrete(np.zeros(1), np.zeros(1), 0.0)
    loss = float(_losses(upper, lower))
    loss -= _ROUNDINGS * (1 + abs(loss))
    return Discrete(np.array([loss]), np.array([upper]), 0.0, offset=loss)


def _anchored(direction: Direction, knots: np.ndarray, near: int) -> tuple[Discrete, float]:
    """Returns a distribution on moved knots, one of which is the loss of the likeliest outcome.

    Most losses of a release that is sampled may be smaller than the interval: their mean decides.
    The edges of the other cells are moved until the losses of their outcomes are near the knots. If
    all on one side are within `near` cells, they are taken together with the likeliest.

    Returns:
      The distribution, and the least `near` for which another might be returned.
    """
    middles = (knots[1:] + knots[:-1]) / 2
    offset, moves, farther = 0.0, np.zeros(len(middles)), math.inf
    for _ in range(_ANCHORINGS):
        least, most = (k + 1e-3 * (middles - k) for k in (knots[:-1], knots[1:]))
        edges = np.clip(middles + moves, least, most) + offset
        upper, lower = _cells(direction, edges)
        anchor = int(np.argmax(upper))
        if not upper[anchor] > 0:
            return Discrete(np.zeros(1), np.zeros(1), 0.0), farther
        some = np.flatnonzero(upper)
        first = some[0] if anchor - some[0] > near else anchor
        last = some[-1] if some[-1] - anchor > near else anchor
        farther = min([farther, *(d for d in (anchor - first, last - anchor) if d > near)])
        for values in (upper, lower):
            values[first : last + 1] = _ends_together(values, first, last)
            values[:first], values[last + 1 :] = 0.0, 0.0
        losses = _losses(upper, lower)
        loss = float(losses[anchor])
        offset = loss - _ROUNDINGS * (1 + abs(loss)) - float(knots[anchor])
        far = np.where(upper > 0, losses - (knots + offset), 0.0)
        moves = edges - offset - middles - (far[1:] + far[:-1]) / 2
    # A smaller loss, as rounded, of an outcome is dominated.
    lower[anchor] = upper[anchor] * math.exp(-(knots[anchor] + offset))
    result = _dominated(upper, lower, knots + offset, anchor)
    return dataclasses.replace(result, offset=offset), farther


def _dominated(
    upper: np.ndarray, lower: np.ndarray, knots: np.ndarray, exact: int | None = None
) -> Discrete:
    """Returns a distribution on knots that outcomes dominate, of whatever probabilities.

    With a loss e and E = e^e, the hockey-stick divergence of the outcomes from number j on is at
    least the line L_j(E), the sum over them of upper - E lower: it is the sum of the positive
    terms. So is any polygon that is below L_(j + 1) between knots j and j + 1. At knot j the
    polygon is the smaller one of L_j and L_(j + 1), which differ little if its outcome has nearly
    the knot's loss. Where it is not convex, its lower hull is meant.

    Args:
      upper: Probabilities of an outcome for each knot, by the upper distribution.
      lower: Value by the lower distribution.
      knots: Increasing losses.
      exact: An outcome that has the loss of its knot.
    """
    is_exact = np.zeros(len(knots), bool)
    if exact is not None:
        is_exact[exact] = True
    # The first outcome may be all that the lower distribution has and the upper one has not.
    width = knots[1] - knots[0] if len(knots) > 1 else np.inf
    is_far = (_losses(upper, lower) < knots - width) & (np.arange(len(knots)) == 0)
    some = np.flatnonzero((upper > 0) & ~is_far)
    upper, lower, knots, is_exact = upper[some], lower[some], knots[some], is_exact[some]
    while len(knots):
        # The last outcome gets the loss of its knot, or is taken together with the one before.
        is_enough = is_exact[-1] or _losses(upper[-1], lower[-1]) >= knots[-1]
        first, last = 0, len(knots) - (1 if is_enough else 2)
        if is_enough:
            is_exact[-1] = True
            mass = _masses_of_polygon(upper, lower, knots, is_exact)
            kept, mass = _hull(knots, mass)
            if not len(kept):
                break
            first, last = kept[0], kept[-1]
            if first == 0 and last == len(knots) - 1:
                return Discrete(knots[kept], mass, 0.0)
        is_exact = is_exact[first : last + 1].copy()
        if len(is_exact):
            is_exact[0] &= first == 0
            is_exact[-1] &= last == len(knots) - 1
        upper, lower = (_ends_together(p, first, last) for p in (upper, lower))
        knots = knots[first : last + 1]
    return Discrete(np.zeros(1), np.zeros(1), 0.0)


def _ends_together(values: np.ndarray, first: int, last: int) -> np.ndarray:
    """Adds the values before `first` and after `last` to those."""
    result = values[first : last + 1].copy()
    if len(result):
        result[0] += values[:first].sum()
        result[-1] += values[last + 1 :].sum()
    return result


def _masses_of_polygon(
    upper: np.ndarray, lower: np.ndarray, knots: np.ndarray, is_exact: np.ndarray
) -> np.ndarray:
    """Returns the changes of the slope of the polygon at the knots, in E, times E."""
    difference = upper * np.expm1(knots - _losses(upper, lower))
    slack = np.where(is_exact, 0.0, _ROUNDINGS * (1 + np.abs(knots)) * upper)
    # The polygon is so far below L_(j + 1), and below L_j.
    right = np.where(is_exact, 0.0, np.maximum(difference, 0.0)) + slack
    left = np.where(is_exact, 0.0, np.maximum(-difference, 0.0)) + slack
    change = right[:-1] - left[1:]
    mass = upper + right - left
    mass[:-1] += change / np.expm1(np.diff(knots))
    mass[1:] += change / np.expm1(-np.diff(knots))
    mass[0] += left[0]  # The first segment begins at E = 0.
    return mass


def _losses(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Returns the losses of outcomes."""
    near = np.abs(upper - lower) < 0.5 * lower
    close = np.log1p(np.where(near, upper - lower, 0.0) / np.where(near, lower, 1.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(near, close, np.log(upper) - np.log(lower))


def _hull(losses: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leaves out knots with negative masses, at which the polygon is not convex.

    Returns:
      The indices of the others, and their masses. Where those lack the first or the last knot, the
      masses are of no use.
    """
    kept = np.arange(len(losses))
    while (mass < 0).any():
        good, dropped = np.flatnonzero(mass >= 0), np.flatnonzero(mass < 0)
        place = np.searchsorted(good, dropped)
        if not len(good) or place.min() == 0 or place.max() == len(good):
            return kept[good], mass[good]
        low, high = good[place - 1], good[place]
        at = losses[kept]
        share = np.expm1(at[low] - at[dropped]) / np.expm1(at[low] - at[high])
        merged = mass[good]
        np.add.at(merged, place - 1, mass[dropped] * (1 - share))
        np.add.at(merged, place, mass[dropped] * share)
        kept, mass = kept[good], merged
    return kept, mass


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
    """Returns the sums of the values from each index on, and 0 at the end [values + 1]."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
