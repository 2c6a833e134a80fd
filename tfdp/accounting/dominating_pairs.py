"""Pairs of distributions that dominate one release, by direction.

A release is compared on neighboring data sets D (where an example contributes nothing) and D'
(where it is there). In each of the two directions it is dominated by a pair (upper, lower): no test
can tell D' from D better (direction "remove": upper is D') or D from D' (direction "add": upper is
D) than it can tell the pair. The privacy loss is the log of the ratio upper / lower, at an outcome
drawn from upper.

Composition (`tfdp.accounting.composition`) asks a pair for one thing: the probabilities, by both
distributions, of all losses between two values.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from scipy import special

_EPS = float(np.finfo(float).eps)


@dataclasses.dataclass(frozen=True)
class Masses:
    """Probabilities of losses up to the first knot, between two knots, and above the last.

    Attributes:
      upper: Probabilities by the upper distribution [knots + 1].
      lower: Probabilities by the lower distribution [knots + 1].
      upper_error: Absolute errors of `upper`, at most.
      lower_error: Absolute errors of `lower`, at most.
    """

    upper: np.ndarray
    lower: np.ndarray
    upper_error: np.ndarray
    lower_error: np.ndarray


class Direction(Protocol):
    """One direction of a pair, or a part of its outcomes."""

    def range(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for probabilities of `tail` on either side."""

    @property
    def loss_error(self) -> float:
        """Error of the losses, on average over many releases and apart from 1e-13 of their sum."""

    def masses(self, losses: np.ndarray) -> Masses:
        """Probabilities between increasing `losses`."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The dominating pairs of a release in both directions."""

    add: Direction
    remove: Direction


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Noise N(0, sigma^2) and the same shifted by 1."""

    sigma: float

    def tail(self, probability: float) -> float:
        """Returns the outcome that is exceeded with this probability."""
        return -self.sigma * float(special.ndtri(min(probability, 1.0)))

    def log_ratio(self, z: float) -> float:
        """Log density of the shifted noise over that of the noise."""
        return (z - 0.5) / self.sigma**2

    def outcome(self, log_ratio: np.ndarray) -> np.ndarray:
        """Returns the outcome with this log ratio."""
        return self.sigma**2 * log_ratio + 0.5

    def probabilities(self, edges: np.ndarray, shift: float) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities between increasing `edges`, infinite ends included, and their errors."""
        z = (np.concatenate([[-np.inf], edges, [np.inf]]) - shift) / self.sigma
        return _differences(z, special.ndtr, lambda x: (1 + x**2) * _EPS)


