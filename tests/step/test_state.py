"""Configs, saved models, checkpoints, and the ledger in them."""

import math
import os

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import OPTIMIZERS, compiled, small_data

X, Y = small_data(64)
# After tfdp, which makes it importable.
tf_privacy = pytest.importorskip(
    "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized"
)
BASES = {
    tfdp.DPSGD: tf_privacy.VectorizedDPKerasSGDOptimizer,
    tfdp.DPSignSGD: tf_privacy.VectorizedDPKerasSGDOptimizer,
    tfdp.DPAdam: tf_privacy.VectorizedDPKerasAdamOptimizer,
    tfdp.DPSignAdam: tf_privacy.VectorizedDPKerasAdamOptimizer,
}


def batches(first_step=0, chunk_size=None, steps=3, padding="none"):
    return tfdp.data.poisson_batches(
        (X, Y),
        expected_batch_size=16,
        steps_per_epoch=steps,
        seed=1,
        first_step=first_step,
        chunk_size=chunk_size,
        padding=padding,
    )


def make(cls, chunk_size=None, padding="none", **kwargs):
    sampling = batches(chunk_size=chunk_size, padding=padding).sampling
    return cls(0.5, 1.1, noise_seed=2, learning_rate=0.02, sampling=sampling, **kwargs)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_is_a_tf_privacy_optimizer(cls):
    assert issubclass(cls, BASES[cls])
    assert cls.__name__ in repr(cls) and cls.__doc__


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_config_round_trip(cls):
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    sgd = issubclass(cls, tf.keras.optimizers.legacy.SGD)
    more = {"momentum": 0.8} if sgd else {"beta_1": 0.8}
    optimizer = cls(0.5, 1.1, 16, None, 2, None, 4, learning_rate=schedule, name="mine", **more)
    copy = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert type(copy) is cls
    assert copy.get_config() == optimizer.get_config()
    assert copy.get_config()["gradient_accumulation_steps"] == 2
    optimizer = make(cls, chunk_size=12)
    copy = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert copy.get_config() == optimizer.get_config()
    assert copy.sampling == optimizer.sampling == batches(chunk_size=12).sampling


def weights_after(model, data, epochs=1):
    model.fit(data, epochs=epochs, verbose=0)
    return support.flat(model.get_weights())


# A way of saving for each optimizer.
FORMS = ["keras", "tf", "checkpoint", "checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "form"), list(zip(OPTIMIZERS, FORMS, strict=True)))
def test_training_resumes_bit_for_bit(cls, form, tmp_path):
    more = {"momentum": 0.9} if cls in (tfdp.DPSGD, tfdp.DPSignSGD) else {}
    whole = compiled(make(cls, **more))
    expected = weights_after(whole, batches(), epochs=2)

    first = compiled(make(cls, **more))
    weights_after(first, batches())
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "c")
        resumed = compiled(make(cls, **more))
        tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path)
    else:
        path = os.path.join(tmp_path, "model.keras" if form == "keras" else "model")
        first.save(path, save_format=form)
        resumed = tf.keras.models.load_model(path)
        assert type(resumed.optimizer) is cls
    result = weights_after(resumed, batches(first_step=3))
    np.testing.assert_array_equal(result, expected)
    assert resumed.optimizer.ledger.steps == 6


def test_ledger_counts_steps_not_chunks():
    model = compiled(make(tfdp.DPSGD, chunk_size=10))
    model.fit(batches(chunk_size=10), epochs=2, verbose=0)
    ledger = model.optimizer.ledger
    assert model.optimizer.gradient_accumulation_steps > 1
    assert ledger.steps == 6
    event = ledger.event
    assert "0.25" in str(event) and "1.1" in str(event)  # q = 16 / 64 and the noise multiplier.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["keras", "tf"])
def test_ledger_is_known_as_soon_as_a_model_is_loaded(form, tmp_path):
    model = compiled(make(tfdp.DPSGD))
    model.fit(batches(), verbose=0)
    path = os.path.join(tmp_path, "model.keras" if form == "keras" else "model")
    model.save(path, save_format=form)
    assert tf.keras.models.load_model(path).optimizer.ledger.steps == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_restoring_an_older_checkpoint_does_not_forget_what_was_released(jit_compile, tmp_path):
    model = compiled(make(tfdp.DPSGD, padding="full"), jit_compile=jit_compile)
    model.fit(batches(padding="full"), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "c")
    model.fit(batches(padding="full"), verbose=0)
    checkpoint.restore(path)
    assert model.optimizer.ledger.steps == 6
    model.fit(batches(padding="full"), verbose=0)
    assert model.optimizer.ledger.steps == 9


