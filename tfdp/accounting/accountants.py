"""dp_accounting's accountants, fixed to add-or-remove-one and to bounds that hold numerically."""

import functools
import math
from collections.abc import Sequence

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from tfdp.accounting import _validation, event_codec, sampled_gaussian, selective_release
from tfdp.accounting.selective_release import (
    CONDITIONAL,
    PER_ATTEMPT,
    SelectiveReleaseDpEvent,
    check_observability,
)

_ADD_OR_REMOVE_ONE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

# The best order is near 1 + 2 log(1/delta) / epsilon. Steps of 10% in (order - 1) cost at most
# 0.16% of epsilon against a grid many times as dense (measured, epsilon from 0.06 to 500).
# From 10 on orders are integers, whose series is finite.
DEFAULT_RDP_ORDERS: tuple[float, ...] = tuple(
    sorted({x if x < 10 else float(round(x)) for x in 1 + 0.02 * 1.1 ** np.arange(114)})
)

# log A_alpha of a step is a sum of cancelling terms near 1 and cut at e^-30: with tiny sampling
# probabilities dp_accounting's comes out zero or negative. This is more than its absolute error.
_RDP_ROUNDING = 1e-12

# The quadrature's grid grows as one over the square of the noise.
_LEAST_NOISE_FOR_QUADRATURE = 0.05

# A distribution composed T times by FFT has mass in its tail that is wrong by up to 5e-17 T either
# way (measured against Gaussians of known delta, T up to 1e6); this leaves a factor of twenty.
_FFT_ROUNDING = 1e-15


