"""Programs of kinds where Keras 2 differs from Keras 3: clipped sums are those of a loop."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from benchmarks import programs
from tests import support
from tests.ports import test_further_programs as further
from tests.ports.test_ports import assert_fast, batches_of, private

CLIP = 0.1
N = 7
layers = tf.keras.layers


def masked_lstm_tags():
    """A class for each token, by a bidirectional layer; padding is masked, at both ends."""
    model = tf.keras.Sequential(
        [
            layers.Embedding(10, 4, mask_zero=True),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.Dense(3),
        ]
    )
    return model, further.LOGITS, (further.ids(6, below=4), further.ids(6))


def padded_numbers():
    """Sequences of vectors, of which those of zeros are masked."""
    model = tf.keras.Sequential(
        [layers.Masking(), layers.LSTM(3, return_sequences=True), layers.Dense(1)]
    )
    x = further.numbers(5, 2) * (further.ids(5, 1) > 0)
    return model, "mse", (x, further.numbers(5, 1))


def segmentation():
    """A class for each pixel; pixels of the class 2 do not count."""
    inputs = layers.Input([8, 8, 3])
    skip = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    h = layers.SeparableConv2D(6, 3, padding="same")(layers.MaxPooling2D()(skip))
    h = layers.Conv2DTranspose(4, 3, 2, padding="same", activation="relu")(h)
    model = tf.keras.Model(inputs, layers.Conv2D(2, 1)(layers.Concatenate()([h, skip])))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    return model, loss, (further.numbers(8, 8, 3), further.ids(8, 8))


def weighted_pixels():
    model, _, (x, y) = segmentation()
    return model, further.LOGITS, (x, y % 2, (y != 2).astype("float32"))


def transfer_learning():
    """A frozen base with BatchNormalization, and a new head."""
    model, loss, data = programs.normalized(further.N)
    head = tf.keras.Sequential([model.layers[1], layers.GlobalAveragePooling2D(), layers.Dense(3)])
    return head, loss, data


PROGRAMS = [
    masked_lstm_tags,
    padded_numbers,
    segmentation,
    weighted_pixels,
    transfer_learning,
    further.siamese,
    further.masked_tags,
    further.translation,
    further.weighted_outputs,
    further.own_loss,
]


def looped(weights, losses):
    """The sum of the clipped gradients of losses, which are functions."""
    gradients = []
    for loss in losses:
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, weights, unconnected_gradients="zero")
        gradients.append(support.flat(tf.convert_to_tensor(g) for g in found))
    return support.sum_of_clipped(gradients, CLIP)


def moved_by(model, weights, batch):
    """Returns what a step of `fit` on a batch subtracts from weights."""
    before = support.flat(w.numpy() for w in weights)
    model.fit(tf.data.Dataset.from_tensor_slices(batch).batch(N), verbose=0)
    return before - support.flat(w.numpy() for w in weights)


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
@pytest.mark.parametrize("build", PROGRAMS)
def test_clipped_sum_is_that_of_a_loop_over_examples(build):
    """One step of `fit`, in one pass."""
    tf.keras.utils.set_random_seed(1)
    model, loss, data = build()
    data = tf.nest.map_structure(lambda a: tf.constant(a[:N]), data)
    optimizer = tfdp.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer, loss)

    def loss_of(i):
        x, y, *weight = tf.nest.map_structure(lambda a: a[i : i + 1], data)
        return model.compute_loss(x, y, model(x, training=True), *(weight or [None]))

    loss_of(0)
    weights = model.trainable_variables
    expected = looped(weights, [lambda i=i: loss_of(i) for i in range(N)])
    assert np.linalg.norm(expected) > 0.01
    np.testing.assert_allclose(moved_by(model, weights, data), expected, atol=2e-6)
    if build is segmentation:  # Keras 2 gathers the pixels that count, of all images, and back.
        assert "(Where)" in optimizer.clipping.report().fallback
    else:
        assert_fast(optimizer.clipping.report())


class OwnStep(tf.keras.Model):
    """A model whose step computes losses of the rows; `minimize` takes the place of two lines."""

    def __init__(self, trained):
        super().__init__()
        self.trained = trained

    def losses_of(self, x):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.losses_of(data[0]))
        self.optimizer.minimize(loss, self.trained.trainable_weights, tape=tape)
        return {"loss": loss}


class Critic(OwnStep):
    """A Wasserstein GAN's critic with padding, and a penalty of its gradient; noise is real."""

    def __init__(self):
        network = [layers.Input([8, 8, 1]), layers.ZeroPadding2D(2)]
        for filters in (4, 4):
            network.append(layers.Conv2D(filters, 3, strides=2, padding="same"))
            network.append(layers.LeakyReLU(0.2))
        super().__init__(tf.keras.Sequential([*network, layers.Flatten(), layers.Dense(1)]))

    def losses_of(self, x):
        fake = 0.5 * x[:, ::-1] + 0.1
        middle = 0.3 * x + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(middle)
            scores = self.trained(middle, training=True)
        gradients = tape.gradient(scores, middle)
        norms = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
        scores = self.trained(fake, training=True) - self.trained(x, training=True)
        return scores[:, 0] + 10.0 * tf.square(norms - 1.0)


class Autoencoder(OwnStep):
    """A variational autoencoder of images, with noise that is drawn."""

    def __init__(self):
        inputs = layers.Input([8, 8, 1])
        h = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
        h = layers.Dense(6, activation="relu")(layers.Flatten()(h))
        mean, log_variance = layers.Dense(2)(h), layers.Dense(2)(h)
        code = mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))
        h = layers.Reshape([4, 4, 4])(layers.Dense(64, activation="relu")(code))
        outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(h)
        super().__init__(tf.keras.Model(inputs, [outputs, mean, log_variance]))

    def losses_of(self, x):
        rebuilt, mean, log_variance = self.trained(x, training=True)
        fit = tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(x), rebuilt)
        divergence = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
        return tf.reduce_sum(fit, axis=[1, 2, 3]) - 0.5 * tf.reduce_sum(divergence, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Critic, Autoencoder])
def test_steps_of_ones_own(kind):
    """In one pass, on Poisson batches; without random numbers, as a loop over examples."""
    tf.keras.utils.set_random_seed(1)
    model, x = kind(), further.numbers(8, 8, 1)
    batches = batches_of(x, x)
    optimizer = private(batches)
    model.compile(optimizer)
    model.fit(batches, verbose=0)
    assert optimizer.ledger.steps == 2
    assert_fast(optimizer.clipping.report())
    if kind is Autoencoder:
        return
    x, weights = tf.constant(x[:N]), model.trained.trainable_weights
    model.compile(tfdp.DPSGD(CLIP, 0.0, 1, learning_rate=1.0))
    expected = looped(weights, [lambda i=i: model.losses_of(x[i : i + 1]) for i in range(N)])
    np.testing.assert_allclose(moved_by(model, weights, (x, x)), expected, atol=2e-6)
