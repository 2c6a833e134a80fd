"""Losses that are computed from a gradient, such as the gradient penalty of WGAN-GP."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine, SlowClippingWarning, VectorizedEngine
from tfdp.clipping.row_analysis import equal_rows
from tfdp.clipping.row_analysis.states import Rows

layers = tf.keras.layers
CLIP, N = 0.05, 4
RNG = np.random.default_rng(0)


def critic(kind):
    tf.keras.utils.set_random_seed(1)
    stack = {
        "dense": [
            layers.Input([4]),
            layers.Dense(3, activation="tanh"),
            layers.Dense(3),
            layers.LeakyReLU(),
        ],
        "convolution": [
            layers.Input([4, 4, 2]),
            layers.Conv2D(3, 3, strides=2, padding="same", activation="relu"),
            layers.LayerNormalization(),
            layers.Reshape([-1]),
        ],
        "padding": [
            layers.Input([4, 4, 2]),
            layers.ZeroPadding2D(((1, 2), (0, 1))),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.Lambda(lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")),
            layers.Cropping2D(((1, 0), (1, 1))),
            layers.Conv2D(3, 2, activation="tanh"),
            layers.Lambda(lambda x: tf.slice(x, [0, 1, 0, 0], [-1, -1, 2, -1])),
            layers.Reshape([-1]),
        ],
        "normalized": [layers.Input([4]), layers.Dense(4), layers.BatchNormalization()],
    }[kind]
    return tf.keras.Sequential([*stack, layers.Dense(1)])


def penalties(model, x):
    """The gradient penalties of a batch, and the scores."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        scores = model(x, training=True)
    gradients = layers.Flatten()(tape.gradient(scores, x))
    return 3 * tf.square(tf.norm(gradients, axis=1) - 1.0) + scores[:, 0]


class Sum:
    """The clipped sum of a loss, traced once for batches of any size or of one."""

    def __init__(self, model, engine, rows=None, losses=penalties):
        def run(x):
            found = engine.clipped_sum(losses(model, x), model.trainable_variables, [1, 2])
            pairs = zip(found.gradients, model.trainable_variables, strict=True)
            return tf.concat(
                [tf.reshape(tf.zeros(v.shape) if g is None else g, [-1]) for g, v in pairs], 0
            )

        spec = [tf.TensorSpec([rows, *model.input_shape[1:]])]
        self.of = tf.function(run, input_signature=spec, autograph=False)

    def __call__(self, x):
        return self.of(x).numpy()


def examples(model, n=N):
    return RNG.normal(size=[n, *model.input_shape[1:]]).astype("float32")


def looped(model, x):
    """The clipped sum, one eager example at a time."""
    total = 0.0
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(penalties(model, tf.constant(x[i : i + 1])))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradient = support.flat(tf.convert_to_tensor(g) for g in gradients)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["dense", "convolution", "padding"])
@pytest.mark.parametrize("rows", [None, N])
def test_clipped_sum_is_that_of_a_loop_over_examples(kind, rows):
    model, engine = critic(kind), OnePassEngine(CLIP)
    x = examples(model)
    found = Sum(model, engine, rows)
    np.testing.assert_allclose(found(x), looped(model, x), atol=1e-6)
    assert engine.report().fast_fraction == 1.0
    if rows is None:  # Neighbors.
        for i in range(N):
            assert np.linalg.norm(found(x) - found(np.delete(x, i, 0))) <= CLIP * (1 + 1e-5)


def test_neighbours_move_further_without_clipping():
    model = critic("dense")
    found, x = Sum(model, support.UnclippedEngine(CLIP)), examples(model)
    assert max(np.linalg.norm(found(x) - found(np.delete(x, i, 0))) for i in range(N)) > 2 * CLIP


@pytest.mark.slow
def test_the_vectorised_engine_makes_the_same_sum():
    model = critic("convolution")
    x = examples(model)
    np.testing.assert_allclose(Sum(model, VectorizedEngine(CLIP))(x), looped(model, x), atol=1e-6)


