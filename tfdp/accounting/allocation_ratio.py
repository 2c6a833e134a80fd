"""The likelihood ratio of one epoch by random allocation, from above in convex order.

An example is in one of t steps, each with probability 1 / t. With independent noise of standard
deviation sigma (in units of the sensitivity), the ratio of the densities of all t releases, with
the example and without it, is at most as spread as

    R = (Y_1 + ... + Y_t) / t,  Y_i = exp(x_i / sigma^2 - 1 / (2 sigma^2)),  x_i ~ N(0, sigma^2),

under the distribution without the example (docs/random_allocation.md). Hockey-stick divergences in
both directions are means of convex functions of R. So each distribution that is larger in convex
order gives upper bounds on all of them, and is a dominating pair for both directions at once.

`ratio` computes one on a geometric grid. Three operations enlarge the order, or leave it:

1. The mass at a value goes to the two grid values next to it so that its mean stays (a
   mean-preserving spread). It also adds up outcomes with nearly equal values.
2. Sums of independent variables, each larger in convex order, are larger in convex order. So S_2m
   is S_m + S_m, spread again: t takes log2(t) sums. On the grid e^(h k) the sum of values number i
   and j is max(i, j) + offset(|i - j|): masses of each difference move by the same offset.
3. Far tails are spread to 0 and to infinity: a mass that moves to infinity with its mean is lost
   from the lower distribution, and stays in the upper one.

Errors of rounding only ever enlarge masses, of which all bounds are increasing functions.
"""

import dataclasses
import functools
import math

import numpy as np
from scipy import special

_EPS = float(np.finfo(float).eps)
# Cells of the grid have this width in standard deviations of the sum, at most: each spread adds
# about a sixth of its square to the variance.
_CELL = 0.04
# Cells of the grid have this width, at most, in the logarithm.
_WIDEST = 0.04
# Standard deviations of log Y beyond which its mass goes to 0, and to infinity: 1e-111, 1e-31.
_LOWEST, _HIGHEST = 22.5, 11.6
# Likewise of sums: the mass below over the squared number of summands, so that the sum of 0 and
# another value, of twice the mass of 0, is far in the tail; and the mean above over that number.
_LOW_TAIL, _HIGH_TAIL = 1e-110, 1e-31
# More than all products of masses that vanish, below 1e-307, times their values. Its fourth power
# is more than these products.
_VANISHED = 1e-60
# For a distribution that is smaller: its cells are so many times as wide, its normal numbers within
# so many deviations, and less likely values are left out.
_COARSER, _WITHIN, _UNLIKELY = 2.5, 9.0, 1e-20
# Nodes of the quadrature in a cell, at most half a standard deviation wide: its relative error is
# below 1e-20.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A distribution that is larger in convex order than the sum of some Y_i.

    Attributes:
      interval: h: the values are e^(h k), for k from `first` on.
      first: The least k.
      mass: The masses of these values, at least [values].
      zero: The mass of the value 0, at least.
      infinite: The mean of what moved to infinity, at least.
      count: The number of summands.
    """

    interval: float
    first: int
    mass: np.ndarray
    zero: float
    infinite: float
    count: int

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of the values over their number: the ratios [values]."""
        places = np.arange(self.first, self.first + len(self.mass))
        return self.interval * places - math.log(self.count)


@functools.lru_cache(maxsize=64)
def ratio(noise_multiplier: float, steps: int) -> Sum:
    """Returns a distribution that is larger in convex order than R.

    Args:
      noise_multiplier: sigma, from 0.1 on.
      steps: t, the number of steps of an epoch.

    Example:
      >>> found = ratio(1.0, 10)
      >>> bool(1 <= found.mass.sum() < 1 + 1e-9)
      True
    """
    finest = _interval(noise_multiplier, steps)
    total = one = _one(noise_multiplier, _coarsened(noise_multiplier, 1, finest))
    for bit in bin(steps)[3:]:
        wanted = _coarsened(noise_multiplier, 2 * total.count, finest)
        while total.interval > 1.5 * wanted:
            total = _refined(total)
        total = _trimmed(_sum(total, total))
        if bit == "1":
            total = _trimmed(_sum(total, one))
    total.mass.setflags(write=False)
    return total


def _interval(sigma: float, count: int) -> float:
    """Returns the interval of the grid for a sum, at most."""
    deviation = math.sqrt(math.expm1(sigma**-2) / count)
    return min(_WIDEST, 0.5 / sigma, _CELL * deviation)


