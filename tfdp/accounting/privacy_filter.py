"""A privacy budget for mechanisms whose parameters depend on what was released before."""

import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import attr
import dp_accounting

from tfdp.accounting import event_codec
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS, RdpAccountant
from tfdp.accounting.bounded_range import bounded_range_rdp
from tfdp.accounting.bounds import EpsilonBound
from tfdp.accounting.ledger import PrivacyParametersChangedError
from tfdp.base import validation

# More releases than any training makes; floats know them exactly.
_MOST_COUNT = 2**53
_FORMAT_VERSION = 2
_KEYS = {"version", "target_epsilon", "delta", "order", "truncation_share", "releases"}
_ADAPTIVE = "RDP filter"
# The conversion to (epsilon, delta) is not stable numerically closer to 1.
_LEAST_ORDER = 1.01
_LARGEST_RANGE = 100.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedRangeDpEvent(dp_accounting.DpEvent):
    """A choice by the exponential mechanism, such as report-noisy-min with Gumbel noise.

    Attributes:
      range: Width eta, in [0, 100], of an interval that holds the logarithm of the ratio of an
        output's probabilities on two neighbors, for all outputs. Where these probabilities are
        proportional to exp(-loss_k / s), and an example adds something in [0, C] to each loss (a
        sum of clipped losses), eta = C / s; it is 2 C / s if it adds something in [-C, C].

    Raises:
      ValueError: `range` is not a number in [0, 100].

    Source: Dong, Durfee, Rogers 2020, "Optimal Differential Privacy Composition for Exponential
    Mechanisms".
    """

    range: float

    def __attrs_post_init__(self) -> None:
        if not (validation.is_number(self.range) and 0 <= self.range <= _LARGEST_RANGE):
            raise validation.error("range", f"a number in [0, {_LARGEST_RANGE:g}]", self.range)


class BudgetExceededError(ValueError):
    """Error of a release that the privacy budget does not allow."""


class _Spending(NamedTuple):
    """Releases of one kind that one filter object paid for.

    Attributes:
      spender: Number of the object, in one process, that paid for them. Its counts only grow, so
        that of two states of one spender the later contains the earlier. Nothing is known of how
        the releases of two spenders overlap: they are added up.
      event: Event of one release.
      truncation_probability: See `RdpFilter.spend`.
    """

    spender: str
    event: dp_accounting.DpEvent
    truncation_probability: float


