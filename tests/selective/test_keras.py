"""Selective models as Keras models: what they run on, and what they refuse."""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, with_both, with_one
from tests.selective_support import (
    ALWAYS,
    MODELS,
    NEVER,
    X,
    Y,
    batches,
    compiled,
    optimizer,
    small_model,
)

layers = tf.keras.layers


def flat(model):
    return support.flat(model.get_weights())


# Any model, any way to run it.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("front", "kind", "steps_per_execution"),
    [
        *((FRONT_ENDS[0], kind, 1) for kind in ("functional", "subclassed")),
        *((front, "sequential", 3) for front in FRONT_ENDS),
    ],
)
def test_any_keras_model(front, kind, steps_per_execution):
    make, x = MODELS[kind]
    own = optimizer(front.tfdp.DPSURSGD)
    model = compiled(own, make(front), steps_per_execution=steps_per_execution)
    before = support.flat(model.base_model.get_weights()) if model.base_model.built else None
    model.fit(batches(x), epochs=2, steps_per_epoch=3, verbose=0)
    assert model.optimizer.ledger.steps == 6
    assert before is None or not np.array_equal(flat(model), before)
    assert np.all(np.isfinite(model.predict(x, verbose=0)))
    np.testing.assert_array_equal(
        model.base_model.predict(x, verbose=0), model.predict(x, verbose=0)
    )


@with_both
@pytest.mark.slow
def test_under_xla_it_is_the_same(front):
    """Compares steps in which nothing is random: XLA has random numbers of its own."""
    results, data = [], batches(expected_batch_size=64, padding="full")
    for jit_compile in (False, True):
        opt = optimizer(front.tfdp.DPSURSGD, data, threshold=ALWAYS, noise_multiplier=0.0)
        model = compiled(opt, jit_compile=jit_compile)
        model.fit(data, steps_per_epoch=5, verbose=0)
        results.append(flat(model))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


@with_one
@pytest.mark.slow
def test_under_xla_some_updates_are_rejected(front):
    data = batches(padding="full")  # Batches of one size: XLA compiles once.
    opt = optimizer(front.tfdp.DPSURSGD, data, selective_release="per_attempt")
    model = compiled(opt, jit_compile=True)
    history = model.fit(data, steps_per_epoch=15, verbose=0).history
    assert 0 < history["accepted"][0] < 1


@with_one
@pytest.mark.slow
def test_compiled_anew_it_uses_what_it_was_given(front):
    cls = front.tfdp.DPSURSGD
    model = compiled(optimizer(cls, threshold=NEVER, max_attempts=2))
    before = flat(model)
    data = batches()
    with pytest.raises(tfdp.TooManyAttemptsError):
        model.fit(data, verbose=0)
    model.compile(optimizer(cls, threshold=ALWAYS), front.crossentropy())
    model.fit(data, steps_per_epoch=1, verbose=0)
    assert not np.array_equal(flat(model), before)


@pytest.mark.slow
@with_both
def test_weight_regularisers(front):
    dense = front.keras.layers.Dense(3, kernel_regularizer=front.keras.regularizers.L2(0.1))
    base = front.keras.Sequential([dense])
    model = compiled(optimizer(front.tfdp.DPSURSGD), base, loss=front.crossentropy("sum"))
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert model.optimizer.ledger.steps == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("front", "steps_per_execution"), [(FRONT_ENDS[-1], 1), (FRONT_ENDS[0], 4)]
)
def test_budget_stops_in_time(front, steps_per_execution):
    """Also where the last call of an epoch is a short one."""
    opt = optimizer(front.tfdp.DPSURSGD, noise_multiplier=2.0)
    model = compiled(opt, steps_per_execution=steps_per_execution)
    callbacks = tfdp.keras2.callbacks if front.part == "tfdp" else front.tfdp
    budget = callbacks.PrivacyBudget(target_epsilon=3.0, delta=1e-3)
    history = model.fit(batches(), epochs=100, steps_per_epoch=6, verbose=0, callbacks=[budget])
    spent = opt.ledger.epsilon(1e-3).epsilon
    assert history.history["epsilon"][-1] == spent <= 3.0
    more = tfdp.accounting.PrivacyLedger.from_dict(opt.ledger.to_dict())
    more.record(opt.release.event, steps_per_execution, opt.release.truncation_probability)
    assert more.epsilon(1e-3).epsilon > 3.0


# What is refused.


@with_both
def test_other_optimizers_are_refused(front):
    with pytest.raises(ValueError, match=f"must be compiled with {front.part}.DPSURSGD"):
        compiled(front.tfdp.DPSGD(1.0, 1.0, 16)).fit(batches())


@with_both
def test_loss_scaling_is_refused(front):
    model = front.tfdp.SelectiveModel(small_model(front), dtype="mixed_float16")
    model.compile(optimizer(front.tfdp.DPSURSGD), front.crossentropy())
    with pytest.raises(ValueError, match="use mixed_bfloat16"):
        model.fit(batches())


