"""Configs, files and checkpoints of Keras 3, and the ledger in them."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.keras3.support import compiled, weights
from tests.support import small_data

X, Y = small_data(64)
NAMES = ["DPSGD", "DPAdam", "DPSignSGD", "DPSignAdam"]


def batches(first_step=0, chunk_size=None):
    return tfdp.data.poisson_batches(
        (X, Y),
        expected_batch_size=16,
        steps_per_epoch=3,
        seed=1,
        first_step=first_step,
        chunk_size=chunk_size,
    )


def make(name="DPAdam", noise_seed=2, **kwargs):
    cls = getattr(tfdp.keras3, name)
    sampling = batches().sampling
    return cls(0.5, 1.1, noise_seed=noise_seed, learning_rate=0.02, sampling=sampling, **kwargs)


def trained(optimizer=None):
    model = compiled(optimizer or make())
    model.fit(batches(), verbose=0)
    return model


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise InterruptedError


def keras_file(first, folder):
    first.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def weights_file(first, folder):
    first.save_weights(folder / "model.weights.h5")
    model = compiled(make())
    model.load_weights(folder / "model.weights.h5")
    return model


def checkpoint(first, folder):
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(folder / "c")
    model = compiled(make())
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    return model


def pickled(first, folder):
    return pickle.loads(pickle.dumps(first))


@functools.cache
def interrupted():
    """A model that was trained for an epoch, and the weights of one trained for two."""
    whole = compiled(make())
    whole.fit(batches(), epochs=2, verbose=0)
    return trained(), weights(whole)


@pytest.mark.slow
@pytest.mark.parametrize("form", [keras_file, weights_file, checkpoint, pickled])
def test_training_resumes_bit_for_bit(form, tmp_path):
    first, expected = interrupted()
    resumed = form(first, tmp_path)
    assert type(resumed.optimizer) is tfdp.keras3.DPAdam
    if form is not checkpoint:  # Which assigns when there are variables.
        assert resumed.optimizer.ledger.steps == 3
    resumed.fit(batches(first_step=3), verbose=0)
    np.testing.assert_array_equal(weights(resumed), expected)
    assert resumed.optimizer.ledger.steps == 6


@pytest.mark.slow
def test_backup_and_restore_resumes(tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path)

    with pytest.raises(InterruptedError):
        compiled(make()).fit(batches(), epochs=2, verbose=0, callbacks=[backup(), Stop()])
    resumed = compiled(make())
    resumed.fit(batches(first_step=3), epochs=2, verbose=0, callbacks=[backup()])
    assert resumed.optimizer.released_steps() == (6, 0)


def test_restoring_an_older_checkpoint_does_not_forget_what_was_released(tmp_path):
    model = trained()
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(tmp_path / "c")
    model.save_weights(tmp_path / "old.weights.h5")
    older = [v.numpy() for v in model.optimizer._variables]
    model.fit(batches(), verbose=0)
    saved.restore(path)
    assert model.optimizer.ledger.steps == 6
    model.load_weights(tmp_path / "old.weights.h5")
    assert model.optimizer.ledger.steps == 6
    model.optimizer.set_weights(older)
    assert model.optimizer.released_steps() == (6, 0)


def test_resuming_with_other_privacy_parameters_is_refused(tmp_path):
    model = trained()
    model.save_weights(tmp_path / "model.weights.h5")
    changed = {**model.optimizer.get_config(), "noise_multiplier": 2.0}
    other = compiled(tfdp.keras3.DPAdam.from_config(changed))
    with pytest.raises(ValueError, match="noise_multiplier"):
        other.load_weights(tmp_path / "model.weights.h5")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_copy_counts_for_itself_and_draws_other_noise(make_copy):
    model = trained(make(noise_seed=None))
    other = make_copy(model.optimizer)
    assert (other.own_steps(), other.released_steps()) == (0, (3, 0))
    assert not np.array_equal(other._noise.next_key(), model.optimizer._noise.next_key())


@pytest.mark.slow
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.loads])
def test_copies_before_there_are_variables(make_copy):
    """Also of an optimizer that waits for variables to assign what it loaded."""
    for optimizer, steps in ((make(), 0), (make(noise_seed=None), 3)):
        if steps:
            store: dict = {}
            trained(make(noise_seed=None)).optimizer.save_own_variables(store)
            optimizer.load_own_variables(store)
        given = pickle.dumps(optimizer) if make_copy is pickle.loads else optimizer
        other = make_copy(given)
        assert other.released_steps() == (steps, 0)
        other.build(compiled(make()).trainable_variables)
        assert other.released_steps() == (steps, 0) and int(other.iterations) == steps


def test_the_ledger_follows_the_weights_into_a_clone():
    model = trained(make(noise_seed=None))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    compiled(make(noise_seed=None), clone)
    clone.fit(batches(first_step=3), verbose=0)
    assert clone.optimizer.released_steps() == (6, 0)


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trip(name):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    more = {"momentum": 0.8} if name.endswith("SGD") else {"beta_1": 0.8}
    cls = getattr(tfdp.keras3, name)
    optimizer = cls(0.5, 1.1, 16, None, 2, None, 4, learning_rate=schedule, name="mine", **more)
    for one in (optimizer, make(name, clipping_rule="per_layer")):
        other = keras.optimizers.deserialize(keras.optimizers.serialize(one))
        assert type(other) is cls and other.get_config() == one.get_config()
    assert other.sampling == one.sampling


def test_config_round_trip_of_any_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    inner = keras.optimizers.AdamW(schedule, weight_decay=0.1)
    optimizer = tfdp.keras3.DPOptimizer(inner, 0.5, 1.1, sampling=batches().sampling)
    other = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert other.get_config() == optimizer.get_config()
    assert type(other.inner_optimizer) is keras.optimizers.AdamW


@pytest.mark.slow
def test_learning_rate_callbacks_reach_the_inner_optimizer():
    model = compiled(make())
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25)
    model.fit(batches(), verbose=0, callbacks=[callback])
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25


def test_accumulated_sums_are_in_no_file(tmp_path):
    """They are private: noise is added only when the logical batch is complete."""
    data = batches(chunk_size=10)
    optimizer = tfdp.keras3.DPSGD(0.5, 1.1, sampling=data.sampling)
    model = compiled(optimizer)
    model.fit(data.take(1), verbose=0)
    secret = [v.numpy() for v in optimizer._accumulators[0].sums]
    assert any(map(np.any, secret)) and optimizer.released_steps() == (1, 0)
    store: dict = {}
    optimizer.save_own_variables(store)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "c")
    reader = tf.train.load_checkpoint(path)
    saved = [reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]
    for value in map(np.asarray, [*saved, *store.values()]):
        assert not any(value.shape == s.shape and np.array_equal(value, s) for s in secret)
