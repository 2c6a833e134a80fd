import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.clipping import VectorizedEngine
from tfdp.clipping.loss_graph import loss_reader

layers = tf.keras.layers
X, Y = support.small_data(6)


def run(model, loss, x=X, **kwargs):
    return support.ClippedSum(VectorizedEngine(1.0), model, x, loss=loss, **kwargs)(x, Y)


def test_a_sum_is_the_sum_of_the_examples_losses():
    model = support.small_model()
    np.testing.assert_allclose(
        run(model, support.crossentropy("sum")), run(model, support.crossentropy()), atol=1e-6
    )


def test_a_scaled_sum_keeps_its_weight():
    model = support.small_model()

    def weighted(y_true, y_pred, sample_weight=None):
        return 0.01 * support.crossentropy("sum")(y_true, y_pred, sample_weight=sample_weight)

    def unclipped(loss):
        engine = VectorizedEngine(np.inf)
        return support.ClippedSum(engine, model, X, loss=loss)(X, Y)

    np.testing.assert_allclose(
        unclipped(weighted), 0.01 * unclipped(support.crossentropy()), atol=1e-6
    )


def test_two_losses_per_example_are_refused():
    def two(y_true, y_pred, sample_weight=None):
        return tf.square(y_pred[:, :2])

    with pytest.raises(ValueError, match=r"shape \(None, 2\)"):
        run(support.small_model(), two)


def test_a_loss_without_examples_is_refused():
    model = support.small_model()

    def constant(y_true, y_pred, sample_weight=None):
        return tf.reduce_sum(tf.square(model.trainable_variables[0])) * tf.ones([3])

    with pytest.raises(ValueError, match="must depend on a batch"):
        run(model, constant)


@pytest.mark.parametrize(
    "layer",
    [layers.BatchNormalization(), layers.BatchNormalization(fused=False)],
    ids=["fused", "unfused"],
)
def test_batch_normalization_is_refused_with_the_fix(layer):
    model = tf.keras.Sequential([layers.Dense(4), layer, layers.Dense(3)])
    with pytest.raises(ValueError, match=r"moving_mean.*GroupNormalization"):
        run(model, support.crossentropy())


def test_frozen_batch_normalization_is_fine():
    layer = layers.BatchNormalization(trainable=False)
    model = tf.keras.Sequential([layers.Dense(4), layer, layers.Dense(3)])
    sums = run(model, support.crossentropy())
    np.testing.assert_allclose(sums, support.looped_clipped_sum(model, X, Y, 1.0), atol=1e-6)


def test_a_layer_that_mixes_examples_sees_one_at_a_time():
    """Whatever a layer does with a batch, an example's gradient depends on that example alone."""
    model = tf.keras.Sequential(
        [
            layers.Dense(4),
            layers.Lambda(lambda t: t + 3 * tf.reduce_mean(t, axis=0, keepdims=True)),
            layers.Dense(3),
        ]
    )
    clipped_sum = support.ClippedSum(VectorizedEngine(1.0), model, X)
    whole = clipped_sum(X, Y)
    alone = sum(clipped_sum(X[i : i + 1], Y[i : i + 1]) for i in range(6))
    np.testing.assert_allclose(whole, alone, atol=1e-5)


def test_a_graph_that_holds_the_batch_size_is_refused():
    model = tf.keras.Sequential([layers.Lambda(lambda t: tf.reshape(t, [6, 4])), layers.Dense(3)])
    model.build([6, 4])
    engine = VectorizedEngine(1.0)

    @tf.function
    def step(x, y):
        loss = support.crossentropy()(y, model(x))
        return engine.clipped_sum(loss, model.trainable_variables, tf.constant([0, 1])).gradients

    with pytest.raises(ValueError, match=r"one example at a time.*drop_remainder=False"):
        step(tf.constant(X), tf.constant(Y))