class RdpAccountant(dp_accounting.rdp.RdpAccountant):
    """Renyi-DP accountant for add-or-remove-one neighbours.

    Guarantees: epsilon is an upper bound, whatever the orders. A Poisson-sampled Gaussian is priced
    once per process and parameters, so that composing it again costs nothing.

    Args:
      orders: Renyi orders, each > 1. Default: `DEFAULT_RDP_ORDERS`, 1.02 to about 1000.
      selective_release: What can be observed of a SelectiveReleaseDpEvent. "conditional": accepted
        updates only. "per_attempt": every attempt, one event being one attempt.
      neighboring_relation: Only ADD_OR_REMOVE_ONE; there for dp_accounting's tools.

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
        orders = DEFAULT_RDP_ORDERS if orders is None else tuple(float(o) for o in orders)
        if not orders or not all(order > 1 for order in orders):
            raise _validation.error("orders", "a non-empty sequence of numbers > 1", orders)
        super().__init__(orders, neighboring_relation)
        self._observability = check_observability(selective_release)

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> "RdpAccountant":
        """Adds `count` releases of `event`, and returns this accountant."""
        if isinstance(event, dp_accounting.DpEvent):  # Else dp_accounting raises its TypeError.
            event_codec.check_event(event)
        return super().compose(event, count)

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if do_compose and isinstance(event, dp_accounting.PoissonSampledDpEvent):
            self._rdp = self._rdp + count * _sampled_rdp(
                event_codec.freeze(event), tuple(self._orders)
            )
            return None
        if isinstance(event, SelectiveReleaseDpEvent):
            problem = _unsupported_part(event)
            if problem is None and do_compose:
                self._rdp = self._rdp + count * _selective_rdp(
                    event_codec.freeze(event), self._observability, tuple(self._orders)
                )
            return problem
        return super()._maybe_compose(event, count, do_compose)


class PldAccountant(dp_accounting.pld.PLDAccountant):
    """Accountant for add-or-remove-one neighbours by privacy-loss distributions.

    Tighter than `RdpAccountant` for the events that it supports; not always for many accepted
    updates of a SelectiveReleaseDpEvent under "conditional" (`bounds.tightest_epsilon` asks both).

    Guarantees: epsilon is an upper bound, the rounding of the fast Fourier transforms included: it
    is computed at delta minus 1e-15 per release, and is infinite if that leaves nothing.

    Args:
      value_discretization_interval: Width of the grid of privacy losses (in units of epsilon). A
        finer one costs time and memory, and is tighter.
      selective_release: As for `RdpAccountant`.
      neighboring_relation: Only ADD_OR_REMOVE_ONE; there for dp_accounting's tools.

    Raises:
      ValueError: An argument is out of its range, or (in `compose`) a parameter of the event is.

    Source: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots".

    Example:
      >>> import dp_accounting
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> round(PldAccountant().compose(step, 1000).get_epsilon(1e-5), 2)
      1.83
    """

    _pld: privacy_loss_distribution.PrivacyLossDistribution

    def __init__(
        self,
        value_discretization_interval: float = 1e-4,
        *,
        selective_release: str = CONDITIONAL,
        neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE_ONE,
    ):
        _check_relation(neighboring_relation)
        interval = _validation.positive(
            "value_discretization_interval", value_discretization_interval
        )
        super().__init__(neighboring_relation, interval)
        self._observability = check_observability(selective_release)
        self._releases = 0

    def compose(self, event: dp_accounting.DpEvent, count: int = 1) -> "PldAccountant":
        """Adds `count` releases of `event`, and returns this accountant."""
        if isinstance(event, dp_accounting.DpEvent):  # Else dp_accounting raises its TypeError.
            event_codec.check_event(event)
        super().compose(event, count)
        self._releases += count * _number_of_releases(event)
        return self

    def get_epsilon(self, target_delta: float) -> float:
        """The smallest known epsilon at `target_delta`."""
        rounding = self._rounding()
        if rounding and target_delta <= rounding:
            return math.inf
        return float(super().get_epsilon(target_delta - rounding))

    def get_delta(self, target_epsilon: float) -> float:
        """The smallest known delta at `target_epsilon`."""
        return float(min(1.0, super().get_delta(target_epsilon) + self._rounding()))

    def _rounding(self) -> float:
        return _FFT_ROUNDING * max(0, self._releases - 1)  # One release needs no transform.

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
        if (
            do_compose
            and isinstance(event, dp_accounting.PoissonSampledDpEvent)
            and isinstance(event.event, dp_accounting.GaussianDpEvent)
        ):
            q, noise_multiplier = event.sampling_probability, event.event.noise_multiplier
            if q == 1:  # T Gaussians are one with sqrt(T) times less noise, exactly.
                return super()._maybe_compose(event.event, count, do_compose)
            if q > 0 and noise_multiplier > 0:
                step = _sampled_gaussian_pld(
                    q, noise_multiplier, self._value_discretization_interval
                )
                self._pld = self._pld.compose(step.self_compose(count))
                return None
        if isinstance(event, SelectiveReleaseDpEvent):
            problem = _unsupported_part(event)
            if problem is None and do_compose and self._observability == PER_ATTEMPT:
                self._compose_attempts(event, count)
            elif problem is None and do_compose:
                self._compose_accepted(event, count)
            return problem
        return super()._maybe_compose(event, count, do_compose)

    def _compose_accepted(self, event: SelectiveReleaseDpEvent, count: int) -> None:
        """Accepted updates only. Their distribution is cached."""
        update = selective_release.conditional_pld(event, self._value_discretization_interval)
        if update is None:
            self._contains_non_dp_event = True
        else:
            self._pld = self._pld.compose(update.self_compose(count))

    def _compose_attempts(self, event: SelectiveReleaseDpEvent, count: int) -> None:
        """An attempt releases its update, and whether it passed: at most both, in full."""
        self._maybe_compose(event.update, count, True)
        q, noise_multiplier = selective_release.parameters(event.selection)
        if noise_multiplier == 0 and q > 0:
            self._contains_non_dp_event = True
        elif q > 0:
            bit = _bit_pld(event_codec.freeze(event), self._value_discretization_interval)
            self._pld = self._pld.compose(bit.self_compose(count))


def _check_relation(relation: dp_accounting.NeighboringRelation) -> None:
    if relation is not _ADD_OR_REMOVE_ONE:
        raise _validation.error("neighboring_relation", "ADD_OR_REMOVE_ONE", relation)


def _unsupported_part(
    event: SelectiveReleaseDpEvent,
) -> dp_accounting.PrivacyAccountant.CompositionErrorDetails | None:
    part = selective_release.unsupported_part(event)
    if part is None:
        return None
    return dp_accounting.PrivacyAccountant.CompositionErrorDetails(
        part,
        "`update` and `selection` of a `SelectiveReleaseDpEvent` must each be a "
        "`PoissonSampledDpEvent` of a `GaussianDpEvent`",
    )


def _number_of_releases(event: dp_accounting.DpEvent) -> int:
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0
    if isinstance(event, SelectiveReleaseDpEvent):
        return 2  # The update, and whether it passed.
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * _number_of_releases(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(_number_of_releases(e) for e in event.events)
    return 1


@functools.lru_cache(maxsize=256)
def _sampled_rdp(
    event: dp_accounting.PoissonSampledDpEvent, orders: tuple[float, ...]
) -> np.ndarray:
    """RDP of one release of a Poisson-sampled event, at `orders`."""
    whole, q = event.event, event.sampling_probability
    grid = np.array(orders)
    # dp_accounting's series for fractional orders takes seconds for moderate q and noise.
    quick = isinstance(whole, dp_accounting.GaussianDpEvent) and 0 < q < 1
    quick = quick and whole.noise_multiplier >= _LEAST_NOISE_FOR_QUADRATURE
    by_quadrature = (grid != np.round(grid)) & (grid < 20) if quick else np.zeros(len(grid), bool)
    rdp = np.empty(len(grid))
    if not by_quadrature.all():
        accountant = dp_accounting.rdp.RdpAccountant(grid[~by_quadrature].tolist())
        rdp[~by_quadrature] = accountant.compose(event).rdp
    for i in np.flatnonzero(by_quadrature):
        rdp[i] = sampled_gaussian.log_moment(q, whole.noise_multiplier, grid[i]) / (grid[i] - 1)
    if 0 < q < 1:
        rdp = np.maximum(rdp, 0) + _RDP_ROUNDING / (grid - 1)
    rdp = np.where(np.isnan(rdp), np.inf, rdp)
    rdp.setflags(write=False)
    return rdp


def _selective_rdp(
    event: SelectiveReleaseDpEvent, observability: str, orders: tuple[float, ...]
) -> np.ndarray:
    """RDP of one accepted update or, if everything is observed, of one attempt."""
    if observability == CONDITIONAL:
        return selective_release.conditional_rdp(event, orders)
    update = _sampled_rdp(selective_release.as_sampled(event.update), orders)
    return update + selective_release.bit_rdp(event, orders)


# A distribution is a few megabytes.
@functools.lru_cache(maxsize=16)
def _sampled_gaussian_pld(
    q: float, noise_multiplier: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    return sampled_gaussian.privacy_loss(q, noise_multiplier, interval)


@functools.lru_cache(maxsize=16)
def _bit_pld(
    event: SelectiveReleaseDpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    return selective_release.bit_pld(event, interval)
