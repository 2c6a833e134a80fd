"""What all private optimizers share: one noisy step per logical batch, on the right sum."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.autograph.impl import conversion

import tfdp
from tests import support
from tests.support import OPTIMIZERS, compiled, small_data, small_model, without_noise

pytestmark = pytest.mark.rewritten_graphs

layers = tf.keras.layers
X, Y = small_data(64)


def weights(model) -> np.ndarray:
    return support.flat(model.get_weights())


def fit(model, data=None, epochs=1, **kwargs):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32) if data is None else data
    return model.fit(data, epochs=epochs, verbose=0, **kwargs)


def masked(mask, x=X, y=Y):
    return tf.data.Dataset.from_tensors((x, y, np.asarray(mask)))


# Equal to Keras without noise and clip.

KERAS = {
    "sgd": (tfdp.DPSGD, tf.keras.optimizers.legacy.SGD, {"learning_rate": 0.3}),
    "momentum": (
        tfdp.DPSGD,
        tf.keras.optimizers.legacy.SGD,
        {"learning_rate": 0.3, "momentum": 0.9, "nesterov": True},
    ),
    "adam": (tfdp.DPAdam, tf.keras.optimizers.legacy.Adam, {"learning_rate": 0.03}),
    "amsgrad": (
        tfdp.DPAdam,
        tf.keras.optimizers.legacy.Adam,
        {"learning_rate": 0.03, "amsgrad": True, "beta_1": 0.7},
    ),
    "schedule": (
        tfdp.DPSGD,
        tf.keras.optimizers.legacy.SGD,
        {"learning_rate": tf.keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.1])},
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", KERAS)
def test_without_noise_and_clip_it_is_keras(name):
    private, plain, arguments = KERAS[name]
    ours = compiled(without_noise(private, 32, **arguments))
    keras = compiled(plain(**arguments), loss=support.crossentropy("auto"))
    fit(ours, epochs=3)
    fit(keras, epochs=3)
    np.testing.assert_allclose(weights(ours), weights(keras), rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_gradient_accumulation_is_one_step(name):
    private, plain, arguments = KERAS[name]
    ours = compiled(without_noise(private, 64, gradient_accumulation_steps=2, **arguments))
    keras = compiled(plain(**arguments), loss=support.crossentropy("auto"))
    fit(ours, epochs=3)
    fit(keras, tf.data.Dataset.from_tensors((X, Y)), epochs=3)
    np.testing.assert_allclose(weights(ours), weights(keras), rtol=1e-4, atol=1e-6)
    assert ours.optimizer.iterations.numpy() == 3


# One step, exactly: clip, noise, divide.


def one_step(optimizer, mask=None, model=None):
    """The change of the weights by one step of gradient descent with rate 1."""
    model = compiled(optimizer, model)
    before = weights(model)
    fit(model, masked(np.ones(len(Y), bool) if mask is None else mask))
    return before - weights(model)


def test_the_step_is_the_clipped_sum_over_the_expected_batch_size():
    model = small_model()
    optimizer = tfdp.DPSGD(0.05, 0.0, expected_batch_size=50, learning_rate=1.0)
    mask = np.arange(64) % 3 != 0
    expected = support.looped_clipped_sum(model, X[mask], Y[mask], 0.05) / 50
    np.testing.assert_allclose(one_step(optimizer, mask, model), expected, atol=1e-6)


class DividesByRealisedSize(tfdp.DPSGD):
    """Mutant: the sum is divided by the number of rows, as in TF-Privacy."""

    def _logical_step(self, step, total, name):
        scale = self.expected_batch_size / tf.cast(tf.shape(total.batch[0])[0], tf.float32)
        scaled = dataclasses.replace(total, gradients=[s * scale for s in total.gradients])
        return super()._logical_step(step, scaled, name)


def test_dividing_by_the_realised_size_is_caught():
    model = small_model()
    optimizer = DividesByRealisedSize(0.05, 0.0, expected_batch_size=50, learning_rate=1.0)
    expected = support.looped_clipped_sum(model, X, Y, 0.05) / 50
    assert not np.allclose(one_step(optimizer, None, model), expected, atol=1e-6)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("num_microbatches", [None, 4])
def test_noise_is_tied_to_the_sensitivity(cls, num_microbatches):
    optimizer = cls(0.3, 1.7, 64, num_microbatches)
    assert optimizer.noise_stddev == 1.7 * 0.3 * (1 if num_microbatches is None else 2)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), num_microbatches=st.sampled_from([None, 2]))
def test_sensitivity_of_a_step(seed, num_microbatches):
    """Without noise, neighbors' steps differ by the sensitivity over the public divisor."""
    rng = np.random.default_rng(seed)
    mask = rng.random(64) < 0.5
    without = mask & (np.arange(64) != rng.choice(np.flatnonzero(mask)))
    optimizer = tfdp.DPSGD(0.3, 0.0, 50, num_microbatches, learning_rate=1.0, noise_seed=1)
    model, ends = compiled(optimizer), []
    start = model.get_weights()
    for rows in (mask, without):
        model.set_weights(start)
        fit(model, masked(rows))
        ends.append(weights(model))
    divisor = num_microbatches or 50
    bound = optimizer.clipping.sensitivity() / divisor
    assert 0 < np.linalg.norm(ends[0] - ends[1]) <= bound * (1 + 1e-4)


