"""The privacy-loss distributions of one selected update; the setting is `selected_gaussian`'s.

What a test S can tell about the accepted update is its power x for its level y: with an example
added, x = E_P[L a' 1_S] / Z' and y = E_P[a 1_S] / Z; with one removed, both exchange their roles.
The hockey-stick divergence at epsilon is the largest x - e^epsilon y, over all S, and here over all
acceptance probabilities a and b, too. As a maximum of affine functions of e^epsilon it is convex in
it: the profile of a pair of distributions, which composes adaptively (Zhu, Dong, Wang 2022).

The greatest power f(y) at level y is a linear-fractional program with one constraint. Hence, for
every price lambda of the level, f(y) is at most the x at which

  h(x, y) = E_P[max over S, a, b of L a' (1_S - x) - lambda a (1_S - y)]

is zero, and the best price gives f(y) itself. As a mean of maxima of functions that are affine in x
and y, h is convex. So where it is at most zero at both ends of a segment in the plane of (y, x), it
is so between them, and f is below the segment. Intervals of y, each with a price of its own, prove
a polygon above f, whose distance from it falls with the square of their width. The polygon holds
for all epsilons at once.

The maximum is over four lines in l = L(w). By growing slope they belong to (a, b) = (B, A), (A, A),
(A, B) and (B, B); S begins or ends between the second and the third. Which one is best changes at
three values of l, that is of w, so that h is a sum of normal probabilities.

One a per epsilon is more freedom than any one a has, and more than one per Renyi order: the result
is exact for one update and, in composition, an upper bound that the Renyi one may fall below.

Only B / A matters, and A = 1 in this module. Other examples, more dimensions and shorter shifts
change nothing, for the reasons given there: h is linear in what is averaged.

References:
  Zhu, Dong, Wang 2022, "Optimal Accounting of Differential Privacy via Characteristic Function".
"""

import dataclasses
import functools
import math

import numpy as np
from scipy import special

from tfdp.accounting import dominating_pairs

# The lowest level but zero is that of so many standard deviations. What has none counts as infinite
# loss: about 1e-23.
_TAIL = 10.0
# Intervals of the level per standard deviation.
_INTERVALS = 100
# Halvings of the interval for each price, of which every value proves a bound.
_BISECTIONS = 36
_NEWTON_STEPS = 4
_MOST_NEWTON_STEPS = 100
# Beyond, likelihood ratios overflow, and rounding is all that is left.
_LEAST_NOISE = 0.05
_LARGEST_LOG_SPREAD = 20.0
_EPS = float(np.finfo(float).eps)


@functools.lru_cache(maxsize=64)
def dominating_pair(
    q: float, sigma: float, validation_q: float, log_spread: float
) -> dominating_pairs.Pair | None:
    """Returns a pair of distributions that dominates one accepted update.

    Guarantees: at no epsilon is delta below the supremum over all acceptance probabilities, errors
    of rounding included. Above it by a thousandth in most cases.

    Args:
      q: Probability that an example is in the batch of the update.
      sigma: Noise multiplier of the update.
      validation_q: Probability that an example is in the batch of the test. Not 0 if q is.
      log_spread: log(B / A) of the least and the largest acceptance probability.

    Returns:
      None if all loss counts as infinite: B / A > e^20, or sigma < 0.05 and q > 0.

    Example:
      >>> from tfdp.accounting import composition
      >>> pair = dominating_pair(0.01, 1.0, 0.01, 0.8)
      >>> round(composition.epsilon([(pair, 1000)], 1e-5), 2)
      3.01
    """
    if (q > 0 and sigma < _LEAST_NOISE) or not log_spread <= _LARGEST_LOG_SPREAD:
        return None
    # With q = 0 the noise does not matter.
    law = _Law(q, sigma if q > 0 else 1.0, validation_q, math.exp(log_spread))
    add, remove = (_polygon(law, r) for r in (False, True))
    if max(add.power[0], remove.power[0]) >= 1:
        return None
    return dominating_pairs.Pair(add=_atoms(remove, add), remove=_atoms(add, remove))