def test_static_batch_sizes_work_for_ordinary_models():
    model = support.small_model()
    engine = VectorizedEngine(0.3)

    @tf.function
    def step(x, y):
        loss = support.crossentropy()(y, model(x))
        return engine.clipped_sum(loss, model.trainable_variables, tf.constant([0, 1])).gradients

    sums = step(tf.constant(X), tf.constant(Y))
    np.testing.assert_allclose(
        support.flat(sums), support.looped_clipped_sum(model, X, Y, 0.3), atol=1e-6
    )


@tf.function
def read(x, y, mask, loss):
    return tf.constant(0 if loss_reader.read_loss(loss(x, y, mask)).mask is None else 1)


WEIGHTED = {
    "keras": lambda x, y, mask: support.crossentropy()(y, x, sample_weight=mask),
    "keras sum": lambda x, y, mask: support.crossentropy("sum")(y, x, sample_weight=mask),
    "by hand": lambda x, y, mask: 0.5 * (tf.reduce_sum(x, 1) * tf.cast(mask, tf.float32)),
    "two outputs": lambda x, y, mask: tf.add_n(
        [support.crossentropy()(y, factor * x, sample_weight=mask) for factor in (1.0, 2.0)]
    ),
}
NOT_WEIGHTED = {
    "label": lambda x, y, label: tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction="none"
    )(tf.cast(label, tf.float32)[:, None], x[:, :1]),
    "feature": lambda x, y, flag: tf.square(x[:, 0] + tf.cast(flag, tf.float32)),
    "of one output only": lambda x, y, mask: tf.add_n(
        [support.crossentropy()(y, x, sample_weight=mask), tf.square(x[:, 0])]
    ),
    "squared": lambda x, y, mask: x[:, 0] * tf.square(tf.cast(mask, tf.float32)),
}


@pytest.mark.parametrize("name", [*WEIGHTED, *NOT_WEIGHTED])
def test_a_mask_is_what_multiplies_every_loss(name):
    """Boolean labels or features are not masks: rows where they are false are examples too."""
    loss = {**WEIGHTED, **NOT_WEIGHTED}[name]
    found = read(tf.constant(X), tf.constant(Y), tf.constant(Y > 0), loss)
    assert bool(found) == (name in WEIGHTED)


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_elements_that_are_no_dense_tensors_are_refused(kind):
    """They were read again from the iterator for each example: whole batches, not its own row."""
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(12) % 5, [1, 3, 2, 2, 1, 3])
    x = ragged if kind == "ragged" else tf.sparse.from_dense(X)
    data = tf.data.Dataset.from_tensor_slices((x, tf.ones([6, 1]))).batch(6).repeat(9)
    first = [layers.Embedding(5, 4), layers.Lambda(lambda t: tf.reduce_mean(t, 1))]
    shape = (
        {"shape": [None], "ragged": True} if kind == "ragged" else {"shape": [4], "sparse": True}
    )
    stack = [layers.Input(**shape), *(first if kind == "ragged" else []), layers.Dense(1)]
    model = tf.keras.Sequential(stack)
    model.compile(tfdp.DPSGD(1.0, 0.0, 6), lambda y, p: y[:, 0] * tf.reduce_mean(p))
    with pytest.raises(ValueError, match="must be a dense tensor"):
        model.fit(data, steps_per_epoch=1, verbose=0)


def test_ragged_elements_that_the_loss_does_not_use_are_no_matter():
    x = tf.RaggedTensor.from_row_lengths(tf.range(12), [1, 3, 2, 2, 1, 3])
    iterator = iter(tf.data.Dataset.from_tensor_slices((x, X)).batch(6).repeat(2))
    model, engine = support.small_model(), VectorizedEngine(1.0)

    @tf.function
    def step():
        losses = tf.reduce_sum(model(next(iterator)[1]), axis=1)
        return engine.clipped_sum(losses, model.trainable_variables, tf.zeros([2], tf.int64)).batch

    (batch,) = step()
    np.testing.assert_array_equal(batch, X)
