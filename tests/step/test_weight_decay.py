"""Decoupled weight decay of the private optimizers of Keras 2."""

import contextlib
import copy

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tests.support import compiled, small_data, small_model, without_noise
from tfdp import TooManyAttemptsError
from tfdp.keras2 import weight_decay

KERAS = tf.keras.optimizers
X, Y = small_data(64)
ALL = [*support.OPTIMIZERS, tfdp.DPAdamBC]


def weights(model):
    return support.flat(model.get_weights())


def fit(model, data=None, **kwargs):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32) if data is None else data
    model.fit(data, verbose=0, **kwargs)
    return weights(model)


def trained_like(private, plain):
    """Weights after 4 steps of a private optimizer without noise, and of one of Keras."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)
    ours = fit(compiled(private), data, epochs=2)
    return ours, fit(compiled(plain, loss=support.crossentropy("auto")), data, epochs=2)


class WithoutLearningRate(weight_decay.WeightDecay):
    """Mutant: forgets the learning rate."""

    def apply(self, distribution, grads_and_vars, learning_rate):
        super().apply(distribution, grads_and_vars, lambda dtype: tf.constant(0.5, dtype))


@pytest.mark.rewritten_graphs
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("private", "plain", "arguments"),
    [
        (tfdp.DPAdam, KERAS.AdamW, {"beta_1": 0.8}),
        (tfdp.DPAdam, KERAS.Adam, {}),
        (tfdp.DPSGD, KERAS.SGD, {"momentum": 0.9}),
    ],
)
def test_without_noise_and_clip_it_is_keras(private, plain, arguments):
    schedule = KERAS.schedules.PiecewiseConstantDecay([1], [0.1, 0.02])
    arguments = {"learning_rate": schedule, "weight_decay": 0.5, **arguments}
    ours, keras = trained_like(without_noise(private, 32, **arguments), plain(**arguments))
    np.testing.assert_allclose(ours, keras, rtol=1e-4, atol=1e-5)
    mutant = without_noise(private, 32, **arguments)
    mutant._weight_decay = WithoutLearningRate(0.5)
    ours, _ = trained_like(mutant, plain(**arguments))
    assert np.max(np.abs(ours - keras)) > 0.01


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cls", ALL)
def test_a_step_shrinks_the_weights_once_and_before_its_update(cls):
    def change(steps=1, **kwargs):
        rate = {"learning_rate": 0.1, "gradient_accumulation_steps": steps}
        model = compiled(cls(1.0, 1.0, 64, noise_seed=1, **rate, **kwargs))
        before = weights(model)
        return before, fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(64 // steps))

    for steps in (1, 2):
        before, plain = change(steps)
        _, shrunk = change(steps, weight_decay=0.3)
        np.testing.assert_allclose(shrunk - plain, -0.1 * 0.3 * before, atol=1e-6)


def shrinking(**kwargs):
    """An optimizer whose step does nothing but halve the weights."""
    return tfdp.DPSGD(1e-12, 0.0, 32, learning_rate=0.1, weight_decay=5.0, **kwargs)


def halved(optimizer, model):
    """Returns which variables of a model have been halved by a step."""
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    fit(compiled(optimizer, model), tf.data.Dataset.from_tensors((X, Y)))
    assert all(np.ptp(w) < 1e-6 for w in model.get_weights())
    return [np.allclose(w, 0.5) for w in model.get_weights()]


def test_variables_that_are_left_out():
    model, optimizer = small_model(), shrinking()
    with pytest.raises(ValueError, match=r"`var_names` must be a list .*var_names='bias'"):
        optimizer.exclude_from_weight_decay(var_names="bias")
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    optimizer.exclude_from_weight_decay(model.trainable_variables[:1], ["bi.s"])  # As in Keras.
    expected = [False, False, True, False]
    from_config = type(optimizer).from_config(optimizer.get_config())
    for each in (copy.copy(optimizer), from_config, optimizer):
        assert halved(each, model) == expected
    with pytest.raises(ValueError, match=r"before the optimizer is built.*var_names=\['bias'\]"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_refused_values(value):
    with pytest.raises(ValueError, match="`weight_decay` must be a non-negative, finite number"):
        tfdp.DPAdam(1.0, 1.0, 32, weight_decay=value)


@pytest.mark.parametrize("value", [None, 0, 0.25])
def test_config_round_trip(value):
    own = tfdp.DPSignAdam(1.0, 1.0, 32, weight_decay=value)
    other = tfdp.DPSignAdam.from_config(own.get_config())
    assert own.weight_decay == other.weight_decay == value
    assert "excluded_from_weight_decay" not in own.get_config()
    older = {k: v for k, v in own.get_config().items() if k != "weight_decay"}
    assert tfdp.DPSignAdam.from_config(older).weight_decay is None


def test_a_step_that_is_refused_leaves_the_weights_as_they_are():
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, steps_per_epoch=1)
    model = compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling, weight_decay=1e3))
    batch = next(iter(data))
    model.train_on_batch(*batch)
    before = weights(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.train_on_batch(*batch)
    np.testing.assert_array_equal(weights(model), before)


def test_files_remember_what_is_left_out(tmp_path):
    model, optimizer = small_model(), shrinking()
    optimizer.exclude_from_weight_decay(model.trainable_variables[:1])
    expected = halved(optimizer, model)
    assert expected == [False, True, True, True]
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert halved(loaded.optimizer, loaded) == expected


@pytest.mark.slow
def test_it_is_part_of_an_update_that_is_tested():
    def tried(threshold):
        arguments = {"l2_norm_clip": 1e-12, "noise_multiplier": 0.0, "weight_decay": 5.0}
        own = selective_support.optimizer(threshold=threshold, **arguments)
        model = selective_support.compiled(own)
        before = weights(model)
        rejected = contextlib.nullcontext()
        if threshold == selective_support.NEVER:
            rejected = pytest.raises(TooManyAttemptsError)
        with rejected:
            model.fit(selective_support.batches(), steps_per_epoch=1, verbose=0)
        return before, weights(model)

    before, kept = tried(selective_support.ALWAYS)
    np.testing.assert_allclose(kept, 0.5 * before, atol=1e-6)
    before, kept = tried(selective_support.NEVER)
    np.testing.assert_array_equal(kept, before)


@pytest.mark.slow
def test_each_replica_shrinks_its_weights_once():
    strategy = support.mirrored(2)
    with strategy.scope():
        model, optimizer = small_model(), shrinking()
        optimizer.exclude_from_weight_decay(model.trainable_variables[:1])
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        compiled(optimizer, model, loss=support.crossentropy("sum_over_batch_size"))
    fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(64))
    for variable, expected in zip(model.trainable_variables, [1.0, 0.5, 0.5, 0.5], strict=True):
        for copied in strategy.experimental_local_results(variable):
            np.testing.assert_allclose(copied.numpy(), expected, rtol=1e-6)


def test_it_costs_nothing():
    def ledger(**kwargs):
        data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, steps_per_epoch=3)
        model = compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling, **kwargs))
        fit(model, data)
        return model.optimizer.ledger.epsilon(1e-3)

    assert ledger(weight_decay=0.1) == ledger()