def test_mixed_bfloat16_clips_and_adds_noise_in_float32():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = tf.keras.Sequential([layers.Dense(50), layers.Dense(3, dtype="float32")])
        optimizer = tfdp.DPSGD(0.01, 0.0, 64, learning_rate=1.0)
        model.build([None, 4])
        assert np.linalg.norm(one_step(optimizer, model=model)) <= 0.01 * (1 + 1e-3)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_microbatches_divide_by_their_number():
    optimizer = tfdp.DPSGD(1e-3, 0.0, 64, num_microbatches=1, learning_rate=1.0)
    np.testing.assert_allclose(np.linalg.norm(one_step(optimizer)), 1e-3, rtol=1e-4)


def test_an_empty_batch_is_a_step_of_noise():
    optimizer = tfdp.DPSGD(1.0, 1.0, 64, learning_rate=1.0)
    step = one_step(optimizer, np.zeros(64, bool))
    assert np.all(np.isfinite(step)) and np.all(step != 0)
    assert optimizer.iterations.numpy() == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_a_bad_example_does_not_destroy_the_model(cls):
    x = X.copy()
    x[0], x[1], x[2] = np.nan, np.inf, 1e38
    model = compiled(cls(1.0, 0.5, 64))
    fit(model, masked(np.ones(64, bool), x), epochs=3)
    assert np.all(np.isfinite(weights(model)))


def test_regularisers_are_added_after_clipping():
    def model():
        tf.keras.utils.set_random_seed(3)
        return tf.keras.Sequential(
            [layers.Input([4]), layers.Dense(3, kernel_regularizer=tf.keras.regularizers.L2(5.0))]
        )

    private = model()
    optimizer = tfdp.DPSGD(0.01, 0.0, expected_batch_size=64, learning_rate=1.0)
    private.compile(optimizer, loss=support.crossentropy("sum"))
    before = weights(private)
    regulariser = np.concatenate([10.0 * private.get_weights()[0].ravel(), np.zeros(3)])

    def bare(y, prediction):
        return support.crossentropy()(y, prediction)

    expected = support.looped_clipped_sum(private, X, Y, 0.01, bare) / 64 + regulariser
    fit(private, tf.data.Dataset.from_tensors((X, Y)))
    np.testing.assert_allclose(before - weights(private), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_frozen_layers_do_not_move():
    model = small_model()
    model.layers[0].trainable = False
    frozen = model.layers[0].get_weights()
    free = model.layers[1].get_weights()
    fit(compiled(tfdp.DPSGD(1.0, 1.0, 32, learning_rate=0.5), model))
    np.testing.assert_array_equal(support.flat(frozen), support.flat(model.layers[0].get_weights()))
    assert not np.allclose(support.flat(free), support.flat(model.layers[1].get_weights()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"steps_per_execution": 4},
        {"jit_compile": True},
        {"steps_per_execution": 2, "jit_compile": True},
    ],
)
def test_keras_ways_of_running_agree(how):
    # XLA draws other normals from the same key: without noise, and see test_noise.py.
    noise_multiplier = 0.0 if "jit_compile" in how else 1.0

    def train(**kwargs):
        optimizer = tfdp.DPSGD(0.1, noise_multiplier, 32, learning_rate=0.5, noise_seed=1)
        model = compiled(optimizer, **kwargs)
        fit(model, epochs=4)
        return weights(model)

    np.testing.assert_allclose(train(), train(**how), atol=1e-5)


def test_a_training_step_is_traced_once():
    """The optimizer's variables are created where Keras's function does not see it."""
    traces = []

    class Counting(tf.keras.Sequential):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    fit(compiled(tfdp.DPAdam(1.0, 1.0, 32), Counting([layers.Input([4]), layers.Dense(3)])))
    assert len(traces) == 1


# Refused.


def test_a_loss_that_is_no_sum_or_mean_is_refused():
    def largest(y_true, y_pred):
        return tf.reduce_max(tf.keras.losses.sparse_categorical_crossentropy(y_true, y_pred))

    with pytest.raises(ValueError, match="one value per example"):
        fit(compiled(tfdp.DPSGD(1.0, 1.0, 32), loss=largest))


