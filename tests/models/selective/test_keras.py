"""Selective models as Keras models: what they run on, and what they refuse."""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.selective_support import (
    ALWAYS,
    MODELS,
    NEVER,
    X,
    Y,
    batches,
    compiled,
    optimizer,
)

layers = tf.keras.layers


def flat(model):
    return support.flat(model.get_weights())


# Any model, any way to run it.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_any_keras_model(kind, steps_per_execution):
    make, x = MODELS[kind]
    model = compiled(optimizer(), make(), steps_per_execution=steps_per_execution)
    before = support.flat(model.base_model.get_weights()) if model.base_model.built else None
    model.fit(batches(x), epochs=2, steps_per_epoch=3, verbose=0)
    assert model.optimizer.ledger.steps == 6
    assert before is None or not np.array_equal(flat(model), before)
    assert np.all(np.isfinite(model.predict(x, verbose=0)))
    np.testing.assert_array_equal(
        model.base_model.predict(x, verbose=0), model.predict(x, verbose=0)
    )


@pytest.mark.slow
def test_under_xla_it_is_the_same():
    """Where nothing is drawn at random, as XLA has random numbers of its own."""
    results, data = [], batches(expected_batch_size=64, padding="full")
    for jit_compile in (False, True):
        opt = optimizer(data=data, threshold=ALWAYS, noise_multiplier=0.0)
        model = compiled(opt, jit_compile=jit_compile)
        model.fit(data, steps_per_epoch=5, verbose=0)
        results.append(flat(model))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_under_xla_some_updates_are_rejected():
    data = batches(padding="full")  # Batches of one size: XLA compiles once.
    model = compiled(optimizer(data=data, selective_release="per_attempt"), jit_compile=True)
    history = model.fit(data, steps_per_epoch=15, verbose=0).history
    assert 0 < history["accepted"][0] < 1


@pytest.mark.slow
def test_compiled_anew_it_uses_what_it_was_given():
    model = compiled(optimizer(threshold=NEVER, max_attempts=2))
    before = flat(model)
    data = batches()
    with pytest.raises(tfdp.models.TooManyAttemptsError):
        model.fit(data, verbose=0)
    model.compile(optimizer(threshold=ALWAYS), support.crossentropy())
    model.fit(data, steps_per_epoch=1, verbose=0)
    assert not np.array_equal(flat(model), before)


def test_weight_regularisers():
    base = tf.keras.Sequential([layers.Dense(3, kernel_regularizer=tf.keras.regularizers.l2(0.1))])
    model = compiled(optimizer(), base, loss=support.crossentropy("sum"))
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert model.optimizer.ledger.steps == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_budget_stops_in_time(steps_per_execution):
    """Also where the last call of an epoch is a short one."""
    opt = optimizer(noise_multiplier=2.0)
    model = compiled(opt, steps_per_execution=steps_per_execution)
    budget = tfdp.callbacks.PrivacyBudget(target_epsilon=3.0, delta=1e-3)
    history = model.fit(batches(), epochs=100, steps_per_epoch=6, verbose=0, callbacks=budget)
    spent = opt.ledger.epsilon(1e-3).epsilon
    assert history.history["epsilon"][-1] == spent <= 3.0
    more = tfdp.accounting.PrivacyLedger.from_dict(opt.ledger.to_dict())
    more.record(opt.release.event, steps_per_execution, opt.release.truncation_probability)
    assert more.epsilon(1e-3).epsilon > 3.0


# What is refused.


def test_other_optimizers_are_refused():
    with pytest.raises(ValueError, match="must be compiled with"):
        compiled(tfdp.DPSGD(1.0, 1.0, 16)).fit(batches())


def test_an_optimizer_without_the_model_is_refused():
    model = support.compiled(optimizer())
    with pytest.raises(RuntimeError, match="SelectiveModel"):
        model.fit(batches(), verbose=0)


def test_no_keras_model_is_refused():
    with pytest.raises(TypeError, match="base_model"):
        tfdp.SelectiveModel(layers.Dense(3))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (tf.data.Dataset.from_tensors((X, Y)), "poisson_batches"),
        (X, "poisson_batches"),
        (batches(expected_batch_size=20), "expected_batch_size=16"),
        (batches(X[:32], Y[:32]), "dataset_size=64"),
        (batches(chunk_size=8), "gradient_accumulation_steps=1"),
    ],
)
def test_other_data_is_refused(data, match):
    with pytest.raises(ValueError, match=match):
        compiled(optimizer()).fit(data, verbose=0)


@pytest.mark.slow
def test_other_data_of_the_same_size_is_used():
    model = compiled(optimizer())
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    other = batches(np.full_like(X, np.nan), Y)
    before = flat(model)
    model.compile(optimizer(noise_multiplier=0.0, threshold=ALWAYS), support.crossentropy())
    model.fit(other, steps_per_epoch=1, verbose=0)
    np.testing.assert_array_equal(flat(model), before)  # Broken examples move nothing.


def test_batches_of_its_own_are_not_taken():
    with pytest.raises(NotImplementedError):
        compiled(optimizer()).train_on_batch(X, Y)
    with pytest.raises(ValueError, match="must be compiled"):
        tfdp.SelectiveModel(support.small_model()).fit(batches())


