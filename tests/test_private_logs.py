"""Callbacks that act on private logs are warned of, and noted in the ledger."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import with_both, with_one
from tfdp.base import private_logs

X, Y = support.small_data(64)
ACTS = "Callbacks must not act on the losses and metrics of the training data"
WRITES = "Callbacks write the losses and metrics of the training data"
NOTE = "A callback of `fit` acted on losses or metrics of the training data"


def compiled(front, **kwargs):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=1)
    model = front.keras.Sequential([front.keras.layers.Dense(3)])
    model.build([None, 4])
    optimizer = front.tfdp.DPSGD(1.0, 2.0, sampling=batches.sampling)
    reduction = "none" if front.part == "tfdp" else "sum_over_batch_size"
    model.compile(optimizer, front.crossentropy(reduction), **kwargs)
    return model, batches


def said(model, batches, callbacks):
    """The warnings of `fit` that are of tfdp."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches, validation_data=(X, Y), callbacks=callbacks, verbose=0)
    found = [warning for warning in caught if str(warning.message).startswith("Callbacks ")]
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


def note(model):
    flowing = " ".join(tfdp.privacy_statement(model, delta=1e-4).split())
    return NOTE in flowing


@pytest.mark.quick_cases(1)
@with_both
def test_one_warning_names_callback_and_monitor(front, tmp_path):
    callbacks = front.keras.callbacks
    model, batches = compiled(front)
    assert said(model, batches, [callbacks.EarlyStopping("val_loss")]) == []
    assert not note(model)
    acting = [
        callbacks.EarlyStopping("loss", patience=9),
        callbacks.ReduceLROnPlateau(monitor="mae", mode="min"),
    ]
    # The step was traced before: it is found when the batches are read.
    (text,) = said(model, batches, acting)
    assert text.startswith(ACTS)
    assert "`EarlyStopping` with monitor='loss'; `ReduceLROnPlateau` with monitor='mae'" in text
    assert 'monitor="val_loss"' in text
    assert note(model)
    assert said(model, batches, acting) == []  # Once.
    path = str(tmp_path / "model.keras")
    model.save(path)
    assert note(front.keras.models.load_model(path))
    assert not note(compiled(front)[0])


@with_one
def test_a_first_training_says_it_once(front):
    model, batches = compiled(front)
    (text,) = said(model, batches, [front.keras.callbacks.TerminateOnNaN()])
    assert text.startswith(ACTS)
    assert "`TerminateOnNaN`, which acts on 'loss'" in text


@with_one
def test_the_trace_finds_callbacks_of_other_data(front):
    model, _ = compiled(front)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).take(1)
    callback = front.keras.callbacks.EarlyStopping("loss")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
            model.fit(data, callbacks=[callback], verbose=0)
    assert any(str(warning.message).startswith(ACTS) for warning in caught)


class Recorded:
    def __init__(self):
        self.said = []

    def of(self, *callbacks):
        self.said.clear()
        acts = private_logs.warn_of(list(callbacks), self.said.append)
        return acts, "".join(self.said)


@with_both
def test_which_callbacks_act(front, tmp_path):
    callbacks = front.keras.callbacks
    recorded = Recorded()
    file, best = str(tmp_path / "w{epoch}.weights.h5"), {"save_best_only": True}
    weights = {"save_weights_only": True}
    harmless = [
        callbacks.EarlyStopping(),
        callbacks.EarlyStopping("epsilon"),
        callbacks.ReduceLROnPlateau("val_accuracy"),
        callbacks.ModelCheckpoint(file, monitor="loss", **weights),
        callbacks.ModelCheckpoint(file, monitor="val_loss", **weights, **best),
        callbacks.ModelCheckpoint(str(tmp_path / "{val_loss:.2f}.weights.h5"), **weights),
        callbacks.BackupAndRestore(str(tmp_path)),
        callbacks.LambdaCallback(),
        callbacks.LearningRateScheduler(lambda epoch: 0.1),
        callbacks.History(),
        front.tfdp.PrivacyBudget(1.0, 1e-4)
        if front.part == "tfdp.keras3"
        else tfdp.PrivacyBudget(1.0, 1e-4),
    ]
    assert recorded.of(*harmless) == (False, "")
    acting = {
        "monitor='loss'": callbacks.EarlyStopping(monitor="loss"),
        "monitor='acc'": callbacks.ModelCheckpoint(file, monitor="acc", **weights, **best),
        "monitor='mae'": callbacks.ReduceLROnPlateau("mae"),
        "shows 'loss'": callbacks.ModelCheckpoint(
            str(tmp_path / "{loss:.2f}.weights.h5"), **weights
        ),
    }
    for words, callback in acting.items():
        acts, text = recorded.of(callback)
        assert acts, words
        assert text.startswith(ACTS), words
        assert words in text
    nested = callbacks.CallbackList([callbacks.EarlyStopping("loss")])
    assert recorded.of(nested)[0]
    acts, text = recorded.of(callbacks.CSVLogger(str(tmp_path / "log.csv")))
    assert not acts
    assert text.startswith(WRITES)
    assert "`CSVLogger`" in text


def test_callbacks_of_an_average_are_looked_at(tmp_path):
    saves = tf.keras.callbacks.ModelCheckpoint("x", monitor="loss", save_best_only=True)
    average = tfdp.ExponentialMovingAverage(decay=0.9, on_average=[saves])
    assert Recorded().of(average)[0]


@pytest.mark.slow
@with_one
def test_a_hook_that_is_missing_is_caught(front, monkeypatch):
    """Mutants: batches do not look, or the trace does not."""
    stops = front.keras.callbacks.EarlyStopping("loss", patience=9)
    model, batches = compiled(front)
    monkeypatch.delattr(type(batches), "__iter__")
    assert len(said(model, batches, [stops])) == 1  # By the trace.
    model, batches = compiled(front)
    assert said(model, batches, []) == []
    assert said(model, batches, [stops]) == []
    monkeypatch.undo()
    assert len(said(model, batches, [stops])) == 1


@pytest.mark.slow
@with_one
def test_a_ledger_without_the_note_is_caught(front, monkeypatch):
    model, batches = compiled(front)
    monkeypatch.setattr(type(model.optimizer._released), "note_shown", lambda self: None)
    said(model, batches, [front.keras.callbacks.EarlyStopping("loss")])
    assert not note(model)


def test_the_note_changes_no_epsilon():
    optimizer = tfdp.DPSGD(1.0, 2.0, sampling=compiled_sampling())
    optimizer.build([tf.Variable(np.zeros(2, "float32"))])
    before = optimizer.ledger.epsilon(1e-4).epsilon
    optimizer._released.note_shown()
    assert optimizer.ledger.epsilon(1e-4).epsilon == before
    assert optimizer.ledger.steps == 0


def compiled_sampling():
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16).sampling
