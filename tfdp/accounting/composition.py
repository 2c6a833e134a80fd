"""Epsilon of composed releases, from above and from below, with certified errors.

The privacy losses of all releases are added up on a grid (`tfdp.accounting.loss_grid`,
`tfdp.accounting.loss_sum`). Where the grid is not precise because few large losses decide on delta,
those are taken apart (`tfdp.accounting.rare_losses`). Every bound holds; the best one counts.
"""

import dataclasses
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
# Large losses decide nothing if each is below this share of epsilon, unless errors are larger than
# this.
_SMALL_LOSS, _LARGE_ERROR_OF_SMALL = 1e-3, 5e-3
# Largest number of guesses at epsilon or delta.
_MOST_GUESSES = 7
# Epsilons of a privacy profile up to that of each target.
_POINTS = 128
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
    return _epsilon_and_sum(directions, delta)[0]


def _epsilon_and_sum(directions: Directions, delta: float) -> tuple[float, LossSum]:
    """Returns the bound, and the last sum of all losses, which is precise near it."""
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
    return bound, whole


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
    if whole.largest_loss < _SMALL_LOSS * bound and share < _LARGE_ERROR_OF_SMALL:
        return False
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


@dataclasses.dataclass(frozen=True)
class PrivacyProfile:
    """Upper bounds on delta at several epsilons, in each direction.

    Attributes:
      epsilons: Increasing, the first 0 [epsilons].
      add: Bounds where the upper distribution is that without the example [epsilons].
      remove: Bounds where the upper distribution is that with it [epsilons].
    """

    epsilons: np.ndarray
    add: np.ndarray
    remove: np.ndarray


def profile(parts: Parts, targets: Sequence[float]) -> PrivacyProfile:
    """Returns upper bounds on the delta of a composition at many epsilons, from 0 on.

    Args:
      parts: The dominating pairs of the releases, and how often each is made; not none.
      targets: Deltas near which the bounds are to be precise.

    Example:
      >>> from tfdp.accounting import dominating_pairs
      >>> found = profile([(dominating_pairs.sampled_gaussian(0.01, 1.0), 1000)], [0.01, 1e-5])
      >>> round(float(np.interp(1.8283, found.epsilons, found.remove)), 6)
      1e-05
    """
    with _overflows_allowed():
        both = [_known_deltas(directions, targets) for directions in _directions(parts)]
        ends = np.concatenate([points for points, _, _ in both])
        ends = np.unique(ends[ends <= _MOST_EPSILON])
        # Dense on the scale of each target.
        grid = np.concatenate([np.linspace(0.0, end, _POINTS) for end in ends])
        epsilons = np.unique(np.append(grid, ends))
        return PrivacyProfile(epsilons, *(_deltas(epsilons, *known) for known in both))


def _known_deltas(
    directions: Directions, targets: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, list[LossSum]]:
    """Returns epsilons, the delta at each, and sums of all losses."""
    found = [_epsilon_and_sum(directions, target) for target in targets]
    first, whole = found[0]
    # A sum that is precise near a positive epsilon is nearly so at 0.
    is_known = first > 0 and whole.error_share <= _LARGE_ERROR
    at_zero = 1.0 if is_known else _delta(directions, 0.0)[0]
    epsilons = np.array([0.0, *(epsilon for epsilon, _ in found)])
    return epsilons, np.array([at_zero, *targets]), [whole for _, whole in found]


def _deltas(
    epsilons: np.ndarray, known: np.ndarray, deltas: np.ndarray, sums: list[LossSum]
) -> np.ndarray:
    """Returns the least bound at each epsilon; delta falls with epsilon."""
    bounds = [whole.upper_deltas(epsilons) for whole in sums]
    bounds += [np.where(epsilons >= e, d, 1.0) for e, d in zip(known, deltas, strict=True)]
    return np.minimum.accumulate(np.min(bounds, axis=0))


def _overflows_allowed() -> np.errstate:
    """Far from epsilon exponentials overflow or vanish; the code says what counts then."""
    return np.errstate(all="ignore")


def _directions(parts: Parts, delta: float = 0.0) -> list[Directions]:
    """The two directions of a composition; none if nothing is released, or epsilon is 0 anyway."""
    if not parts or delta >= 1:
        return []
    return [[(pair.add, n) for pair, n in parts], [(pair.remove, n) for pair, n in parts]]
