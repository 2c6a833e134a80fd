"""Selective models of Keras 3: what Keras 2 does not have. The rest is in `tests/selective`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.selective_support import ALWAYS, NEVER, X, Y, batches, compiled, optimizer, state

layers = keras.layers
SGD = tfdp.keras3.DPSURSGD


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


KINDS = {
    "average of weights": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 1},
    "weight decay": {"weight_decay": 0.1, "momentum": 0.9},
    "clipnorm": {"clipnorm": 0.1, "nesterov": True, "momentum": 0.5},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
}


def rejected(changes, base=None):
    """The state before and after attempts that are all rejected, and that of one accepted."""
    data = batches(padding="full")
    model = compiled(optimizer(SGD, data, threshold=NEVER, **changes), base)
    before = state(model)
    with pytest.raises(tfdp.keras3.TooManyAttemptsError):
        model.fit(data, steps_per_epoch=1, verbose=0)
    after = state(model)
    model.compile(optimizer(SGD, data, threshold=ALWAYS, **changes), model.loss)
    model.fit(data, steps_per_epoch=1, verbose=0)
    return before, after, state(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_rejected_update_is_in_the_inner_optimizer(kind):
    before, after, accepted = rejected(KINDS[kind])
    assert_same(before, after)
    assert any(not np.array_equal(after[name], accepted[name]) for name in after)


def test_seeds_of_layers_are_rolled_back():
    """Else an accepted update would show how many were rejected, to who knows the seed."""
    base = keras.Sequential([keras.Input([4]), layers.Dropout(0.5, seed=1), layers.Dense(3)])
    before, after, accepted = rejected({}, base)
    assert_same(before, after)
    (name,) = (name for name in before if "seed_generator" in name)
    assert not np.array_equal(after[name], accepted[name])


@pytest.mark.slow
def test_the_seed_of_all_layers_is_rolled_back():
    class Noise(layers.Layer):
        def call(self, x, training=None):
            return x + keras.random.normal([4]) if training else x

    keras.utils.set_random_seed(1)
    base = keras.Sequential([keras.Input([4]), Noise(), layers.Dense(3)])
    global_seed = keras.src.random.seed_generator.global_seed_generator().state
    seeds = [global_seed.numpy()]
    data = batches(padding="full")
    model = compiled(optimizer(SGD, data, threshold=NEVER), base)
    with pytest.raises(tfdp.keras3.TooManyAttemptsError):
        model.fit(data, steps_per_epoch=1, verbose=0)
    seeds.append(global_seed.numpy())
    np.testing.assert_array_equal(*seeds)


@pytest.mark.slow
def test_a_strategy_of_one_device():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        base = keras.Sequential([keras.Input([4]), layers.Dense(3)])
        model = compiled(optimizer(SGD), base, metrics=["accuracy"])
    model.fit(batches(), steps_per_epoch=2, verbose=0, validation_data=(X, Y))
    assert model.optimizer.ledger.steps == 2


def test_a_model_that_is_not_built_sees_no_example():
    seen = []

    class Looks(layers.Layer):
        def build(self, shape):
            seen.append(shape)

        def call(self, x):
            seen.append(tf.executing_eagerly() and tf.is_tensor(x))
            return x

    model = compiled(optimizer(SGD), keras.Sequential([Looks(), layers.Dense(3)]))
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    assert seen[0] == (None, 4) and not any(seen[1:])
    assert model.predict(X, verbose=0).shape == (64, 3)


def test_it_is_not_chosen_by_make_private():
    model = keras.Sequential([keras.Input([4]), layers.Dense(3)])
    arguments = {"epochs": 1, "target_epsilon": 1.0, "loss": "mse", "optimizer": SGD}
    with pytest.raises(ValueError, match="must not be selective"):
        tfdp.keras3.make_private(model, (X, Y), **arguments)


@pytest.mark.slow
def test_metrics_are_those_of_evaluations():
    data = batches(padding="full")
    model = compiled(optimizer(SGD, data), metrics=["accuracy"])
    assert model.get_metrics_result() == {}
    budget = tfdp.keras3.PrivacyBudget(20.0, 1e-3)  # Warns of metrics over padding, if shown.
    history = model.fit(data, steps_per_epoch=2, verbose=0, callbacks=[budget]).history
    assert set(history) == {"accepted_updates", "epsilon"}
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert set(found) == set(model.get_metrics_result()) == {"loss", "accuracy"}
    history = model.fit(data, steps_per_epoch=2, verbose=0, validation_data=(X, Y)).history
    assert set(history) == {"accepted_updates", "val_loss", "val_accuracy"}


@pytest.mark.slow
def test_it_is_exported(tmp_path):
    model = compiled(optimizer(SGD))
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_each_keras_names_the_other():
    with pytest.raises(ValueError, match=r"models of Keras 3 \(`import keras`\)"):
        support.compiled(optimizer(SGD))
    with pytest.raises(ValueError, match="models of Keras 2"):
        tfdp.keras3.SelectiveModel(keras.Sequential()).compile(optimizer(tfdp.DPSURSGD))
