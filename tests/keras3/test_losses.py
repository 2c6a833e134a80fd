"""Losses as Keras 3 reduces, weighs and adds them: the clipped sum is that of a loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.keras3.support import crossentropy, open_batches
from tests.support import flat

CLIP = 0.1
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 4)).astype("float32"), RNG.integers(0, 3, 6)
REAL = RNG.normal(size=(6, 3)).astype("float32")
SEQUENCES = RNG.normal(size=(6, 5, 3)).astype("float32")
TOKENS = RNG.integers(0, 7, (6, 5))
WEIGHTS = np.array([1, 0, 2, 0.5, 1, 3], np.float32)
MASK = np.array([1, 1, 0, 1, 1, 1], np.float32)


class AddLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def mlp(**kwargs):
    hidden = layers.Dense(5, activation="tanh", **kwargs)
    return keras.Sequential([keras.Input([4]), hidden, layers.Dense(3)])


def with_layer(layer):
    return keras.Sequential([keras.Input([4]), layers.Dense(5), layer, layers.Dense(3)])


def two_outputs():
    x = keras.Input([4])
    hidden = layers.Dense(5)(x)
    return keras.Model(x, [layers.Dense(3, name="a")(hidden), layers.Dense(1, name="b")(hidden)])


def dict_inputs():
    u, v = keras.Input([4], name="u"), keras.Input([4], name="v")
    return keras.Model({"u": u, "v": v}, layers.Dense(3)(u * v))


def embedding():
    return keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.LSTM(4),
            layers.Dense(3),
        ]
    )


def sequences():
    inputs = keras.Input([5, 3])
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(4, return_sequences=True)(inputs)))


def tagger(mask_zero=True):
    inputs = keras.Input([5], dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=mask_zero)(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(4, return_sequences=True)(hidden)))


def masked_steps():
    inputs = keras.Input([5, 3])
    return keras.Model(
        inputs, layers.Dense(3)(layers.GRU(4, return_sequences=True)(layers.Masking()(inputs)))
    )


def two_taggers():
    inputs = keras.Input([5], dtype="int32")
    hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(7, 4, mask_zero=True)(inputs))
    outputs = [layers.Dense(3, name="a")(hidden), layers.Dense(1, name="b")(hidden)]
    return keras.Model(inputs, outputs)


def segmentation():
    return keras.Sequential([keras.Input([5, 4, 3]), layers.Conv2D(3, 3, padding="same")])


def ignoring(ignored, reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )


TAGS = RNG.integers(0, 3, (6, 5))
# Sequences of several lengths; the last has no token.
SENTENCES = np.where(np.arange(5) < np.array([[5], [3], [1], [4], [2], [0]]), TOKENS + 1, 0) % 7
STEPS = np.where(SENTENCES[..., np.newaxis] > 0, SEQUENCES, 0).astype("float32")
OF_TOKENS = RNG.uniform(0, 3, (6, 5)).astype("float32")
PIXELS = RNG.normal(size=(6, 5, 4, 3)).astype("float32")
VOID = np.where(RNG.uniform(size=(6, 5, 4)) < 0.4, 255, RNG.integers(0, 3, (6, 5, 4)))
VOID[1] = 255

# Losses over tokens: with a mean over the valid ones of the batch, in Keras, and here of each
# example. Model, x, y, weights, arguments of `compile`.
TOKEN_CASES = {
    "a mask of tokens": (tagger, SENTENCES, TAGS, None, {}),
    "Masking": (masked_steps, STEPS, TAGS, None, {}),
    "weights of tokens under a mask": (tagger, SENTENCES, TAGS, OF_TOKENS, {}),
    "weights of examples under a mask": (tagger, SENTENCES, TAGS, WEIGHTS[:, np.newaxis], {}),
    "boolean weights of tokens": (lambda: tagger(False), TOKENS, TAGS, SENTENCES > 0, {}),
    "boolean weights under a mask": (tagger, SENTENCES, TAGS, OF_TOKENS > 1, {}),
    "a sum under a mask": (tagger, SENTENCES, TAGS, None, {"loss": crossentropy("sum")}),
    "a weighted mean under a mask": (
        *(tagger, SENTENCES, TAGS, OF_TOKENS),
        {"loss": crossentropy("mean_with_sample_weight")},
    ),
    "a weighted mean of tokens": (
        *(lambda: tagger(False), TOKENS, TAGS, OF_TOKENS),
        {"loss": crossentropy("mean_with_sample_weight")},
    ),
    "several masked outputs": (
        *(two_taggers, SENTENCES, (TAGS, OF_TOKENS[..., np.newaxis]), None),
        {"loss": [crossentropy(), "mse"], "loss_weights": [1.0, 0.3]},
    ),
    "an ignored class of pixels": (segmentation, PIXELS, VOID, None, {"loss": ignoring(255)}),
    "an ignored class of tokens": (
        *(lambda: tagger(False), TOKENS, TAGS, None),
        {"loss": ignoring(1)},
    ),
    "an ignored class under a mask": (tagger, SENTENCES, TAGS, OF_TOKENS, {"loss": ignoring(1)}),
    "an ignored class and a weighted mean": (
        *(segmentation, PIXELS, VOID, np.abs(PIXELS[..., 0])),
        {"loss": ignoring(255, "mean_with_sample_weight")},
    ),
}

# Model, x, y, weights, arguments of `compile`.
CASES = {
    **TOKEN_CASES,
    "sum": (mlp, X, Y, None, {"loss": crossentropy("sum")}),
    "one for each example": (mlp, X, Y, None, {"loss": crossentropy("none")}),
    "sample weights": (mlp, X, Y, WEIGHTS, {}),
    "weighted mean": (mlp, X, Y, MASK, {"loss": crossentropy("mean_with_sample_weight")}),
    "a name": (mlp, X, REAL, None, {"loss": "mse"}),
    "a function": (mlp, X, REAL, None, {"loss": lambda y, p: ops.mean(ops.abs(p - y), -1)}),
    "two outputs": (
        two_outputs,
        X,
        (Y, REAL[:, :1]),
        None,
        {"loss": [crossentropy(), "mse"], "loss_weights": [1.0, 0.3]},
    ),
    "dict inputs": (dict_inputs, {"u": X, "v": X + 1}, Y, None, {}),
    "masked tokens": (embedding, TOKENS, Y, None, {}),
    "a loss for each step": (sequences, SEQUENCES, RNG.integers(0, 3, (6, 5)), None, {}),
    "added loss": (lambda: with_layer(AddLoss()), X, Y, None, {}),
    "activity regularizer": (lambda: mlp(activity_regularizer="l2"), X, Y, None, {}),
}


def looped(model, x, y, weights):
    total = 0.0
    for i in range(6):
        one = tf.nest.map_structure(
            lambda t, i=i: None if t is None else tf.constant(t[i : i + 1]), (x, y, weights)
        )
        with tf.GradientTape() as tape:
            loss = model._compile_loss(one[1], model(one[0], training=True), one[2])
            loss = tf.reduce_sum(loss) + sum(model.losses)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradient = flat(tf.convert_to_tensor(g) for g in gradients)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


def of_fit(model, x, y, weights):
    before = flat(v.numpy() for v in model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices((x, y) if weights is None else (x, y, weights))
    model.fit(data.batch(6), verbose=0)
    return before - flat(v.numpy() for v in model.trainable_variables)


def compiled(model, x, y, loss=None, **kwargs):
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer, crossentropy() if loss is None else loss, **kwargs)
    model.evaluate(x, y, verbose=0)  # Which builds the loss.
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_the_sum_of_clipped_gradients(name):
    keras.utils.set_random_seed(0)
    make, x, y, weights, arguments = CASES[name]
    model = compiled(make(), x, y, **arguments)
    expected = looped(model, x, y, weights)
    np.testing.assert_allclose(of_fit(model, x, y, weights), expected, rtol=1e-4, atol=1e-6)
    assert not model.optimizer.clipping.report().fallback


def of_all_examples(padding, weights, **kwargs):
    """The update by a batch that all examples are drawn for."""
    keras.utils.set_random_seed(0)
    data = tfdp.data.poisson_batches(
        (TOKENS, TAGS, weights), expected_batch_size=6, padding=padding
    )
    model = tagger(mask_zero=False)
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, learning_rate=6.0, sampling=data.sampling)
    model.compile(optimizer, crossentropy(), **kwargs)
    before = flat(v.numpy() for v in model.trainable_variables)
    model.fit(data, verbose=0)
    assert optimizer.ledger.steps == 1  # The batch was recognized.
    return before - flat(v.numpy() for v in model.trainable_variables)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("padding", "jit_compile"), [("buckets", False), ("full", True)])
def test_weights_of_tokens_leave_out_rows_of_padding(padding, jit_compile):
    weights = np.where(SENTENCES > 0, OF_TOKENS, 0)  # The last example has none.
    found = of_all_examples(padding, weights, jit_compile=jit_compile)
    np.testing.assert_allclose(found, of_all_examples("none", weights), atol=1e-6)
    assert np.abs(found).max() > 0.01


@pytest.mark.slow
def test_weights_may_be_bools():
    np.testing.assert_allclose(
        of_all_examples("none", OF_TOKENS > 1),
        of_all_examples("none", (OF_TOKENS > 1).astype("float32")),
    )


def test_weight_regularizers_are_public():
    model = compiled(mlp(kernel_regularizer=keras.regularizers.L2(0.1)), X, Y)
    kernel = model.layers[0].kernel
    kernel.assign(0 * kernel + 5.0)
    plain = compiled(mlp(), X, Y)
    plain.set_weights(model.get_weights())
    difference = of_fit(model, X, Y, None) - of_fit(plain, X, Y, None)
    np.testing.assert_allclose(difference[:20], 2 * 0.1 * 5.0, rtol=1e-4)  # Not clipped to 0.1.
    np.testing.assert_allclose(difference[20:], 0.0, atol=1e-5)


def test_a_loop_that_takes_one_batch_again_is_refused():
    model = compiled(mlp(), X, Y)
    variables = model.trainable_variables

    def step(x, y):
        model.optimizer.minimize(crossentropy()(y, model(x)), variables)
        return tf.constant(True)

    @tf.function
    def run(iterator):
        batch = iterator.get_next_as_optional()

        def body(i):
            tf.cond(batch.has_value(), lambda: step(*batch.get_value()), lambda: True)
            return i + 1

        tf.while_loop(lambda i: i < 3, body, [0])

    with pytest.raises(ValueError, match="that read no batch of their own"):
        run(iter(open_batches(X, Y)))