@dataclasses.dataclass(frozen=True)
class _Law:
    q: float
    sigma: float
    validation_q: float
    spread: float

    def log_ratio(self, w: np.ndarray) -> np.ndarray:
        """Log L(w)."""
        with np.errstate(divide="ignore"):
            log_rest, log_q = np.log1p(-self.q), np.log(self.q)
        return np.logaddexp(log_rest, log_q + (2 * w - 1) / (2 * self.sigma**2))

    def tails(self, ratio: np.ndarray, lower: bool) -> np.ndarray:
        """Probabilities [2, ...], by P and by P', of L(w) > ratio, or of L(w) < ratio."""
        excess = ratio - (1 - self.q)
        with np.errstate(divide="ignore", invalid="ignore"):
            w = self.sigma**2 * (np.log(np.maximum(excess, 0)) - np.log(self.q)) + 0.5
        w = np.where(excess > 0, w, -np.inf)
        sign = 1 if lower else -1
        p = special.ndtr(sign * w / self.sigma)
        shifted = special.ndtr(sign * (w - 1) / self.sigma)
        return np.stack([p, (1 - self.q) * p + self.q * shifted])


def _mixed(a: np.ndarray, b: np.ndarray, validation_q: float) -> np.ndarray:
    """a': the example is in the test's batch with probability `validation_q`."""
    return (1 - validation_q) * a + validation_q * b


