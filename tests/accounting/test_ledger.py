"""The ledger remembers everything that was released, and survives saving."""

import json
import math

import dp_accounting
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.accounting import (
    PrivacyLedger,
    RdpAccountant,
    SelectiveReleaseDpEvent,
    bounds,
    event_codec,
)
from tfdp.accounting.bounds import Release
from tfdp.accounting.event_codec import sampled_gaussian

_STEP = sampled_gaussian(0.01, 1.0)
_OTHER = sampled_gaussian(0.02, 1.5)
_SELECTIVE = SelectiveReleaseDpEvent(_STEP, _OTHER)


def test_an_empty_ledger_costs_nothing():
    ledger = PrivacyLedger()
    assert (ledger.steps, ledger.releases, ledger.notes) == (0, (), ())
    assert isinstance(ledger.event, dp_accounting.NoOpDpEvent)
    assert ledger.epsilon(1e-5).epsilon == 0


def test_equal_consecutive_releases_are_merged():
    ledger = PrivacyLedger()
    ledger.record(_STEP)
    ledger.record(sampled_gaussian(0.01, 1.0), count=9)
    ledger.record(_OTHER, 2)
    ledger.record(_STEP, 3)
    ledger.record(_STEP, 4, truncation_probability=1e-20)
    assert ledger.releases == (
        Release(_STEP, 10),
        Release(_OTHER, 2),
        Release(_STEP, 3),
        Release(_STEP, 4, 1e-20),
    )
    assert ledger.steps == 19
    assert ledger.event == dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(_STEP, 10),
            dp_accounting.SelfComposedDpEvent(_OTHER, 2),
            dp_accounting.SelfComposedDpEvent(_STEP, 7),
        ]
    )


def test_step_by_step_costs_what_dp_accounting_says_of_the_event():
    ledger = PrivacyLedger()
    for _ in range(200):
        ledger.record(_STEP)
    ledger.record(_OTHER, 100)
    expected = dp_accounting.pld.PLDAccountant().compose(ledger.event).get_epsilon(1e-5)
    assert abs(ledger.epsilon(1e-5).epsilon - expected) < 1e-3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([_STEP, _OTHER]), max_size=12))
def test_steps_are_never_lost(events):
    ledger = PrivacyLedger()
    for event in events:
        ledger.record(event)
    assert ledger.steps == len(events)
    flat = [release.event for release in ledger.releases for _ in range(release.count)]
    assert flat == events


def test_round_trip():
    ledger = PrivacyLedger(notes=["fixed noise seed: for tests only"])
    ledger.record(_STEP, 10, truncation_probability=1e-17)
    ledger.record(dp_accounting.ComposedDpEvent([_STEP, dp_accounting.GaussianDpEvent(4.0)]), 2)
    ledger.record(_STEP, 3, cycle_length=5)
    text = json.dumps(ledger.to_dict(), allow_nan=False)
    copy = PrivacyLedger.from_dict(json.loads(text))
    assert (copy.releases, copy.notes) == (ledger.releases, ledger.notes)
    assert copy.epsilon(1e-5) == ledger.epsilon(1e-5)
    copy.record(_STEP)
    assert ledger.steps == 15


_NO_EVENT = {"event": {}, "count": 1, "truncation_probability": 0, "cycle_length": 1}


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"version": 99}, "version"),
        ({"extra": 1}, "data"),
        ({"releases": [{"event": {}, "count": 1}]}, "releases"),
        ({"releases": [{"event": {}, "count": 1, "truncation_probability": 0}]}, "releases"),
        ({"releases": [_NO_EVENT]}, "event"),
        ({"notes": [3]}, "notes"),
        ({"selective_release": "hidden"}, "selective_release"),
        ({"version": 1, "notes": None, "extra": 1}, "data"),
    ],
)
def test_damaged_data_is_refused(change, argument):
    with pytest.raises(ValueError, match=f"Argument `{argument}` must be"):
        PrivacyLedger.from_dict({**PrivacyLedger().to_dict(), **change})


@pytest.mark.parametrize("count", [0, -5, 1.5])
def test_damaged_counts_are_refused(count):
    ledger = PrivacyLedger()
    ledger.record(_STEP)
    data = ledger.to_dict()
    data["releases"][0]["count"] = count
    with pytest.raises(ValueError, match="Argument `count` must be a positive integer"):
        PrivacyLedger.from_dict(data)


_JUNK = (
    None, True, False, 0, -1, 2, 0.5, 3.0, math.nan, "", "3", "inf", [], {}, [[]], [None], [1, 2],
    {"float": "nan"}, {"float": "1.0"}, {"float": 2}, {"event": {}},
)  # fmt: skip


def _edits(node):
    """Yields copies of nested JSON in each of which one value is another, missing or too much."""
    yield from _JUNK
    if isinstance(node, dict):
        yield {**node, "more": 1}
        for key, value in node.items():
            yield {name: part for name, part in node.items() if name != key}
            yield from ({**node, key: other} for other in _edits(value))
    if isinstance(node, list):
        yield [*node, node[0]] if node else [None]
        for i, value in enumerate(node):
            yield from ([*node[:i], other, *node[i + 1 :]] for other in _edits(value))