@with_both
def test_several_replicas_are_refused(front):
    with support.mirrored(2).scope():
        model = compiled(optimizer(front.tfdp.DPSURSGD), front.keras.Sequential())
    with pytest.raises(ValueError, match=r"on one replica.* of 2 replicas"):
        model.fit(batches())


@with_both
def test_an_optimizer_without_the_model_is_refused(front):
    model = small_model(front)
    model.compile(optimizer(front.tfdp.DPSURSGD), front.crossentropy("none"))
    with pytest.raises(RuntimeError, match=f"used in a `{front.part}.SelectiveModel`"):
        model.fit(batches(), verbose=0)
    assert model.optimizer.ledger.steps == 0


@with_both
def test_no_keras_model_is_refused(front):
    others = [small_model(other) for other in FRONT_ENDS if other is not front]
    for base in (front.keras.layers.Dense(3), *others):
        with pytest.raises(TypeError, match=r"base_model` must be a model of Keras [23]\. Rec"):
            front.tfdp.SelectiveModel(base)


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
@with_both
def test_other_data_is_refused(front, data, match):
    with pytest.raises(ValueError, match=match):
        compiled(optimizer(front.tfdp.DPSURSGD)).fit(data, verbose=0)


@pytest.mark.slow
def test_other_data_of_the_same_size_is_used():
    model = compiled(optimizer())
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    other = batches(np.full_like(X, np.nan), Y)
    before = flat(model)
    model.compile(optimizer(noise_multiplier=0.0, threshold=ALWAYS), support.crossentropy())
    model.fit(other, steps_per_epoch=1, verbose=0)
    np.testing.assert_array_equal(flat(model), before)  # Broken examples move nothing.


@with_both
def test_batches_of_its_own_are_not_taken(front):
    model = compiled(optimizer(front.tfdp.DPSURSGD))
    with pytest.raises(NotImplementedError):
        model.train_on_batch(X, Y)
    with pytest.raises(ValueError, match=r"`y` must be None, and `x` what `tfdp\.data\.poisson_b"):
        model.fit(X, Y)
    with pytest.raises(ValueError, match="must be trained with `fit`"):
        front.keras.Model.fit(model, batches(), verbose=0)
    with pytest.raises(ValueError, match="must be compiled"):
        front.tfdp.SelectiveModel(small_model(front)).fit(batches())


