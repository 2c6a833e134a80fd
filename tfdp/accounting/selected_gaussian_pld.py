"""The privacy-loss distributions of one selected update; the setting is `selected_gaussian`'s.

What a test S can tell about the accepted update is its power x for its level y: with an example
added, x = E_P[L a' 1_S] / Z' and y = E_P[a 1_S] / Z; with one removed, both exchange their roles.
The hockey-stick divergence at epsilon is the largest x - e^epsilon y, over all S, and here over all
acceptance probabilities a and b, too. As a maximum of affine functions of e^epsilon it is convex in
it: the profile of a pair of distributions, which composes adaptively (Zhu, Dong, Wang 2022).

The greatest power f(y) at level y is a linear-fractional program with one constraint. Hence, for
every price lambda of the level, f(y) is at most the x at which

  h(x, y) = E_P[max over S, a, b of L a' (1_S - x) - lambda a (1_S - y)]

is zero, and the best price gives f(y) itself. What h is the mean of is a maximum of functions that
are affine in x, lambda and lambda y together. So h is convex in these three, which has two uses:

- If h <= 0 for (x, y, lambda) at two levels, it is so on the segment between them. This proves a
  curve above f, of which the segment from point to point is the case of two equal prices, and which
  otherwise is an arc of a hyperbola, below its tangents at both ends. Levels with prices prove a
  polygon above f, for all epsilons at once.
- At one level h is convex in x and lambda: its tangents tell where the best price is, and where two
  of them meet is a lower bound on f(y). Intervals of the level are cut where the polygon is too far
  above that. Near a kink of h in lambda the prices at both ends of an interval prove the better
  polygon; elsewhere one price for both does, whose error is a third as large.

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

# Standard deviations at the lowest level but zero. With selection there are more. Losses below it,
# of a probability of about 1e-23, count as infinite.
_TAIL = 10.0
# Standard deviations between the first levels.
_INTERVAL = 0.25
# An interval is cut where the polygon is further above what is attained than this share of the
# hockey-stick divergence, at the epsilon that the slope belongs to, and than this probability.
_PRECISION = 3e-5
_NEGLIGIBLE = 1e-30
# Most parts that an interval is cut into at once, most rounds of cuts, and most intervals.
_MOST_PARTS = 8
_MOST_CUTS = 12
_MOST_INTERVALS = 5000
# Prices are searched until what they prove is this share of that above what is attained.
_PRICE_PRECISION = 0.2
_MOST_PRICES = 80
_MOST_NEWTON_STEPS = 100
# With less noise or a larger spread, likelihood ratios overflow, and only rounding is left.
_LEAST_NOISE = 0.05
_LARGEST_LOG_SPREAD = 20.0
_EPS = float(np.finfo(float).eps)
# Relative rounding of powers, in most cases.
_NOISE = 32 * _EPS


@functools.lru_cache(maxsize=64)
def dominating_pair(
    q: float, sigma: float, validation_q: float, log_spread: float
) -> dominating_pairs.Pair | None:
    """Returns a pair of distributions that dominates one accepted update.

    Guarantees: at no epsilon is delta below the supremum over all acceptance probabilities, errors
    of rounding included. Above it by less than a thousandth in most cases.

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
    setting = _Setting(q, sigma if q > 0 else 1.0, validation_q, math.exp(log_spread))
    add, remove = (_polygon(setting, r) for r in (False, True))
    if max(add[1, 0], remove[1, 0]) >= 1:
        return None
    return dominating_pairs.Pair(add=_atoms(remove, add), remove=_atoms(add, remove))


