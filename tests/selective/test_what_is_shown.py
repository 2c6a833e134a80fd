"""Logs and progress of a training: the number of attempts is not shown unless it is paid for."""

import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both, with_one
from tests.selective_support import X, Y, batches, compiled, optimizer
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training.selective.shadows import Shadows

pytestmark = pytest.mark.rewritten_graphs


@with_both
def test_nothing_tells_how_many_attempts_there_were(front, capsys):
    seen = []

    class Logs(front.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs or {}))

    model = compiled(optimizer(front.tfdp.DPSURSGD), weighted_metrics=["accuracy"])
    history = model.fit(
        batches(), epochs=2, steps_per_epoch=2, validation_data=(X, Y), callbacks=[Logs()]
    )
    assert set(history.history) == {"accepted_updates", "val_loss", "val_accuracy"}
    assert seen == [{"accepted_updates": i} for i in (1, 2, 3, 4)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines if line.startswith("Epoch")] == [
        "Epoch 1/2: 2 accepted updates",
        "Epoch 2/2: 2 accepted updates",
    ]
    assert "ms/step" not in "".join(lines) and "ETA" not in "".join(lines)
    assert int(model.optimizer.iterations) == 4


class OwnMetric:
    """Part of a model that has a mean of what it sees."""

    def __init__(self, metric):
        super().__init__()
        self.mean, self.dense = metric, None

    def build(self, shape):
        self.built = True

    def call(self, inputs):
        self.mean.update_state(inputs)
        return self.dense(inputs)


def private_means(front, kind):
    """A model with a metric in it."""
    keras = front.keras
    if kind == "add_metric":
        inputs = keras.layers.Input([4])
        base = keras.Model(inputs, keras.layers.Dense(3)(inputs))
        base.add_metric(tf.reduce_mean(inputs), name="mean")
        return base
    parent = keras.Model if kind == "model" else keras.layers.Layer
    part = type("Part", (OwnMetric, parent), {})(keras.metrics.Mean(name="mean"))
    part.dense = keras.layers.Dense(3)
    return part if kind == "model" else keras.Sequential([part])


KEEPERS = [(FRONT_ENDS[0], "add_metric")]
KEEPERS += [(front, kind) for front in FRONT_ENDS for kind in ("model", "layer")]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("front", "kind"), KEEPERS)
def test_keras_keeps_no_mean_of_private_numbers(front, kind):
    base = private_means(front, kind)
    model = compiled(optimizer(front.tfdp.DPSURSGD), base)
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    means = [layer for layer in [base, *base.layers] if hasattr(layer, "mean")]
    metrics = [*model.metrics, *(layer.mean for layer in means)]
    assert len(metrics) > 1
    for metric in metrics:
        for variable in metric.variables:
            assert float(variable) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("front", "kind"), [KEEPERS[0], KEEPERS[-1]])
def test_a_mean_that_is_kept_is_caught(front, kind, monkeypatch):
    """Mutant: a commit sets metrics, too."""
    right = Shadows.commit
    monkeypatch.setattr(Shadows, "commit", lambda self, last, without: right(self, last))
    with pytest.raises(AssertionError):
        test_keras_keeps_no_mean_of_private_numbers(front, kind)


@with_one
@pytest.mark.slow
def test_diagnostics_are_named_and_noted(front):
    cls = front.tfdp.DPSURSGD
    model = compiled(optimizer(cls), diagnostics=True)
    history = model.fit(batches(), epochs=2, steps_per_epoch=5, verbose=0).history
    assert set(history) == {"accepted_updates", "non_private_attempts"}
    assert all(value >= 1 for value in history["non_private_attempts"])
    assert "number of attempts" in tfdp.privacy_statement(model, 1e-3)
    assert "number of attempts" not in tfdp.privacy_statement(compiled(optimizer(cls)), 1e-3)


@pytest.mark.quick_cases(1)
@with_both
def test_observed_attempts_are_all_paid_for(front):
    model = compiled(optimizer(front.tfdp.DPSURSGD, selective_release="per_attempt"))
    history = model.fit(batches(), steps_per_epoch=30, verbose=0).history
    assert 0 < history["accepted"][0] < 1
    assert int(model.optimizer.iterations) == round(30 * history["accepted"][0])
    assert model.optimizer.ledger.steps == 30


@with_one
@pytest.mark.slow
def test_an_attempt_that_is_not_counted_is_caught(front, monkeypatch):
    """Mutant: the count of a rejected attempt is rolled back with the rest."""
    right = SelectiveUpdateMixin.kept_variables

    def wrong(self):
        counters = set(map(id, self._released.counters))
        return [variable for variable in right(self) if id(variable) not in counters]

    monkeypatch.setattr(SelectiveUpdateMixin, "kept_variables", wrong)
    with pytest.raises(AssertionError):
        test_observed_attempts_are_all_paid_for(front)
