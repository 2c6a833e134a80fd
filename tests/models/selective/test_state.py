"""Selective models that are saved, loaded, and trained further."""

import os

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.selective_support import CLASSES, MODELS, X, Y, batches, compiled, optimizer


def flat(model):
    return support.flat(model.get_weights())


def train(model, epochs=1):
    model.fit(batches(), epochs=epochs, steps_per_epoch=3, verbose=0)
    return flat(model)


# A way of saving for each optimizer.
FORMS = ["keras", "tf", "checkpoint", "checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "form"), list(zip(CLASSES, FORMS, strict=True)))
def test_training_resumes_bit_for_bit(cls, form, tmp_path):
    more = {"momentum": 0.9} if "SGD" in cls.__name__ else {}
    expected = train(compiled(optimizer(cls, **more)), epochs=2)

    first = compiled(optimizer(cls, **more))
    train(first)
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "c")
        resumed = compiled(optimizer(cls, **more))
        tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path)
    else:
        path = os.path.join(tmp_path, "model.keras" if form == "keras" else "model")
        first.save(path, save_format=form)
        resumed = tf.keras.models.load_model(path)
        assert type(resumed) is tfdp.SelectiveModel and type(resumed.optimizer) is cls
    np.testing.assert_array_equal(train(resumed), expected)
    assert resumed.optimizer.ledger.steps == 6


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", MODELS)
def test_any_model_is_saved_whole_and_alone(kind, tmp_path):
    make, x = MODELS[kind]
    model = compiled(optimizer(), make())
    model.fit(batches(x), steps_per_epoch=2, verbose=0)
    expected = model.predict(x, verbose=0)
    for saved, name in ((model, "whole"), (model.base_model, "alone")):
        path = os.path.join(tmp_path, f"{name}.keras")
        saved.save(path)
        loaded = tf.keras.models.load_model(path)
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)


@pytest.mark.slow
def test_restoring_an_older_checkpoint_does_not_forget_what_was_released(tmp_path):
    model = compiled(optimizer(noise_seed=None))
    train(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "c")
    train(model)
    checkpoint.restore(path)
    weights = flat(model)
    train(model)
    assert model.optimizer.ledger.steps == 9
    assert not np.array_equal(flat(model), weights)


CHANGES = [
    ("validation_noise_multiplier", 2.0),
    ("validation_batch_size", 9),
    ("threshold", 0.5),
    ("max_attempts", 77),
    ("noise_multiplier", 2.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_resuming_with_other_privacy_parameters_is_refused(name, value, tmp_path):
    model = compiled(optimizer())
    train(model)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    changed = tfdp.DPSURSGD.from_config({**model.optimizer.get_config(), name: value})
    other = compiled(changed)
    tf.train.Checkpoint(model=other, optimizer=changed).restore(path)
    with pytest.raises(tf.errors.InvalidArgumentError, match="privacy parameters"):
        train(other)
    with pytest.raises(tfdp.accounting.PrivacyParametersChangedError, match=name):
        _ = changed.ledger


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["keras", "tf", "checkpoint"])
def test_that_attempts_were_shown_is_not_forgotten(form, tmp_path):
    model = compiled(optimizer(), diagnostics=True)
    train(model)
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
        loaded = compiled(optimizer())
        tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).restore(path)
        train(loaded)
    else:
        path = os.path.join(tmp_path, "model.keras" if form == "keras" else "model")
        model.save(path, save_format=form)
        loaded = tf.keras.models.load_model(path)
    assert any("number of attempts" in note for note in loaded.optimizer.ledger.notes)


def test_it_is_saved_before_it_is_called(tmp_path):
    make, x = MODELS["functional"]
    model = compiled(optimizer(), make())
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_the_config_makes_the_model_again():
    model = tfdp.SelectiveModel(support.small_model(), non_private_diagnostics=True, name="mine")
    model(X)
    copy = tfdp.SelectiveModel.from_config(model.get_config())
    assert copy.get_config() == model.get_config()
    assert copy.name == "mine"


class FailsOnLargeValues(tf.keras.layers.Layer):
    def call(self, x):
        with tf.control_dependencies(
            [tf.debugging.assert_less(tf.reduce_max(x), 1e3, "too large")]
        ):
            return tf.identity(x)


def test_an_attempt_that_fails_is_counted():
    """That an operation failed on an example tells that the example was there."""
    x = X.copy()
    x[0] = 1e6
    data = tfdp.data.poisson_batches((x, Y), expected_batch_size=32, seed=1)
    base = tf.keras.Sequential([FailsOnLargeValues(input_shape=[4]), tf.keras.layers.Dense(3)])
    model = tfdp.SelectiveModel(base)
    optimizer = tfdp.DPSURSGD(
        1.0, 1.1, validation_batch_size=8, validation_noise_multiplier=1.0, sampling=data.sampling
    )
    model.compile(optimizer, loss=support.crossentropy())
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(data, epochs=1, steps_per_epoch=20, verbose=0)
    counted = optimizer.ledger.steps
    assert counted == int(optimizer.iterations.numpy()) + 1