@dataclasses.dataclass(frozen=True)
class _Setting:
    q: float
    sigma: float
    validation_q: float
    spread: float

    def log_ratio(self, w: np.ndarray) -> np.ndarray:
        """Log L(w)."""
        with np.errstate(divide="ignore"):
            log_rest, log_q = np.log1p(-self.q), np.log(self.q)
        return np.logaddexp(log_rest, log_q + (2 * w - 1) / (2 * self.sigma**2))

    def furthest(self, selections: float) -> float:
        """Returns how many standard deviations count, where selection favors them so often."""
        return math.sqrt((_TAIL + 1 / self.sigma) ** 2 + 2 * selections * math.log(self.spread))

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

    def __init__(self, setting: _Setting, remove: bool, level: np.ndarray):
        self.setting, self.remove, self.level = setting, remove, level
        a = np.array([setting.spread, 1.0, 1.0, setting.spread])
        b = np.array([1.0, 1.0, setting.spread, setting.spread])
        self.a, self.a_with = a[:, np.newaxis], _mixed(a, b, setting.validation_q)[:, np.newaxis]
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
        tails = self.setting.tails(breaks, self.remove)
        everything, nothing = np.ones_like(tails[:, :1]), np.zeros_like(tails[:, :1])
        ends = (nothing, tails, everything) if self.remove else (everything, tails, nothing)
        p, p_with = np.abs(np.diff(np.concatenate(ends, axis=1), axis=1))
        without, with_it = p * self.a, p_with * self.a_with
        return (without, with_it) if self.remove else (with_it, without)

    def tangent(self, price: np.ndarray, power: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns c, p and s: where h <= 0, x >= c - p * price. The slope of x in y is s there.

        h is convex in x and the price: these are its tangents.
        """
        upper, lower = self.masses(self.breaks(*self.lines(price, power)))
        mass = upper.sum(axis=0)
        paid = ((self.test - self.level) * lower).sum(axis=0)
        return (self.test * upper).sum(axis=0) / mass, paid / mass, price * lower.sum(axis=0) / mass

    def solve(self, price: np.ndarray, power: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the x with h = 0, by Newton's (Dinkelbach's) method, and the tangent there.

        h is convex in x: from the right a step leads to the left, and from there never beyond.
        """
        done = np.zeros(len(self.level), dtype=bool)
        for step in range(_MOST_NEWTON_STEPS):
            last, (c, p, s) = power, self.tangent(price, power)
            power = np.clip(c - p * price, self.level, 1.0)
            done |= (power <= last * (1 + 8 * _EPS)) & (step > 0)
            if done.all():
                break
        return power, c, p, s

    def proven(self, price: np.ndarray, power: np.ndarray) -> np.ndarray:
        """An x, not far above `power`, for which h <= 0 is certain; infinite if it exceeds 1."""
        slope, intercept = self.lines(price, power)
        breaks = self.breaks(slope, intercept)
        upper, lower = self.masses(breaks)
        terms = (self.test - power) * upper, -price * (self.test - self.level) * lower
        # Selection moves the lowest level and its price's break, and that of the power.
        furthest = self.setting.furthest(6)
        # The relative error of a normal probability at z is z^2 times that of z.
        rounding = 4 * _EPS * (4 + furthest**2) * sum(np.abs(t).sum(axis=0) for t in terms)
        # Next to a rounded break the wrong line was taken.
        off = _EPS * (1 - self.setting.q + breaks) * (100 + 4 * furthest / self.setting.sigma)
        near = [self.setting.tails(breaks + side * off, self.remove)[0] for side in (-1, 1)]
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
class _Levels:
    """Levels with nearly the best prices.

    Attributes:
      deviation: The level is the probability that so many standard deviations are exceeded.
      price: The prices.
      power: What these prices prove to be the greatest powers.
      attained: Powers that are attained by some acceptance probabilities, but for rounding.
      delta: The hockey-stick divergence at the epsilon for which this level is the best.
      rounding: Errors of rounding of `power`, at most.
    """

    deviation: np.ndarray
    price: np.ndarray
    power: np.ndarray
    attained: np.ndarray
    delta: np.ndarray
    rounding: np.ndarray

    @property
    def level(self) -> np.ndarray:
        """The levels."""
        return special.ndtr(-self.deviation)

    def take(self, chosen: np.ndarray) -> "_Levels":
        """Returns some of the levels."""
        return _Levels(*(getattr(self, f.name)[chosen] for f in dataclasses.fields(self)))

    @staticmethod
    def join(*parts: "_Levels") -> "_Levels":
        """Returns the levels of all parts."""
        names = [f.name for f in dataclasses.fields(_Levels)]
        return _Levels(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def _polygon(setting: _Setting, remove: bool) -> np.ndarray:
    """Returns points (level, power) [2, points]; f is below their hull wherever f(y) <= 1 - y.

    Where f is larger, (1 - x, 1 - y) is covered by the points of the other direction.
    """
    # A level is larger than without selection by B / A, at most, and so is a power.
    furthest = setting.furthest(2)
    edges = np.linspace(furthest, 0, math.ceil(furthest / _INTERVAL) + 1)
    levels = _solve(setting, remove, edges, *_bracket(setting, remove, special.ndtr(-edges)))
    first = levels.take(np.zeros(1, dtype=int))
    found = [_points_to_zero(setting, remove, first)]
    left, right = levels.take(np.arange(len(edges) - 1)), levels.take(np.arange(1, len(edges)))
    count = 0
    for cuts in range(_MOST_CUTS):
        points, parts = _points(setting, remove, left, right)
        count += int(parts.sum())
        if cuts == _MOST_CUTS - 1 or count > _MOST_INTERVALS:
            parts[:] = 1
        found.append(points[:, :, parts == 1].reshape(2, -1))
        left, right = left.take(parts > 1), right.take(parts > 1)
        if not len(left.price):
            break
        count -= len(left.price)
        left, right = _cut(setting, remove, left, right, parts[parts > 1])
    return _highest(np.concatenate(found, axis=1))


def _highest(points: np.ndarray) -> np.ndarray:
    """Returns the points with the largest power of each level."""
    levels, index = np.unique(points[0], return_inverse=True)
    powers = np.zeros_like(levels)
    np.maximum.at(powers, index, points[1])
    return np.stack([levels, powers])


def _points_to_zero(setting: _Setting, remove: bool, first: _Levels) -> np.ndarray:
    """Returns points above f between level 0 and the first level."""
    levels = np.append(0.0, first.level)
    price, power = np.repeat(first.price, 2), np.append(0.0, first.attained)
    powers = np.minimum(_power(setting, remove, levels, price, power), 1.0)
    return np.stack([levels, powers if powers[1] < 1 else np.ones(2)])


def _points(
    setting: _Setting, remove: bool, left: _Levels, right: _Levels
) -> tuple[np.ndarray, np.ndarray]:
    """Returns points [2, 3, n] above f between levels, and the numbers of parts to cut these into.

    Two prices for each interval: the best ones of both ends, or one between them. The first is
    better where h has a kink in the price, the second elsewhere.
    """
    between = np.sqrt(left.price) * np.sqrt(right.price)
    options = [
        _arc(left.level, right.level, left.power, right.power, left.price / right.price),
        _arc(
            left.level,
            right.level,
            _power(setting, remove, left.level, between, left.attained),
            _power(setting, remove, right.level, between, right.attained),
            np.ones_like(between),
        ),
    ]
    rise = (right.attained - left.attained) / (right.level - left.level)
    gaps = [np.max(x - left.attained - rise * (y - left.level), axis=0) for y, x in options]
    best = np.where(gaps[0] < gaps[1], options[0], options[1])
    # Allowed error: a share of the hockey-stick divergence at the epsilon of the slope.
    allowed = _PRECISION * (left.delta + right.delta) / 2 + _NEGLIGIBLE
    allowed += left.rounding + right.rounding
    # The error falls with the square of the width.
    parts = np.ceil(np.sqrt(np.maximum(np.minimum(*gaps), 0) / allowed))
    # On the other intervals, f is larger than 1 - y, except for rounding.
    needed = left.level + left.attained < 1 + 1e-9
    best = np.where(needed, best, 0.0)
    return best, np.where(needed, np.clip(parts, 1, _MOST_PARTS), 1).astype(int)


def _arc(
    left: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray, fall: np.ndarray
) -> np.ndarray:
    """Returns points [2, 3, n] above the curve that two levels with their prices prove.

    Args:
      left: The lower levels.
      right: The upper levels.
      low: The powers that are proven at the lower levels.
      high: The powers that are proven at the upper levels.
      fall: The prices of the lower levels over those of the upper ones.
    """
    # Both ends must be proven; but f rises with the level.
    low = np.where(high <= 1, np.minimum(low, 1.0), 1.0)
    high = np.maximum(np.minimum(high, 1.0), low)
    # The curve is convex if the price rises; else it is below its tangents at both ends.
    share = np.where(fall > 1, 1 / (1 + fall), 0.0)
    meet = np.where(fall > 1, low + (high - low) * (1 - share) * (1 + 16 * _EPS), low)
    return np.stack([[left, left + (right - left) * share, right], [low, meet, high]])


def _cut(
    setting: _Setting, remove: bool, left: _Levels, right: _Levels, parts: np.ndarray
) -> tuple[_Levels, _Levels]:
    """Returns the ends of the parts of intervals."""
    intervals = np.arange(len(parts))
    owner = np.repeat(intervals, parts - 1)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts - 1) - (parts - 1), parts - 1) + 1
    ends = left.take(owner), right.take(owner)
    step = (ends[1].deviation - ends[0].deviation) / parts[owner]
    near = np.log(ends[0].price), np.log(ends[1].price)
    inner = _solve(setting, remove, ends[0].deviation + part * step, *near)
    every = _Levels.join(left, inner, right)
    owners = np.concatenate([intervals, owner, intervals])
    order = np.lexsort((np.concatenate([0 * parts, part, parts]), owners))
    adjacent = owners[order][1:] == owners[order][:-1]
    return every.take(order[:-1][adjacent]), every.take(order[1:][adjacent])


