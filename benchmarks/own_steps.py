"""Programs of Keras 3 users with training steps of their own, for `benchmarks.programs_keras_3`.

A private optimizer needs one line in the step, `scale_loss`, which others leave as it is.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

random = np.random.default_rng(0)
# A model, its loss, which its step computes, and its data.
Program = tuple[keras.Model, None, tuple[np.ndarray]]


class OwnStep(keras.Model):
    """A model whose step computes losses of the rows, and trains `trained`."""

    trained: keras.Model

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        """Returns its input."""
        return x

    def train_step(self, data: Any) -> dict[str, Any]:
        """Takes a step."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = ops.mean(self.losses_of(x))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trained.trainable_weights)
        self.optimizer.apply(gradients, self.trained.trainable_weights)
        return {"loss": loss}


class Trainer(OwnStep):
    """A trainer with a model and a loss of its own.

    Args:
      features: Size of an example.
      units: Size of the hidden layer.
    """

    def __init__(self, features: int, units: int):
        super().__init__()
        hidden = layers.Dense(units, activation="relu")
        self.trained = keras.Sequential([layers.Input([features]), hidden, layers.Dense(3)])

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        y = tf.cast(tf.abs(x[:, 0]) > 1, tf.int32)
        logits = self.trained(x, training=True)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def trainer(n: int, features: int = 5, units: int = 4) -> Program:
    """Builds a trainer that holds a model."""
    return Trainer(features, units), None, (random.normal(size=[n, features]).astype("float32"),)


