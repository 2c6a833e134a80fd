"""A privacy budget for mechanisms whose parameters depend on what was released before."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import attr
import dp_accounting
import numpy as np

from tfdp import _validation
from tfdp.accounting import event_codec
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS, RdpAccountant
from tfdp.accounting.bounds import EpsilonBound
from tfdp.accounting.ledger import PrivacyParametersChangedError

_FORMAT_VERSION = 1
_ADAPTIVE = "RDP filter"
# The conversion to (epsilon, delta) is not stable numerically closer to 1.
_LEAST_ORDER = 1.01
_LARGEST_RANGE = 100.0
# A bounded range's worst case is enclosed by cells of its range: each is 0.05% too dear at most.
_CELLS = 4096
# More than the absolute error of a log moment, which is near 0 for small sampling probabilities.
_ROUNDING = 1e-12


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedRangeDpEvent(dp_accounting.DpEvent):
    """A choice by the exponential mechanism, such as report-noisy-min with Gumbel noise.

    Attributes:
      range: Width eta, in [0, 100], of an interval that holds the logarithm of the ratio of an
        output's probabilities on two neighbours, for all outputs. Where these probabilities are
        proportional to exp(-loss_k / s), and an example adds something in [0, C] to each loss (a
        sum of clipped losses), eta = C / s; it is 2 C / s if it adds something in [-C, C].

    Raises:
      ValueError: `range` is not a number in [0, 100].

    Source: Dong, Durfee, Rogers 2020, "Optimal Differential Privacy Composition for Exponential
    Mechanisms".
    """

    range: float

    def __attrs_post_init__(self) -> None:
        if not (_validation.is_number(self.range) and 0 <= self.range <= _LARGEST_RANGE):
            raise _validation.error("range", f"a number in [0, {_LARGEST_RANGE:g}]", self.range)


class BudgetExceededError(ValueError):
    """Error of a release that the privacy budget does not allow."""


class RdpFilter:
    """Budget for releases that may be chosen adaptively.

    An accountant takes the best Renyi order after the fact. This is proven if all parameters are
    fixed beforehand. If they depend on earlier releases (a noise level, the number of steps), the
    sums at different orders vary together with the outputs. A filter fixes one order alpha, and its
    budget B, before anything is released:

        B = target_epsilon - log(1 - 1/alpha) + log(delta alpha) / (alpha - 1)

    and lets events be spent only while the sum of their Renyi divergences at that order is within
    B. Then, on neighbours, and with releases Y_1, Y_2, ... of densities p_t and p'_t given the
    past, each conditional expectation of (p_t / p'_t)^alpha under p'_t is at most
    exp((alpha - 1) rho_t), with a rho_t that is a function of the past. So is, by induction from
    the last release on, the expectation of their product at most exp((alpha - 1) B), because
    the sum of rho_t never exceeds B.

    Guarantees: all releases that were paid for are together (target_epsilon, delta)-DP under
    add-or-remove-one neighbours, however the next release, or the end, is chosen from the outputs
    of earlier ones.

    Report the target, `guarantee`, as epsilon, also if less was spent, when the outputs decided the
    end of the training. `spent_epsilon()` shows progress and is not a guarantee: it depends on the
    outputs, and the theorem holds only for a bound that does not. (Both may be shown: what has been
    spent reveals nothing beyond the releases.)

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
        self._target_epsilon = _validation.positive("target_epsilon", target_epsilon)
        self._delta = _validation.between_zero_and_one("delta", delta)
        self._truncation_share = _validation.between_zero_and_one(
            "truncation_share", truncation_share
        )
        if order is None:
            if expected_event is None:
                expected_event = dp_accounting.GaussianDpEvent(1.0)
            order = self._best_order(event_codec.freeze(expected_event))
        elif expected_event is not None:
            raise _validation.error("expected_event", "None when `order` is given", expected_event)
        if not (_validation.is_number(order) and _LEAST_ORDER < order < math.inf):
            raise _validation.error("order", f"a finite number above {_LEAST_ORDER}", order)
        self._order = float(order)
        self._budget = self._budget_at(self._order)
        if self._budget <= 0:
            raise _validation.error(
                "target_epsilon",
                f"larger: at order={self._order:g} and delta={self._delta:g} there is no budget",
                target_epsilon,
            )
        e = math.exp(-self._target_epsilon)
        # (1 + e^epsilon) times this is the share of delta.
        self._truncation_budget = self._truncation_share * self._delta * e / (1 + e)
        self._releases: dict[tuple[dp_accounting.DpEvent, float], int] = {}

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
            raise _validation.error(
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
        return math.fsum(n * _cost(event, self._order) for (event, _), n in self._releases.items())

    @property
    def remaining(self) -> float:
        """The rest of `budget`; never negative."""
        return max(0.0, self._budget - self.spent)

    @property
    def guarantee(self) -> EpsilonBound:
        """The guarantee for all that was and will be spent: the epsilon to report."""
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
        key, count = self._check(event, count, truncation_probability)
        return self._fits(key, count)

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
            it: see `tfdp.accounting.bounds.tightest_epsilon`.

        Raises:
          BudgetExceededError: The releases cost more than is left. Nothing is spent.
          ValueError: An argument is out of its range.
          dp_accounting.UnsupportedEventError: Nothing is known about the event.
        """
        key, count = self._check(event, count, truncation_probability)
        if not self._fits(key, count):
            raise BudgetExceededError(
                f"Argument `event` must cost at most {self.remaining:.6g}, what is left of the "
                f"budget {self._budget:.6g} at Renyi order {self._order:g}. Received: {event=!r}, "
                f"{count=}, {truncation_probability=!r}."
            )
        self._releases[key] = self._releases.get(key, 0) + count

    def _check(
        self, event: dp_accounting.DpEvent, count: int, truncation_probability: float
    ) -> tuple[tuple[dp_accounting.DpEvent, float], int]:
        tau = _validation.small_probability("truncation_probability", truncation_probability)
        return (event_codec.freeze(event), tau), _validation.positive_integer("count", count)

    def _fits(self, key: tuple[dp_accounting.DpEvent, float], count: int) -> bool:
        after = {**self._releases, key: self._releases.get(key, 0) + count}
        spent = math.fsum(n * _cost(event, self._order) for (event, _), n in after.items())
        truncation = math.fsum(n * tau for (_, tau), n in after.items())
        return spent <= self._budget and truncation <= self._truncation_budget

    def to_dict(self) -> dict[str, Any]:
        """Returns the filter as a dict that JSON can hold and `from_dict` reads back."""
        return {
            "version": _FORMAT_VERSION,
            "target_epsilon": self._target_epsilon,
            "delta": self._delta,
            "order": self._order,
            "truncation_share": self._truncation_share,
            "releases": [
                {"event": event_codec.encode(event), "count": n, "truncation_probability": tau}
                for (event, tau), n in self._releases.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RdpFilter":
        """Returns the filter that `to_dict` turned into `data`.

        Raises:
          ValueError: `data` is not of that form, or holds more than its budget allows.
        """
        keys = {"version", "target_epsilon", "delta", "order", "truncation_share", "releases"}
        if not isinstance(data, Mapping) or set(data) != keys:
            raise _validation.error("data", f"a mapping with the keys {sorted(keys)}", data)
        if data["version"] != _FORMAT_VERSION:
            raise _validation.error("version", f"{_FORMAT_VERSION}", data["version"])
        names = ("target_epsilon", "delta", "order", "truncation_share")
        made = cls(**{name: data[name] for name in names})
        for release in data["releases"]:
            if set(release) != {"event", "count", "truncation_probability"}:
                raise _validation.error("releases", "what `to_dict` wrote", release)
            made.spend(**{**release, "event": event_codec.decode(release["event"])})
        return made

    def resume(self, data: Mapping[str, Any]) -> None:
        """Resumes from what `to_dict` saved. What was spent since then stays spent.

        Raises:
          PrivacyParametersChangedError: The saved filter is of another budget.
          ValueError: As `from_dict`.
        """
        saved = self.from_dict(data)
        for name in ("target_epsilon", "delta", "order"):
            old, new = getattr(saved, name), getattr(self, name)
            if old != new:
                raise PrivacyParametersChangedError(
                    f"Argument `{name}` must stay {old!r}, with which training began. "
                    f"Received: {name}={new!r}. Start a new training to change it."
                )
        if saved.spent > self.spent:
            self._releases = saved._releases

    def __repr__(self) -> str:
        return (
            f"RdpFilter(target_epsilon={self._target_epsilon!r}, delta={self._delta!r}, "
            f"order={self._order!r}, budget={self._budget:.6g}, spent={self.spent:.6g})"
        )


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


def bounded_range_rdp(width: float, q: float, order: float) -> float:
    """Computes the Renyi divergence of a bounded-range mechanism on a Poisson sample.

    It holds in both directions.

    Let M have range eta, and let P = M(S) and Q = M(S + x) for a sample S without the example x.
    By the joint convexity of exp((alpha - 1) D_alpha) it is enough to compare P with
    (1 - q) P + q Q for the worst S. For some s in [0, eta] the ratio r = Q / P is in
    [e^-s, e^(eta - s)], and has mean 1 under P. Both t^alpha and t^(1 - alpha) are convex, so that
    the means of (1 - q + q r)^alpha (an example more) and of (1 - q + q r)^(1 - alpha) (one less)
    are largest when r takes only the two ends of its interval, the upper one with probability
    (1 - e^-s) / (e^(eta - s) - e^-s). Some exponential mechanism with two candidates attains the
    worst s, so that this cost is the smallest that is valid for all of them. It is at most
    alpha eta^2 / 8 (q = 1), and at most that of randomised response with epsilon = eta.

    The worst s is enclosed: in each of many cells of [0, eta] the interval is widened to hold
    those of all s in the cell.

    Args:
      width: The range eta, at least 0.
      q: Sampling probability, in [0, 1].
      order: Renyi order alpha > 1.

    Source: for q = 1, Dong, Durfee, Rogers 2020, "Optimal Differential Privacy Composition for
    Exponential Mechanisms", section 3; here with sampling.

    Example:
      >>> exact = math.log(1 + 0.1**2 * math.sinh(0.5) ** 2)  # At order 2.
      >>> bool(0 <= bounded_range_rdp(1.0, 0.1, 2.0) / exact - 1 < 1e-3)
      True
    """
    if width == 0 or q == 0:
        return 0.0
    s = np.linspace(0.0, width, _CELLS + 1)
    above = np.expm1(width - s[:-1])  # Upper end minus 1.
    below = -np.expm1(-s[1:])  # 1 minus the lower end.
    log_upper, log_lower = np.log(below / (above + below)), np.log(above / (above + below))
    sampled = np.log1p(q * above), np.log1p(-min(q, 1 - 1e-16) * below)
    upper, lower = sampled if q < 1 else (width - s[:-1], -s[1:])
    moments = [
        np.logaddexp(log_upper + power * upper, log_lower + power * lower).max()
        for power in (order, 1 - order)
    ]
    return float((max(0.0, *moments) + _ROUNDING) / (order - 1))