@pytest.mark.slow
def test_what_has_no_rule_is_left_to_the_vectorised_engine():
    """A depthwise kernel, in the gradient, is used in a way that no rule knows."""
    tf.keras.utils.set_random_seed(1)
    stack = [layers.Input([4, 4, 2]), layers.DepthwiseConv2D(3, activation="tanh")]
    model = tf.keras.Sequential([*stack, layers.Flatten(), layers.Dense(1)])
    x, engine = examples(model), OnePassEngine(CLIP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Sum(model, engine)(x)
    np.testing.assert_allclose(found, looped(model, x), atol=1e-6)
    assert [entry.variable.split("/")[1] for entry in engine.report().slow] == [
        "depthwise_kernel:0"
    ]


def of_all_gradients(model, x):
    """A penalty on the norm of the gradients of all examples together, a mistake."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        scores = model(x, training=True)
    return tf.square(tf.norm(tape.gradient(scores, x)) - 1.0)


def times_that_of_all(model, x):
    return of_all_gradients(model, x) * penalties(model, x)


def plus_that_of_all(model, x):
    return of_all_gradients(model, x) + penalties(model, x)


def of_shared_values(model, x):
    """A penalty on the gradient by a value that all examples share."""
    shared = tf.zeros([1, 4])
    with tf.GradientTape() as tape:
        tape.watch(shared)
        scores = model(x + shared, training=True)
    return tf.reduce_sum(x * tape.gradient(scores, shared), axis=1)


@pytest.mark.parametrize(
    ("kind", "losses", "message"),
    [
        ("dense", times_that_of_all, "mixes examples: it reduces over the batch"),
        ("dense", plus_that_of_all, "must hold one value per example"),
        ("dense", of_shared_values, "mixes examples: it "),
        ("normalized", penalties, "writes a statistic of the batch"),
    ],
)
def test_gradients_that_mix_examples_are_refused(kind, losses, message):
    model = critic(kind)
    with pytest.raises(ValueError, match=message):
        Sum(model, OnePassEngine(CLIP), losses=losses)(examples(model))


def test_one_row_is_not_computed_with_the_ones_of_a_whole_batch():
    """A linear critic of a batch of one size: its gradient is made of constants alone."""
    model = tf.keras.Sequential([layers.Input([4]), layers.Dense(1)])

    def mean(model, x):
        return tf.reduce_mean(penalties(model, x))

    with pytest.raises(ValueError, match="its graph holds the size of the batch"):
        Sum(model, VectorizedEngine(CLIP), rows=N, losses=mean)(examples(model))


def shared_ones(model, x):
    """Ones, as many as examples, that are used as a matrix for all of them."""
    kernel, bias = model.trainable_variables
    return tf.tanh((x @ (tf.ones([N, 1]) @ tf.transpose(kernel)) + bias)[:, 0])


def test_ones_that_all_examples_share_are_no_rows():
    model = tf.keras.Sequential([layers.Input([N]), layers.Dense(1)])
    x = examples(model)
    with pytest.warns(SlowClippingWarning, match="of computed weights"):
        found = Sum(model, OnePassEngine(CLIP), rows=N, losses=shared_ones)(x)
    expected = Sum(model, VectorizedEngine(CLIP), losses=shared_ones)
    np.testing.assert_allclose(found, expected(x), atol=1e-6)


def test_only_equal_rows_may_be_rows_of_the_examples():
    with tf.Graph().as_default():
        made = [tf.ones([N, 1]), tf.constant([1.0, 1, 1, 2]), tf.range(float(N)), tf.ones([1, N])]
        operations = [tensor.op for tensor in made]
        batch = [tf.compat.v1.placeholder(tf.float32, [N, 2])]
        assert equal_rows.find(operations, batch) == {made[0].ref(): Rows()}
        assert not equal_rows.find(operations, [tf.compat.v1.placeholder(tf.float32, [None, 2])])


def weighted_by_place(model, x):
    return model(x)[:, 0] * tf.constant([1.0, 5.0, 1.0, 1.0])


def test_mutant_that_takes_any_constant_for_rows_is_caught(monkeypatch):
    """Then what an example contributes depends on its place among the others."""
    model = critic("dense")
    x = examples(model)
    engine = OnePassEngine(np.inf)
    with pytest.raises(ValueError, match="holds the size of the batch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Sum(model, engine, rows=N, losses=weighted_by_place)(x)
    monkeypatch.setattr(
        equal_rows, "_has_equal_rows", lambda op, size: op.outputs[0].shape.as_list() == [size]
    )
    found = Sum(model, engine, rows=N, losses=weighted_by_place)
    assert not np.allclose(found(x), found(x[::-1].copy()), atol=1e-3)
