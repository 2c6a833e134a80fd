"""dp_accounting's accountants for zero-out, with bounds that hold numerically.

dp_accounting knows the pairs of zero-out under the name ADD_OR_REMOVE_ONE, and prices no sampled
mechanism under REPLACE_SPECIAL: with constant parameters the pairs of both relations are the same
(`tfdp.accounting.relation`).
"""

import functools
import math
from collections.abc import Callable, Sequence

import attr
import dp_accounting
import numpy as np

from tfdp.accounting import (
    composition,
    dominating_pairs,
    event_codec,
    mechanisms,
    sampled_gaussian,
)
from tfdp.accounting.observability import CONDITIONAL, check_observability
from tfdp.base import validation

_ADD_OR_REMOVE_ONE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

# The best order is near 1 + 2 log(1/delta) / epsilon. Steps of 10% in (order - 1) cost at most
# 0.16% of epsilon against a grid many times as dense (measured, epsilon from 0.06 to 500).
# From 10 on orders are integers, whose series is finite. Others have six digits, so that they are
# the same on every machine: a filter resumes with the order that it began with.
DEFAULT_RDP_ORDERS: tuple[float, ...] = tuple(
    sorted({round(x, 5 if x < 10 else 0) for x in (1 + 0.02 * 1.1**i for i in range(114))})
)

# log A_alpha of a step is a sum of cancelling terms near 1 and cut at e^-30: with tiny sampling
# probabilities dp_accounting's comes out zero or negative. This is more than its absolute error.
_RDP_ROUNDING = 1e-12

# The quadrature's grid grows as one over the square of the noise.
_LEAST_NOISE_FOR_QUADRATURE = 0.01

# Less noise counts as none: one step has an epsilon of 5 * 10^7. More counts as this much.
_LEAST_NOISE, _MOST_NOISE = 1e-4, 1e12
# More releases of one event count as if they hid nothing.
_MOST_RELEASES = 10**15
# The grid of losses of more sampled releases does not fit in memory, or takes minutes.
_MOST_SAMPLED_RELEASES = 10**9


class RdpAccountant(dp_accounting.rdp.RdpAccountant):
    """Renyi-DP accountant for zero-out.

    Guarantees: epsilon is an upper bound for any orders. The cost of a Poisson-sampled Gaussian is
    computed once per process and parameters, and cached.

    Args:
      orders: Renyi orders, each > 1. Default: `DEFAULT_RDP_ORDERS`, 1.02 to about 1000.
      selective_release: The observable part of an event that makes attempts, such as
        SelectiveReleaseDpEvent. "conditional": accepted updates only. "per_attempt": every
        attempt; one event is then one attempt.
      neighboring_relation: Only ADD_OR_REMOVE_ONE, dp_accounting's name of the pairs of zero-out.

    Raises:
      ValueError: An argument is out of its range, or (in `compose`) a parameter of the event is.

    Source: Mironov, Talwar, Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian
    Mechanism"; conversion by Canonne, Kamath, Steinke 2020, Proposition 12.

    Example:
      >>> import dp_accounting
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> round(RdpAccountant().compose(step, 1000).get_epsilon(1e-5), 2)
      2.1
    """

    _rdp: np.ndarray

    def __init__(
        self,
        orders: Sequence[float] | None = None,
        *,
        selective_release: str = CONDITIONAL,
        neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE_ONE,
    ):
        _check_relation(neighboring_relation)
        requirement = "a non-empty sequence of finite numbers > 1"
        given = DEFAULT_RDP_ORDERS if orders is None else orders
        values = validation.elements("orders", given, requirement)
        if not (values and all(validation.is_number(o) and 1 < o < math.inf for o in values)):
            raise validation.error("orders", requirement, orders)
        super().__init__(tuple(map(float, values)), neighboring_relation)
        self._observability = check_observability(selective_release)

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> "RdpAccountant":
        """Adds `count` releases of `event`, and returns this accountant."""
        super().compose(_checked(event), validation.positive_integer("count", count))
        return self

    def get_epsilon(self, target_delta: float) -> float:
        """Returns an upper bound on epsilon at `target_delta`."""
        return super().get_epsilon(_probability("target_delta", target_delta))

    def get_delta(self, target_epsilon: float) -> float:
        """Returns an upper bound on delta at `target_epsilon` >= 0."""
        return super().get_delta(_not_negative("target_epsilon", target_epsilon))

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        event, count = _priceable(event, count)
        if isinstance(event, dp_accounting.LaplaceDpEvent) and event.noise_multiplier == 0:
            event = dp_accounting.NonPrivateDpEvent()  # dp_accounting divides by zero.
        mechanism = mechanisms.of(event)
        if (
            mechanism is None
            and do_compose
            and isinstance(event, dp_accounting.PoissonSampledDpEvent)
        ):
            self._rdp = self._rdp + count * sampled_rdp(
                event_codec.freeze(event), tuple(self._orders)
            )
            return None
        if mechanism is None:
            return super()._maybe_compose(event, count, do_compose)
        problem = _unsupported_part(mechanism, event)
        if problem is None and do_compose:
            event = event_codec.freeze(event)
            rdp = mechanism.rdp(event, self._observability, tuple(self._orders))
            self._rdp = self._rdp + count * rdp
        return problem


