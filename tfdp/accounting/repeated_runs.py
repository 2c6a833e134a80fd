"""The price of the best of a random number of runs: the mechanism of RepeatAndSelectDpEvent."""

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp.accounting import mechanisms
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS, PldAccountant, RdpAccountant
from tfdp.accounting.repetitions import Repetitions


class RepeatedRuns(mechanisms.ApartMechanism):
    """Private selections whose number of runs has one of the distributions of `Repetitions`."""

    prices_orders_together = True

    def check(self, event: RepeatAndSelectDpEvent) -> None:
        """Raises a ValueError if the event is not of a distribution of `Repetitions`."""
        Repetitions.of_event(event)

    def rdp(
        self, event: RepeatAndSelectDpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        """Returns the RDP of the best run (`Repetitions.rdp`)."""
        return _rdp(event, observability, orders)

    def epsilon(self, event: RepeatAndSelectDpEvent, delta: float, observability: str) -> float:
        """Returns epsilon of the best run (`Repetitions.profile_epsilon`)."""
        return _epsilon(event, delta, observability)

    def attained(self, event: RepeatAndSelectDpEvent) -> dp_accounting.DpEvent | None:
        """Returns one run; None where there may be none.

        If the score does not depend on the data, the best of several runs is one run, and nothing
        with the probability that there is none.
        """
        return None if math.isinf(event.shape) else event.event


@functools.lru_cache(maxsize=256)
def _rdp(
    event: RepeatAndSelectDpEvent, observability: str, orders: tuple[float, ...]
) -> np.ndarray:
    """Computes `RepeatedRuns.rdp`.

    The order at which a run is compared with itself is best among many, whatever `orders` are.
    """
    grid = np.array(sorted({*DEFAULT_RDP_ORDERS, *orders}))
    run = RdpAccountant(grid.tolist(), selective_release=observability).compose(event.event)
    rdp = Repetitions.of_event(event).rdp(grid, np.array(run.rdp))
    rdp = np.where(np.isnan(rdp), np.inf, rdp)[np.searchsorted(grid, orders)]
    rdp.setflags(write=False)
    return rdp


@functools.lru_cache(maxsize=1024)
def _epsilon(event: RepeatAndSelectDpEvent, delta: float, observability: str) -> float:
    run = PldAccountant(selective_release=observability).compose(event.event)
    repetitions = Repetitions.of_event(event)
    return repetitions.profile_epsilon(run.get_epsilon, run.delta_profile(), delta)


mechanisms.register(RepeatAndSelectDpEvent, RepeatedRuns())
