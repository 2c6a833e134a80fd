"""Epsilon of composed releases, from above and from below, with certified errors.

The privacy losses of all releases are added up on a grid (`tfdp.accounting.loss_grid`,
`tfdp.accounting.loss_sum`). Where the grid is not precise because few large losses decide on delta,
those are taken apart (`tfdp.accounting.rare_losses`). Every bound holds; the best one counts.
"""

import math
from collections.abc import Sequence

import numpy as np

from tfdp.accounting.dominating_pairs import Pair
from tfdp.accounting.loss_sum import Directions, LossSum
from tfdp.accounting.rare_losses import RareLosses

# Epsilon counts as infinite at a smaller delta.
_LEAST_DELTA = 1e-250
# Delta at a larger epsilon counts as that at this epsilon.
_MOST_EPSILON = 1e4
# If the errors are a larger share of delta, and move an upper bound on epsilon by a larger share of
# it, large losses are handled apart.
_LARGE_ERROR, _LARGE_SHIFT = 1e-4, 3e-5
# Largest number of guesses at epsilon or delta.
_MOST_GUESSES = 7
# Relative distance of epsilons for which one sum of losses is precise.
_SAME = 0.2

Parts = Sequence[tuple[Pair, int]]


def epsilon(parts: Parts, delta: float) -> float:
    """Returns an upper bound on the smallest epsilon of a composition at `delta`.

    Args:
      parts: The dominating pairs of the releases, and how often each is made.
      delta: The delta of the guarantee, in (0, 1).

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
      1.8282
    """
    delta = max(delta, _LEAST_DELTA)
    with _overflows_allowed():
        return max((_least_epsilon(d, delta) for d in _directions(parts, delta)), default=0.0)


def _epsilon(directions: Directions, delta: float) -> float:
    bound, near = math.inf, None
    for _ in range(_MOST_GUESSES):
        whole = LossSum(directions, False, delta, near)
        bound = min(bound, whole.epsilon(delta))
        # The Renyi bound that the tilt was chosen by is much too large if few large losses decide.
        if bound >= 0.9 * whole.near or bound == 0:
            break
        near = bound
    near = min(bound, whole.near, _MOST_EPSILON)
    if near > 0 and _errors_matter(whole, delta, bound):
        for _ in range(_MOST_GUESSES):
            apart = RareLosses(directions, False, delta, near).epsilon(delta)
            bound = min(bound, apart)
            if bound >= 0.9 * near or bound == 0:
                break
            near = bound
    return bound


def _least_epsilon(directions: Directions, delta: float) -> float:
    near = min(_epsilon(directions, delta), _MOST_EPSILON)
    whole = LossSum(directions, True, delta, near)
    bound = whole.epsilon(delta)
    if whole.error_share > _LARGE_ERROR and near > 0:
        bound = max(bound, RareLosses(directions, True, delta, near).epsilon(delta))
    return bound


def _errors_matter(whole: LossSum, delta: float, bound: float) -> bool:
    """Returns whether the errors of a sum move its epsilon at `delta`, `bound`, by too much."""
    share = whole.error_share
    if not _LARGE_ERROR < share < 0.5:
        return share > _LARGE_ERROR
    # At a delta that is larger by the errors, epsilon is about that of `delta` without them.
    return not bound - whole.epsilon((1 + share) * delta) <= _LARGE_SHIFT * bound


def delta(parts: Parts, epsilon: float) -> float:
    """Returns an upper bound on the smallest delta of a composition at `epsilon`: see `epsilon`."""
    epsilon = min(epsilon, _MOST_EPSILON)
    with _overflows_allowed():
        return max((_delta(d, epsilon)[0] for d in _directions(parts)), default=0.0)


def _delta(
    directions: Directions, epsilon: float, guess: float = 0.1
) -> tuple[float, LossSum | RareLosses]:
    """Returns delta, and the sum that it is the delta of."""
    best: LossSum | RareLosses
    bound = 1.0
    for _ in range(_MOST_GUESSES):
        best = whole = LossSum(directions, False, guess, epsilon)
        bound = min(bound, whole.delta(epsilon))
        if bound > guess / 10:
            break
        guess = max(bound, guess**2, _LEAST_DELTA)
    if whole.error_share > _LARGE_ERROR:
        for _ in range(_MOST_GUESSES):
            guess = bound
            if guess < _LEAST_DELTA:
                break
            best = RareLosses(directions, False, guess, epsilon)
            bound = min(bound, best.delta(epsilon))
            if bound > guess / 2:
                break
    return bound, best


class DeltaProfile:
    """Upper bounds on delta at several epsilons: sums of losses are used again.

    Every sum bounds delta at all epsilons, and is precise near the one that it was made for.

    Args:
      parts: See `epsilon`.
    """

    def __init__(self, parts: Parts):
        self._known: list[tuple[Directions, list[tuple[float, LossSum | RareLosses]]]]
        self._known = [(directions, []) for directions in _directions(parts)]

    def __call__(self, epsilon: float) -> float:
        """Returns an upper bound on the smallest delta of the composition at `epsilon`."""
        epsilon = min(epsilon, _MOST_EPSILON)
        with _overflows_allowed():
            return max((self._delta(*known, epsilon) for known in self._known), default=0.0)

    def _delta(
        self,
        directions: Directions,
        sums: list[tuple[float, LossSum | RareLosses]],
        epsilon: float,
    ) -> float:
        bound = min((one.delta(epsilon) for _, one in sums), default=1.0)
        if bound < _LEAST_DELTA or any(
            abs(epsilon - made_for) <= _SAME * made_for for made_for, _ in sums
        ):
            return bound
        delta, best = _delta(directions, epsilon, min(bound, 0.1))
        sums.append((epsilon, best))
        return min(bound, delta)


def _overflows_allowed() -> np.errstate:
    """Far from epsilon exponentials overflow or vanish; the code says what counts then."""
    return np.errstate(all="ignore")


def _directions(parts: Parts, delta: float = 0.0) -> list[Directions]:
    """The two directions of a composition; none if nothing is released, or epsilon is 0 anyway."""
    if not parts or delta >= 1:
        return []
    return [[(pair.add, n) for pair, n in parts], [(pair.remove, n) for pair, n in parts]]
