"""The record of what has been released, and what it costs."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting

from tfdp.accounting import bounds, event_codec
from tfdp.accounting.bounds import EpsilonBound, Release
from tfdp.accounting.observability import (
    CONDITIONAL,
    PER_ATTEMPT,
    AttemptsDpEvent,
    check_observability,
    contains_attempts,
)
from tfdp.accounting.relation import RELATION
from tfdp.accounting.sampling import EXAMPLE, UNITS
from tfdp.base import validation

if TYPE_CHECKING:
    from tfdp.accounting.trade_off import TradeOff

_FORMAT_VERSION = 1
_FIELDS = {"event", "count", "truncation_probability", "cycle_length"}  # Fields of a release.


class PrivacyParametersChangedError(ValueError):
    """Error of a training that resumes with other privacy parameters than it began with."""


class PrivacyLedger:
    """Record of what has been released so far.

    Guarantees: `epsilon(delta)` is an upper bound for all recorded releases together, composed
    adaptively, under zero-out: for data sets that differ in one unit of privacy, which is there in
    one of them and contributes nothing in the other. Numbers of examples, sampling probabilities,
    noise and numbers of steps are public.

    Args:
      notes: Sentences that `privacy_statement` must print.
      selective_release: The observable part of its SelectiveReleaseDpEvents: "conditional"
        (accepted updates only) or "per_attempt" (everything; one event is one attempt).
      unit: The unit of privacy of all releases: "example", or "user" where neighboring data sets
        differ in all examples of one user.

    Raises:
      ValueError: `selective_release` or `unit` is not one of these, or a note is no string.

    Example:
      >>> import dp_accounting
      >>> ledger = PrivacyLedger()
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> ledger.record(step, count=1000)
      >>> bound = ledger.epsilon(delta=1e-5)
      >>> bound.accountant, round(bound.epsilon, 2)
      ('PLD', 1.83)
    """

    def __init__(
        self,
        notes: Iterable[str] = (),
        selective_release: str = CONDITIONAL,
        unit: str = EXAMPLE,
    ):
        self._selective_release = check_observability(selective_release)
        self._unit = validation.one_of("unit", unit, UNITS)
        self._releases: list[Release] = []
        self._notes: list[str] = []
        self._dataset_sizes: tuple[int, ...] = ()
        requirement = "an iterable of non-empty strings"
        for note in validation.elements("notes", notes, requirement):
            if not (isinstance(note, str) and note):
                raise validation.error("notes", requirement, notes)
            self.add_note(note)

    def record(
        self,
        event: dp_accounting.DpEvent,
        count: int = 1,
        truncation_probability: float = 0.0,
        cycle_length: int = 1,
    ) -> None:
        """Adds `count` releases of `event`.

        Args:
          event: Event of one release. An event equal to the one before it is merged with it.
          count: Number of releases.
          truncation_probability: An upper bound tau, in [0, 1), on the probability that one release
            leaves examples out because its Poisson batch does not fit into its fixed size. It is
            charged to delta: see `tfdp.accounting.bounds.tightest_epsilon`.
          cycle_length: Training steps that one release covers, in which an example has one chance
            to be sampled (cyclic Poisson sampling). Statements name it, and the charge for
            truncation depends on it; nothing else does.

        Raises:
          ValueError: An argument, or a parameter of `event`, is out of its range.
        """
        event = event_codec.freeze(event)
        count = validation.positive_integer("count", count)
        tau = validation.small_probability("truncation_probability", truncation_probability)
        cycle = validation.positive_integer("cycle_length", cycle_length)
        new = Release(event, count, tau, cycle)
        last = self._releases[-1] if self._releases else None
        if last is not None and dataclasses.replace(last, count=count) == new:
            self._releases[-1] = dataclasses.replace(new, count=last.count + count)
        else:
            self._releases.append(new)

    def add_note(self, note: str) -> None:
        """Adds a sentence that `privacy_statement` must print, unless it is there already."""
        if not (isinstance(note, str) and note):
            raise validation.error("note", "a non-empty string", note)
        if note not in self._notes:
            self._notes.append(note)

    @property
    def releases(self) -> tuple[Release, ...]:
        """The releases in their order, equal ones in a row merged."""
        return tuple(self._releases)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that `privacy_statement` must print."""
        return tuple(self._notes)

    @property
    def selective_release(self) -> str:
        """The observable part of SelectiveReleaseDpEvents."""
        return self._selective_release

    @property
    def unit(self) -> str:
        """The unit of privacy: "example" or "user"."""
        return self._unit

    @property
    def relation(self) -> str:
        """The neighboring relation of the guarantee, "zero-out": see docs/relation.md."""
        return RELATION

    @property
    def dataset_sizes(self) -> tuple[int, ...]:
        """Numbers of training examples (users) that the optimizers knew which took the steps."""
        return self._dataset_sizes

    def read_only(self, dataset_sizes: Iterable[int] = ()) -> "PrivacyLedger":
        """Returns a copy that refuses to be changed.

        Args:
          dataset_sizes: Numbers of training examples that are known.

        Raises:
          ValueError: They are not positive integers.
        """
        requirement = "an iterable of positive integers"
        for size in (sizes := validation.elements("dataset_sizes", dataset_sizes, requirement)):
            if not (validation.is_integer(size) and size > 0):
                raise validation.error("dataset_sizes", requirement, dataset_sizes)
        dataset_sizes = [int(size) for size in sizes]
        return compose_ledgers([self], cls=_ReadOnlyLedger, dataset_sizes=dataset_sizes)

    @property
    def steps(self) -> int:
        """Number of releases in all."""
        return sum(release.count for release in self._releases)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """All releases as one event, for dp_accounting's tools. Truncation is not part of it."""
        builder = dp_accounting.DpEventBuilder()
        for release in self._releases:
            builder.compose(release.event, release.count)
        return builder.build()

    def epsilon(self, delta: float, *, group_size: int = 1) -> EpsilonBound:
        """Returns the smallest epsilon that RDP or PLD accounting can prove at `delta`.

        If batches can be truncated, the bound is computed at a smaller delta that leaves room for
        the truncation (0.1% smaller if this is enough). It holds at the stated `delta`.

        Args:
          delta: The delta of the guarantee, in (0, 1); should be below one over the number of
            training examples.
          group_size: Number of examples (units of privacy) that are protected together, at most:
            all of a person who has contributed up to so many. Gaussian mechanisms and those on
            Poisson samples alone have a price for groups (`tfdp.accounting.group_privacy`).

        Raises:
          ValueError: `delta` is not in (0, 1), or `group_size` not an integer from 1 to 1000.
          dp_accounting.UnsupportedEventError: No accountant supports all events, or not for groups.

        Example:
          >>> ledger = PrivacyLedger()
          >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
          >>> ledger.record(step, count=1000)
          >>> [round(ledger.epsilon(1e-5, group_size=k).epsilon, 2) for k in (1, 2, 4)]
          [1.83, 3.98, 8.9]
        """
        delta = validation.between_zero_and_one("delta", delta)
        with self._reasons():
            releases = self._for_groups(group_size)
            return bounds.tightest_epsilon(releases, delta, self._selective_release)

    def trade_off(self, *, group_size: int = 1) -> "TradeOff":
        """Returns the trade-off curve: upper bounds on what any attack can reach.

        It has the true positive rate at any false positive rate, the advantage, and mu of Gaussian
        differential privacy: see `TradeOff`.

        Args:
          group_size: As for `epsilon`.

        Raises:
          ValueError: `group_size` is not an integer from 1 to 1000.
          dp_accounting.UnsupportedEventError: No accountant supports all events, or not for groups.

        Example:
          >>> ledger = PrivacyLedger()
          >>> ledger.record(dp_accounting.GaussianDpEvent(2.0))
          >>> curve = ledger.trade_off()
          >>> round(curve.true_positive_rate(0.01), 3), round(curve.gaussian_dp(1e-5).mu, 3)
          (0.034, 0.5)
        """
        module = importlib.import_module("tfdp.accounting.trade_off")  # Training asks for none.
        with self._reasons():
            releases = self._for_groups(group_size)
            return module.trade_off_of(releases, self._selective_release, self._unit, group_size)

    def _for_groups(self, group_size: int) -> Sequence[Release]:
        if type(group_size) is int and group_size == 1:
            return self._releases  # Training asks for nothing else.
        module = importlib.import_module("tfdp.accounting.group_privacy")
        return module.group_releases(self._releases, group_size)

    @contextlib.contextmanager
    def _reasons(self) -> Iterator[None]:
        """Adds the notes to errors about releases without a price."""
        try:
            yield
        except dp_accounting.UnsupportedEventError as refusal:
            reasons = " ".join([*self._notes, str(refusal)])
            raise dp_accounting.UnsupportedEventError(reasons) from refusal

    def to_dict(self) -> dict[str, Any]:
        """Returns the ledger as a dict that JSON can hold and `from_dict` reads back.

        Raises:
          ValueError: An event is of a class that could not be read back.
        """
        return {
            "version": _FORMAT_VERSION,
            "selective_release": self._selective_release,
            "unit": self._unit,
            "releases": [
                {
                    "event": event_codec.encode(release.event),
                    "count": release.count,
                    "truncation_probability": release.truncation_probability,
                    "cycle_length": release.cycle_length,
                }
                for release in self._releases
            ],
            "notes": list(self._notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PrivacyLedger":
        """Returns the ledger that `to_dict` turned into `data`.

        Raises:
          ValueError: `data` is not of that form, or names an unknown class of events.
        """
        keys = {"version", "selective_release", "unit", "releases", "notes"}
        if not isinstance(data, Mapping) or set(data) != keys:
            raise validation.error("data", f"a mapping with the keys {sorted(keys)}", data)
        if type(data["version"]) is not int or data["version"] != _FORMAT_VERSION:
            raise validation.error("version", str(_FORMAT_VERSION), data["version"])
        for name in ("releases", "notes"):
            if not isinstance(data[name], list | tuple):
                raise validation.error(name, "a list", data[name])
        ledger = cls(data["notes"], data["selective_release"], data["unit"])
        for release in data["releases"]:
            if not isinstance(release, Mapping) or set(release) != _FIELDS:
                raise validation.error("releases", "what `to_dict` wrote", release)
            ledger.record(**{**release, "event": event_codec.decode(release["event"])})
        return ledger

    def __repr__(self) -> str:
        text = (
            f"PrivacyLedger(steps={self.steps}, event={self.event!r}, relation={RELATION!r}, "
            f"notes={self.notes!r}"
        )
        if contains_attempts(self.event):
            text += f", selective_release={self._selective_release!r}"
        if self._unit != EXAMPLE:
            text += f", unit={self._unit!r}"
        return text + ")"


class _ReadOnlyLedger(PrivacyLedger):
    """A ledger of what optimizers have counted."""

    _sealed = False

    def record(
        self,
        event: dp_accounting.DpEvent,
        count: int = 1,
        truncation_probability: float = 0.0,
        cycle_length: int = 1,
    ) -> None:
        """Raises an error: a ledger of an optimizer is read-only.

        Raises:
          TypeError: Always: the ledger shows what the optimizer has counted.
        """
        self._refuse("record")
        super().record(event, count, truncation_probability, cycle_length)

    def add_note(self, note: str) -> None:
        """Raises an error: a ledger of an optimizer is read-only.

        Raises:
          TypeError: Always: the ledger shows what the optimizer has counted.
        """
        self._refuse("add_note")
        super().add_note(note)

    def _refuse(self, method: str) -> None:
        if self._sealed:
            raise TypeError(
                f"The ledger of an optimizer can only be read: it shows what was counted. Received "
                f"a call of `{method}`. Record other releases in a `PrivacyLedger` of your own, "
                "and give it as `prior` to `tfdp.privacy_statement` and "
                "`tfdp.PrivacyBudget`."
            )


Ledgers = PrivacyLedger | Iterable[PrivacyLedger]


def as_ledgers(prior: Ledgers | None) -> list[PrivacyLedger]:
    """Returns the ledgers of an argument `prior`.

    Raises:
      ValueError: It is neither a PrivacyLedger, nor an iterable of them, nor None.
    """
    if prior is None:
        return []
    given = [prior] if isinstance(prior, PrivacyLedger) else prior
    requirement = "a PrivacyLedger, an iterable of them, or None"
    ledgers = validation.elements("prior", given, requirement)
    if not all(isinstance(ledger, PrivacyLedger) for ledger in ledgers):
        raise validation.error("prior", requirement, prior)
    return ledgers


def compose_ledgers(
    ledgers: Iterable[PrivacyLedger],
    selective_release: str | None = None,
    cls: type[PrivacyLedger] = PrivacyLedger,
    dataset_sizes: Iterable[int] = (),
) -> PrivacyLedger:
    """Returns the ledger of all releases of several ledgers, equal ones merged.

    Where some assume that only accepted updates of selective release are seen, and others that all
    attempts are, every attempt of the latter is recorded as what it is: the release of its update,
    and that of its test.

    Args:
      ledgers: Any number of them.
      selective_release: Assumption about releases that will follow, or None.
      cls: Class of the result.
      dataset_sizes: Numbers of training examples that are known, besides those of the ledgers.

    Raises:
      ValueError: `selective_release` is none of `OBSERVABILITY`; or the ledgers are of several
        units of privacy, whose costs do not add up.
    """
    ledgers = list(ledgers)
    units = sorted({ledger.unit for ledger in ledgers if ledger.releases})
    if len(units) > 1:
        raise ValueError(
            "Ledgers must be of one unit of privacy to be composed: what is known about an example "
            f"says nothing about its user. Received ledgers of units: {units}."
        )
    unit = (units or [ledger.unit for ledger in ledgers] or [EXAMPLE])[0]
    if selective_release is not None:
        check_observability(selective_release)
    modes = [ledger.selective_release for ledger in ledgers if _is_selective(ledger)]
    modes += [] if selective_release is None else [selective_release]
    modes = modes or [ledger.selective_release for ledger in ledgers[:1]] or [CONDITIONAL]
    mode = modes[0] if len(set(modes)) == 1 else CONDITIONAL
    counts: dict[Release, int] = {}
    for ledger in ledgers:
        for release in ledger.releases:
            for part in _seen_as(release, ledger.selective_release, mode):
                one = dataclasses.replace(part, count=1)
                counts[one] = counts.get(one, 0) + part.count
    whole = cls([note for ledger in ledgers for note in ledger.notes], mode, unit)
    for release, count in counts.items():
        whole.record(release.event, count, release.truncation_probability, release.cycle_length)
    sizes = {*dataset_sizes, *(size for ledger in ledgers for size in ledger.dataset_sizes)}
    whole._dataset_sizes = tuple(sorted(sizes))
    if isinstance(whole, _ReadOnlyLedger):
        whole._sealed = True
    return whole


def check_unit(past: PrivacyLedger, unit: str) -> None:
    """Raises a ValueError if a training cannot follow what was released of another unit."""
    if past.releases and past.unit != unit:
        raise ValueError(
            f"The unit of privacy of this training is one {unit}, but that of what has been "
            f"released before is one {past.unit}: no epsilon can be stated for both together."
        )


def as_seen(
    event: dp_accounting.DpEvent, selective_release: str, ledger: PrivacyLedger
) -> dp_accounting.DpEvent:
    """Returns `event`, which assumes `selective_release`, in a form that `ledger` can hold.

    Raises:
      ValueError: `selective_release` is none of `OBSERVABILITY`.
    """
    check_observability(selective_release)
    parts = _seen_as(Release(event, 1), selective_release, ledger.selective_release)
    if len(parts) == 1:
        return event
    return dp_accounting.ComposedDpEvent([part.event for part in parts])


def _is_selective(ledger: PrivacyLedger) -> bool:
    return any(contains_attempts(release.event) for release in ledger.releases)


def _seen_as(release: Release, old: str, new: str) -> list[Release]:
    """Returns a release under another assumption of what can be observed."""
    event = release.event
    if old == new or not contains_attempts(event):
        return [release]
    if not isinstance(event, AttemptsDpEvent) or old != PER_ATTEMPT:
        raise ValueError(
            "Selective releases of different assumptions can be composed only as they are, not "
            f"within other events. Received: {event!r}, which assumes {old!r}."
        )
    first, *others = event.releases_of_attempt()
    return [
        Release(first, release.count, release.truncation_probability),
        *(Release(part, release.count) for part in others),
    ]