@dataclasses.dataclass(frozen=True)
class Laplace:
    """Laplace noise of the given scale and the same shifted by 1."""

    scale: float

    def tail(self, probability: float) -> float:
        """Returns the outcome that is exceeded with this probability."""
        return math.inf  # Losses are bounded.

    def log_ratio(self, z: float) -> float:
        """Log density of the shifted noise over that of the noise."""
        return (2 * min(max(z, 0.0), 1.0) - 1) / self.scale

    def outcome(self, log_ratio: np.ndarray) -> np.ndarray:
        """Returns the largest outcome with this log ratio; infinite where there is none."""
        z = (self.scale * log_ratio + 1) / 2
        return np.where(z < 0, -np.inf, np.where(z >= 1, np.inf, z))

    def probabilities(self, edges: np.ndarray, shift: float) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities between increasing `edges`, infinite ends included, and their errors."""
        x = (np.concatenate([[-np.inf], edges, [np.inf]]) - shift) / self.scale
        return _differences(x, _laplace_cdf, lambda x: (1 + np.abs(x)) * _EPS)


def _laplace_cdf(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, 0.5 * np.exp(-np.abs(x)), 1 - 0.5 * np.exp(-np.abs(x)))


def _differences(
    x: np.ndarray,
    cdf: Callable[[np.ndarray], np.ndarray],
    relative_error: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Differences of a symmetric distribution function and their errors.

    From the smaller tail on each side of 0, so that the errors are relative to that.
    """
    tails = cdf(-np.abs(x))
    right, across = x[:-1] > 0, (x[:-1] <= 0) & (x[1:] > 0)
    tail = np.where(right, tails[:-1], tails[1:])
    difference = np.where(right, tails[:-1] - tails[1:], tails[1:] - tails[:-1])
    difference = np.where(across, 1 - tails[:-1] - tails[1:], difference)
    with np.errstate(invalid="ignore"):  # The tail is 0 at infinite edges.
        error = relative_error(np.where(right, x[:-1], x[1:])) * tail
    error = np.where(across, _EPS, np.where(tail > 0, error, 0.0))
    return np.maximum(difference, 0.0), 4 * error


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One direction of noise on a Poisson sample: r = (1 - q) + q * (ratio of the noise).

    Attributes:
      noise: The noise, and the same shifted by the sensitivity.
      q: Sampling probability, in (0, 1].
      remove: Whether upper is the mixture (1 - q) noise + q shifted noise; else it is the noise.
    """

    noise: Gaussian | Laplace
    q: float
    remove: bool

    def range(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for probabilities of `tail` on either side."""
        plain = self.noise.tail(tail / 2)
        if not self.remove:
            return -self._mixed(plain), -self._mixed(-plain)
        # The mixture has at most q of its tail from the shifted noise.
        high = max(plain, 1 + self.noise.tail(tail / (2 * self.q)))
        return self._mixed(-plain), self._mixed(high)

    @property
    def loss_error(self) -> float:
        """Error of the losses, on average over many releases and apart from 1e-13 of their sum.

        A loss that is written as `losses` is off by at most 72 eps |loss| + 64 eps q, by the
        roundings of `_edges`. One sign's losses are at most -log(1 - q) (or, for a Gaussian with
        q near 1, that of 14 sigma), so that the sum of |loss| exceeds |sum of losses| by at most
        twice that, for each release.
        """
        return _EPS * (144 * min(map(abs, self.range(1e-44))) + 64 * self.q)

    def masses(self, losses: np.ndarray) -> Masses:
        """Probabilities between increasing `losses`."""
        edges = self._edges(losses if self.remove else -losses[::-1])
        plain, plain_error = self.noise.probabilities(edges, 0.0)
        shifted, shifted_error = self.noise.probabilities(edges, 1.0)
        mixed = (1 - self.q) * plain + self.q * shifted
        mixed_error = (1 - self.q) * plain_error + self.q * shifted_error + 4 * _EPS * mixed
        if self.remove:
            return Masses(mixed, plain, mixed_error, plain_error)
        return Masses(plain[::-1], mixed[::-1], plain_error[::-1], mixed_error[::-1])

    def _mixed(self, z: float) -> float:
        log_ratio = self.noise.log_ratio(z)
        if self.q == 1:
            return log_ratio
        return float(np.logaddexp(math.log1p(-self.q), math.log(self.q) + log_ratio))

    def _edges(self, log_ratios: np.ndarray) -> np.ndarray:
        """Returns the outcomes where the log of r is `log_ratios`; -infinity below log(1 - q)."""
        if self.q == 1:
            return self.noise.outcome(log_ratios)
        # r - (1 - q), without overflow, and without cancellation near log r = 0.
        x = np.minimum(log_ratios, 1.0)
        excess = np.where(x < -0.5, np.exp(x) - (1 - self.q), np.expm1(x) + self.q)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_excess = np.where(
                log_ratios > 1,
                log_ratios + np.log1p(-(1 - self.q) * np.exp(-np.abs(log_ratios))),
                np.log(np.maximum(excess, 0)),
            )
            return self.noise.outcome(log_excess - math.log(self.q))


def sampled_gaussian(q: float, sigma: float) -> Pair:
    """Returns the pair of a Gaussian mechanism on a Poisson sample.

    Along the gradient of the added example, and in units of the sensitivity, the release is
    N(0, sigma^2) without it, and (1 - q) N(0, sigma^2) + q N(1, sigma^2) with it.

    Args:
      q: Sampling probability, in (0, 1].
      sigma: Noise multiplier > 0.

    Source: Zhu, Dong, Wang 2022, "Optimal Accounting of Differential Privacy via Characteristic
    Function", Theorem 11.
    """
    noise = Gaussian(sigma)
    return Pair(Sampled(noise, q, False), Sampled(noise, q, True))


