"""Programs of Keras 3 users with training steps of their own: two lines are changed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
import tfdp.keras3
from tests import support
from tests.ports.test_keras_3_programs import CLIP, N, numbers, sum_of_clipped


class OwnStep(keras.Model):
    """A model whose step computes losses of the rows; two lines are changed."""

    def losses_of(self, x):
        raise NotImplementedError

    def call(self, x):
        return x

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.losses_of(data[0])
            loss = self.optimizer.scale_loss(losses)
        gradients = tape.gradient(loss, self.trained.trainable_weights)
        self.optimizer.apply(gradients, self.trained.trainable_weights)
        return {"loss": tf.reduce_mean(loss)}


class Trainer(OwnStep):
    """A trainer with a model, a loss and a metric of its own."""

    shape = (5,)

    def __init__(self):
        super().__init__()
        self.trained = keras.Sequential(
            [layers.Input([5]), layers.Dense(4, activation="relu"), layers.Dense(3)]
        )

    def losses_of(self, x):
        y = tf.cast(tf.abs(x[:, 0]) > 1, tf.int32)
        logits = self.trained(x, training=True)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


class Autoencoder(OwnStep):
    """A variational autoencoder of images."""

    shape = (8, 8, 1)

    def __init__(self):
        super().__init__()
        inputs = layers.Input(self.shape)
        h = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
        h = layers.Dense(6, activation="relu")(layers.Flatten()(h))
        mean, log_variance = layers.Dense(2)(h), layers.Dense(2)(h)
        self.encoder = keras.Model(inputs, [mean, log_variance])
        self.decoder = keras.Sequential(
            [
                layers.Input([2]),
                layers.Dense(4 * 4 * 4, activation="relu"),
                layers.Reshape([4, 4, 4]),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.trained = keras.Model(inputs, [self.decoder(mean), log_variance])
        self.seeds = keras.random.SeedGenerator(1)

    def losses_of(self, x):
        x = tf.sigmoid(x)
        mean, log_variance = self.encoder(x)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        fit = ops.sum(keras.losses.binary_crossentropy(x, rebuilt), axis=(1, 2))
        divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        return fit - 0.5 * ops.sum(divergence, axis=1)


def sinusoids(x):
    angles = 2.0 * np.pi * ops.exp(ops.linspace(ops.log(1.0), ops.log(1000.0), 3)) * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


class Diffusion(OwnStep):
    """A denoising model: the noise of a random step, from the noisy image and its variance."""

    shape = (8, 8, 3)

    def __init__(self):
        super().__init__()
        images, variances = layers.Input(self.shape), layers.Input([1, 1, 1])
        e = layers.Lambda(sinusoids, output_shape=(1, 1, 6))(variances)
        e = layers.UpSampling2D(8, interpolation="nearest")(e)
        h = layers.Concatenate()([layers.Conv2D(4, 1)(images), e])
        skip = layers.Conv2D(4, 3, padding="same", activation="swish")(h)
        h = layers.GroupNormalization(2)(layers.AveragePooling2D(2)(skip))
        h = layers.Conv2D(4, 3, padding="same", activation="swish")(h)
        h = layers.Concatenate()([layers.UpSampling2D(2, interpolation="bilinear")(h), skip])
        outputs = layers.Conv2D(3, 1, kernel_initializer="zeros")(h)
        self.trained = keras.Model([images, variances], outputs)
        self.seeds = keras.random.SeedGenerator(1)

    def losses_of(self, x):
        rows = ops.shape(x)[0]
        noises = keras.random.normal(ops.shape(x), seed=self.seeds)
        times = keras.random.uniform([rows, 1, 1, 1], 0.0, 1.0, seed=self.seeds)
        angles = 0.3 + times * 1.2
        noisy = ops.cos(angles) * x + ops.sin(angles) * noises
        found = self.trained([noisy, ops.square(ops.sin(angles))], training=True)
        return ops.mean(ops.abs(noises - found), axis=(1, 2, 3))


class Critic(OwnStep):
    """A Wasserstein GAN's critic with padding, and a penalty of its gradient; noise is real."""

    shape = (8, 8, 1)

    def __init__(self):
        super().__init__()
        self.trained = keras.Sequential(
            [
                layers.Input(self.shape),
                layers.ZeroPadding2D((2, 2)),
                layers.Conv2D(4, 5, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Cropping2D(1),
                layers.Conv2D(4, 3, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )

    def losses_of(self, x):
        fake = 0.5 * x[:, ::-1] + 0.1
        middle = 0.3 * x + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(middle)
            scores = self.trained(middle, training=True)
        norms = ops.sqrt(ops.sum(ops.square(tape.gradient(scores, middle)), axis=(1, 2, 3)))
        scores = self.trained(fake, training=True) - self.trained(x, training=True)
        return scores[:, 0] + 10.0 * ops.square(norms - 1.0)


class Discriminator(OwnStep):
    """A convolutional GAN's discriminator, whose generator trains on what it says."""

    shape = (8, 8, 1)

    def __init__(self):
        super().__init__()
        self.trained = keras.Sequential(
            [
                layers.Input(self.shape),
                layers.Conv2D(4, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dropout(0.2),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        self.generator = keras.Sequential(
            [
                layers.Input([3]),
                layers.Dense(4 * 4 * 2),
                layers.Reshape([4, 4, 2]),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.seeds = keras.random.SeedGenerator(1)
        self.of_generator = keras.optimizers.Adam(0.01)

    def losses_of(self, x):
        codes = keras.random.normal([ops.shape(x)[0], 3], seed=self.seeds)
        fakes = self.generator(codes)
        real, fake = self.trained(x, training=True), self.trained(fakes, training=True)
        ones = ops.ones_like(real)
        return keras.losses.binary_crossentropy(ones, real) + keras.losses.binary_crossentropy(
            0 * ones, fake
        )

    def train_step(self, data):
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            fakes = self.generator(keras.random.normal([4, 3], seed=self.seeds))
            loss = -ops.mean(ops.log(self.trained(fakes) + 1e-6))
        weights = self.generator.trainable_weights
        self.of_generator.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return logs


OWN_STEPS = [Trainer, Autoencoder, Diffusion, Critic, Discriminator]
DRAWS = {Autoencoder, Diffusion, Discriminator}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", OWN_STEPS)
def test_steps_of_ones_own(kind):
    """In one pass, on Poisson batches; without random numbers, as a loop over examples."""
    keras.utils.set_random_seed(1)
    model, x = kind(), numbers(*kind.shape)
    batches = tfdp.data.poisson_batches((x, x), expected_batch_size=4, steps_per_epoch=2)
    private = tfdp.keras3.DPOptimizer(
        keras.optimizers.Adam(0.01), 1.0, 1.0, sampling=batches.sampling
    )
    model.compile(private)
    model.fit(batches, verbose=0)
    assert private.ledger.steps == 2
    report = private.clipping.report()
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []
    if kind in DRAWS:
        return
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer)
    weights = model.trained.trainable_weights
    expected = sum_of_clipped(
        weights,
        [lambda i=i: tf.reduce_sum(model.losses_of(tf.constant(x[i : i + 1]))) for i in range(N)],
    )
    before = support.flat(w.numpy() for w in weights)
    model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(N), verbose=0)
    np.testing.assert_allclose(
        before - support.flat(w.numpy() for w in weights), expected, atol=2e-6
    )
