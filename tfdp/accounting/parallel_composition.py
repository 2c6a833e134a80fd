"""Parallel composition: releases on separate parts of the data, of which an example is in one."""

import attr
import dp_accounting
import numpy as np

from tfdp.accounting import bounds, mechanisms
from tfdp.accounting.accountants import RdpAccountant
from tfdp.accounting.bounds import Release
from tfdp.base import validation

_Apart = mechanisms.ApartMechanism


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ParallelDpEvent(dp_accounting.DpEvent):
    """One release, which costs each example the price of one of several events.

    Each example (or user) has to do with one of the events at most, and which one it is does not
    depend on the data: a model is trained on some examples, and scored on others. The release costs
    the largest price of the events, and not their sum.

    Attributes:
      events: Events, each of which is all that the release costs the examples of one part.

    Raises:
      ValueError: There is no event (when it is recorded or priced).

    Source: docs/private_selection.md. McSherry 2009, "Privacy Integrated Queries", Theorem 4.

    Example:
      >>> from tfdp.accounting import PrivacyLedger
      >>> ledger = PrivacyLedger()
      >>> parts = [dp_accounting.GaussianDpEvent(noise) for noise in (2.0, 3.0)]
      >>> ledger.record(ParallelDpEvent(parts))
      >>> alone = PrivacyLedger()
      >>> alone.record(parts[0])
      >>> ledger.epsilon(1e-5).epsilon == alone.epsilon(1e-5).epsilon
      True
    """

    events: list[dp_accounting.DpEvent]


class Parallel(_Apart):
    """Releases on separate parts of the data: every price is the largest of the parts' prices.

    So it holds for the examples of each part, and composes with other releases, in which the parts
    may be others, and may depend on what was released before.
    """

    prices_orders_together = True

    def check(self, event: ParallelDpEvent) -> None:
        """Raises a ValueError if there is no event."""
        if not (isinstance(event.events, list | tuple) and event.events):
            raise validation.error("event", "one whose `events` are not empty", event)

    def rdp(
        self, event: ParallelDpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        """Returns the largest RDP of the parts, at each order."""
        accountants = [
            RdpAccountant(list(orders), selective_release=observability).compose(part)
            for part in event.events
        ]
        return np.max([accountant.rdp for accountant in accountants], axis=0)

    def epsilon(self, event: ParallelDpEvent, delta: float, observability: str) -> float:
        """Returns the largest epsilon of the parts at `delta`."""
        return max(
            bounds.pld_epsilon([Release(part, 1)], delta, observability) for part in event.events
        )

    def attained(self, event: ParallelDpEvent) -> dp_accounting.DpEvent | None:
        """Returns what the examples of the first part can see of it."""
        part = event.events[0]
        mechanism = mechanisms.of(part)
        return mechanism.attained(part) if isinstance(mechanism, _Apart) else part


mechanisms.register(ParallelDpEvent, Parallel())