class PldAccountant(dp_accounting.PrivacyAccountant):
    """Accountant for zero-out by privacy-loss distributions.

    Supports (Poisson-sampled) Gaussian and Laplace mechanisms, selective release, and compositions
    of these. Tighter than `RdpAccountant`, but not always for many accepted updates of a
    SelectiveReleaseDpEvent under "conditional" (`bounds.tightest_epsilon` asks both).

    Guarantees: epsilon is an upper bound that includes all errors of discretization and rounding.
    `get_least_epsilon` is a lower bound.

    Args:
      selective_release: See `RdpAccountant`.
      neighboring_relation: Only ADD_OR_REMOVE_ONE, dp_accounting's name of the pairs of zero-out.

    Raises:
      ValueError: An argument is out of its range, or (in `compose`) a parameter of the event is.

    Source: `tfdp.accounting.composition`.

    Example:
      >>> import dp_accounting
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> accountant = PldAccountant().compose(step, 1000)
      >>> round(accountant.get_epsilon(1e-5), 4), round(accountant.get_least_epsilon(1e-5), 4)
      (1.8283, 1.8282)
    """

    def __init__(
        self,
        *,
        selective_release: str = CONDITIONAL,
        neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE_ONE,
    ):
        _check_relation(neighboring_relation)
        super().__init__(neighboring_relation)
        self._observability = check_observability(selective_release)
        self._contains_non_dp_event = False
        self._counts: dict[dp_accounting.DpEvent, int] = {}
        # T Gaussians are one with sqrt(T) times less noise: the sum of 1 / noise^2.
        self._precision = 0.0

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> "PldAccountant":
        """Adds `count` releases of `event`, and returns this accountant."""
        super().compose(_checked(event), validation.positive_integer("count", count))
        return self

    def get_epsilon(self, target_delta: float) -> float:
        """Returns an upper bound on epsilon at `target_delta`."""
        target_delta = _probability("target_delta", target_delta)
        if self._contains_non_dp_event:
            return math.inf
        if self._ever_sampled() <= target_delta:
            return 0.0  # The total variation distance is at most that.
        return composition.epsilon(self._parts(_upper_pairs), target_delta)

    def get_least_epsilon(self, target_delta: float) -> float:
        """Returns a lower bound on epsilon at `target_delta`: some data sets cannot have less.

        For an accepted update, this is the epsilon without any selection; for an attempt
        ("per_attempt"), that of its test alone. For everything else it is within a thousandth of
        `get_epsilon` in most cases. The gap is larger where few, large losses decide: see
        docs/accounting.md.
        """
        target_delta = _probability("target_delta", target_delta)
        if self._contains_non_dp_event:
            return 0.0  # It may not be the example's own loss that is infinite.
        return composition.least_epsilon(self._parts(_attained_pairs), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Returns an upper bound on delta at `target_epsilon` >= 0."""
        target_epsilon = _not_negative("target_epsilon", target_epsilon)
        if self._contains_non_dp_event:
            return 1.0
        delta = composition.delta(self._parts(_upper_pairs), target_epsilon)
        return min(delta, self._ever_sampled())

    def get_profile(self, target_deltas: Sequence[float]) -> composition.PrivacyProfile | None:
        """Returns upper bounds on delta at many epsilons; None without a guarantee.

        Args:
          target_deltas: Deltas in (0, 1) near which the bounds are to be precise.

        Raises:
          ValueError: `target_deltas` is not a sequence of such numbers.
        """
        requirement = "a non-empty sequence of numbers in (0, 1)"
        targets = validation.elements("target_deltas", target_deltas, requirement)
        if not (targets and all(validation.is_number(t) and 0 < t < 1 for t in targets)):
            raise validation.error("target_deltas", requirement, target_deltas)
        if self._contains_non_dp_event:
            return None
        parts = self._parts(_upper_pairs)
        if not parts:
            return composition.PrivacyProfile(*np.zeros([3, 1]))
        found = composition.profile(parts, targets)
        most = self._ever_sampled()
        return composition.PrivacyProfile(
            found.epsilons, np.minimum(found.add, most), np.minimum(found.remove, most)
        )

    def delta_profile(self) -> Callable[[float], float]:
        """Returns `get_delta` for many epsilons >= 0, of which most are near each other."""
        if self._contains_non_dp_event:
            return lambda _: 1.0
        profile, most = composition.DeltaProfile(self._parts(_upper_pairs)), self._ever_sampled()
        return lambda epsilon: min(profile(epsilon), most)

    def _ever_sampled(self) -> float:
        """Returns the probability, at most, that an example is in one of the samples at all."""
        if self._precision > 0:
            return 1.0
        never = 0.0
        for event, count in self._counts.items():
            sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
            q = event.sampling_probability if sampled else 1.0
            never += count * math.log1p(-q) if q < 1 else -math.inf
        return -math.expm1((1 + 1e-9) * never)

    def _parts(
        self,
        pairs_of: Callable[[dp_accounting.DpEvent, str], Sequence[dominating_pairs.Pair] | None],
    ) -> list[tuple[dominating_pairs.Pair, int]]:
        parts = [
            (pair, count)
            for event, count in self._counts.items()
            for pair in pairs_of(event, self._observability) or ()
        ]
        if self._precision > 0:
            noise = 1 / math.sqrt(self._precision)
            parts.append((dominating_pairs.sampled_gaussian(1.0, noise), 1))
        return parts

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        event, count = _priceable(event, count)
        if isinstance(event, dp_accounting.ComposedDpEvent):
            problems = (self._maybe_compose(part, count, do_compose) for part in event.events)
            return next((problem for problem in problems if problem is not None), None)
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._maybe_compose(event.event, event.count * count, do_compose)
        mechanism = mechanisms.of(event)
        if isinstance(mechanism, mechanisms.PairedMechanism):
            problem = _unsupported_part(mechanism, event)
            if problem is None and do_compose:
                self._add(event, count)
            return problem
        whole, q = event, 1.0
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            whole, q = event.event, event.sampling_probability
        if isinstance(whole, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
            if do_compose and q > 0:
                self._add_noise(whole, q, count)
            return None
        if isinstance(event, dp_accounting.NoOpDpEvent):
            return None
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            self._contains_non_dp_event |= do_compose
            return None
        return dp_accounting.PrivacyAccountant.CompositionErrorDetails(
            event, "Only (Poisson-sampled) Gaussian and Laplace mechanisms are supported."
        )

    def _add_noise(self, whole: dp_accounting.DpEvent, q: float, count: int) -> None:
        if whole.noise_multiplier == 0:
            self._contains_non_dp_event = True
        elif math.isinf(whole.noise_multiplier):
            return  # Nothing can be seen.
        elif q == 1 and isinstance(whole, dp_accounting.GaussianDpEvent):
            self._precision += count / whole.noise_multiplier**2
        else:
            self._add(dp_accounting.PoissonSampledDpEvent(q, whole), count)

    def _add(self, event: dp_accounting.DpEvent, count: int) -> None:
        event = event_codec.freeze(event)
        count += self._counts.get(event, 0)
        if count > _MOST_SAMPLED_RELEASES or _upper_pairs(event, self._observability) is None:
            self._contains_non_dp_event = True
        else:
            self._counts[event] = count


def _checked(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    if not isinstance(event, dp_accounting.DpEvent):  # The error that dp_accounting's raise.
        raise TypeError(str(validation.error("event", "a dp_accounting.DpEvent", event)))
    event_codec.check_event(event)
    return event


def _probability(name: str, value: float) -> float:
    if not (validation.is_number(value) and 0 <= value <= 1):
        raise validation.error(name, "in [0, 1]", value)
    return float(value)


def _not_negative(name: str, value: float) -> float:
    if not (validation.is_number(value) and value >= 0):
        raise validation.error(name, "a number >= 0", value)
    return float(value)


def _check_relation(relation: dp_accounting.NeighboringRelation) -> None:
    if relation is not _ADD_OR_REMOVE_ONE:
        raise validation.error("neighboring_relation", "ADD_OR_REMOVE_ONE", relation)


def _priceable(event: dp_accounting.DpEvent, count: int) -> tuple[dp_accounting.DpEvent, int]:
    """Returns releases that cost no less, of noise and a number that floats can handle."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return event, 1
    if count > _MOST_RELEASES:
        return dp_accounting.NonPrivateDpEvent(), 1
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        if event.sampling_probability == 0:
            return dp_accounting.NoOpDpEvent(), 1
        noise, _ = _priceable(event.event, 1)
        if noise is not event.event:
            event = dp_accounting.PoissonSampledDpEvent(event.sampling_probability, noise)
    elif isinstance(event, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
        noise = event.noise_multiplier
        if 0 < noise < _LEAST_NOISE:
            event = attr.evolve(event, noise_multiplier=0.0)
        elif noise > _MOST_NOISE:
            event = attr.evolve(event, noise_multiplier=_MOST_NOISE)
    return event, count


def _unsupported_part(
    mechanism: mechanisms.Mechanism, event: dp_accounting.DpEvent
) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
    part = mechanism.unsupported_part(event)
    if part is None:
        return None
    return dp_accounting.PrivacyAccountant.CompositionErrorDetails(part, mechanism.parts)


@functools.lru_cache(maxsize=256)
def sampled_rdp(
    event: dp_accounting.PoissonSampledDpEvent, orders: tuple[float, ...]
) -> np.ndarray:
    """Computes the RDP of one release of a Poisson-sampled event, at `orders`."""
    whole, q = event.event, event.sampling_probability
    grid = np.array(orders)
    is_integer = grid == np.round(grid)
    by_sum = is_integer & (grid <= sampled_gaussian.LARGEST_INTEGER)
    by_quadrature = ~is_integer & (grid < 20)
    noise = whole.noise_multiplier if isinstance(whole, dp_accounting.GaussianDpEvent) else 0.0
    by_sum &= noise > 0 and 0 < q < 1
    by_quadrature &= noise >= _LEAST_NOISE_FOR_QUADRATURE and 0 < q < 1
    # dp_accounting computes value by value, fractional orders by a series that may take seconds.
    rdp, others = np.empty(len(grid)), ~(by_sum | by_quadrature)
    if others.any():
        accountant = dp_accounting.rdp.RdpAccountant(grid[others].tolist())
        rdp[others] = accountant.compose(event).rdp
    integers = tuple(int(order) for order in grid[by_sum])
    moments = sampled_gaussian.log_moments_at_integers(q, noise, integers)
    rdp[by_sum] = moments / (grid[by_sum] - 1)
    for i in np.flatnonzero(by_quadrature):
        rdp[i] = sampled_gaussian.log_moment(q, noise, grid[i]) / (grid[i] - 1)
    if 0 < q < 1:
        rdp = np.maximum(rdp, 0) + _RDP_ROUNDING / (grid - 1)
    rdp = np.where(np.isnan(rdp), np.inf, rdp)
    rdp.setflags(write=False)
    return rdp


@functools.lru_cache(maxsize=256)
def _upper_pairs(
    event: dp_accounting.DpEvent, observability: str
) -> tuple[dominating_pairs.Pair, ...] | None:
    """Returns pairs that dominate one composed release; None if all loss counts as infinite."""
    mechanism = mechanisms.of(event)
    if isinstance(mechanism, mechanisms.PairedMechanism):
        return mechanism.upper_pairs(event, observability)
    return (_sampled_pair(event),)


@functools.lru_cache(maxsize=256)
def _attained_pairs(
    event: dp_accounting.DpEvent, observability: str
) -> tuple[dominating_pairs.Pair, ...]:
    """Returns pairs that some data sets attain, for lower bounds. All loss is finite."""
    mechanism = mechanisms.of(event)
    if isinstance(mechanism, mechanisms.PairedMechanism):
        return mechanism.attained_pairs(event, observability)
    return (_sampled_pair(event),)


def _sampled_pair(event: dp_accounting.PoissonSampledDpEvent) -> dominating_pairs.Pair:
    make = (
        dominating_pairs.sampled_gaussian
        if isinstance(event.event, dp_accounting.GaussianDpEvent)
        else dominating_pairs.sampled_laplace
    )
    return make(event.sampling_probability, event.event.noise_multiplier)