def _coarsened(sigma: float, count: int, finest: float) -> float:
    """Returns the largest interval for a sum that is `finest` times a power of two."""
    most = _interval(sigma, count)
    return finest * 2.0 ** max(0, math.floor(math.log2(most / finest)))


def _one(sigma: float, interval: float) -> Sum:
    """Returns Y_1 on the grid."""
    # log Y is N(-1 / (2 sigma^2), 1 / sigma^2); weighted by Y, its mean has the other sign.
    middle, deviation = 0.5 / sigma / sigma, 1 / sigma
    first = math.floor((-middle - _LOWEST * deviation) / interval)
    last = math.ceil((middle + _HIGHEST * deviation) / interval)
    places = np.arange(first, last)[:, np.newaxis]
    share = (_NODES + 1) / 2
    z = (interval * (places + share) + middle) / deviation
    density = np.exp(-z * z / 2) * (interval / deviation / 2 / math.sqrt(2 * math.pi))
    density *= _WEIGHTS * (1 + 8 * _EPS * (4 + z * z + np.abs(z) / sigma))
    up = np.expm1(interval * share) / np.expm1(interval)
    mass = np.zeros(last - first + 1)
    mass[:-1] += (density * (1 - up + _EPS)).sum(axis=1)
    mass[1:] += (density * (up + _EPS)).sum(axis=1)
    mass *= 1 + 64 * _EPS
    below = special.ndtr((interval * first + middle) / deviation) * (1 + 1e-9)
    above, beyond = (
        special.ndtr((m - interval * last) / deviation) * (1 + 1e-9) for m in (-middle, middle)
    )
    mass[0] += below
    mass[-1] += above
    return Sum(interval, first, mass, float(below), float(beyond), 1)


def _refined(total: Sum) -> Sum:
    """Returns the same distribution on a grid with half the interval."""
    mass = np.zeros(2 * len(total.mass) - 1)
    mass[::2] = total.mass
    return dataclasses.replace(total, interval=total.interval / 2, first=2 * total.first, mass=mass)


