"""Descriptions of releases in words."""

import itertools
from collections.abc import Iterable
from typing import Any

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp.accounting.bounds import Release
from tfdp.accounting.ledger import PrivacyLedger
from tfdp.accounting.observability import PER_ATTEMPT
from tfdp.accounting.repetitions import Repetitions
from tfdp.accounting.selective_release import SelectiveReleaseDpEvent, parameters, unsupported_part

# Names of classes whose modules are imported where there are such events.
_SIGNS = "SignedGaussianDpEvent"
_ALLOCATED = "RandomAllocationDpEvent"
_PARALLEL = "ParallelDpEvent"


def what_was_released(ledger: PrivacyLedger, dataset_size: int | None) -> str:
    """Returns the releases of a ledger in words.

    Args:
      ledger: The ledger.
      dataset_size: Number of training examples (or users), if it is to be named.
    """
    if not ledger.releases:
        return (
            "Released: nothing yet, in 0 steps. Weights that were trained in another way are not "
            "covered."
        )
    parts = [_describe(run, dataset_size, ledger) for run in _runs(ledger.releases)]
    return (
        f"Released: {'; then '.join(parts)}. Every intermediate state of the released parameters "
        "may be published, not only the last."
    )


def is_parallel(event: dp_accounting.DpEvent) -> bool:
    """Returns whether an event is of releases on separate parts of the data."""
    return type(event).__name__ == _PARALLEL


def _runs(releases: Iterable[Release]) -> list[list[Release]]:
    """Returns the releases, those in a row that differ in the noise of a schedule together."""

    def sampling(numbered: tuple[int, Release]) -> Any:
        number, event = numbered[0], numbered[1].event
        scheduled = isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
            event.event, dp_accounting.GaussianDpEvent
        )
        scheduled = scheduled and type(event.event).__name__ != _ALLOCATED
        if not scheduled:
            return f"alone: {number}"
        return type(event.event), event.sampling_probability, numbered[1].cycle_length

    return [
        [release for _, release in run]
        for _, run in itertools.groupby(enumerate(releases), key=sampling)
    ]


def _describe(run: list[Release], dataset_size: int | None, ledger: PrivacyLedger) -> str:
    """Describes a run of `_runs`."""
    release, event = run[0], run[0].event
    if isinstance(event, SelectiveReleaseDpEvent) and unsupported_part(event) is None:
        return _describe_selective(release.count, event, dataset_size, ledger)
    if isinstance(event, RepeatAndSelectDpEvent):
        return _describe_selection(release, dataset_size, ledger)
    if is_parallel(event):
        return _describe_parallel(release, dataset_size, ledger)
    sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if type(event.event if sampled else event).__name__ == _ALLOCATED:
        return _describe_epochs(release, dataset_size, ledger)
    cycle = release.cycle_length
    noun = "step" if cycle == 1 else "cycle"
    steps = _number(sum(one.count for one in run), noun)
    if type(event) is dp_accounting.GaussianDpEvent and cycle > 1:
        return (
            f"{steps} of {_gaussian(event)} with noise multiplier {event.noise_multiplier:.6g}: "
            f"each {ledger.unit} is in at most one of the {cycle} batches of a cycle, and gets no "
            "credit for not being sampled"
        )
    if not isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return f"{steps} of {event!r}"
    if len(run) > 1:
        noises = ", then ".join(
            f"{one.event.event.noise_multiplier:.6g} ({_number(one.count, noun)})" for one in run
        )
        mechanism = f"of {_gaussian(event.event)} with noise multipliers {noises}"
    elif isinstance(event.event, dp_accounting.GaussianDpEvent):
        mechanism = (
            f"of {_gaussian(event.event)} with noise multiplier {event.event.noise_multiplier:.6g}"
        )
    else:
        mechanism = f"of {event.event!r}"
    sampling = _describe_sampling(event.sampling_probability, dataset_size, ledger.unit, cycle)
    return f"{steps} {mechanism}, on {sampling}"


