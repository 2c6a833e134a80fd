"""Selective models that are saved, loaded, and trained further."""

import functools
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, with_both
from tests.selective_support import (
    CLASSES_OF_BOTH,
    MODELS,
    X,
    Y,
    batches,
    compiled,
    front_of,
    optimizer,
    small_model,
)


def flat(model):
    return support.flat(model.get_weights())


def train(model, epochs=1):
    model.fit(batches(), epochs=epochs, steps_per_epoch=3, verbose=0)
    return flat(model)


def restored(form, first, make, folder):
    """Saves a model one way; returns a new one, or one of `make` that is restored from it."""
    keras = first._front_end.package
    if form == "pickle":
        return pickle.loads(pickle.dumps(first))
    if form in ("keras", "tf"):
        path = os.path.join(folder, "model.keras" if form == "keras" else "model")
        first.save(path, **({"save_format": form} if keras is tf.keras else {}))
        return keras.models.load_model(path)
    model = make()
    if form == "weights":
        first.save_weights(folder / "model.weights.h5")
        model.load_weights(folder / "model.weights.h5")
    else:
        path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(folder / "c")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


# Each way of saving, and each optimizer but DPSURSignSGD, which has no state but that of all.
FORMS = ["keras", "tf", None, "checkpoint", "keras", "pickle", None, "weights"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cls", "form"),
    [(cls, form) for cls, form in zip(CLASSES_OF_BOTH, FORMS, strict=False) if form],
)
def test_training_resumes_bit_for_bit(cls, form, tmp_path):
    more = {"momentum": 0.9} if "SGD" in cls.__name__ else {}

    def make():
        return compiled(optimizer(cls, **more))

    first = make()
    train(first)
    resumed = restored(form, first, make, tmp_path)
    assert type(resumed) is front_of(cls).tfdp.SelectiveModel and type(resumed.optimizer) is cls
    np.testing.assert_array_equal(train(resumed), train(first))
    assert resumed.optimizer.ledger.steps == 6


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("front", "kind"), [*((FRONT_ENDS[0], kind) for kind in MODELS), (FRONT_ENDS[-1], "subclassed")]
)
def test_any_model_is_saved_whole_and_alone(front, kind, tmp_path):
    make, x = MODELS[kind]
    model = compiled(optimizer(front.tfdp.DPSURSGD), make(front))
    model.fit(batches(x), steps_per_epoch=2, verbose=0)
    expected = model.predict(x, verbose=0)
    for saved, name in ((model, "whole"), (model.base_model, "alone")):
        path = os.path.join(tmp_path, f"{name}.keras")
        saved.save(path)
        loaded = front.keras.models.load_model(path)
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)


@with_both
@pytest.mark.slow
def test_restoring_an_older_checkpoint_does_not_forget_what_was_released(front, tmp_path):
    model = compiled(optimizer(front.tfdp.DPSURSGD, noise_seed=None))
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes the config and a checkpoint of a trained optimizer, once for each front end."""

    @functools.cache
    def made(front):
        model = compiled(optimizer(front.tfdp.DPSURSGD))
        train(model)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(tmp_path_factory.mktemp("trained") / "c")
        return model.optimizer.get_config(), path

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("front", "name", "value"),
    [(FRONT_ENDS[-1], *CHANGES[0]), *((FRONT_ENDS[0], *change) for change in CHANGES)],
)
def test_resuming_with_other_privacy_parameters_is_refused(front, name, value, trained):
    config, path = trained(front)
    changed = front.tfdp.DPSURSGD.from_config({**config, name: value})
    other = compiled(changed)
    changed.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=changed).restore(path)
    if name == CHANGES[0][0]:  # A step compares all of them at once.
        with pytest.raises(tf.errors.InvalidArgumentError, match="privacy parameters"):
            train(other)
    with pytest.raises(tfdp.accounting.PrivacyParametersChangedError, match=name):
        _ = changed.ledger


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("front", "form"),
    [(FRONT_ENDS[0], "checkpoint"), (FRONT_ENDS[0], "tf"), (FRONT_ENDS[-1], "keras")],
)
def test_that_attempts_were_shown_is_not_forgotten(front, form, tmp_path):
    cls = front.tfdp.DPSURSGD
    model = compiled(optimizer(cls), diagnostics=True)
    train(model)
    loaded = restored(form, model, lambda: compiled(optimizer(cls)), tmp_path)
    if form == "checkpoint":
        train(loaded)
    assert any("number of attempts" in note for note in loaded.optimizer.ledger.notes)


def test_it_is_saved_before_it_is_called(tmp_path):
    make, x = MODELS["functional"]
    model = compiled(optimizer(), make(FRONT_ENDS[0]))
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


@with_both
def test_a_model_of_several_inputs_is_saved_before_it_is_called(front, tmp_path):
    make, x = MODELS["functional"]
    model = compiled(optimizer(front.tfdp.DPSURSGD), make(front))
    model.save(tmp_path / "model.keras")
    loaded = front.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


@with_both
def test_the_config_makes_the_model_again(front):
    cls = front.tfdp.SelectiveModel
    model = cls(small_model(front), non_private_diagnostics=True, name="mine")
    model(X)
    copy = cls.from_config(model.get_config())
    assert copy.get_config() == model.get_config()
    assert copy.name == "mine"


def fails_on_large_values(x):
    with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), 1e3, "too large")]):
        return tf.identity(x)


@pytest.mark.quick_cases(1)
@with_both
def test_an_attempt_that_fails_is_counted(front):
    """That an operation failed on an example tells that the example was there."""
    x = X.copy()
    x[0] = 1e6
    data = tfdp.data.poisson_batches((x, Y), expected_batch_size=32, seed=1)
    layers = front.keras.layers
    base = front.keras.Sequential(
        [
            layers.Input([4]),
            layers.Lambda(fails_on_large_values, output_shape=(4,)),
            layers.Dense(3),
        ]
    )
    own = optimizer(front.tfdp.DPSURSGD, data, threshold=-1.0)
    model = compiled(own, base)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(data, epochs=1, steps_per_epoch=20, verbose=0)
    assert own.ledger.steps == int(own.iterations) + 1
