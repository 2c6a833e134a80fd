import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import support
from tests.clipping.models import (
    IMAGES,
    SEQUENCES,
    TOKENS,
    VECTORS,
    N,
    Y,
    attention,
    two_inputs,
)
from tfdp.clipping import VectorizedEngine
from tfdp.clipping.engine import random_parts
from tfdp.clipping.vectorized import vectorized_engine as vectorized

layers = tf.keras.layers


def sequential(*stack):
    return lambda: tf.keras.Sequential([*stack, layers.Dense(3)])


MODELS = {
    "dense": (sequential(layers.Dense(4, activation="tanh")), VECTORS),
    "convolution": (
        sequential(
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.GroupNormalization(2),
            layers.MaxPool2D(),
            layers.Flatten(),
        ),
        IMAGES,
    ),
    "separable": (sequential(layers.SeparableConv2D(4, 3), layers.Reshape([-1])), IMAGES),
    "embedding": (
        sequential(
            layers.Embedding(20, 4, input_length=6), layers.LayerNormalization(), layers.Flatten()
        ),
        TOKENS,
    ),
    "lstm": (sequential(layers.Embedding(20, 4, mask_zero=True), layers.LSTM(5)), TOKENS),
    "bidirectional": (
        sequential(
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GlobalAveragePooling1D(),
        ),
        SEQUENCES,
    ),
    "gru": (sequential(layers.GRU(5)), SEQUENCES),
    "attention": (attention, SEQUENCES),
    "shared layer, two inputs": (two_inputs, (VECTORS, VECTORS[::-1].copy())),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_equals_a_loop_over_examples(name):
    make, x = MODELS[name]
    model = make()
    clipped_sum = support.ClippedSum(VectorizedEngine(0.5), model, x)
    expected = support.looped_clipped_sum(model, x, Y, 0.5)
    np.testing.assert_allclose(clipped_sum(x, Y), expected, atol=2e-6)
    # The clip was at work: otherwise the test would say little.
    unclipped = support.looped_clipped_sum(model, x, Y, np.inf)
    assert np.linalg.norm(unclipped - expected) > 1e-2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows_per_pass", [1, 3, 7, 100])
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_chunks_do_not_change_the_sum(rows_per_pass, num_microbatches):
    model = support.small_model()
    x, y = support.small_data(N)
    whole = support.ClippedSum(VectorizedEngine(0.5, num_microbatches), model, x)
    parts = support.ClippedSum(
        VectorizedEngine(0.5, num_microbatches, rows_per_pass=rows_per_pass), model, x
    )
    np.testing.assert_allclose(parts(x, y), whole(x, y), atol=1e-6)


LSTM = layers.LSTM(3, dtype="float64")
SCALE = tf.Variable([0.5, -1.0, 2.0], dtype=tf.float64)
MATRIX = tf.Variable(np.eye(3) / 2, dtype=tf.float64)


def scanned(x):
    """Sums of a recurrence; traced gradients of `SCALE` are of unknown shape."""
    rows = tf.transpose(x, [1, 0, 2])
    return tf.reduce_sum(tf.scan(lambda s, row: tf.tanh(s + row * SCALE), rows), axis=[0, 2])


def looped(x):
    def body(i, h):
        return i + 1, tf.tanh(h @ MATRIX * SCALE)

    return tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, body, [0, x])[1], axis=[1, 2])


def penalised(x):
    """A recurrent layer with a penalty on the gradient by its inputs."""
    scaled = x * SCALE
    with tf.GradientTape() as tape:
        tape.watch(scaled)
        outputs = tf.reduce_sum(LSTM(scaled), axis=1)
    slope = tf.norm(tape.gradient(outputs, scaled), axis=[1, 2])
    return outputs + (slope - 1) ** 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("losses", [scanned, looped, penalised])
def test_gradients_whose_shapes_tensorflow_loses(losses):
    x = np.random.default_rng(0).normal(size=(5, 4, 3))
    LSTM(x)
    used = {scanned: [SCALE], looped: [SCALE, MATRIX]}
    variables = used.get(losses, [SCALE, *LSTM.trainable_variables])

    def clipped(rows):
        result = VectorizedEngine(0.5).clipped_sum(losses(rows), variables, tf.constant([1, 2]))
        return result.gradients

    step = tf.function(clipped, input_signature=[support.open_spec(x)], autograph=False)
    expected = 0.0
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            one = losses(tf.constant(x[i : i + 1]))
        gradient = support.flat(tape.gradient(one, variables))
        expected = expected + gradient / max(1.0, np.linalg.norm(gradient) / 0.5)
    np.testing.assert_allclose(support.flat(step(x)), expected, atol=1e-6)


