"""Files and copies of a model hold what was paid for, and nothing else.

Two data sets, of which one has an extreme outlier and other draws, with as many rows as these have;
the released values are made the same. Then all that is saved must be the same, bit for bit.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import saved_files
from tests.front_ends import FRONT_ENDS, with_both
from tests.saved_files import KERAS_2, OWN_MODELS, contents, differences, trained, written
from tfdp.clipping import step_check
from tfdp.step import private_metrics

MODELS = [
    *(saved_files.compiled, saved_files.tracking, saved_files.unlisted, saved_files.in_layer),
    *OWN_MODELS,
]


# What takes little time, beside the tests of each way in `tests/tf/test_private_variables.py`.
QUICK = ("keras", "checkpoint", "weights", "state_tree")


def saved_of_both(front, make, monkeypatch, folder, names=None, **how):
    """What both data sets leave, and what they showed."""
    found, shown = [], []
    for neighbour in (False, True):
        model, logs = trained(front, make, neighbour, monkeypatch, **how)
        here = folder / str(neighbour)
        here.mkdir()
        found.append(contents(front, model, here, names))
        shown.append(logs)
    return found, shown


@with_both
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_nothing_private_is_saved(front, make, monkeypatch, tmp_path):
    evaluated = make in OWN_MODELS
    found, shown = saved_of_both(front, make, monkeypatch, tmp_path, evaluated=evaluated)
    assert shown[0] != shown[1]  # There is something private.
    assert len(found[0]) > 40 and differences(*found) == []


@with_both
@pytest.mark.slow
@pytest.mark.parametrize("finds", [True, False])
def test_nothing_private_is_saved_of_replicas(front, finds, monkeypatch, tmp_path):
    """And the mutant is caught."""
    if not finds:
        monkeypatch.setattr(step_check, "keep_private", lambda variable: None)
    found, shown = [], []
    for neighbour in (False, True):
        model, logs = saved_files.trained_on_replicas(front, neighbour, monkeypatch)
        (here := tmp_path / str(neighbour)).mkdir()
        found.append(contents(front, model, here, ("keras", "checkpoint", "weights")))
        shown.append(logs)
    assert shown[0] != shown[1]
    assert (differences(*found) == []) == finds


# What finds the metrics, a model that needs it, and a part of the names of what leaks without.
FINDERS = [
    (step_check, KERAS_2, saved_files.compiled, "metrics/mean/vars/0"),
    (step_check, KERAS_2, saved_files.tracking, "tracker/total"),
    (step_check, KERAS_2, saved_files.in_layer, "most"),
    (step_check, FRONT_ENDS[-1], saved_files.compiled, "state_tree"),
    (private_metrics, KERAS_2, saved_files.gan, "metrics/mean/vars/0"),
    (private_metrics, FRONT_ENDS[-1], saved_files.vae, "state_tree"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("finder", "front", "make", "name"), FINDERS)
def test_mutant_without_a_finder_is_caught(finder, front, make, name, monkeypatch, tmp_path):
    monkeypatch.setattr(finder, "keep_private", lambda variable: None)
    evaluated = make in OWN_MODELS
    ways = None if make is saved_files.tracking else (*QUICK, "folder")
    found, _ = saved_of_both(front, make, monkeypatch, tmp_path, ways, evaluated=evaluated)
    assert any(name in leak for leak in differences(*found))


def files_while_training(front, make, neighbour, monkeypatch, folder):
    """What callbacks write, in the middle of epochs, too."""
    callbacks = front.keras.callbacks
    saving = [
        callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1, delete_checkpoint=False),
        callbacks.ModelCheckpoint(f"{folder}/epoch{{epoch}}.keras"),
        callbacks.ModelCheckpoint(f"{folder}/step.keras", save_freq=1),
        callbacks.ModelCheckpoint(f"{folder}/step.weights.h5", save_weights_only=True, save_freq=1),
    ]
    if front is KERAS_2:
        tf_format = f"{folder}/tf/step"
        saving.append(callbacks.ModelCheckpoint(tf_format, save_weights_only=True, save_freq=1))
    _, shown = trained(front, make, neighbour, monkeypatch, callbacks=saving)
    return written(folder), shown


def while_both_train(front, make, monkeypatch, tmp_path):
    both = []
    for neighbour in (False, True):
        (tmp_path / str(neighbour)).mkdir()
        folder = tmp_path / str(neighbour)
        both.append(files_while_training(front, make, neighbour, monkeypatch, folder))
    return both


@with_both
@pytest.mark.slow
@pytest.mark.parametrize("make", [saved_files.compiled, saved_files.tracking])
def test_nothing_private_is_saved_while_training(front, make, monkeypatch, tmp_path):
    (first, shown), (second, others) = while_both_train(front, make, monkeypatch, tmp_path)
    assert shown != others
    assert len(first) > 20 and differences(first, second) == []


@pytest.mark.slow
def test_mutant_without_a_finder_is_caught_while_training(monkeypatch, tmp_path):
    monkeypatch.setattr(step_check, "keep_private", lambda variable: None)
    both = while_both_train(KERAS_2, saved_files.tracking, monkeypatch, tmp_path)
    leaks = differences(both[0][0], both[1][0])
    for kind in ("step.keras", "step.weights.h5", "epoch1.keras", "backup", "tf/step"):
        assert any(leak.startswith(kind) for leak in leaks), kind


@with_both
def test_metrics_show_what_they_would_show(front, monkeypatch, tmp_path):
    class Saving(front.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.save(tmp_path / "model.keras")
            self.model.get_weights()

    model, shown = trained(front, saved_files.compiled, False, monkeypatch, callbacks=[Saving()])
    last = [float(metric.result()) for metric in model.metrics if metric.name == "loss"]
    evaluated = model.evaluate(*small(), verbose=0)
    again = model.evaluate(*small(), verbose=0)  # With metrics that are known to be private.
    for finder in (step_check, private_metrics):
        monkeypatch.setattr(finder, "keep_private", lambda variable: None)
    other, expected = trained(front, saved_files.compiled, False, monkeypatch)
    assert shown == expected and last == [expected["loss"][-1]]
    assert evaluated == again == other.evaluate(*small(), verbose=0)


def small():
    x = np.random.default_rng(5).normal(size=[20, 4]).astype("float32")
    return x, x[:, :1] + 1


@with_both
@pytest.mark.parametrize("old", [False, True])
def test_a_loaded_model_begins_with_metrics_of_zero(front, old, monkeypatch, tmp_path):
    """Files of before are loaded, too: what they hold is not saved again."""
    with monkeypatch.context() as before:
        if old:
            before.setattr(step_check, "keep_private", lambda variable: None)
        model, _ = trained(front, saved_files.compiled, False, monkeypatch)
        model.save(tmp_path / "model.keras")
    batches = saved_files.batches_of(False)
    loaded = front.keras.models.load_model(tmp_path / "model.keras")
    if front is KERAS_2 and not old:
        assert all(float(tf.identity(v)) == 0 for m in loaded.metrics for v in m.variables)
    expected = model.evaluate(*small(), verbose=0)
    np.testing.assert_array_equal(loaded.evaluate(*small(), verbose=0), expected)
    loaded.fit(batches, verbose=0)
    assert loaded.optimizer.ledger.steps == model.optimizer.ledger.steps + 2
    assert all(
        not np.any(w) for metric in loaded.metrics for w in map(np.asarray, metric.variables)
    )


@pytest.mark.slow
def test_metrics_of_other_models_are_saved_as_before(tmp_path):
    """Without a private optimizer nothing is changed, also not by the wrapped `evaluate`."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[4])])
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    tfdp.DPSGD(1.0, 1.0, 10)
    model.fit(*small(), verbose=0)
    model.evaluate(*small(), verbose=0)
    assert [float(v.numpy()) > 0 for metric in model.metrics for v in metric.variables] == [
        True
    ] * 4
