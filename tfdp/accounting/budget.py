"""A privacy budget: how many releases it allows, and with how little noise."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dp_accounting
import scipy.optimize

from tfdp.accounting import bounds
from tfdp.accounting.bounds import Release
from tfdp.accounting.ledger import Ledgers, as_ledgers, compose_ledgers
from tfdp.accounting.observability import check_observability
from tfdp.accounting.rounding import rounded_up
from tfdp.accounting.sampling import MOST_EXAMPLES
from tfdp.base import validation

# Relative tolerance. The result exceeds the smallest noise multiplier by at most four times this;
# with rounding to six digits, by at most 0.1%.
_TOLERANCE = 2.4e-4
# With less noise, a single step costs an epsilon of thousands, which guarantees nothing.
_LEAST_NOISE = 0.01
_MOST_NOISE = 2.0**40
MOST_RELEASES = 10**8
# Numbers of steps are told apart that differ by one in so many.
_STEPS_TOLD_APART = 5_000
# Shares of the distance to the root that is expected: until it is passed, and then.
_OVERSHOOT, _BEYOND = 0.02, 0.005
# Epsilon of n releases is taken to grow like this power of n, where nothing is known, or at least.
_POWER, _LEAST_POWER = 0.5, 0.1
# Largest factor between numbers of releases that are asked for in a row.
_MOST_GROWTH = 16.0
# Costs below this share of the target count as it.
_LEAST_RATIO = 1e-6

_Cost = Callable[..., float]
_Releases = Callable[[float], Sequence[Release]]


@dataclasses.dataclass(frozen=True)
class Budget:
    """Privacy budget: what may be spent in all, and what has been spent.

    Attributes:
      target: Epsilon that may be spent.
      delta: The delta at which it is stated.
      past: Earlier releases.
      selective_release: The observable part of SelectiveReleaseDpEvents.
    """

    target: float
    delta: float
    past: tuple[Release, ...]
    selective_release: str

    def __post_init__(self) -> None:
        check_observability(self.selective_release)

    @classmethod
    def check(
        cls,
        target_epsilon: Any,
        delta: Any,
        prior: Ledgers | None,
        selective_release: str | None = None,
        dataset_size: int | None = None,
    ) -> "Budget":
        """Returns the budget that is left after `prior`.

        Args:
          target_epsilon: Epsilon that may be spent in all.
          delta: The delta at which it is stated. A warning if it is too large for the data.
          prior: Earlier releases.
          selective_release: The observable part of the selective releases to come, or None.
          dataset_size: Number of training examples, if known.

        Raises:
          ValueError: An argument is out of its range.
        """
        past = compose_ledgers(as_ledgers(prior), selective_release)
        if dataset_size is not None:
            dataset_size = validation.integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
        delta = validation.between_zero_and_one("delta", delta)
        warn_of_delta(delta, [*past.dataset_sizes, *([dataset_size] if dataset_size else [])])
        return cls(
            validation.positive("target_epsilon", target_epsilon),
            delta,
            past.releases,
            past.selective_release,
        )

    def epsilon(self, *new: Release) -> float:
        """Returns the smallest known epsilon of all that was released and `new`."""
        releases = (*self.past, *new)
        return bounds.tightest_epsilon(releases, self.delta, self.selective_release).epsilon

    def most(self, releases: Callable[[int], Sequence[Release]]) -> int:
        """Returns the largest n for which `releases(n)` are affordable, from 0 to 10^8.

        Above 10,000, up to 0.02% more may be affordable.

        Args:
          releases: The releases of n steps, n >= 1; they cost more for a larger n.
        """
        known = (self.delta, self.selective_release)

        def by_rdp(n: int) -> float:
            try:
                return bounds.rdp_epsilon((*self.past, *(releases(n) if n else [])), *known)
            except dp_accounting.UnsupportedEventError:
                return math.inf

        def tightest(n: int) -> float:
            return self.epsilon(*(releases(n) if n else []))

        if tightest(0) > self.target:
            return 0
        # RDP accounting takes as long for many steps as for a few.
        start = _most(by_rdp, self.target, 0, 1) if by_rdp(0) <= self.target else 0
        return _most(tightest, self.target, start, max(1, start // 8))

    def least_noise(self, releases: _Releases) -> float:
        """Returns the least noise multiplier for which `releases(noise multiplier)` are affordable.

        Raises:
          ValueError: The past has spent the budget, or no noise is enough.
        """
        spent = self.epsilon()
        if spent >= self.target:
            raise validation.error(
                "target_epsilon", f"above what `prior` has spent, {spent!r}", self.target
            )

        def by_pld(noise: float) -> float:
            return self._quick_epsilon(*releases(noise))

        if bounds.have_apart(releases(_MOST_NOISE)):
            noise = self._less_by_rdp(releases, math.inf)
            if by_pld(min((1 - 2 * _TOLERANCE) * noise, _MOST_NOISE)) <= self.target:
                noise = min(noise, self._least(by_pld, min(noise, _MOST_NOISE)))
        else:  # PLD accounting is quick, and in most cases the tightest.
            noise = self._less_by_rdp(releases, self._least(by_pld, 1.0))
        if noise == math.inf:
            raise self._never_enough(releases(_MOST_NOISE))
        return noise

    def _least(self, cost: Callable[[float], float], start: float) -> float:
        """Returns the least noise that is affordable, searched from `start`; infinite if none is.

        Args:
          cost: Epsilon of a noise multiplier, falling.
          start: The first noise multiplier.
        """
        low, high, factor = 0.0, start, 2.0
        while cost(high) > self.target:
            if high >= _MOST_NOISE:
                return math.inf
            # Epsilon is nearly affine in 1 / noise where that is small: any bracket will do.
            low, high, factor = high, min(factor * high, _MOST_NOISE), factor**2
        while low == 0.0:
            lower = max(high / 2, _LEAST_NOISE)
            if cost(lower) > self.target:
                low = lower
            elif lower == _LEAST_NOISE:
                return _LEAST_NOISE
            else:
                high = lower
        return self._root(cost, low, high)

    def _root(self, cost: Callable[[float], float], low: float, high: float) -> float:
        """Returns nearly the least noise that is affordable: `high` is, and `low` is not.

        It has few digits, so that it is the same on machines whose costs differ in the last bits.
        """

        def gap(noise: float) -> float:
            return min(cost(noise), 2 * self.target) - self.target  # Finite, for the root finder.

        # Evaluates at the noises themselves: at 1 / (1 / noise), rounding may change the sign.
        ends = {1 / high: gap(high), 1 / low: gap(low)}

        def of_inverse(y: float) -> float:
            return ends[y] if y in ends else gap(1 / y)

        inverse = scipy.optimize.brentq(of_inverse, *ends, xtol=1e-300, rtol=_TOLERANCE)
        noise = rounded_up(1 / inverse)
        while noise < high and gap(noise) > 0:
            noise = rounded_up((1 + _TOLERANCE) * noise)
        return min(noise, high)

    def _less_by_rdp(self, releases: _Releases, noise: float) -> float:
        """Returns `noise`, or less of it if that is affordable by RDP accounting.

        Every order gives a bound, and the best one is affordable with the least noise. Where a
        single order is quick, the noise that it needs is searched, then the best order there, in
        turn.

        Args:
          releases: The releases of a noise multiplier.
          noise: A noise multiplier that is affordable, or infinity.
        """
        known = (self.delta, self.selective_release)

        def cost(x: float) -> float:
            return bounds.rdp_epsilon((*self.past, *releases(x)), *known)

        def at(order: float) -> Callable[[float], float]:
            return lambda x: bounds.rdp_epsilon_at(order, (*self.past, *releases(x)), *known)

        start = min(noise, _MOST_NOISE)
        try:
            if cost(start) > self.target:
                return noise
        except dp_accounting.UnsupportedEventError:
            return noise
        if bounds.price_orders_together(releases(start)):
            return min(noise, self._least(cost, 1.0))
        noise = start
        while True:
            order = bounds.rdp_order((*self.past, *releases(noise)), *known)
            less = self._least(at(order), noise)
            if less >= (1 - _TOLERANCE) * noise or cost(less) > self.target:
                break
            noise = less
        if noise == _LEAST_NOISE or cost((1 - 2 * _TOLERANCE) * noise) > self.target:
            return noise
        # If epsilon is 0, any order may be called the best.
        return min(noise, self._least(cost, 1.0))

    def _quick_epsilon(self, *new: Release) -> float:
        try:
            return bounds.pld_epsilon((*self.past, *new), self.delta, self.selective_release)
        except dp_accounting.UnsupportedEventError:  # An event of the past that only RDP supports.
            return self.epsilon(*new)

    def _never_enough(self, releases: Sequence[Release]) -> ValueError:
        return validation.error(
            "target_epsilon",
            f"larger: no noise is enough for {sum(r.count for r in releases)} steps with "
            f"truncation probability {releases[0].truncation_probability!r}",
            self.target,
        )


def default_delta(dataset_size: int) -> float:
    """Returns the delta of a guarantee for N examples: N^-1.1, rounded down to two digits.

    It is below 1 / N, so that publishing one example in full is not within the guarantee.

    Args:
      dataset_size: Number of examples, N.

    Example:
      >>> default_delta(60000)
      5.5e-06
    """
    delta = max(2, dataset_size) ** -1.1
    digit = 10.0 ** (math.floor(math.log10(delta)) - 1)
    return float(f"{math.floor(delta / digit) * digit:.1e}")


def too_large(delta: float, dataset_sizes: Iterable[int]) -> str | None:
    """Returns a warning if `delta` is not below one over the number of examples, else None."""
    size = max(dataset_sizes, default=0)
    if not size or delta < 1 / size:
        return None
    return (
        f"delta = {delta!r} is not below 1 / {size}. A mechanism that publishes one example at "
        "random may satisfy such a guarantee: choose a smaller delta."
    )


def warn_of_delta(delta: float, dataset_sizes: Iterable[int]) -> None:
    """Warns if `delta` is not below one over the number of examples."""
    message = too_large(delta, dataset_sizes)
    if message is not None:
        warnings.warn(message, stacklevel=4)


def sampling_probability(
    probability: float | None,
    dataset_size: int | None,
    batch_size: float | None,
    names: tuple[str, str] = ("sampling_probability", "expected_batch_size"),
) -> float:
    """Returns the sampling probability q, from one of its two descriptions, checked.

    Args:
      probability: q itself; or
      dataset_size: number of training examples, N, and
      batch_size: expected number of examples in a batch, B <= N: q = B / N.
      names: The user's names of `probability` and `batch_size`.
    """
    if probability is not None:
        if dataset_size is not None or batch_size is not None:
            raise validation.error(
                names[0], f"None when `dataset_size` or `{names[1]}` is given", probability
            )
        return validation.positive_probability(names[0], probability)
    if dataset_size is None or batch_size is None:
        raise ValueError(
            f"Argument `{names[0]}`, or both `dataset_size` and `{names[1]}`, must be given. "
            f"Received: {names[0]}=None, {dataset_size=}, {names[1]}={batch_size!r}."
        )
    size = validation.integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
    batch = validation.positive(names[1], batch_size)
    if batch > size:
        raise validation.error(names[1], f"at most dataset_size={size}", batch_size)
    return batch / size


def _most(cost: Callable[[int], float], target: float, low: int, stride: int) -> int:
    """Returns an n >= `low`, which is affordable, with a few more not; at most 10^8.

    Epsilon is nearly a power of n, locally: guesses are interpolations of its logarithm over that
    of n. Whatever is guessed, what is returned was found affordable, or is `low`.

    Args:
      cost: Epsilon of a number of releases.
      target: The largest that is affordable.
      low: A number that is affordable.
      stride: The first distance to search.
    """

    def excess(n: int) -> float:
        return math.log(max(_LEAST_RATIO, min(cost(n) / target, 2.0)))  # Finite.

    at_low, high, missed = math.nan, low, 0
    while True:
        if high >= MOST_RELEASES:
            return MOST_RELEASES
        high = min(high + stride, MOST_RELEASES)
        at_high = excess(high)
        if at_high > 0:
            break
        power = _power(low, at_low, high, at_high)
        growth = min(math.exp(-at_high / power), _MOST_GROWTH)
        missed += growth < _MOST_GROWTH
        # Where a large prior costs as much as many releases, no power tells much.
        least = 1 if missed < 3 else 4 * stride
        stride = max(math.ceil((1 + _OVERSHOOT) * (growth - 1) * high), least)
        low, at_low = high, at_high
    # Guesses beyond the root that is expected, on the side of the end that is farther from it, so
    # that both ends come near. Halves the interval where that does not.
    is_slow = False
    while high - low > (tolerance := max(1, low // _STEPS_TOLD_APART)):
        width, power = high - low, _power(low, at_low, high, at_high)
        root = max(low, high * math.exp(-at_high / power))
        beyond = max(_BEYOND * min(root - low, high - root), 0.4 * (tolerance - 1))
        guess = math.ceil(root + beyond) if root - low < high - root else math.floor(root - beyond)
        middle = (low + high) // 2 if is_slow else min(max(guess, low + 1), high - 1)
        at_middle = excess(middle)
        if at_middle > 0:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
        is_slow = not is_slow and high - low > width / 2
    return low


def _power(low: int, at_low: float, high: int, at_high: float) -> float:
    """Returns the power of n that epsilon is between two numbers of releases, nearly."""
    if not low or math.isnan(at_low):
        return _POWER
    return max((at_high - at_low) / math.log(high / low), _LEAST_POWER)
