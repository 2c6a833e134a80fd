"""The smallest epsilon that the accountants can prove."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfdp.accounting import accountants, mechanisms
from tfdp.accounting.composition import PrivacyProfile
from tfdp.accounting.mechanisms import ApartMechanism
from tfdp.accounting.observability import CONDITIONAL

# Largest number of shares of delta that are tried for the accountants.
_MOST_SHARES = 4
# Deltas near which a privacy profile is precise.
_PROFILE_DELTAS = (1e-2, 1e-6, 1e-12)
# Stride between the Renyi orders that are tried first.
_STRIDE = 8


@dataclasses.dataclass(frozen=True)
class Release:
    """A mechanism that was run `count` times in a row.

    Attributes:
      event: The release of one run; frozen (`event_codec.freeze`).
      count: Number of runs.
      truncation_probability: Probability, at most, that in one run examples were left out because
        the sampled batch did not fit, on any data set.
      cycle_length: Training steps that one run covers, in which an example has one chance to be
        sampled; the charge for truncation depends on it.
    """

    event: dp_accounting.DpEvent
    count: int
    truncation_probability: float = 0.0
    cycle_length: int = 1


@dataclasses.dataclass(frozen=True)
class EpsilonBound:
    """An (epsilon, delta) guarantee under zero-out.

    Attributes:
      epsilon: The smallest known; `math.inf` if there is no guarantee.
      delta: The delta at which it holds.
      accountant: The accountant that found it, "RDP" or "PLD".
      by_accountant: Epsilon by each accountant that supports the events. Each is valid.
    """

    epsilon: float
    delta: float
    accountant: str
    by_accountant: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class EpsilonInterval:
    """Bounds between which the smallest epsilon at `delta` lies.

    Attributes:
      lower: No pair (epsilon, delta) with a smaller epsilon is a guarantee.
      upper: (upper, delta) is a guarantee: the epsilon of `EpsilonBound`.
      delta: The delta of both.
    """

    lower: float
    upper: float
    delta: float


def tightest_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> EpsilonBound:
    """Returns the smaller of the RDP and the PLD epsilon of all `releases`.

    An accountant that does not support one of the events is left out. Results are cached.

    If batches can be truncated, the mechanism M that ran differs from the one accounted for. Let
    the latter be (epsilon, delta')-DP, and tau the sum of count * truncation_probability. Then M is
    (epsilon, delta' + charge)-DP, where each release has the smaller of two charges:

    - (1 + e^epsilon) tau. M differs with probability at most tau on either of two neighboring data
      sets: P[M(D) in S] <= e^epsilon P[M(D') in S] + delta' + (1 + e^epsilon) tau for every set S.
    - tau / q, for noise on a Poisson sample. Given what was sampled of all other examples, each
      step is noise on a sample of the last one alone, and (epsilon, delta') covers it. If the
      others leave a row in every step, nothing is truncated, whether or not the last one is
      sampled. So M is (epsilon, delta' + p)-DP, where p is the probability that they fill all rows
      in some step. As the last one is sampled independently, a step is truncated with probability
      at least q times that of the others filling it: p <= tau / q. (In a cycle of c steps, an
      example is in each of them with probability q / c.)

    Epsilon is taken at a delta' that leaves room for the charge, and is infinite if there is none.

    Args:
      releases: The releases, adaptively chosen and in any order.
      delta: The delta of the guarantee, in (0, 1).
      selective_release: The observable part of SelectiveReleaseDpEvents; see `RdpAccountant`.

    Raises:
      ValueError: `selective_release` is not one of the allowed.
      dp_accounting.UnsupportedEventError: No accountant supports all events; says why not.

    Example:
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> bound = tightest_epsilon([Release(step, 1000)], delta=1e-5)
      >>> bound.accountant, round(bound.epsilon, 2)
      ('PLD', 1.83)
    """
    by_accountant, refusals = {}, []
    for name, epsilon in (("RDP", rdp_epsilon), ("PLD", pld_epsilon)):
        try:
            by_accountant[name] = epsilon(releases, delta, selective_release)
        except dp_accounting.UnsupportedEventError as refusal:
            refusals.append(f"{name}: {refusal}")
    if not by_accountant:
        raise dp_accounting.UnsupportedEventError(
            "No accountant supports all that was released. " + " ".join(refusals)
        )
    best = min(by_accountant, key=lambda name: by_accountant[name])
    return EpsilonBound(by_accountant[best], delta, best, by_accountant)


def epsilon_interval(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> EpsilonInterval:
    """Returns `tightest_epsilon` and a lower bound: some pair of data sets has no less.

    The lower bound assumes that truncation lowers epsilon as far as it can (see
    `tightest_epsilon`). It is 0 for events that the PLD accountant does not support.

    Args:
      releases: See `tightest_epsilon`.
      delta: The delta of the guarantee, in (0, 1).
      selective_release: The observable part of SelectiveReleaseDpEvents; see `RdpAccountant`.

    Source: `tfdp.accounting.composition`.
    """
    most = tightest_epsilon(releases, delta, selective_release).epsilon
    if most == 0:
        return EpsilonInterval(0.0, 0.0, delta)
    least = min(most, _least_epsilon(releases, delta, selective_release, most))
    return EpsilonInterval(least, most, delta)


def _least_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str, most: float
) -> float:
    truncation = _truncation(releases)
    # Epsilon is at most `most`, so that (1 + e^epsilon) truncation is at most this.
    slack = truncation * (1 + math.exp(min(most, 700.0))) if truncation else 0.0
    if not delta + slack < 1:
        return 0.0
    accountant = accountants.PldAccountant(selective_release=selective_release)
    attained = [part for release in releases if (part := _attained(release)) is not None]
    try:
        return float(_composed(accountant, attained).get_least_epsilon(delta + slack))
    except dp_accounting.UnsupportedEventError:
        return 0.0


def have_apart(releases: Sequence[Release]) -> bool:
    """Returns whether some releases have no dominating pair, and so a PLD epsilon that is dear."""
    return any(isinstance(mechanisms.of(r.event), ApartMechanism) for r in releases)


def price_orders_together(releases: Sequence[Release]) -> bool:
    """Returns whether the RDP of some releases takes as long at one order as at many."""
    found = [mechanisms.of(release.event) for release in releases]
    return any(one is not None and one.prices_orders_together for one in found)


def _attained(release: Release) -> Release | None:
    """Returns a release that costs no more on some data sets, or None."""
    mechanism = mechanisms.of(release.event)
    if not isinstance(mechanism, ApartMechanism):
        return release
    event = mechanism.attained(release.event)
    return event and Release(event, release.count, release.truncation_probability)


def rdp_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> float:
    """Returns epsilon by the RDP accountant alone. See `tightest_epsilon`."""
    return _rdp_epsilon(tuple(releases), delta, selective_release)


def rdp_epsilon_at(
    order: float, releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> float:
    """Returns epsilon by the RDP accountant of a single Renyi order: an upper bound, quickly."""
    accountant = accountants.RdpAccountant([order], selective_release=selective_release)
    return _epsilon(accountant, tuple(releases), delta)


def rdp_order(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> float:
    """Returns the Renyi order that `rdp_epsilon` is the epsilon of, but for truncation."""
    releases = tuple(releases)
    near = _near_best_orders(releases, delta, selective_release)
    accountant = accountants.RdpAccountant(near, selective_release=selective_release)
    return float(_composed(accountant, releases).get_epsilon_and_optimal_order(delta)[1])


def pld_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> float:
    """Returns epsilon by the PLD accountant alone. See `tightest_epsilon`.

    Events without dominating pairs, such as private selections, are priced apart and added.
    """
    return _pld_epsilon(tuple(releases), delta, selective_release)


def privacy_profile(
    releases: Sequence[Release], selective_release: str = CONDITIONAL
) -> PrivacyProfile | None:
    """Returns upper bounds on delta at many epsilons, in both directions.

    By the PLD accountant, and by the RDP accountant at a few deltas; where the PLD accountant knows
    none, by `tightest_epsilon` at these, and then the same in both directions. Truncation adds
    to delta: see `tightest_epsilon`.

    Returns:
      The profile, or None if there is no guarantee.

    Raises:
      dp_accounting.UnsupportedEventError: No accountant supports all events.
    """
    accountant, found = accountants.PldAccountant(selective_release=selective_release), None
    if not any(isinstance(mechanisms.of(r.event), ApartMechanism) for r in releases):
        with contextlib.suppress(dp_accounting.UnsupportedEventError):
            found = _composed(accountant, releases).get_profile(_PROFILE_DELTAS)
    if found is None:
        return _few_deltas(releases, selective_release)
    charge = np.array([_charge(releases, float(epsilon)) for epsilon in found.epsilons])
    known = np.min(
        [_by_rdp(found.epsilons, releases, d, selective_release) for d in _PROFILE_DELTAS], axis=0
    )
    add, remove = (
        np.minimum(np.nan_to_num(deltas + charge, nan=1.0), known)
        for deltas in (found.add, found.remove)
    )
    return PrivacyProfile(found.epsilons, add, remove)


def _by_rdp(
    epsilons: np.ndarray, releases: Sequence[Release], delta: float, selective_release: str
) -> np.ndarray:
    """Returns `delta` from the epsilon of RDP accounting on, and 1 before [epsilons]."""
    try:
        least = rdp_epsilon(releases, delta, selective_release)
    except dp_accounting.UnsupportedEventError:
        least = math.inf
    return np.where(epsilons >= least, delta, 1.0)


def _few_deltas(releases: Sequence[Release], selective_release: str) -> PrivacyProfile | None:
    deltas = np.array(_PROFILE_DELTAS)
    epsilons = [tightest_epsilon(releases, one, selective_release).epsilon for one in deltas]
    finite = np.isfinite(epsilons)
    if not finite.any():
        return None
    found = np.append(1.0, deltas[finite])
    return PrivacyProfile(np.append(0.0, np.array(epsilons)[finite]), found, found)


@functools.lru_cache(maxsize=1024)
def _rdp_epsilon(releases: tuple[Release, ...], delta: float, selective_release: str) -> float:
    near = _near_best_orders(releases, delta, selective_release)
    accountant = accountants.RdpAccountant(near, selective_release=selective_release)
    return _epsilon(accountant, releases, delta)


def _near_best_orders(
    releases: tuple[Release, ...], delta: float, selective_release: str
) -> tuple[float, ...]:
    # Epsilon falls with the order, and then rises. A few orders show where, and all orders near
    # the best of them are asked. Every order gives an upper bound.
    orders = accountants.DEFAULT_RDP_ORDERS
    few = accountants.RdpAccountant(orders[::_STRIDE], selective_release=selective_release)
    _, order = _composed(few, releases).get_epsilon_and_optimal_order(delta)
    best = orders.index(order)
    near = orders[max(best - _STRIDE + 1, 0) : best + _STRIDE]
    priced = [mechanisms.of(release.event) for release in releases]
    if not any(mechanism is not None and mechanism.best_at_integers for mechanism in priced):
        return near
    return tuple(sorted({*near, *map(float, range(math.ceil(near[0]), math.ceil(near[-1])))}))


@functools.lru_cache(maxsize=1024)
def _pld_epsilon(releases: tuple[Release, ...], delta: float, selective_release: str) -> float:
    known = [(r, mechanisms.of(r.event)) for r in releases]
    apart = [(r, m) for r, m in known if isinstance(m, ApartMechanism)]
    rest = tuple(r for r, m in known if not isinstance(m, ApartMechanism))
    accountant = _composed(accountants.PldAccountant(selective_release=selective_release), rest)
    parts = sum(r.count for r, _ in apart) + bool(rest)

    def epsilon_at(delta: float) -> float:
        # Basic composition: epsilons add up, and so do deltas.
        share = delta if parts <= 1 else (1 - 1e-12) * delta / parts
        costs = [r.count * m.epsilon(r.event, share, selective_release) for r, m in apart]
        return math.fsum([*costs, accountant.get_epsilon(share) if rest or not costs else 0.0])

    return _with_truncation(epsilon_at, delta, releases)


def _epsilon(
    accountant: dp_accounting.PrivacyAccountant, releases: tuple[Release, ...], delta: float
) -> float:
    epsilon_at = _composed(accountant, releases).get_epsilon
    return _with_truncation(epsilon_at, delta, releases)


def _truncation(releases: Sequence[Release]) -> float:
    """Returns the probability, at most, that one of the releases was truncated."""
    # So many releases that no float holds their number cost an infinite epsilon anyway.
    return math.fsum(min(r.count, 10**300) * r.truncation_probability for r in releases)


def _charge(releases: Sequence[Release], epsilon: float) -> float:
    """Returns what truncation adds to delta at `epsilon`: see `tightest_epsilon`."""
    on_both = 1 + math.exp(min(epsilon, 700.0))
    return math.fsum(
        min(r.count, 10**300) * r.truncation_probability * min(on_both, _others_alone(r))
        for r in releases
        if r.truncation_probability
    )


def _others_alone(release: Release) -> float:
    """Returns one over the probability that an example is in a batch; infinite if unknown."""
    event = release.event
    if not isinstance(event, dp_accounting.PoissonSampledDpEvent) or not event.sampling_probability:
        return math.inf
    mechanism, steps = mechanisms.of(event), None
    if mechanism is not None:
        steps = mechanism.steps(event)
    elif isinstance(event.event, dp_accounting.GaussianDpEvent | dp_accounting.LaplaceDpEvent):
        steps = 1
    if steps is None:
        return math.inf
    return (1 + 1e-12) * max(steps, release.cycle_length) / event.sampling_probability


def _composed(accountant: Any, releases: Sequence[Release]) -> Any:
    counts: dict[dp_accounting.DpEvent, int] = {}  # Many equal releases cost as much as a few.
    for release in releases:
        counts[release.event] = counts.get(release.event, 0) + release.count
    for event, count in counts.items():
        accountant.compose(event, count)
    return accountant


def _with_truncation(
    epsilon_at: Callable[[float], float], delta: float, releases: Sequence[Release]
) -> float:
    """Returns epsilon at `delta` of releases that may be truncated.

    Args:
      epsilon_at: Their epsilon at any delta, if none of them is.
      delta: The delta.
      releases: The releases.
    """
    if _truncation(releases) == 0:
        return _not_nan(epsilon_at(delta))
    share = 1 - 1e-9
    for _ in range(_MOST_SHARES):
        epsilon = _not_nan(epsilon_at(share * delta))
        charge = _charge(releases, epsilon) / delta
        if charge <= 1 - share:
            return epsilon
        share = 1 - 1.1 * charge  # A smaller delta makes epsilon somewhat larger.
        if share < 0.01:
            return math.inf
    return math.inf


def _not_nan(epsilon: float) -> float:
    return float(epsilon) if epsilon >= 0 else math.inf
