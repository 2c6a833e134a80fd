"""The smallest epsilon that the accountants can vouch for."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import dp_accounting

from tfdp.accounting import accountants
from tfdp.accounting.selective_release import CONDITIONAL


@dataclasses.dataclass(frozen=True)
class Release:
    """A mechanism that was run `count` times in a row.

    Attributes:
      event: What one run released; frozen (`event_codec.freeze`).
      count: Number of runs.
      truncation_probability: Probability, at most, that in one run examples were left out because
        the sampled batch did not fit, on any data set.
    """

    event: dp_accounting.DpEvent
    count: int
    truncation_probability: float = 0.0


@dataclasses.dataclass(frozen=True)
class EpsilonBound:
    """An (epsilon, delta) guarantee under add-or-remove-one neighbours.

    Attributes:
      epsilon: The smallest known; `math.inf` if there is no guarantee.
      delta: The delta at which it holds.
      accountant: Which accountant found it, "RDP" or "PLD".
      by_accountant: Epsilon by each accountant that supports the events. Each is true.
    """

    epsilon: float
    delta: float
    accountant: str
    by_accountant: Mapping[str, float]


def tightest_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> EpsilonBound:
    """The smaller of the RDP and the PLD epsilon of all `releases`.

    An accountant that does not support one of the events is left out. Results are cached.

    If batches can be truncated, the mechanism that ran differs from the one accounted for with
    probability at most tau = sum of count * truncation_probability, on either of two neighbouring
    data sets. If the latter is (epsilon, delta')-DP, then for every set S
    P[M(D) in S] <= e^epsilon P[M(D') in S] + delta' + (1 + e^epsilon) tau. Epsilon is therefore
    taken at a delta' < delta that leaves room for the last term; it is infinite when there is none.

    Args:
      releases: What was released, adaptively and in any order.
      delta: In (0, 1).
      selective_release: What can be observed of SelectiveReleaseDpEvents; see `RdpAccountant`.

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


def rdp_epsilon(
    releases: Sequence[Release],
    delta: float,
    selective_release: str = CONDITIONAL,
    orders: tuple[float, ...] = accountants.DEFAULT_RDP_ORDERS,
) -> float:
    """Epsilon by the RDP accountant alone: quick, and up to a tenth larger. See above."""
    return _rdp_epsilon(tuple(releases), delta, selective_release, orders)


def pld_epsilon(
    releases: Sequence[Release], delta: float, selective_release: str = CONDITIONAL
) -> float:
    """Epsilon by the PLD accountant alone. See `tightest_epsilon`."""
    return _pld_epsilon(tuple(releases), delta, selective_release)


@functools.lru_cache(maxsize=1024)
def _rdp_epsilon(
    releases: tuple[Release, ...],
    delta: float,
    selective_release: str,
    orders: tuple[float, ...],
) -> float:
    accountant = accountants.RdpAccountant(orders, selective_release=selective_release)
    return _epsilon(accountant, releases, delta)


@functools.lru_cache(maxsize=1024)
def _pld_epsilon(releases: tuple[Release, ...], delta: float, selective_release: str) -> float:
    interval = _discretization_interval(releases, delta, selective_release)
    accountant = accountants.PldAccountant(interval, selective_release=selective_release)
    return _epsilon(accountant, releases, delta)


def _epsilon(
    accountant: dp_accounting.PrivacyAccountant, releases: tuple[Release, ...], delta: float
) -> float:
    counts: dict[dp_accounting.DpEvent, int] = {}  # Many equal releases cost as much as a few.
    for release in releases:
        counts[release.event] = counts.get(release.event, 0) + release.count
    for event, count in counts.items():
        accountant.compose(event, count)
    truncation = math.fsum(r.count * r.truncation_probability for r in releases)
    return _with_truncation(accountant.get_epsilon, delta, truncation)


def _with_truncation(
    epsilon_at: Callable[[float], float], delta: float, truncation: float
) -> float:
    """Epsilon at `delta` of a mechanism that may be truncated.

    With probability `truncation`, at most, it differs from one whose epsilon at any delta' is
    `epsilon_at(delta')`.
    """
    if truncation == 0:
        return _not_nan(epsilon_at(delta))
    for share in (0.999, 0.99, 0.9, 0.5):
        epsilon = _not_nan(epsilon_at(share * delta))
        # (1 + e^epsilon) truncation <= (1 - share) delta, without overflow.
        room = (1 - share) * delta / truncation - 1
        if room > 0 and epsilon <= math.log(room):
            return epsilon
    return math.inf


def _not_nan(epsilon: float) -> float:
    return float(epsilon) if epsilon >= 0 else math.inf


def _discretization_interval(
    releases: tuple[Release, ...], delta: float, selective_release: str
) -> float:
    """A grid of privacy losses that is fine enough for epsilon, and no finer.

    1e-4 is good to a thousandth in most cases. Two need another: large epsilons, where 1e-5 of
    epsilon will do and 1e-4 would take gigabytes; and many steps of tiny loss each, which
    1e-4 would round up to tens of percents too much. Powers of two let cached steps be reused.
    """
    steps = sum(release.count for release in releases)
    try:  # Truncation may make epsilon infinite; the losses are as large without it.
        untruncated = [Release(r.event, r.count) for r in releases]
        epsilon = rdp_epsilon(untruncated, delta, selective_release)
    except dp_accounting.UnsupportedEventError:
        return 1e-4
    if not math.isfinite(epsilon):
        return 1e-4
    wanted = min(max(1.0, epsilon / 10), 400 * epsilon / math.sqrt(max(1, steps)))
    return 1e-4 * 2.0 ** max(-2, math.floor(math.log2(max(wanted, 0.25))))