def test_a_fixed_dropout_seed_is_refused():
    base = tf.keras.Sequential([layers.Dropout(0.5, seed=1), layers.Dense(3)])
    data = batches(padding="full")
    with pytest.raises(ValueError, match="fixed seed"):
        compiled(optimizer(data=data), base).fit(data, verbose=0)
    model = compiled(optimizer(), base)  # Without padding, streams are secret.
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("front", "jit_compile"), [(FRONT_ENDS[-1], False), (FRONT_ENDS[0], True)])
def test_a_cap_that_is_reached_is_an_error_and_charged(front, jit_compile):
    data = batches(padding="full" if jit_compile else "none")
    opt = optimizer(front.tfdp.DPSURSGD, data, threshold=NEVER, max_attempts=2)
    model = compiled(opt, jit_compile=jit_compile)
    with pytest.raises(tfdp.TooManyAttemptsError, match="max_attempts=2"):
        model.fit(data, steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 1


@pytest.mark.quick_cases(1)
@with_both
def test_what_the_test_does_to_the_model_is_rolled_back(front):
    class CountsTests(front.keras.layers.Layer):
        def build(self, shape):
            self.tests = self.add_weight(
                name="tests", shape=[], initializer="zeros", trainable=False
            )

        def call(self, inputs, training=None):
            if not training:
                self.tests.assign_add(1.0)
            return inputs

    layers = front.keras.layers
    base = front.keras.Sequential(
        [layers.Input([4]), CountsTests(trainable=False), layers.Dense(3)]
    )
    model = compiled(optimizer(front.tfdp.DPSURSGD), base)
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert float(base.layers[0].tests) == 0


def _fixed_in_tests(inputs, training=None):
    return inputs if training else tf.nn.dropout(inputs, 0.5, seed=3)


def _counts_in_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    zero = tf.constant([0], tf.int64)

    def count(inputs, training=None):
        if training:
            table.insert(zero, table.lookup(zero) + 1)
        return inputs

    return count


@pytest.mark.parametrize(
    ("make", "match"),
    [(lambda: _fixed_in_tests, "fixed seed"), (_counts_in_a_table, "no side effects")],
)
@with_both
def test_layers_that_cannot_be_set_back_are_refused(front, make, match):
    function = make()

    class Function(front.keras.layers.Layer):
        def call(self, inputs, training=None):
            return function(inputs, training)

    layers = front.keras.layers
    base = front.keras.Sequential([layers.Input([4]), Function(), layers.Dense(3)])
    with pytest.raises(ValueError, match=match):
        compiled(optimizer(front.tfdp.DPSURSGD), base).fit(batches())


@pytest.mark.slow
def test_dropout_under_xla():
    """XLA gives every stream a seed of its own that everybody knows, but for secret ones."""
    base = tf.keras.Sequential([layers.Dropout(0.5, seed=1), layers.Dense(3)])
    data = batches(padding="buckets")
    model = compiled(optimizer(data=data), base, jit_compile=True)
    model.fit(data, steps_per_epoch=1, verbose=0)  # XLA compiles each size of a batch.
    assert model.optimizer.ledger.steps == 1
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


@pytest.mark.parametrize("name", ["train_step", "test_step", "compute_loss"])
@with_both
def test_a_training_step_that_would_not_be_used_is_refused(front, name):
    own = type("Own", (front.keras.Sequential,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=rf"`base_model` .* `{name}`"):
        front.tfdp.SelectiveModel(own([front.keras.layers.Dense(3)]))


@pytest.mark.parametrize("steps", [0, 2.5, "a"])
def test_steps_that_are_no_number_are_refused(steps):
    with pytest.raises(ValueError, match="steps_per_epoch"):
        compiled(optimizer()).fit(batches(), steps_per_epoch=steps)


@with_both
def test_diagnostics_must_be_asked_for_clearly(front):
    with pytest.raises(ValueError, match="non_private_diagnostics"):
        front.tfdp.SelectiveModel(small_model(front), "False")


@pytest.mark.parametrize("name", ["TensorBoard", "ProgbarLogger"])
@with_both
def test_callbacks_that_would_show_times_are_refused(front, name):
    callback = getattr(front.keras.callbacks, name)()
    with pytest.raises(ValueError, match=f"Received a {name}"):
        compiled(optimizer(front.tfdp.DPSURSGD)).fit(batches(), callbacks=[callback])


@with_both
@pytest.mark.slow
def test_keras_does_not_log_that_a_callback_is_slower_than_a_step(front, caplog, capfd):
    class Slow(front.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    model = compiled(optimizer(front.tfdp.DPSURSGD, selective_release="conditional"))
    model.fit(batches(), steps_per_epoch=8, verbose=0, callbacks=[Slow()])
    assert "batch time" not in caplog.text + "".join(capfd.readouterr())


@with_one
@pytest.mark.slow
def test_a_second_training_draws_other_batches(front):
    """Also with a fixed seed of the sampling, compiled anew, on the same data."""
    data, seen = batches(seed=5), []
    for _ in range(2):
        own = optimizer(front.tfdp.DPSURSGD, threshold=ALWAYS, noise_multiplier=0.0)
        model = compiled(own)
        model.fit(data, steps_per_epoch=1, verbose=0)
        seen.append(flat(model))
    assert not np.array_equal(*seen)


@with_both
@pytest.mark.slow
def test_eager_training_is_traced_all_the_same(front):
    results = []
    for run_eagerly in (False, True):
        model = compiled(optimizer(front.tfdp.DPSURSGD), run_eagerly=run_eagerly)
        model.fit(batches(), steps_per_epoch=3, verbose=0)
        results.append(flat(model))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@with_both
def test_weights_for_each_output_are_refused(front):
    inputs = front.keras.Input([4])
    outputs = {name: front.keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    base = front.keras.Model(inputs, outputs)
    ones = {"a": np.ones(20, "float32"), "b": np.ones(20, "float32")}
    targets = {name: values[:, np.newaxis] for name, values in ones.items()}
    data = np.zeros([20, 4], "float32"), targets, ones
    batches = tfdp.data.poisson_batches(data, expected_batch_size=16)
    own = optimizer(front.tfdp.DPSURSGD, batches)
    with pytest.raises(ValueError, match=r"one weight for each example.*`loss_weights`"):
        compiled(own, base, loss={"a": "mse", "b": "mse"}).fit(batches, verbose=0)


@pytest.mark.slow
@with_both
def test_a_model_of_several_outputs(front):
    """Keras 3 has a mean of the loss of each, which is private."""
    inputs = front.keras.Input([4])
    outputs = {name: front.keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    base = front.keras.Model(inputs, outputs)
    targets = {name: X[:, :1] for name in ("a", "b")}
    data = batches(X, targets)
    loss = {"a": "mse", "b": "mse"}
    model = compiled(optimizer(front.tfdp.DPSURSGD, data), base, loss=loss)
    model.fit(data, steps_per_epoch=2, verbose=0)
    assert model.optimizer.ledger.steps == 2
    for metric in model.metrics:
        for variable in metric.variables:
            assert float(variable) == 0
