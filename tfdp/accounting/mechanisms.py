"""Mechanisms besides (sampled) noise: who checks and prices events of which type.

The accountants and the ledger know none of them. The module that defines a type of event registers
its mechanism, and is imported before there can be such an event.
"""

import abc
import importlib
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.dp_event import PoissonSampledDpEvent, RepeatAndSelectDpEvent

from tfdp.accounting.dominating_pairs import Pair

# Types that others define: the module that prices them.
_MODULES: dict[type, str] = {RepeatAndSelectDpEvent: "tfdp.accounting.repeated_runs"}
_MECHANISMS: dict[type, "Mechanism"] = {}


class Mechanism(abc.ABC):
    """Checks and prices events of one type.

    All prices are upper bounds for both directions of zero-out. Events are frozen
    (`event_codec.freeze`), and `observability` is one of `observability.OBSERVABILITY`.

    Attributes:
      parts: What the parts of such an event must be, for errors.
      prices_samples: Whether it gets a PoissonSampledDpEvent of such an event, too.
      best_at_integers: Whether its RDP is tight at integer orders alone.
      prices_orders_together: Whether its RDP takes as long at one order as at many.
    """

    parts = ""
    prices_samples = False
    best_at_integers = False
    prices_orders_together = False

    def check(self, event: Any) -> None:  # noqa: B027  # Most have nothing more to check.
        """Raises a ValueError if a parameter is wrong that `event_codec.check_event` accepts."""

    def unsupported_part(self, event: Any) -> dp_accounting.DpEvent | None:
        """Returns a part of the event whose cost is not known, or None."""
        return None

    def steps(self, event: Any) -> int | None:
        """Returns the steps of a release on a Poisson sample; an example is in one of them at most.

        None if its price may not hold given what was sampled of all other examples: see
        `bounds.tightest_epsilon`.
        """
        return None

    @abc.abstractmethod
    def rdp(self, event: Any, observability: str, orders: tuple[float, ...]) -> np.ndarray:
        """Returns the RDP of one release at `orders` [orders]."""


class PairedMechanism(Mechanism):
    """A mechanism with dominating pairs of privacy losses, which compose with all others."""

    @abc.abstractmethod
    def upper_pairs(self, event: Any, observability: str) -> tuple[Pair, ...] | None:
        """Returns pairs that dominate one release; None if all loss counts as infinite."""

    @abc.abstractmethod
    def attained_pairs(self, event: Any, observability: str) -> tuple[Pair, ...]:
        """Returns pairs that some data sets attain, of finite loss, for lower bounds."""


class ApartMechanism(Mechanism):
    """A mechanism without pairs: its epsilon is found apart, and added to that of the others."""

    @abc.abstractmethod
    def epsilon(self, event: Any, delta: float, observability: str) -> float:
        """Returns epsilon of one release at `delta`, from the privacy profile of its parts."""

    @abc.abstractmethod
    def attained(self, event: Any) -> dp_accounting.DpEvent | None:
        """Returns an event with pairs that costs no more on some data sets; None if it is free."""


def register(event: type, mechanism: Mechanism) -> None:
    """Lets the accountants price events of a type."""
    _MECHANISMS[event] = mechanism


def of(event: dp_accounting.DpEvent) -> Mechanism | None:
    """Returns the mechanism of an event; None if it is noise, a composition, or unknown."""
    if isinstance(event, PoissonSampledDpEvent):
        mechanism = _MECHANISMS.get(type(event.event))
        return mechanism if mechanism is not None and mechanism.prices_samples else None
    for cls in type(event).__mro__:
        if cls in _MODULES and cls not in _MECHANISMS:
            importlib.import_module(_MODULES[cls])
        if cls in _MECHANISMS:
            return _MECHANISMS[cls]
    return None
