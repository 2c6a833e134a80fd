"""Epsilon where few large privacy losses decide: those are taken apart from the others.

With probability q a step has a loss that may be huge, where noise is small. If delta is about the
probability of such a loss, no tilt makes the losses near epsilon the likely ones without losing the
many small ones, which add up to nearly nothing, in the errors.

Let the outcomes of a step above a loss b, the rare ones, be so few that all steps together are
expected to have `mean` of them. Delta is a sum over the numbers of rare outcomes in the steps:

- None: the sum of the other losses, under a tilt of its own.
- One, in one of n steps: an integral over its loss x of the delta of all other steps at
  epsilon - x. That delta is known at all epsilons from a second sum, with a tilt at which its
  typical values are likely. It is convex in e^epsilon, so that moving the rare losses to knots
  (`tfdp.accounting.loss_grid`) bounds the integral as well.
- Two or more: with probability at most mean^2 / 2, which is added, or left out of a lower bound.

Outcomes that are left out make the others a pair of measures below probability. All bounds on grids
and their sums hold for such pairs: hockey-stick divergences at all e^epsilon >= 0 decide on all
convex functions of the ratio that vanish at infinity, and so on those of the composition.

**The other steps** are one less of the kind of the rare outcome. Let D be the delta of all steps
without their rare outcomes, and let one step have probability a of being no rare one by the upper
distribution, and b <= 1 by the lower. By Jensen's inequality the delta without that step is, at
e^epsilon, at most 1 / a times D at e^epsilon a / b. The lower bound uses one step less of each
kind, with rare outcomes that cannot be told from the largest others: they raise delta by at most
`mean`.
"""

import dataclasses
import math

import numpy as np

from tfdp.accounting.dominating_pairs import Direction, Masses
from tfdp.accounting.loss_grid import HUGE_LOSS, discretize
from tfdp.accounting.loss_sum import Directions, LossSum

