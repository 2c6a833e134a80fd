"""Events as immutable values and as JSON."""

import json
import math

import attr
import dp_accounting
import numpy as np
import pytest

from tfdp.accounting import SelectiveReleaseDpEvent, event_codec

Gaussian = dp_accounting.GaussianDpEvent
_EVENTS = [
    dp_accounting.NoOpDpEvent(),
    dp_accounting.NonPrivateDpEvent(),
    dp_accounting.UnsupportedDpEvent(),
    Gaussian(0.1 + 0.2),
    dp_accounting.LaplaceDpEvent(3),
    event_codec.sampled_gaussian(256 / 60000, 1.1),
    dp_accounting.SelfComposedDpEvent(Gaussian(1.0), 7),
    dp_accounting.ComposedDpEvent([Gaussian(1.0), event_codec.sampled_gaussian(0.1, 2.0)]),
    dp_accounting.SampledWithoutReplacementDpEvent(100, 10, Gaussian(1.0)),
    dp_accounting.SingleEpochTreeAggregationDpEvent(1.0, [3, 4]),
    dp_accounting.dp_event.RepeatAndSelectDpEvent(Gaussian(5.0), 10.0, math.inf),
    SelectiveReleaseDpEvent(event_codec.sampled_gaussian(0.1, 2.0), Gaussian(1.3), -0.5),
]


@pytest.mark.parametrize("event", _EVENTS, ids=lambda event: type(event).__name__)
def test_round_trip_through_strict_json(event):
    frozen = event_codec.freeze(event)
    text = json.dumps(event_codec.encode(frozen), allow_nan=False)
    assert event_codec.decode(json.loads(text)) == frozen


@pytest.mark.parametrize("event", _EVENTS, ids=lambda event: type(event).__name__)
def test_frozen_events_are_keys_and_never_change(event):
    frozen = event_codec.freeze(event)
    assert {frozen: 1}[event_codec.freeze(event)] == 1
    if isinstance(event, dp_accounting.ComposedDpEvent):
        copy = dp_accounting.ComposedDpEvent(list(event.events))
        frozen = event_codec.freeze(copy)
        copy.events.pop()
        assert len(frozen.events) == 2


def test_numpy_scalars_become_pythons():
    frozen = event_codec.freeze(
        dp_accounting.SelfComposedDpEvent(Gaussian(np.float32(0.5)), np.int64(3))
    )
    assert type(frozen.count) is int
    assert type(frozen.event.noise_multiplier) is float


def test_refuses_foreign_classes():
    @attr.s(frozen=True, auto_attribs=True)
    class ForeignDpEvent(dp_accounting.DpEvent):
        x: float

    with pytest.raises(ValueError, match="class of dp_accounting or tfdp"):
        event_codec.encode(ForeignDpEvent(1.0))


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "subprocess.Popen",
        "dp_accounting.dp_event.NoSuchDpEvent",
        "dp_accounting.no_such_module.GaussianDpEvent",
        "dp_accounting.dp_event.importlib",
        "dp_accounting.dp_event_builder.DpEventBuilder",
        "dp_accounting_evil.Event",
        "",
        None,
        3,
    ],
)
def test_decoding_refuses_unknown_classes(name):
    with pytest.raises(ValueError, match=r"Argument `class` must be .*Received: class="):
        event_codec.decode({"class": name, "fields": {}})


@pytest.mark.parametrize("data", [None, [], {}, {"class": "x"}, "text"])
def test_decoding_refuses_other_data(data):
    with pytest.raises(ValueError, match="Argument `event` must be a dict"):
        event_codec.decode(data)


@pytest.mark.parametrize("fields", [{}, {"noise": 1.0}, {"noise_multiplier": 1.0, "x": 2}, None])
def test_decoding_refuses_other_fields(fields):
    with pytest.raises(ValueError, match="Argument `fields` must be"):
        event_codec.decode({"class": "dp_accounting.dp_event.GaussianDpEvent", "fields": fields})


def test_decoding_refuses_impossible_parameters():
    data = event_codec.encode(Gaussian(1.0))
    data["fields"]["noise_multiplier"] = -1.0
    with pytest.raises(ValueError, match="noise_multiplier"):
        event_codec.decode(data)
    for threshold in (math.nan, math.inf, "1", None):
        with pytest.raises(ValueError, match="threshold"):
            event_codec.check_event(SelectiveReleaseDpEvent(Gaussian(1), Gaussian(1), threshold))


def _nested(levels, leaf, wrap):
    for _ in range(levels):
        leaf = wrap(leaf)
    return leaf


def test_refuses_events_that_are_nested_too_deeply():
    wrap = lambda event: dp_accounting.ComposedDpEvent([event])  # noqa: E731
    event = _nested(49, dp_accounting.GaussianDpEvent(1.0), wrap)
    assert event_codec.decode(event_codec.encode(event)) == event_codec.freeze(event)
    with pytest.raises(ValueError, match="`event` must be nested at most 50"):
        event_codec.check_event(_nested(5000, dp_accounting.GaussianDpEvent(1.0), wrap))
    data = {"class": "dp_accounting.dp_event.GaussianDpEvent", "fields": {"noise_multiplier": 1.0}}
    name = "dp_accounting.dp_event.ComposedDpEvent"
    deep = _nested(5000, data, lambda d: {"class": name, "fields": {"events": [d]}})
    with pytest.raises(ValueError, match="`event` must be nested at most 50"):
        event_codec.decode(deep)


def test_refuses_integers_beyond_all_floats():
    with pytest.raises(ValueError, match="`noise_multiplier`"):
        event_codec.check_event(dp_accounting.GaussianDpEvent(10**400))