def _offsets(interval: float, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns where 1 + e^(-h d) is on the grid, for differences d from 0 to `most`.

    Returns:
      The place below it, and the masses of that place and of the next one, at least.
    """
    log = np.log1p(np.exp(-interval * np.arange(most + 1)))
    place = np.floor(log / interval)
    error = 8 * _EPS * (1 + 1 / interval)
    up = np.clip(np.expm1(log - interval * place) / math.expm1(interval), 0, 1)
    return place.astype(np.int64), 1 - up + error, up + error


def _near(interval: float) -> int:
    """Returns a difference from which on the larger value and the next one surround a sum."""
    return math.ceil(-math.log(math.expm1(interval)) / interval) + 1


def _sum(large: Sum, small: Sum) -> Sum:
    """Returns the sum of two independent ones.

    Args:
      large: One of them, of the finer grid.
      small: The other; it may be the same.
    """
    stride = round(small.interval / large.interval)
    interval, size = large.interval, len(large.mass)
    places = stride * (small.first + np.arange(len(small.mass))) - large.first
    near = min(_near(interval), max(size, int(places[-1]) + 1) - min(0, int(places[0])))
    place, down, up = _offsets(interval, near)
    # Places are counted from the first one of `large`. What is below it is spread to it and 0.
    result = np.zeros(max(size, int(places[-1]) + 1) + int(place[0]) + 2)
    if small is large:
        for d in range(near):
            both = large.mass[: size - d] * large.mass[d:] * (1.0 if d == 0 else 2.0)
            start = d + place[d]
            result[start : start + size - d] += down[d] * both
            result[start + 1 : start + 1 + size - d] += up[d] * both
    else:
        for a, mass in zip(places.tolist(), small.mass.tolist(), strict=True):
            first, last = max(0, a - near + 1), min(size, a + near)
            if first >= last:
                continue
            values = np.arange(first, last)
            both, d = mass * large.mass[first:last], np.abs(values - a)
            target = np.maximum(values, a) + place[d]
            start = int(target[0])  # Sums rise with the value.
            for moved, share in ((0, down), (1, up)):
                sums = np.bincount(target - start, share[d] * both)
                result[start + moved : start + moved + len(sums)] += sums
    _add_far(result, large.mass, np.arange(size), small.mass, places, interval, near)
    _add_far(result, small.mass, places, large.mass, np.arange(size), interval, near)
    inside = places >= 0
    outside = float(small.mass[~inside].sum())
    result[:size] += small.zero * large.mass
    result[places[inside]] += large.zero * small.mass[inside]
    result[0] += large.zero * outside
    result *= 1 + _EPS * (8 * (size + len(places)) + 64)
    infinite = large.infinite * (float(small.mass.sum()) + small.zero)
    infinite += small.infinite * (float(large.mass.sum()) + large.zero)
    return Sum(
        interval,
        large.first,
        result,
        large.zero * (small.zero + outside) * (1 + 1e-9) + _VANISHED**4,
        infinite * (1 + 1e-9) + _VANISHED,
        large.count + small.count,
    )


def _add_far(
    result: np.ndarray,
    large: np.ndarray,
    large_places: np.ndarray,
    small: np.ndarray,
    small_places: np.ndarray,
    interval: float,
    near: int,
) -> None:
    """Adds the sums of values that are at least `near` places apart, the larger one first."""
    ends = np.searchsorted(small_places, large_places - near, side="right")
    some = (ends > 0) & (large_places >= 0)
    if not some.any():
        return
    large, places, ends = large[some], large_places[some], ends[some] - 1
    middle = int(small_places[-1])  # Every place that counts is below; nothing overflows.
    mean = np.cumsum(small * np.exp(interval * (small_places - middle)))[ends]
    ups = mean * np.exp(interval * (middle - places)) / math.expm1(interval)
    count = np.cumsum(small)[ends]
    ups = np.minimum(ups, count)
    span = max(np.abs(small_places - middle).max(), np.abs(middle - places).max())
    error = 4 * _EPS * (len(small) + 64 + interval * span) * count
    result[places] += large * (count - ups + error)
    result[places + 1] += large * (ups + error)


def _trimmed(total: Sum) -> Sum:
    """Spreads the far tails to 0 and to infinity."""
    mass = total.mass
    below = np.cumsum(mass)
    first = int(np.searchsorted(below, _LOW_TAIL * total.count**2))
    values = mass * np.exp(np.minimum(total.logs, 700.0)) * total.count
    beyond = np.cumsum(values[::-1])[::-1]
    last = len(mass) - 1 - int(np.searchsorted(beyond[::-1], _HIGH_TAIL * total.count))
    last = max(last, first)
    kept = mass[first : last + 1].copy()
    low, high = ((1 + 1e-9) * float(m.sum()) for m in (mass[:first], mass[last + 1 :]))
    kept[0] += low
    kept[-1] += high
    moved = float(values[last + 1 :].sum()) * (1 + 1e-9)
    return dataclasses.replace(
        total,
        first=total.first + first,
        mass=kept,
        zero=total.zero + low,
        infinite=total.infinite + moved,
    )


@functools.lru_cache(maxsize=64)
def ratio_below(noise_multiplier: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a distribution that is smaller in convex order than R, but for lost masses.

    Outcomes of nearly equal values are taken together: their mean is smaller in convex order. The
    relative errors of masses and values are below (t + 10) 1e-11: 1e-12 for each sum of up to
    10,000 numbers, which add up.

    Args:
      noise_multiplier: sigma, from 0.1 on.
      steps: t, the number of steps of an epoch.

    Returns:
      Values of R, and their masses [values].
    """
    one = total = _merged(*_cells(noise_multiplier), noise_multiplier, 1)
    count = 1
    for bit in bin(steps)[3:]:
        for part in (total, one)[: 1 + int(bit)]:
            count += count if part is total else 1
            values = np.add.outer(total[0], part[0]).ravel()
            masses = np.multiply.outer(total[1], part[1]).ravel()
            total = _merged(values, masses, noise_multiplier, count)
    return total[0] / steps, total[1]


def _cells(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means of cells of Y_1, and their masses."""
    edges = np.linspace(-_WITHIN, _WITHIN + 1 / sigma, 1 + math.ceil(100 * (_WITHIN + 1 / sigma)))
    without, with_it = (
        np.where(x[:-1] > 0, special.ndtr(-x[:-1]) - special.ndtr(-x[1:]), np.diff(special.ndtr(x)))
        for x in (edges, edges - 1 / sigma)
    )
    return with_it / without, without


def _merged(
    values: np.ndarray, masses: np.ndarray, sigma: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Takes the outcomes in each cell of a grid together, and leaves out unlikely ones."""
    places = np.floor(np.log(values) / (_COARSER * _interval(sigma, count))).astype(np.int64)
    places -= places.min()
    mass, mean = np.bincount(places, masses), np.bincount(places, masses * values)
    keep = (mass > _UNLIKELY) | (mean > _UNLIKELY * count)
    return mean[keep] / mass[keep], mass[keep]