class RdpFilter:
    """Budget for releases that may be chosen adaptively.

    An accountant takes the best Renyi order after the fact. This is proven if all parameters are
    fixed beforehand. If they depend on earlier releases (a noise level, the number of steps), the
    sums at different orders vary together with the outputs. A filter fixes one order alpha, and its
    budget B, before anything is released:

        B = target_epsilon - log(1 - 1/alpha) + log(delta alpha) / (alpha - 1)

    and lets events be spent only while the sum of their Renyi divergences at that order is within
    B. Then, on neighbors, and with releases Y_1, Y_2, ... of densities p_t and p'_t given the
    past, each conditional expectation of (p_t / p'_t)^alpha under p'_t is at most
    exp((alpha - 1) rho_t), with a rho_t that is a function of the past. So is, by induction from
    the last release on, the expectation of their product at most exp((alpha - 1) B), because
    the sum of rho_t never exceeds B.

    Guarantees: all releases that were paid for are together (target_epsilon, delta)-DP under
    zero-out, however the next release, or the end, is chosen from the outputs of earlier ones.

    Report the target, `guarantee`, as epsilon, also if less was spent, when the outputs decided the
    end of the training. `spent_epsilon()` shows progress and is not a guarantee: it depends on the
    outputs, and the theorem holds only for a bound that does not. (Both may be shown: what has been
    spent reveals nothing beyond the releases.)

    Copies, pickles, forked processes and what `from_dict` returns go on with what was spent so far,
    and count what they spend apart: `resume` adds up what several of them spent.

    For Gaussian mechanisms that are not sampled, rho(alpha) is alpha / (2 sigma^2), and this is the
    filter of zero-concentrated DP.

    Args:
      target_epsilon: Epsilon that may be spent in all.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      order: The Renyi order, above 1.01. None: the order of the accountant that allows most of
        `expected_event`. It must not depend on private data.
      expected_event: The release, or the composition of releases, to choose the order for. None:
        Gaussian mechanisms that are not sampled.
      truncation_share: Share of delta, in (0, 1), that is reserved for batches that do not fit into
        their fixed size: see `spend`. Epsilons above about 12 need a larger share.

    Raises:
      ValueError: An argument is out of its range, or no order leaves a budget.

    References:
      - Feldman, Zrnic, 2021, Individual Privacy Accounting via a Renyi Filter
        (https://arxiv.org/abs/2008.11193), Theorem 4.3.
      - Lecuyer, 2021, Practical Privacy Filters and Odometers with Renyi Differential Privacy and
        Applications to Differentially Private Deep Learning (https://arxiv.org/abs/2103.01379).
      - Canonne, Kamath, Steinke, 2020, The Discrete Gaussian for Differential Privacy
        (https://arxiv.org/abs/2004.00010), Proposition 12: the conversion.

    Example:
      >>> import dp_accounting
      >>> budget = RdpFilter(target_epsilon=1.0, delta=1e-5)
      >>> noise = 20.0
      >>> while budget.can_afford(dp_accounting.GaussianDpEvent(noise)):
      ...     budget.spend(dp_accounting.GaussianDpEvent(noise))
      ...     noise *= 0.9  # Or whatever what was released asks for.
      >>> budget.guarantee.epsilon, round(budget.spent_epsilon(), 2)
      (1.0, 0.99)
    """

    def __init__(
        self,
        target_epsilon: float,
        delta: float,
        order: float | None = None,
        *,
        expected_event: dp_accounting.DpEvent | None = None,
        truncation_share: float = 1e-3,
    ):
        self._target_epsilon = validation.positive("target_epsilon", target_epsilon)
        self._delta = validation.between_zero_and_one("delta", delta)
        self._truncation_share = validation.between_zero_and_one(
            "truncation_share", truncation_share
        )
        if order is None:
            if expected_event is None:
                expected_event = dp_accounting.GaussianDpEvent(1.0)
            if not isinstance(expected_event, dp_accounting.DpEvent):
                raise validation.error(
                    "expected_event", "a dp_accounting.DpEvent or None", expected_event
                )
            order = self._best_order(event_codec.freeze(expected_event))
        elif expected_event is not None:
            raise validation.error("expected_event", "None when `order` is given", expected_event)
        if not (validation.is_number(order) and _LEAST_ORDER < order < math.inf):
            raise validation.error("order", f"a finite number above {_LEAST_ORDER}", order)
        self._order = float(order)
        self._budget = self._budget_at(self._order)
        if self._budget <= 0:
            raise validation.error(
                "target_epsilon",
                f"larger: at order={self._order:g} and delta={self._delta:g} there is no budget",
                target_epsilon,
            )
        e = math.exp(-self._target_epsilon)
        # (1 + e^epsilon) times this is the share of delta.
        self._truncation_budget = self._truncation_share * self._delta * e / (1 + e)
        self._releases: dict[_Spending, int] = {}
        self._lock = threading.Lock()
        self._spender, self._process = _new_spender(), os.getpid()

    def _budget_at(self, order: float) -> float:
        delta = (1 - self._truncation_share) * self._delta
        return (
            self._target_epsilon
            - math.log1p(-1 / order)
            + (math.log(delta) + math.log(order)) / (order - 1)
        )

    def _best_order(self, event: dp_accounting.DpEvent) -> float:
        def releases(order: float) -> float:
            cost = _cost(event, order)
            return self._budget_at(order) / cost if cost > 0 else math.inf

        orders = [o for o in DEFAULT_RDP_ORDERS if o > _LEAST_ORDER and self._budget_at(o) > 0]
        if not orders:
            raise validation.error(
                "target_epsilon",
                f"larger: no order leaves a budget at delta={self._delta:g}",
                self._target_epsilon,
            )
        return max(orders, key=releases)

    @property
    def target_epsilon(self) -> float:
        """Epsilon that may be spent in all."""
        return self._target_epsilon

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self._delta

    @property
    def order(self) -> float:
        """The Renyi order, alpha."""
        return self._order

    @property
    def budget(self) -> float:
        """The whole budget, as Renyi divergence at `order`."""
        return self._budget

    @property
    def spent(self) -> float:
        """The part of `budget` that has been spent."""
        return self._cost_of(self._releases)

    @property
    def remaining(self) -> float:
        """The rest of `budget`; never negative."""
        return max(0.0, self._budget - self.spent)

    @property
    def guarantee(self) -> EpsilonBound:
        """The guarantee for all that was and will be spent: the epsilon to report.

        Raises:
          BudgetExceededError: Several trainings resumed from one state, and overspent together.
        """
        self._check_budget()
        epsilon = self._target_epsilon
        return EpsilonBound(epsilon, self._delta, _ADAPTIVE, {_ADAPTIVE: epsilon})

    def spent_epsilon(self) -> float:
        """Returns epsilon of what has been spent so far: progress, not a guarantee (see the class).

        It would be a guarantee if all releases, and the end, had been fixed beforehand.
        """
        if not self._releases:
            return 0.0
        return max(0.0, self._target_epsilon - (self._budget - self.spent))

    def cost(self, event: dp_accounting.DpEvent) -> float:
        """Returns the cost of one release: its Renyi divergence at `order`, or an upper bound.

        Args:
          event: The release: anything that `RdpAccountant` supports, a `BoundedRangeDpEvent`
            (Poisson-sampled or not), or compositions of these.

        Raises:
          ValueError: A parameter of the event is out of its range.
          dp_accounting.UnsupportedEventError: Nothing is known about the event.
        """
        return _cost(event_codec.freeze(event), self._order)

    def can_afford(
        self, event: dp_accounting.DpEvent, count: int = 1, truncation_probability: float = 0.0
    ) -> bool:
        """Returns whether `spend` with these arguments would be allowed.

        Raises:
          As `spend`, but for the budget.
        """
        return self._fits(self._after(event, count, truncation_probability))

    def spend(
        self, event: dp_accounting.DpEvent, count: int = 1, truncation_probability: float = 0.0
    ) -> None:
        """Pays for `count` releases. Call it before they are made.

        Args:
          event: Event of one of them; see `cost`.
          count: Number of releases.
          truncation_probability: An upper bound on the probability that one release leaves examples
            out because its batch does not fit into its fixed size. The sum over all releases, tau,
            is kept so small that (1 + e^target_epsilon) tau is within the share of delta kept for
            it: see `tfdp.accounting.bounds.tightest_epsilon`. For padded batches and a target above
            10, draw them with `max_truncation_probability=1e-30`.

        Raises:
          BudgetExceededError: The releases cost more than is left. Nothing is spent.
          ValueError: An argument is out of its range.
          dp_accounting.UnsupportedEventError: Nothing is known about the event.
        """
        with self._lock:
            after = self._after(event, count, truncation_probability)
            if not self._fits(after):
                raise BudgetExceededError(
                    f"Argument `event` must cost at most {self.remaining:.6g}, what is left of the "
                    f"budget {self._budget:.6g} at Renyi order {self._order:g}. Received: "
                    f"{event=!r}, {count=}, {truncation_probability=!r}."
                )
            self._releases = after

    def _after(
        self, event: dp_accounting.DpEvent, count: int, truncation_probability: float
    ) -> dict[_Spending, int]:
        """Returns what would be spent after some releases."""
        tau = validation.small_probability("truncation_probability", truncation_probability)
        if self._process != os.getpid():  # Both sides of a fork go on from here.
            self._spender, self._process = _new_spender(), os.getpid()
        key = _Spending(self._spender, event_codec.freeze(event), tau)
        count = validation.integer("count", count, 1, _MOST_COUNT)
        return {**self._releases, key: self._releases.get(key, 0) + count}

    def _cost_of(self, releases: Mapping[_Spending, int]) -> float:
        return math.fsum(n * _cost(key.event, self._order) for key, n in releases.items())

    def _fits(self, releases: Mapping[_Spending, int]) -> bool:
        truncation = math.fsum(n * key.truncation_probability for key, n in releases.items())
        return self._cost_of(releases) <= self._budget and truncation <= self._truncation_budget

    def _check_budget(self) -> None:
        if not self._fits(self._releases):
            raise BudgetExceededError(
                f"No guarantee of target_epsilon={self._target_epsilon!r} holds: trainings that "
                f"resumed from one state have spent {self.spent:.6g} together, of a budget of "
                f"{self._budget:.6g} at Renyi order {self._order:g} (epsilon "
                f"{self.spent_epsilon():.6g}, had all of it been fixed beforehand). Resume a "
                "training once, from its latest state."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the filter as a dict that JSON can hold and `from_dict` reads back."""
        return {
            "version": _FORMAT_VERSION,
            "target_epsilon": self._target_epsilon,
            "delta": self._delta,
            "order": self._order,
            "truncation_share": self._truncation_share,
            "releases": [
                {**key._asdict(), "event": event_codec.encode(key.event), "count": n}
                for key, n in self._releases.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RdpFilter":
        """Returns the filter that `to_dict` turned into `data`.

        Raises:
          BudgetExceededError: It holds more than its budget allows.
          ValueError: `data` is not of that form.
        """
        if not isinstance(data, Mapping) or set(data) != _KEYS:
            raise validation.error("data", f"a mapping with the keys {sorted(_KEYS)}", data)
        if type(data["version"]) is not int or data["version"] not in (1, _FORMAT_VERSION):
            raise validation.error("version", f"1 or {_FORMAT_VERSION}", data["version"])
        names = ("target_epsilon", "delta", "order", "truncation_share")
        made = cls(**{name: data[name] for name in names})
        fields = {"event", "count", "truncation_probability", "spender"}
        releases = data["releases"]
        if data["version"] == 1 and isinstance(releases, list):  # They named no spender.
            unknown = hashlib.sha256(json.dumps(dict(data), sort_keys=True).encode()).hexdigest()
            releases = [{"spender": unknown, **r} if isinstance(r, dict) else r for r in releases]
        if not isinstance(releases, list):
            raise validation.error("releases", "a list", releases)
        for release in releases:
            if not isinstance(release, Mapping) or set(release) != fields:
                raise validation.error("releases", "what `to_dict` wrote", release)
            if not (isinstance(release["spender"], str) and release["spender"]):
                raise validation.error("spender", "a non-empty string", release["spender"])
            tau = validation.small_probability(
                "truncation_probability", release["truncation_probability"]
            )
            key = _Spending(release["spender"], event_codec.decode(release["event"]), tau)
            count = validation.integer("count", release["count"], 1, _MOST_COUNT)
            made._releases[key] = made._releases.get(key, 0) + count
        made._check_budget()
        return made

    def resume(self, data: Mapping[str, Any]) -> None:
        """Resumes from what `to_dict` saved; what was spent since then stays spent.

        What both this filter and the saved one know of is counted once: the releases that one
        filter object paid for in one process. All others are added up, so that the cost of two
        trainings that resumed from one state is the cost of both.

        Raises:
          PrivacyParametersChangedError: The saved filter is of another budget.
          BudgetExceededError: More was spent in all than the budget allows. It stays spent.
          ValueError: As `from_dict`.
        """
        saved = self.from_dict(data)
        for name in ("target_epsilon", "delta", "order", "truncation_share"):
            old, new = getattr(saved, f"_{name}"), getattr(self, f"_{name}")
            if old != new:
                raise PrivacyParametersChangedError(
                    f"Argument `{name}` must stay {old!r}, with which training began. "
                    f"Received: {name}={new!r}. Start a new training to change it."
                )
        with self._lock:
            merged = {**saved._releases, **self._releases}
            for key, n in saved._releases.items():
                merged[key] = max(n, merged[key])
            self._releases = merged
        self._check_budget()

    def __reduce__(self) -> tuple:
        # A copy is another spender, which pays for what it releases apart.
        return type(self).from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        return (
            f"RdpFilter(target_epsilon={self._target_epsilon!r}, delta={self._delta!r}, "
            f"order={self._order!r}, budget={self._budget:.6g}, spent={self.spent:.6g})"
        )


def _new_spender() -> str:
    return os.urandom(16).hex()


@functools.lru_cache(maxsize=4096)
def _cost(event: dp_accounting.DpEvent, order: float) -> float:
    """Returns the Renyi divergence of one release of a frozen event, in both directions."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * _cost(event.event, order)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.fsum(_cost(part, order) for part in event.events)
    if isinstance(event, BoundedRangeDpEvent):
        return bounded_range_rdp(event.range, 1.0, order)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
        event.event, BoundedRangeDpEvent
    ):
        return bounded_range_rdp(event.event.range, event.sampling_probability, order)
    rdp = float(RdpAccountant([order]).compose(event).rdp[0])
    return rdp if rdp >= 0 else math.inf
