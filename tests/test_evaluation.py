"""The report by subgroups: its numbers, intervals, text and picture."""

import numpy as np
import pytest
import scipy.stats

from tests import support
from tests.front_ends import keras, needs_keras_3
from tfdp.evaluation import subgroup_report

X, Y = support.small_data(90)
GROUPS = np.arange(90) % 3


class Echo:
    """A model that returns its inputs."""

    def predict(self, x, batch_size=None, verbose="auto"):
        return np.asarray(x)


def small_model_of_keras_3():
    from tests.keras3.support import small_model

    model = small_model()
    assert isinstance(model, keras.Model)
    return model


OF_BOTH = [support.small_model, pytest.param(small_model_of_keras_3, marks=needs_keras_3)]


@pytest.mark.parametrize("model", OF_BOTH)
def test_models_of_both_keras(model):
    model = model()
    report = subgroup_report(model, X, Y, GROUPS, batch_size=32)
    right = np.asarray(model(X)).argmax(axis=-1) == Y
    assert [group.name for group in report.subgroups] == ["0", "1", "2"]
    for number, group in enumerate(report.subgroups):
        chosen = right[number == GROUPS]
        assert (group.count, group.value) == (30, chosen.mean())
        wilson = scipy.stats.binomtest(int(chosen.sum()), 30).proportion_ci(0.95, "wilson")
        assert (group.lower, group.upper) == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    assert report.whole.value == right.mean()
    assert report.gap == report.whole.value - min(g.value for g in report.subgroups) > 0


def test_labels_of_every_form():
    outputs = np.eye(3)[Y]
    for labels in (Y, Y[:, np.newaxis], np.eye(3)[Y], list(Y)):
        report = subgroup_report(Echo(), outputs, labels, GROUPS)
        assert report.whole.value == 1 and report.gap == 0
        assert report.whole.lower < 1 == report.whole.upper


def test_a_metric_of_ones_own_has_bootstrap_intervals():
    rng = np.random.default_rng(0)
    outputs = rng.exponential(size=[600, 1]) * np.repeat([1.0, 3.0], 300)[:, np.newaxis]
    groups = np.repeat(["one", "three"], 300).astype(object)

    def loss(y, outputs):
        return np.abs(outputs[:, 0] - y)

    report = subgroup_report(
        Echo(), outputs, np.zeros(600), groups, metric=loss, higher_is_better=False
    )
    assert report.metric == "loss" and report.worst.name == "three"
    assert report.gap == pytest.approx(report.worst.value - outputs.mean())
    for group, scale in zip(report.subgroups, (1.0, 3.0), strict=True):
        # An exponential distribution: the deviation of the mean is scale / sqrt(300).
        assert group.upper - group.lower == pytest.approx(2 * 1.96 * scale / 300**0.5, rel=0.25)
        assert group.lower < group.value < group.upper
    again = subgroup_report(Echo(), outputs, np.zeros(600), groups, metric=loss)
    assert again.subgroups == report.subgroups


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["share", "number"])
def test_intervals_hold_as_often_as_they_say(kind):
    rng, held = np.random.default_rng(1), 0
    for _ in range(100):
        drawn = rng.random(60)
        values = (drawn < 0.8) if kind == "share" else drawn
        report = subgroup_report(
            Echo(), drawn, values, np.zeros(60, int), metric=lambda y, _: y, confidence=0.9
        )
        held += report.whole.lower <= (0.8 if kind == "share" else 0.5) <= report.whole.upper
    assert scipy.stats.binomtest(held, 100, 0.9).pvalue > 1e-3


def test_text_and_picture(tmp_path):
    report = subgroup_report(Echo(), np.eye(3)[Y], (Y + (GROUPS == 1)) % 3, GROUPS)
    assert "The worst group is '1', 0.6667 worse than the mean of all examples." in str(report)
    assert "not covered by the model's guarantee" in str(report)
    report.plot(tmp_path / "groups.png")
    assert (tmp_path / "groups.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": GROUPS[:-1]}, "must be of the same number"),
        ({"y": Y[:5]}, "must be of the same number"),
        ({"groups": GROUPS.astype(float)}, "`groups` must"),
        ({"groups": [None] * 90}, "`groups` must"),
        ({"x": np.zeros([90, 1])}, "`metric` must be given"),
        ({"y": np.zeros([90, 2])}, "`y` must"),
        ({"metric": lambda y, outputs: 1.0}, "`metric` must"),
        ({"metric": lambda y, outputs: np.full(90, np.nan)}, "`metric` must"),
        ({"metric": int}, "`metric` must be a function of `y` and"),
        ({"confidence": 1.0}, "`confidence` must"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {"x": np.eye(3)[Y], "y": Y, "groups": GROUPS, **changes}
    with pytest.raises(ValueError, match=message):
        subgroup_report(Echo(), **arguments)