class Autoencoder(OwnStep):
    """A variational autoencoder of images.

    Args:
      size: Height and width of the images.
      filters: Filters of the convolutions.
    """

    def __init__(self, size: int, filters: int):
        super().__init__()
        inputs = layers.Input([size, size, 1])
        options = {"strides": 2, "padding": "same"}
        h = layers.Conv2D(filters, 3, activation="relu", **options)(inputs)
        h = layers.Dense(6, activation="relu")(layers.Flatten()(h))
        mean, log_variance = layers.Dense(2)(h), layers.Dense(2)(h)
        self.encoder = keras.Model(inputs, [mean, log_variance])
        self.decoder = keras.Sequential(
            [
                layers.Input([2]),
                layers.Dense((size // 2) ** 2 * filters, activation="relu"),
                layers.Reshape([size // 2, size // 2, filters]),
                layers.Conv2DTranspose(1, 3, activation="sigmoid", **options),
            ]
        )
        self.trained = keras.Model(inputs, [self.decoder(mean), log_variance])
        self.seeds = keras.random.SeedGenerator(1)

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        mean, log_variance = self.encoder(x)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        fit = ops.sum(keras.losses.binary_crossentropy(x, rebuilt), axis=(1, 2))
        divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        return fit - 0.5 * ops.sum(divergence, axis=1)


def variational_autoencoder(n: int, size: int = 8, filters: int = 4) -> Program:
    """Builds a variational autoencoder of images."""
    return Autoencoder(size, filters), None, (images(n, size, 1),)


def sinusoids(x: Any) -> Any:
    """Returns sines and cosines of a number at several frequencies."""
    angles = 2.0 * np.pi * ops.exp(ops.linspace(ops.log(1.0), ops.log(1000.0), 3)) * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


class Diffusion(OwnStep):
    """A denoising model: the noise of a random step, from the noisy image and its variance.

    Args:
      size: Height and width of the images.
      filters: Filters of the convolutions.
    """

    def __init__(self, size: int, filters: int):
        super().__init__()
        noisy, variances = layers.Input([size, size, 3]), layers.Input([1, 1, 1])
        e = layers.Lambda(sinusoids, output_shape=(1, 1, 6))(variances)
        e = layers.UpSampling2D(size, interpolation="nearest")(e)
        h = layers.Concatenate()([layers.Conv2D(filters, 1)(noisy), e])
        skip = layers.Conv2D(filters, 3, padding="same", activation="swish")(h)
        h = layers.GroupNormalization(2)(layers.AveragePooling2D(2)(skip))
        h = layers.Conv2D(filters, 3, padding="same", activation="swish")(h)
        h = layers.Concatenate()([layers.UpSampling2D(2, interpolation="bilinear")(h), skip])
        outputs = layers.Conv2D(3, 1, kernel_initializer="zeros")(h)
        self.trained = keras.Model([noisy, variances], outputs)
        self.seeds = keras.random.SeedGenerator(1)

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        rows = ops.shape(x)[0]
        noises = keras.random.normal(ops.shape(x), seed=self.seeds)
        times = keras.random.uniform([rows, 1, 1, 1], 0.0, 1.0, seed=self.seeds)
        angles = 0.3 + times * 1.2
        noisy = ops.cos(angles) * x + ops.sin(angles) * noises
        found = self.trained([noisy, ops.square(ops.sin(angles))], training=True)
        return ops.mean(ops.abs(noises - found), axis=(1, 2, 3))


def diffusion(n: int, size: int = 8, filters: int = 4) -> Program:
    """Builds a denoising diffusion model (DDIM)."""
    return Diffusion(size, filters), None, (images(n, size, 3),)


class Critic(OwnStep):
    """A Wasserstein GAN's critic with padding, and a penalty of its gradient; noise is real.

    Args:
      size: Height and width of the images.
      filters: Filters of the convolutions.
    """

    def __init__(self, size: int, filters: int):
        super().__init__()
        self.trained = keras.Sequential(
            [
                layers.Input([size, size, 1]),
                layers.ZeroPadding2D((2, 2)),
                layers.Conv2D(filters, 5, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Cropping2D(1),
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        fake = 0.5 * x[:, ::-1] + 0.1
        middle = 0.3 * x + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(middle)
            scores = self.trained(middle, training=True)
        norms = ops.sqrt(ops.sum(ops.square(tape.gradient(scores, middle)), axis=(1, 2, 3)))
        scores = self.trained(fake, training=True) - self.trained(x, training=True)
        return scores[:, 0] + 10.0 * ops.square(norms - 1.0)


def wgan_critic(n: int, size: int = 8, filters: int = 4) -> Program:
    """Builds a critic with a penalty of its gradient (WGAN-GP)."""
    return Critic(size, filters), None, (images(n, size, 1),)


class Discriminator(OwnStep):
    """A convolutional GAN's discriminator, whose generator trains on what it says.

    Args:
      size: Height and width of the images.
      filters: Filters of the convolutions.
    """

    def __init__(self, size: int, filters: int):
        super().__init__()
        self.trained = keras.Sequential(
            [
                layers.Input([size, size, 1]),
                layers.Conv2D(filters, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2D(2 * filters, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dropout(0.2),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        self.generator = keras.Sequential(
            [
                layers.Input([3]),
                layers.Dense((size // 2) ** 2 * filters),
                layers.Reshape([size // 2, size // 2, filters]),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
            ]
        )
        self.seeds = keras.random.SeedGenerator(1)
        self.of_generator = keras.optimizers.Adam(0.01)

    def losses_of(self, x: Any) -> Any:
        """Returns the losses of the rows, `[batch]`."""
        codes = keras.random.normal([ops.shape(x)[0], 3], seed=self.seeds)
        fakes = self.generator(codes)
        real, fake = self.trained(x, training=True), self.trained(fakes, training=True)
        ones = ops.ones_like(real)
        return keras.losses.binary_crossentropy(ones, real) + keras.losses.binary_crossentropy(
            0 * ones, fake
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        """Takes a step of the discriminator, and one of the generator."""
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            fakes = self.generator(keras.random.normal([32, 3], seed=self.seeds))
            loss = -ops.mean(ops.log(self.trained(fakes) + 1e-6))
        weights = self.generator.trainable_weights
        self.of_generator.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return logs


def dcgan(n: int, size: int = 8, filters: int = 4) -> Program:
    """Builds a convolutional GAN with a private discriminator."""
    return Discriminator(size, filters), None, (images(n, size, 1),)


def images(n: int, size: int, channels: int) -> np.ndarray:
    """Random images, `[n, size, size, channels]`, between 0 and 1."""
    return random.random([n, size, size, channels], dtype="float32")