# Expected rare losses, over delta; and their square, over delta: pairs of them.
_RARE, _PAIRS = 100.0, 2e-4
# Share of delta for rare losses that are too large for the grid.
_LEFT_OUT = 1e-5
_KNOTS = 2000
_BISECTIONS = 60
# Relative, of a sum over the knots of products.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class _Changed:
    """A direction that is changed above a loss.

    Attributes:
      whole: The direction.
      bound: The loss.
    """

    whole: Direction
    bound: float

    @property
    def loss_error(self) -> float:
        """Error of the losses, on average over many releases and apart from 1e-13 of their sum."""
        return self.whole.loss_error

    def range(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for probabilities of `tail` on either side."""
        low, high = self.whole.range(tail)
        return min(low, self.bound), min(high, self.bound)

    def masses(self, losses: np.ndarray) -> Masses:
        """Probabilities between increasing `losses`."""
        place = int(np.searchsorted(losses, self.bound))
        whole = self.whole.masses(np.insert(losses, place, self.bound))
        return Masses(
            self._changed(whole.upper, place),
            self._changed(whole.lower, place),
            self._changed(whole.upper_error, place),
            self._changed(whole.lower_error, place),
        )

    def _changed(self, values: np.ndarray, place: int) -> np.ndarray:
        """Changes values of cells, of which cell `place` ends at the bound [cells - 1]."""
        raise NotImplementedError


class Below(_Changed):
    """The outcomes with losses up to the bound."""

    def _changed(self, values: np.ndarray, place: int) -> np.ndarray:
        return np.where(np.arange(len(values) - 1) <= place, values[:-1], 0.0)


class Above(_Changed):
    """The outcomes with losses above the bound."""

    def range(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for probabilities of `tail` on either side."""
        return self.bound, max(self.whole.range(tail)[1], self.bound)

    def _changed(self, values: np.ndarray, place: int) -> np.ndarray:
        return np.where(np.arange(len(values) - 1) >= place, values[1:], 0.0)


class Capped(_Changed):
    """All outcomes; those with losses above the bound cannot be told from the largest others."""

    def _changed(self, values: np.ndarray, place: int) -> np.ndarray:
        result = np.where(np.arange(len(values) - 1) <= place, values[:-1], 0.0)
        result[place] += values[place + 1 :].sum()
        return result


class RareLosses:
    """The sum of the losses of all releases in one direction, rare large ones apart.

    Args:
      directions: The releases, and how often each is made.
      below: Whether bounds are lower ones.
      delta: About the delta at which the sum is to be precise.
      near: An upper bound on epsilon, near which the sum is to be precise.
    """

    def __init__(self, directions: Directions, below: bool, delta: float, near: float):
        self._sign, self._near = -1.0 if below else 1.0, near
        bound = _bound(directions, min(_RARE * delta, math.sqrt(_PAIRS * delta)))
        rare = [_probability_above(d, bound) for d, _ in directions]
        mean = math.fsum(n * p for (_, n), p in zip(directions, rare, strict=True))
        self._pairs = 0.0 if below else mean**2 / 2
        self._none: LossSum | None = None
        if mean > 0.5:  # Infinite losses are not rare: nothing is known.
            return
        bulk: Directions = [(Below(d, bound), n) for d, n in directions]
        self._none = LossSum(bulk, below, delta, near)
        self._change, self._too_much = 0.0, 0.0
        if below:
            bulk, self._too_much = [(Capped(d, bound), n) for d, n in directions], mean
        elif len(directions) > 1:
            self._change = -math.log1p(-max(rare))
        if below or len(directions) == 1:
            bulk = [(direction, n - 1) for direction, n in bulk if n > 1]
        self._rest = LossSum(bulk, below, delta, near, typical=True) if bulk else None
        tail = _LEFT_OUT * delta / math.fsum(n for _, n in directions)
        losses, masses = [], []
        for direction, count in directions:
            above = Above(direction, bound)
            high = above.range(tail)[1]
            piece = discretize(
                above, _knots(bound, min(high, HUGE_LOSS) if below else high, near), below
            )
            losses.append(piece.losses)
            masses.append(count * piece.mass)
            self._pairs += count * piece.infinite
        self._losses, self._masses = np.concatenate(losses), np.concatenate(masses)
        self._loss_error = math.fsum(n * d.loss_error for d, n in directions)

    def epsilon(self, delta: float) -> float:
        """A bound on the smallest epsilon at `delta`; infinite, or 0, where nothing is known."""
        low, high = 0.0, self._near
        if self.delta(low) <= delta:
            return 0.0
        if not self.delta(high) <= delta:
            return math.inf if self._sign > 0 else high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
        return high if self._sign > 0 else low

    def delta(self, epsilon: float) -> float:
        """Returns a bound on the smallest delta at `epsilon`."""
        if self._none is None:
            return max(self._sign, 0.0)
        epsilon -= self._sign * (1e-13 * abs(epsilon) + self._loss_error)
        none = float(self._none.deltas(np.array([epsilon]))[0])
        places = epsilon - self._losses - self._change
        if self._rest is None:
            deltas = np.maximum(-np.expm1(places), 0.0)
        else:
            deltas = self._rest.deltas(places)
        deltas = np.maximum(deltas - self._too_much, 0.0)
        one = float(self._masses @ deltas) * math.exp(self._change)
        return min((none + one + self._pairs) * (1 + self._sign * _ROUNDING), 1.0)


def _probability_above(direction: Direction, bound: float) -> float:
    """Returns the probability of losses above, at most."""
    masses = direction.masses(np.array([bound]))
    return min(float(masses.upper[1] + masses.upper_error[1]), 1.0)


def _bound(directions: Directions, mean: float) -> float:
    """Returns the loss above which about so many are expected."""
    low, high = 1e-12, max(1e-12, *(direction.range(1e-300)[1] for direction, _ in directions))
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        above = math.fsum(n * _probability_above(d, middle) for d, n in directions)
        low, high = (middle, high) if above > mean else (low, middle)
    return high


def _knots(bound: float, high: float, near: float) -> np.ndarray:
    """Knots from below `bound` to `high`, dense where epsilon may be."""
    first = max(near / _KNOTS, 1e-12)
    offsets = np.geomspace(first, max(high - bound, 2 * first), _KNOTS)
    return bound + np.concatenate([[-first, 0.0], offsets])