CHANGES = [("noise_multiplier", 2.0), ("l2_norm_clip", 0.7), ("num_microbatches", 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The config of an optimizer that has trained, and a checkpoint."""
    model = compiled(make(tfdp.DPSGD))
    model.fit(batches(), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    return model.optimizer.get_config(), checkpoint.save(tmp_path_factory.mktemp("saved") / "c")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_resuming_with_other_privacy_parameters_is_refused(name, value, saved):
    config, path = saved
    changed = tfdp.DPSGD.from_config({**config, name: value})
    other = compiled(changed)
    changed.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=changed).restore(path)
    if name == CHANGES[0][0]:  # A step compares all of them at once.
        with pytest.raises(tf.errors.InvalidArgumentError, match="privacy parameters"):
            other.fit(batches(), verbose=0)
    with pytest.raises(tfdp.accounting.PrivacyParametersChangedError, match=name):
        _ = changed.ledger


def test_values_that_differ_in_their_last_digits_are_shown_with_these(saved):
    config, path = saved
    noise = math.nextafter(config["noise_multiplier"], 9.0)
    changed = tfdp.DPSGD.from_config({**config, "noise_multiplier": noise})
    other = compiled(changed)
    changed.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=changed).restore(path)
    with pytest.raises(tfdp.accounting.PrivacyParametersChangedError) as raised:
        _ = changed.ledger
    assert f"noise_multiplier={noise:.17g}." in str(raised.value)


def test_loading_a_keras_file_into_other_privacy_parameters_is_refused():
    store = {"privacy_parameters": np.array([0.5, 9.9, 16, 0, 64])}
    with pytest.raises(ValueError, match=r"noise_multiplier.*9\.9"):
        make(tfdp.DPSGD).load_own_variables({k: v for k, v in store.items()})


def test_accumulated_sums_are_in_no_checkpoint(tmp_path):
    """They are private: noise is added only when the logical batch is complete."""
    model = compiled(make(tfdp.DPSGD, chunk_size=10))
    model.fit(batches(chunk_size=10).take(1), verbose=0)
    assert any(np.any(v.numpy()) for v in model.optimizer._accumulators[0].sums)
    assert model.optimizer.ledger.steps == 1  # Counted at its first chunk.
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "c")
    secret = [v.numpy() for v in model.optimizer._accumulators[0].sums]
    reader = tf.train.load_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
        value = np.asarray(reader.get_tensor(name))
        assert not any(value.shape == s.shape and np.array_equal(value, s) for s in secret)


def test_without_sampling_there_is_no_ledger():
    with pytest.raises(ValueError, match="`sampling` must be given"):
        _ = tfdp.DPSGD(1.0, 1.0, 16).ledger


def shuffled(*weights):
    """A data set of batches; `fit` refuses arrays before it begins."""
    return tf.data.Dataset.from_tensor_slices((X, Y, *weights)).shuffle(len(X)).batch(16)


def test_shuffled_batches_are_refused_and_cost_nothing():
    model = compiled(make(tfdp.DPSGD))
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(shuffled(), verbose=0)
    assert model.optimizer.released_steps() == (0, 0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_under_xla_shuffled_batches_get_no_epsilon():
    model = compiled(make(tfdp.DPSGD, padding="full"), jit_compile=True)
    model.fit(shuffled(np.ones(len(X), bool)), verbose=0)
    ledger = model.optimizer.ledger
    with pytest.raises(Exception, match="UnsupportedDpEvent"):
        ledger.epsilon(1e-5)
    assert any("poisson_batches" in note for note in ledger.notes)


@pytest.mark.slow
def test_boolean_labels_are_no_mask():
    """Every example counts, whatever its label; and nothing is taken for Poisson batches."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    model.compile(tfdp.DPSGD(1.0, 1.0, 16), loss=loss)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y > 0)).batch(16), verbose=0)
    assert model.optimizer.released_steps() == (0, 4)


def test_a_fixed_noise_seed_is_noted():
    assert any("noise_seed" in note for note in make(tfdp.DPSGD).ledger.notes)


@pytest.mark.slow
def test_under_xla_which_drops_assertions_they_get_no_epsilon():
    data = batches(padding="full")
    model = compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling), jit_compile=True)
    model.fit(tf.data.Dataset.from_tensors((X[:16], Y[:16], np.ones(16, bool))), verbose=0)
    assert model.optimizer.released_steps() == (0, 1)
    model.fit(data, verbose=0)
    assert model.optimizer.released_steps() == (3, 1)


@pytest.mark.slow
def test_restoring_an_older_checkpoint_does_not_forget_unaccounted_steps(tmp_path):
    model = compiled(make(tfdp.DPSGD, padding="full"), jit_compile=True)
    model.fit(batches(padding="full"), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "c")
    model.fit(shuffled(np.ones(len(X), bool)), verbose=0)
    checkpoint.restore(path)
    assert model.optimizer.released_steps() == (3, 4)