def test_batch_normalization_is_refused():
    model = tf.keras.Sequential([layers.BatchNormalization(), layers.Dense(3)])
    with pytest.raises(ValueError, match="GroupNormalization"):
        fit(compiled(tfdp.DPSGD(1.0, 1.0, 32), model))


def test_eager_execution_is_refused():
    with pytest.raises(ValueError, match="run_eagerly=False"):
        fit(compiled(tfdp.DPSGD(1.0, 1.0, 32), run_eagerly=True))


@pytest.mark.parametrize("method", ["apply_gradients", "_compute_gradients"])
def test_gradients_from_elsewhere_are_refused(method):
    model, optimizer = small_model(), tfdp.DPSGD(1.0, 1.0, 32)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = support.crossentropy()(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        if method == "_compute_gradients":
            optimizer._compute_gradients(loss, model.trainable_variables, tape=tape)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with pytest.raises(RuntimeError, match=f"not private.*`{method}`"):
        step(X, Y)


def test_a_custom_training_loop_calls_minimize():
    model, optimizer = small_model(), tfdp.DPSGD(0.5, 0.0, 64, learning_rate=1.0)
    before = weights(model)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = support.crossentropy()(y, model(x))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    expected = support.looped_clipped_sum(model, X, Y, 0.5) / 64
    step(tf.constant(X), tf.constant(Y))
    np.testing.assert_allclose(before - weights(model), expected, atol=1e-6)


def test_mixed_float16_loss_scaling_is_refused():
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tfdp.DPSGD(1.0, 1.0, 32))
    with pytest.raises(RuntimeError, match=r"mixed_float16: use `tf\.keras\.mixed_precision"):
        fit(compiled(optimizer))


GOOD = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 10}


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l2_norm_clip", -1.0),
        ("l2_norm_clip", 0.0),
        ("l2_norm_clip", float("nan")),
        ("l2_norm_clip", float("inf")),
        ("l2_norm_clip", "1"),
        ("noise_multiplier", -0.1),
        ("noise_multiplier", float("nan")),
        ("noise_multiplier", float("inf")),
        ("noise_multiplier", None),
        ("expected_batch_size", 0),
        ("expected_batch_size", 2.5),
        ("num_microbatches", 0),
        ("num_microbatches", 1.5),
        ("gradient_accumulation_steps", 0),
        ("sampling", (100, 10)),
        ("noise_seed", 0.5),
    ],
)
def test_bad_arguments(cls, name, value):
    with pytest.raises(ValueError, match=f"Argument `{name}` must .*Received"):
        cls(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("expected_batch_size", "expected_batch_size="),
        ("gradient_accumulation_steps", "chunk_size="),
    ],
)
def test_what_the_sampling_says_must_not_be_said_again(name, remedy):
    sampling = tfdp.accounting.sampling.PoissonSampling(100, 10)
    says = f"`{name}` must not be given together with `sampling`.*poisson_batches.*{remedy}"
    with pytest.raises(ValueError, match=says):
        tfdp.DPSGD(1.0, 1.0, sampling=sampling, **{name: 2})


def test_without_sampling_the_batch_size_must_be_given():
    with pytest.raises(ValueError, match=r"`sampling` must be given.*Received neither"):
        tfdp.DPSGD(1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "name"),
    [((9, 10), "expected_batch_size"), ((100.5, 10), "dataset_size"), ((9, 3, 0), "gradient_acc")],
)
def test_impossible_sampling_is_refused(values, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        tfdp.accounting.sampling.PoissonSampling(*values)


def test_microbatches_with_accumulation_are_refused():
    with pytest.raises(ValueError, match="`num_microbatches` must be None"):
        tfdp.DPSGD(**GOOD, num_microbatches=2, gradient_accumulation_steps=2)


def test_numpy_arguments_are_taken():
    optimizer = tfdp.DPSGD(np.float32(1), np.float64(1), np.int64(10))
    assert optimizer.get_config()["expected_batch_size"] == 10


class Repeated(layers.Layer):
    """A layer whose loop AutoGraph must see."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        y = self.dense(x)
        for _ in tf.range(2):
            y = tf.tanh(y)
        return y


def test_autograph_reads_layers_that_a_callable_loss_calls_and_not_tfdp():
    model = tf.keras.Sequential([Repeated()])
    model.build(X.shape)
    optimizer = without_noise(tfdp.DPSGD, 32)
    before = weights(model)

    @tf.function
    def step(x, y):
        loss = support.crossentropy()
        optimizer.minimize(lambda: loss(y, model(x, training=True)), model.trainable_variables)

    step(tf.constant(X[:32]), tf.constant(Y[:32]))
    assert np.any(weights(model) != before)
    assert conversion.is_allowlisted(tfdp.clipping.OnePassEngine.clipped_sum)
    assert not conversion.is_allowlisted(Repeated.call)