def _ledger_of_many_events():
    ledger = PrivacyLedger(["a note"], "per_attempt", "user")
    ledger.record(_STEP, 10, truncation_probability=1e-17)
    ledger.record(_SELECTIVE, 4)
    ledger.record(dp_accounting.ComposedDpEvent([_OTHER, dp_accounting.LaplaceDpEvent(4.0)]), 2)
    ledger.record(dp_accounting.SelfComposedDpEvent(_OTHER, 3), 3, cycle_length=5)
    ledger.record(RepeatAndSelectDpEvent(_STEP, 5.0, math.inf))
    return ledger


def _plain(node):
    """JSON whose equal numbers are equal, whatever their type; but no boolean is a number."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return repr(float(node)) if type(node) in (int, float) else repr(node)


def _has_a_price(ledger):
    """Whether an accountant can tell what it costs, or that it cannot."""
    try:
        RdpAccountant([8.0], selective_release="per_attempt").compose(ledger.event)
    except dp_accounting.UnsupportedEventError:
        return True
    except Exception:
        return False
    return True


def _read_as_another(data):
    """Edits of a ledger that are read as something else than what they say, or as nonsense."""
    found = []
    edits = list(_edits(data))
    assert len(edits) > 1000
    for edited in edits:
        try:
            ledger = PrivacyLedger.from_dict(edited)
        except ValueError:
            continue
        written = ledger.to_dict()
        if not _has_a_price(ledger):
            found.append(edited)
        releases, notes = edited["releases"], edited["notes"]
        if _plain({**edited, "notes": list(dict.fromkeys(notes))}) != _plain(written) and (
            len(releases) == len(written["releases"])  # Else equal ones were merged.
        ):
            found.append(edited)
    return found


def test_an_edited_ledger_is_read_as_what_it_says_or_refused_with_a_value_error():
    assert not _read_as_another(_ledger_of_many_events().to_dict())
    with pytest.raises(ValueError, match="Argument `releases` must be a list"):
        PrivacyLedger.from_dict({**PrivacyLedger().to_dict(), "releases": {}})


def test_mutant_that_takes_no_fields_type_is_caught(monkeypatch):
    data = _ledger_of_many_events().to_dict()
    monkeypatch.setattr(event_codec, "_is_of_type", lambda value, declared: True)
    assert _read_as_another(data) or pytest.fail("Nothing was read as another.")


def test_notes_are_kept_once():
    ledger = PrivacyLedger(notes=["a"])
    ledger.add_note("b")
    ledger.add_note("a")
    assert ledger.notes == ("a", "b")
    with pytest.raises(ValueError, match="Argument `note` must be"):
        ledger.add_note("")


def test_refuses_impossible_releases():
    ledger = PrivacyLedger()
    bad_events = ["step", None, dp_accounting.GaussianDpEvent(math.nan), sampled_gaussian(2.0, 1.0)]
    for event in bad_events:
        with pytest.raises(ValueError, match="Argument `event` must be"):
            ledger.record(event)
    for count in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="Argument `count` must be"):
            ledger.record(_STEP, count)
    for tau in (-1e-9, 1.0, math.nan, None):
        with pytest.raises(ValueError, match="Argument `truncation_probability` must be"):
            ledger.record(_STEP, 1, tau)
    for delta in (0, 1, -1, math.nan, "1e-5"):
        with pytest.raises(ValueError, match="Argument `delta` must be in"):
            ledger.epsilon(delta)
    assert ledger.steps == 0


def test_repr_shows_what_was_released():
    ledger = PrivacyLedger(notes=["a note"])
    ledger.record(_STEP, 3)
    assert "steps=3" in repr(ledger)
    assert "a note" in repr(ledger)


# Selective release.


@pytest.mark.parametrize("mode", ["conditional", "per_attempt"])
def test_observability_is_kept_and_priced(mode):
    ledger = PrivacyLedger(selective_release=mode)
    ledger.record(_SELECTIVE, 20)
    assert ledger.epsilon(1e-5) == bounds.tightest_epsilon(ledger.releases, 1e-5, mode)
    copy = PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict(), allow_nan=False)))
    assert copy.selective_release == ledger.selective_release == mode
    assert copy.epsilon(1e-5) == ledger.epsilon(1e-5)
    assert f"selective_release='{mode}'" in repr(ledger)


def test_ledgers_of_the_published_price_are_refused():
    ledger = PrivacyLedger()
    ledger.record(_SELECTIVE, 20)
    data = {**ledger.to_dict(), "selective_release": "published"}
    with pytest.raises(ValueError, match=r"selective_release='published'.*not an upper bound"):
        PrivacyLedger.from_dict(data)
    # What the message says to do.
    read = PrivacyLedger.from_dict({**data, "selective_release": "conditional"})
    assert read.epsilon(1e-5) == ledger.epsilon(1e-5)


def test_mutant_that_reads_ledgers_of_the_published_price_is_caught(monkeypatch):
    monkeypatch.setattr("tfdp.accounting.ledger.check_observability", lambda value: value)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_ledgers_of_the_published_price_are_refused()


def test_observability_is_one_of_two():
    with pytest.raises(ValueError, match="Argument `selective_release` must be one of"):
        PrivacyLedger(selective_release="hidden")