@pytest.mark.slow
def test_compiled_by_xla():
    model = support.small_model()
    x, y = support.small_data(N)
    plain = support.ClippedSum(VectorizedEngine(0.5, rows_per_pass=3), model, x)
    compiled = support.ClippedSum(
        VectorizedEngine(0.5, rows_per_pass=3), model, x, jit_compile=True
    )
    np.testing.assert_allclose(compiled(x, y), plain(x, y), atol=1e-6)


# Sensitivity.


def assert_sensitivity(engine, clipped_sum, x, y, row):
    """Removing an example, by the mask or from the batch, moves the sum by the bound at most."""
    without = np.arange(len(y)) != row
    bound = engine.sensitivity()
    here = clipped_sum(x, y)
    assert np.linalg.norm(here - clipped_sum(x, y, without)) <= bound * (1 + 1e-5)
    if engine.num_microbatches is None:
        there = clipped_sum(x[without], y[without])
        assert np.linalg.norm(here - there) <= bound * (1 + 1e-5)


@functools.cache
def traced(num_microbatches):
    engine = VectorizedEngine(0.3, num_microbatches)
    return engine, support.ClippedSum(engine, support.small_model(), support.small_data(1)[0])


@settings(max_examples=8, deadline=None)
@given(
    data_seed=st.integers(0, 10**6),
    model_seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
    rows=st.integers(1, 9),
    num_microbatches=st.sampled_from([None, 1, 3]),
)
def test_sensitivity_of_random_neighbours(data_seed, model_seed, scale, rows, num_microbatches):
    x, y = support.small_data(rows, data_seed)
    engine, clipped_sum = traced(num_microbatches)
    clipped_sum.model.set_weights(support.small_model(model_seed).get_weights())
    assert_sensitivity(engine, clipped_sum, x * scale, y, data_seed % rows)


def test_a_skipped_clip_is_caught():
    x, y = support.small_data(5)
    engine = support.UnclippedEngine(0.3)
    clipped_sum = support.ClippedSum(engine, support.small_model(), x)
    with pytest.raises(AssertionError):
        assert_sensitivity(engine, clipped_sum, x * 100, y, 2)


def linear_loss(y_true, y_pred, sample_weight=None):
    return y_pred[:, 0] * tf.cast(sample_weight, tf.float32)


def linear_sum(engine, x):
    """The clipped sum of a model whose gradient is the example itself."""
    model = tf.keras.Sequential([layers.Dense(1, use_bias=False)])
    return support.ClippedSum(engine, model, x, loss=linear_loss, target_dtype=tf.float32)