def test_a_fixed_dropout_seed_is_refused():
    base = tf.keras.Sequential([layers.Dropout(0.5, seed=1), layers.Dense(3)])
    data = batches(padding="full")
    with pytest.raises(ValueError, match="fixed seed"):
        compiled(optimizer(data=data), base).fit(data, verbose=0)
    model = compiled(optimizer(), base)  # Without padding, streams are secret.
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_cap_that_is_reached_is_an_error_and_charged(jit_compile):
    data = batches(padding="full" if jit_compile else "none")
    opt = optimizer(data=data, threshold=NEVER, max_attempts=2)
    model = compiled(opt, jit_compile=jit_compile)
    with pytest.raises(tfdp.models.TooManyAttemptsError, match="max_attempts=2"):
        model.fit(data, steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 1


class CountsTests(layers.Layer):
    def build(self, shape):
        self.tests = self.add_weight("tests", [], trainable=False, initializer="zeros")

    def call(self, inputs, training=None):
        if not training:
            self.tests.assign_add(1.0)
        return inputs


def test_what_the_test_does_to_the_model_is_rolled_back():
    base = tf.keras.Sequential([layers.Input([4]), CountsTests(), layers.Dense(3)])
    model = compiled(optimizer(), base)
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert base.layers[0].tests.numpy() == 0


class FixedInTests(layers.Layer):
    def call(self, inputs, training=None):
        return inputs if training else tf.nn.dropout(inputs, 0.5, seed=3)


class CountsInATable(layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, inputs, training=None):
        if training:
            zero = tf.constant([0], tf.int64)
            self.table.insert(zero, self.table.lookup(zero) + 1)
        return inputs


@pytest.mark.parametrize(
    ("layer", "match"), [(FixedInTests, "fixed seed"), (CountsInATable, "no side effects")]
)
def test_layers_that_cannot_be_set_back_are_refused(layer, match):
    with pytest.raises(ValueError, match=match):
        compiled(optimizer(), tf.keras.Sequential([layer(), layers.Dense(3)])).fit(batches())


@pytest.mark.slow
def test_dropout_under_xla():
    """XLA gives every stream a seed of its own that everybody knows, but for secret ones."""
    base = tf.keras.Sequential([layers.Dropout(0.5, seed=1), layers.Dense(3)])
    data = batches(padding="buckets")
    model = compiled(optimizer(data=data), base, jit_compile=True)
    model.fit(data, steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 2
    with pytest.raises(ValueError, match="XLA"):
        data = batches(padding="full")
        compiled(optimizer(data=data), base, jit_compile=True).fit(data, verbose=0)


class KeepsTheFirstExample(layers.Layer):
    def call(self, inputs):
        if not hasattr(self, "first"):
            first = tf.identity(inputs[0])
            first = first if tf.executing_eagerly() else tf.zeros([4])
            self.first = tf.Variable(first, trainable=False)
        return inputs + 0.0 * self.first


@pytest.mark.slow
def test_a_model_is_not_built_on_an_example():
    layer = KeepsTheFirstExample()
    model = compiled(optimizer(), tf.keras.Sequential([layer, layers.Dense(3)]))
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    np.testing.assert_array_equal(layer.first.numpy(), np.zeros(4))


class OwnStep(tf.keras.Sequential):
    def train_step(self, data):
        raise NotImplementedError


def test_a_training_step_that_would_not_be_used_is_refused():
    with pytest.raises(ValueError, match=r"`base_model` .* `train_step`"):
        tfdp.SelectiveModel(OwnStep([layers.Dense(3)]))


@pytest.mark.parametrize("steps", [0, 2.5, "a"])
def test_steps_that_are_no_number_are_refused(steps):
    with pytest.raises(ValueError, match="steps_per_epoch"):
        compiled(optimizer()).fit(batches(), steps_per_epoch=steps)


def test_diagnostics_must_be_asked_for_clearly():
    with pytest.raises(ValueError, match="non_private_diagnostics"):
        tfdp.SelectiveModel(support.small_model(), "False")


def test_tensorboard_would_show_times(tmp_path):
    board = tf.keras.callbacks.TensorBoard(tmp_path)
    with pytest.raises(ValueError, match="TensorBoard"):
        compiled(optimizer()).fit(batches(), callbacks=[board])


@pytest.mark.slow
def test_keras_does_not_log_that_a_callback_is_slower_than_a_step(caplog, capfd):
    class Slow(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    model = compiled(optimizer(selective_release="conditional"))
    model.fit(batches(), steps_per_epoch=8, verbose=0, callbacks=[Slow()])
    assert "batch time" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_second_training_draws_other_batches():
    """Also with a fixed seed of the sampling, compiled anew, on the same data."""
    data, seen = batches(seed=5), []
    for _ in range(2):
        model = compiled(optimizer(threshold=ALWAYS, noise_multiplier=0.0))
        model.fit(data, steps_per_epoch=1, verbose=0)
        seen.append(flat(model))
    assert not np.array_equal(*seen)


@pytest.mark.slow
def test_eager_training_is_traced_all_the_same():
    results = []
    for run_eagerly in (False, True):
        model = compiled(optimizer(), run_eagerly=run_eagerly)
        model.fit(batches(), steps_per_epoch=3, verbose=0)
        results.append(flat(model))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_weights_for_each_output_are_refused():
    inputs = tf.keras.Input([4])
    outputs = {name: tf.keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = tfdp.SelectiveModel(tf.keras.Model(inputs, outputs))
    ones = {"a": np.ones(20, "float32"), "b": np.ones(20, "float32")}
    targets = {name: values[:, np.newaxis] for name, values in ones.items()}
    data = np.zeros([20, 4], "float32"), targets, ones
    batches = tfdp.data.poisson_batches(data, expected_batch_size=5)
    optimizer = tfdp.DPSURSGD(
        1.0,
        1.0,
        sampling=batches.sampling,
        validation_batch_size=5,
        validation_clip=1.0,
        validation_noise_multiplier=1.0,
    )
    model.compile(optimizer, {"a": "mse", "b": "mse"})
    with pytest.raises(ValueError, match=r"one weight for each example.*`loss_weights`"):
        model.fit(batches, verbose=0)