class _Dual:
    """h(x, y) of one direction, at many levels y, with a price for each.

    The four corners are in the order of the l where they are best. The test holds in the upper two
    if an example was added, in the lower two if one was removed.
    """

    def __init__(self, law: _Law, remove: bool, level: np.ndarray):
        self.law, self.remove, self.level = law, remove, level
        a = np.array([law.spread, 1.0, 1.0, law.spread])
        b = np.array([1.0, 1.0, law.spread, law.spread])
        self.a, self.a_with = a[:, np.newaxis], _mixed(a, b, law.validation_q)[:, np.newaxis]
        self.test = np.array([1.0, 1.0, 0, 0] if remove else [0, 0, 1.0, 1.0])[:, np.newaxis]

    def lines(self, price: np.ndarray, power: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slope and intercept [4, n] of what h is the mean of."""
        gain, cost = self.test - power, -price * (self.test - self.level)
        if self.remove:
            return cost * self.a_with, gain * self.a
        return gain * self.a_with, cost * self.a

    def breaks(self, slope: np.ndarray, intercept: np.ndarray) -> np.ndarray:
        """Returns the three l [3, n] at which the best of the lines changes."""
        # The lower two fall with l and the upper two rise. They meet where the last of the lower
        # ones gets below one of the upper ones.
        meet = np.max(
            [np.min([_crossing(slope, intercept, i, j) for j in (2, 3)], axis=0) for i in (0, 1)],
            axis=0,
        )
        return np.stack(
            [
                np.minimum(_crossing(slope, intercept, 0, 1), meet),
                meet,
                np.maximum(_crossing(slope, intercept, 2, 3), meet),
            ]
        )

    def masses(self, breaks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the corners [4, n] add to the masses that x and y are shares of."""
        tails = self.law.tails(breaks, self.remove)
        everything, nothing = np.ones_like(tails[:, :1]), np.zeros_like(tails[:, :1])
        ends = (nothing, tails, everything) if self.remove else (everything, tails, nothing)
        p, p_with = np.abs(np.diff(np.concatenate(ends, axis=1), axis=1))
        without, with_it = p * self.a, p_with * self.a_with
        return (without, with_it) if self.remove else (with_it, without)

    def improve(self, price: np.ndarray, power: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step of Newton's method (Dinkelbach's) for h = 0, and the slope of h in the price.

        h is convex in x: from the right a step leads to the left, and from there never beyond.
        """
        upper, lower = self.masses(self.breaks(*self.lines(price, power)))
        paid = ((self.test - self.level) * lower).sum(axis=0)
        power = ((self.test * upper).sum(axis=0) - price * paid) / upper.sum(axis=0)
        return np.clip(power, self.level, 1.0), -paid

    def proven(self, price: np.ndarray, power: np.ndarray) -> np.ndarray:
        """An x, not far above `power`, for which h <= 0 is certain; infinite if it exceeds 1."""
        slope, intercept = self.lines(price, power)
        breaks = self.breaks(slope, intercept)
        upper, lower = self.masses(breaks)
        terms = (self.test - power) * upper, -price * (self.test - self.level) * lower
        furthest = _TAIL + 1 / self.law.sigma
        # Of a normal probability at z: z^2 times that of z.
        rounding = 4 * _EPS * (4 + furthest**2) * sum(np.abs(t).sum(axis=0) for t in terms)
        # Next to a rounded break the wrong line was taken.
        off = _EPS * (1 - self.law.q + breaks) * (100 + 4 * furthest / self.law.sigma)
        near = [self.law.tails(breaks + side * off, self.remove)[0] for side in (-1, 1)]
        rounding += (np.abs(np.diff(slope, axis=0)) * off * np.abs(near[0] - near[1])).sum(axis=0)
        excess = np.maximum(sum(t.sum(axis=0) for t in terms), 0) + rounding
        # dh/dx is the mass that x is a share of, at least A = 1, with the sign changed.
        power = power + excess
        return np.where(power < 1, power, np.inf)


def _crossing(slope: np.ndarray, intercept: np.ndarray, i: int, j: int) -> np.ndarray:
    """Returns where line j, the less steep one, gets above line i."""
    with np.errstate(over="ignore"):
        ratio = (intercept[i] - intercept[j]) / np.maximum(slope[j] - slope[i], 1e-300)
    return np.minimum(ratio, 1e290)


@dataclasses.dataclass(frozen=True)
class _Polygon:
    """Points whose upper hull is above all (level, power)."""

    level: np.ndarray
    power: np.ndarray

    def corners(self) -> list[tuple[float, float]]:
        """Pairs of level and power."""
        return list(zip(self.level.tolist(), self.power.tolist(), strict=True))


def _polygon(law: _Law, remove: bool) -> _Polygon:
    """Returns a polygon that is proven to be above f wherever f(y) <= 1 - y.

    Where f is larger, (1 - x, 1 - y) is covered by the polygon of the other direction.
    """
    furthest = _TAIL + 1 / law.sigma
    deviations = np.arange(math.ceil(furthest * _INTERVALS), -1, -1) / _INTERVALS
    levels = np.unique(np.concatenate([[0.0], special.ndtr(-deviations)]))
    left, right = levels[:-1], levels[1:]
    price, power = _prices(law, remove, np.maximum(np.sqrt(left * right), right / 2))
    ends = [_power(law, remove, level, price, power) for level in (left, right)]
    # The segment proves something only if both its ends are proven.
    ends[0] = np.where(ends[1] <= 1, np.minimum(ends[0], 1.0), 1.0)
    powers = np.maximum(np.append(ends[0], 0.0), np.append(0.0, np.minimum(ends[1], 1.0)))
    needed = np.append(True, powers[:-1] + levels[:-1] < 1)
    return _Polygon(levels[needed], powers[needed])


def _prices(law: _Law, remove: bool, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearly the best prices at `level`, and the power that they lead to.

    Where h = 0, its slope in the price says on which side the best one is.
    """
    dual = _Dual(law, remove, level)
    # Selection changes the level by a factor of B / A, at most.
    most = np.minimum(level * law.spread, 1 - 1e-9)
    quantiles = [law.sigma * special.ndtri(p) for p in (level / law.spread, most)]
    if remove:
        bounds = -law.log_ratio(quantiles[1] + 1), -law.log_ratio(quantiles[0])
    else:
        bounds = law.log_ratio(-quantiles[1]), law.log_ratio(-quantiles[0])
    low, high = bounds[0] - math.log(law.spread), bounds[1] + math.log(law.spread)
    power = level
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        price = np.exp(middle)
        for _ in range(_NEWTON_STEPS):
            power, slope = dual.improve(price, power)
        low, high = np.where(slope > 0, low, middle), np.where(slope > 0, middle, high)
    return np.exp((low + high) / 2), power


def _power(
    law: _Law, remove: bool, level: np.ndarray, price: np.ndarray, power: np.ndarray
) -> np.ndarray:
    """The power that `price` proves to be the greatest at `level`; infinite if it proves none."""
    dual = _Dual(law, remove, level)
    for _ in range(_MOST_NEWTON_STEPS):
        last, (power, _) = power, dual.improve(price, power)
        if (np.abs(power - last) <= 4 * _EPS * power).all():
            break
    return dual.proven(price, power)


def _atoms(own: _Polygon, other: _Polygon) -> dominating_pairs.Atoms:
    """Returns the outcomes of a pair whose trade-off curve is the hull of both polygons.

    A test of power x at level y is, the other way round, one of power 1 - y at level 1 - x.
    """
    ours = [(y, x, 1 - y, 1 - x) for y, x in own.corners()]
    theirs = [(1 - x, 1 - y, x, y) for y, x in other.corners()]
    return dominating_pairs.hull_atoms([*ours, *theirs, (1.0, 1.0, 0.0, 0.0)])