def _describe_epochs(release: Release, dataset_size: int | None, ledger: PrivacyLedger) -> str:
    event, epoch, q = release.event, release.event, 1.0
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        epoch, q = event.event, event.sampling_probability
    text = (
        f"{_number(release.count, 'epoch')} of {_number(epoch.steps, 'step')} each of the Gaussian "
        f"mechanism with noise multiplier {epoch.noise_multiplier:.6g}, by random allocation: each "
        f"{ledger.unit} is in the batch of one step of an epoch, drawn anew for each epoch"
    )
    if q < 1:
        text += f", with probability q = {q:.6g}, or else of none"
    if dataset_size is not None:
        expected = q * dataset_size / epoch.steps
        text += f" (of {dataset_size} {ledger.unit}s, {expected:g} expected per batch)"
    return text


def _gaussian(event: dp_accounting.GaussianDpEvent) -> str:
    if type(event).__name__ == _SIGNS:
        return "the signs of the Gaussian mechanism (one for each coordinate, and no magnitude)"
    return "the Gaussian mechanism"


def _describe_selective(
    count: int, event: SelectiveReleaseDpEvent, dataset_size: int | None, ledger: PrivacyLedger
) -> str:
    (q, noise), (validation_q, validation_noise) = map(parameters, (event.update, event.selection))
    attempts = ledger.selective_release == PER_ATTEMPT
    sampling = _describe_sampling(q, dataset_size, ledger.unit)
    return (
        f"{_number(count, 'attempt' if attempts else 'accepted update')} of selective release: "
        f"the Gaussian mechanism with noise multiplier {noise:.6g}, on "
        f"{sampling}, and accepted only if a test passes (the clipped "
        f"change of the loss on another batch, sampled with q = {validation_q:.6g}, plus noise of "
        f"multiplier {validation_noise:.6g}, is below {event.threshold:.6g} times the clipping "
        "bound)"
    )


def _describe_parallel(release: Release, dataset_size: int | None, ledger: PrivacyLedger) -> str:
    parts = [_describe([Release(part, 1)], dataset_size, ledger) for part in release.event.events]
    described = "; or ".join(f"({number}) {part}" for number, part in enumerate(parts, 1))
    return (
        f"{_number(release.count, 'release')} on separate parts of the data, of which each "
        f"{ledger.unit} is in one at most: {described}"
    )


def _describe_selection(release: Release, dataset_size: int | None, ledger: PrivacyLedger) -> str:
    repetitions = Repetitions.of_event(release.event)
    distribution = repetitions.distribution.replace("_", " ")
    if repetitions.shape is not None:
        distribution = f"truncated {distribution} of shape {repetitions.shape:g}"
    parts = [_describe([part], dataset_size, ledger) for part in _parts(release.event.event)]
    return (
        f"{_number(release.count, 'private selection')}: the best of a random number of runs "
        f"({distribution} distribution, mean {repetitions.mean:g}), of which each is "
        f"{'; then '.join(parts)}"
    )


def _parts(event: dp_accounting.DpEvent, count: int = 1) -> list[Release]:
    """Returns the releases that an event is composed of."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return [part for one in event.events for part in _parts(one, count)]
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _parts(event.event, count * event.count)
    return [Release(event, count)]


def _describe_sampling(q: float, dataset_size: int | None, unit: str, cycle: int = 1) -> str:
    text = f"Poisson-sampled batches: each {unit} is in "
    if cycle == 1:
        text += f"each batch independently with probability q = {q:.6g}"
    else:
        text += (
            f"one of {cycle} random sets, which the {cycle} batches of a cycle are sampled from, "
            f"and in its batch independently with probability q = {q:.6g}"
        )
    if dataset_size is not None:
        expected = q * dataset_size / cycle
        text += f" (of {dataset_size} {unit}s, {expected:g} expected per batch)"
    return text


def _number(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