def test_consecutive_microbatches_would_break_the_sensitivity(monkeypatch):
    """Mutant: microbatches are cut from consecutive rows, as in TF-Privacy.

    Removing the first row moves every later one towards another group.
    """
    x = np.array([[-10], [1], [1], [-10], [100], [-1000]], "float32") * 100
    y = np.zeros(len(x), "float32")
    engine = VectorizedEngine(1.0, num_microbatches=3)
    with monkeypatch.context() as patch:
        patch.setattr(vectorized, "random_parts", lambda _, rows, m: tf.range(rows) * m // rows)
        clipped_sum = linear_sum(engine, x)
        moved = np.linalg.norm(clipped_sum(x, y) - clipped_sum(x[1:], y[1:]))
    assert moved > 1.9 * engine.sensitivity()

    clipped_sum = linear_sum(engine, x)
    moved = np.linalg.norm(clipped_sum(x, y) - clipped_sum(x, y, np.arange(len(x)) != 0))
    assert moved <= engine.sensitivity() * (1 + 1e-5)


def test_a_group_swings_by_twice_the_clip():
    """The factor 2 is needed: an example turns its group's clipped mean to the other side."""
    x, y = np.array([[1.0], [-3.0]], "float32") * 100, np.zeros(2, "float32")
    engine = VectorizedEngine(1.0, num_microbatches=1)
    clipped_sum = linear_sum(engine, x)
    moved = clipped_sum(x, y) - clipped_sum(x, y, np.array([True, False]))
    np.testing.assert_allclose(np.linalg.norm(moved), engine.sensitivity(), rtol=1e-6)


def test_microbatches_are_means_of_groups_drawn_per_example():
    model = support.small_model()
    x, y = support.small_data(N)
    engine = VectorizedEngine(0.1, num_microbatches=3)
    clipped_sum = support.ClippedSum(engine, model, x)
    groups = random_parts(tf.constant([1, 2], tf.int64), N, 3).numpy()
    assert len(set(groups)) > 1
    single = support.ClippedSum(VectorizedEngine(np.inf), model, x)
    expected = 0.0
    for group in set(groups):
        mean = single(x[groups == group], y[groups == group]) / np.sum(groups == group)
        expected = expected + mean / max(1, np.linalg.norm(mean) / 0.1)
    np.testing.assert_allclose(clipped_sum(x, y), expected, atol=1e-6)


# Bad examples, masks, regularizers.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_a_bad_example_contributes_nothing(bad, num_microbatches):
    model = support.small_model()
    x, y = support.small_data(N)
    clipped_sum = support.ClippedSum(VectorizedEngine(0.5, num_microbatches), model, x)

    def squared(y_true, y_pred, sample_weight=None):
        return tf.reduce_sum(tf.square(y_pred), 1) * tf.cast(sample_weight, tf.float32)

    if bad == 1e30:  # tanh saturates: let it reach the gradient through the last layer.
        model = tf.keras.Sequential([layers.Dense(3)])
        engine = VectorizedEngine(0.5, num_microbatches)
        clipped_sum = support.ClippedSum(engine, model, x, loss=squared)
    broken = x.copy()
    broken[3] = bad
    others = np.arange(N) != 3
    result = clipped_sum(broken, y)
    assert np.all(np.isfinite(result))
    if num_microbatches is None:
        np.testing.assert_allclose(result, clipped_sum(x, y, others), atol=1e-6)


def test_masked_rows_contribute_nothing_whatever_they_hold():
    model = support.small_model()
    x, y = support.small_data(N)
    clipped_sum = support.ClippedSum(VectorizedEngine(0.5), model, x)
    mask = np.array([True, False, True, False, True, False, False])
    padded = np.where(mask[:, None], x, np.float32(np.nan))
    np.testing.assert_allclose(
        clipped_sum(padded, y, mask), clipped_sum(x[mask], y[mask]), atol=1e-6
    )
    assert not np.any(clipped_sum(x, y, np.zeros(N, bool)))
    assert not np.any(clipped_sum(x[:0], y[:0]))


def regularised_model():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            layers.Dense(4, kernel_regularizer=tf.keras.regularizers.L2(0.7)),
            layers.Dense(3, bias_regularizer=tf.keras.regularizers.L1(0.2)),
        ]
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_regularisers_are_taken_out_of_the_examples(reduction):
    model = regularised_model()
    x, y = support.small_data(N)

    def regularised(y_true, y_pred, sample_weight=None):
        losses = support.crossentropy(reduction)(y_true, y_pred, sample_weight=sample_weight)
        return losses + tf.add_n(model.losses)

    clipped_sum = support.ClippedSum(VectorizedEngine(0.2), model, x, loss=regularised)
    np.testing.assert_allclose(
        clipped_sum(x, y), support.looped_clipped_sum(model, x, y, 0.2), atol=1e-6
    )
    public = clipped_sum.gradients(x, y)[1]
    kernel = model.trainable_variables[0].numpy()
    np.testing.assert_allclose(public[0], 2 * 0.7 * kernel, rtol=1e-5)
    assert public[1] is None and public[2] is None
    bias = model.trainable_variables[3].numpy()
    np.testing.assert_allclose(public[3], 0.2 * np.sign(bias), rtol=1e-5)


def test_dropout_is_drawn_for_each_example():
    model = tf.keras.Sequential([layers.Dropout(0.5), layers.Dense(1, use_bias=False)])
    x, y = np.ones([200, 50], "float32"), np.zeros(200, "float32")
    engine = VectorizedEngine(np.inf)
    clipped_sum = support.ClippedSum(engine, model, x, loss=linear_loss, target_dtype=tf.float32)
    # A coordinate survives 100 +- 7 of 200 masks, each time worth 2. One mask for all
    # examples would give 0 or 400. By chance, one of 50 is out of range once in 2e10 runs.
    total = clipped_sum(x, y)
    assert np.all((total > 100) & (total < 300))
    assert not np.array_equal(total, clipped_sum(x, y))


def test_variables_that_the_loss_does_not_use_get_no_gradient():
    class Unused(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), self.add_weight("unused", [2])

        def call(self, inputs):
            return self.used(inputs)

    x, y = support.small_data(N)
    gradients, _ = support.ClippedSum(VectorizedEngine(0.5), Unused(), x).gradients(x, y)
    assert [g is None for g in gradients].count(True) == 1