def _solve(setting: _Setting, remove: bool, deviation: np.ndarray, *near: np.ndarray) -> _Levels:
    """Searches the prices that lead to the least powers, which are convex in them.

    The next price is that at which the tangents on both sides meet. That is a lower bound, and one
    that is attained: what both belong to can be mixed.

    Args:
      setting: What is released.
      remove: The direction.
      deviation: Of the levels: see `_Levels`.
      *near: Logs of prices between which the best ones are in most cases.
    """
    level = special.ndtr(-deviation)
    low, high = _bracket(setting, remove, level)
    likely = np.minimum(*near), np.maximum(*near)
    trial, attained = (likely[0] + likely[1]) / 2, level.copy()
    price, power, delta = (np.ones_like(level) for _ in range(3))
    # Tangents c - p * price, at first of a test that always holds, and of one that never does.
    falling = np.stack([np.ones_like(level), 1 - level])
    rising = np.stack([np.zeros_like(level), -level])
    active = np.arange(len(level))
    for step in range(_MOST_PRICES):
        y, tried = level[active], np.exp(trial[active])
        x, c, p, s = _Dual(setting, remove, y).solve(tried, attained[active])
        better = x < power[active]
        chosen = active[better]
        price[chosen], power[chosen] = tried[better], x[better]
        delta[chosen] = np.maximum(x - s * y, 0)[better]
        falls = p > 0
        falling[:, active[falls]] = np.stack([c, p])[:, falls]
        rising[:, active[~falls]] = np.stack([c, p])[:, ~falls]
        low[active[falls]] = trial[active[falls]]
        high[active[~falls]] = trial[active[~falls]]
        (above, fall), (below, rise) = falling[:, active], rising[:, active]
        meet = (above - below) / (fall - rise)
        attained[active] = np.maximum(attained[active], below - meet * rise)
        excess = power[active] - attained[active]
        allowed = _PRICE_PRECISION * (_PRECISION * delta[active] + _NEGLIGIBLE)
        allowed += _NOISE * power[active]
        trial[active] = _next(step, meet, low[active], high[active], [x[active] for x in likely])
        active = active[excess > allowed]
        if not len(active):
            break
    proven = _Dual(setting, remove, level).proven(price, power)
    rounding = np.maximum(proven - power, 0) + _NOISE * power
    return _Levels(deviation, price, proven, attained, delta, rounding)