def sampled_laplace(q: float, scale: float) -> Pair:
    """Returns the pair of a Laplace mechanism on a Poisson sample.

    Args:
      q: Sampling probability, in (0, 1].
      scale: Scale of the noise over the sensitivity, > 0.
    """
    noise = Laplace(scale)
    return Pair(Sampled(noise, q, False), Sampled(noise, q, True))


@dataclasses.dataclass(frozen=True)
class Atoms:
    """One direction of a pair with finitely many outcomes.

    Attributes:
      upper: Probabilities by the upper distribution [outcomes], the infinite loss apart.
      lower: Probabilities by the lower distribution [outcomes], all positive.
      upper_error: Absolute errors of `upper`, at most.
      lower_error: Absolute errors of `lower`, at most.
      infinite: Probability of an infinite loss.
    """

    upper: np.ndarray
    lower: np.ndarray
    upper_error: np.ndarray
    lower_error: np.ndarray
    infinite: float = 0.0

    @property
    def losses(self) -> np.ndarray:
        """The privacy losses [outcomes]."""
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(self.upper, 0.0)) - np.log(self.lower)

    def range(self, tail: float) -> tuple[float, float]:
        """Returns the least and the largest finite loss."""
        losses = self.losses[self.upper > 0]
        return (float(losses.min()), float(losses.max())) if len(losses) else (0.0, 0.0)

    @property
    def loss_error(self) -> float:
        """Error of the losses, on average over many releases and apart from 1e-13 of their sum."""
        return 16 * _EPS * (1 + min(map(abs, self.range(0.0))))

    def masses(self, losses: np.ndarray) -> Masses:
        """Probabilities between increasing `losses`."""
        cells = np.searchsorted(losses, self.losses)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(cells, values, minlength=len(losses) + 1)

        upper, upper_error = total(self.upper), total(self.upper_error)
        upper[-1] += self.infinite
        return Masses(upper, total(self.lower), upper_error, total(self.lower_error))


def hull_atoms(points: Sequence[tuple[float, float, float, float]]) -> Atoms:
    """Returns the outcomes of a pair whose trade-off curve is the upper hull of points.

    Args:
      points: Level and power of tests, and 1 - level and 1 - power, which are known more precisely
        where they are small. The level and the power are the probabilities, by the lower and by the
        upper distribution, that a test says "upper". With (1, 1, 0, 0), and a power at level 0.
    """
    hull = upper_hull(points)
    steps = [(_step(p, q, 0), _step(p, q, 1)) for p, q in itertools.pairwise(hull)]
    lower, upper = (np.array([max(step[i], 0.0) for step in steps]) for i in (0, 1))
    sizes = [[min(q[i], p[i + 2]) for p, q in itertools.pairwise(hull)] for i in (0, 1)]
    lower_error, upper_error = (4 * _EPS * np.array(size) for size in sizes)
    keep = lower > 0
    return Atoms(
        upper[keep],
        lower[keep],
        upper_error[keep],
        lower_error[keep],
        infinite=float(hull[0][1] + upper[~keep].sum()),
    )


_Point = tuple[float, float, float, float]


def upper_hull(points: Sequence[_Point]) -> list[_Point]:
    """Returns the upper hull of points; of those with the same level, the one with most power."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda p: (p[0], -p[2], p[1], -p[3])):
        while hull and _step(hull[-1], point, 0) <= 0 <= _step(hull[-1], point, 1):
            hull.pop()
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _step(p: _Point, q: _Point, i: int) -> float:
    """Returns the difference of the levels (i = 0) or powers (i = 1) of two points, from p to q."""
    return q[i] - p[i] if max(q[i], p[i]) < 0.5 else p[i + 2] - q[i + 2]


def _is_below(point: _Point, left: _Point, right: _Point) -> bool:
    """Returns whether `point` is not above the segment from `left` to `right`."""
    rise = _step(left, point, 1) * _step(point, right, 0)
    return rise <= _step(point, right, 1) * _step(left, point, 0)