def _next(
    step: int, meet: np.ndarray, low: np.ndarray, high: np.ndarray, likely: list[np.ndarray]
) -> np.ndarray:
    """Returns logs of the next prices: `meet`, or others in turn where that is slow."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_meet = np.log(meet)
    if step == 0:  # The other side of what is likely.
        guess = np.where(low > likely[0], likely[1], likely[0])
    elif step % 3 == 2:
        guess = (low + high) / 2
    else:
        guess = log_meet
    inside = (guess > low) & (guess < high)
    return np.where(inside, guess, (low + high) / 2)


def _bracket(setting: _Setting, remove: bool, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns logs of prices between which the best ones are."""
    # Selection changes a level, and its distance from 1, by a factor of B / A at most.
    spread = setting.spread
    least, most = special.ndtri(level / spread), special.ndtri(np.minimum(level * spread, 1))
    most = np.where(level * (1 + spread) < 1, most, -special.ndtri((1 - level) / spread))
    least, most = setting.sigma * least, setting.sigma * most
    if remove:
        bounds = -setting.log_ratio(most + 1), -setting.log_ratio(least)
    else:
        bounds = setting.log_ratio(-most), setting.log_ratio(-least)
    return bounds[0] - math.log(spread), bounds[1] + math.log(spread)


def _power(
    setting: _Setting, remove: bool, level: np.ndarray, price: np.ndarray, power: np.ndarray
) -> np.ndarray:
    """The power that `price` proves to be the greatest at `level`; infinite if it proves none."""
    dual = _Dual(setting, remove, level)
    return dual.proven(price, dual.solve(price, power)[0])


def _atoms(own: np.ndarray, other: np.ndarray) -> dominating_pairs.Atoms:
    """Returns the outcomes of a pair whose trade-off curve is the hull of both directions' points.

    A test of power x at level y is, the other way round, one of power 1 - y at level 1 - x.
    """
    ours = [(y, x, 1 - y, 1 - x) for y, x in own.T.tolist()]
    theirs = [(1 - x, 1 - y, x, y) for y, x in other.T.tolist()]
    return dominating_pairs.hull_atoms([*ours, *theirs, (1.0, 1.0, 0.0, 0.0)])
