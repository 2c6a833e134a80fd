"""The networks of the experiments on variational autoencoders, one function per data set.

Each returns an encoder, which gives `[batch, 2 * latent_dim]`: the location and the raw scale of
q(z|x); and a decoder of codes `[batch, latent_dim]`. None of them has BatchNorm: it mixes examples,
so that no gradient belongs to one of them.
"""

import math

import tensorflow as tf

import tfdp  # noqa: F401  # Makes `tf.keras` Keras 2.

Pair = tuple[tf.keras.Model, tf.keras.Model]


def pinwheel(latent_dim: int = 2) -> Pair:
    """Builds networks for points `[batch, 2]`, each with 100 hidden units (section 5.2)."""
    layers = tf.keras.layers
    encoder = tf.keras.Sequential(
        [
            layers.Input((2,)),
            layers.Dense(100, activation="relu"),
            layers.Dense(2 * latent_dim),
        ],
        name="encoder",
    )
    decoder = tf.keras.Sequential(
        [
            layers.Input((latent_dim,)),
            layers.Dense(100, activation="relu"),
            layers.Dense(2),
        ],
        name="decoder",
    )
    return encoder, decoder


def digits(latent_dim: int = 8, num_classes: int | None = None) -> Pair:
    """Builds networks for images `[batch, 8, 8, 1]`, conditional if `num_classes` is given.

    The class comes beside the image and beside the code: `encoder([x, one_hot])`,
    `decoder([z, one_hot])`. Two dense layers each way: of 64 pixels there is little to convolve.
    """
    return _dense((8, 8, 1), 128, latent_dim, num_classes)


def mnist(latent_dim: int = 16, num_classes: int | None = None) -> Pair:
    """Builds networks for images `[batch, 28, 28, 1]`, as `digits`, with 256 hidden units."""
    return _dense((28, 28, 1), 256, latent_dim, num_classes)


def _dense(shape: tuple, units: int, latent_dim: int, num_classes: int | None) -> Pair:
    layers = tf.keras.layers
    image, code = layers.Input(shape), layers.Input((latent_dim,))
    classes = [] if num_classes is None else [layers.Input((num_classes,))]

    def beside_classes(hidden: tf.Tensor) -> tf.Tensor:
        return layers.Concatenate()([hidden, *classes]) if classes else hidden

    def model(first: tf.Tensor, output: tf.Tensor, name: str) -> tf.keras.Model:
        return tf.keras.Model([first, *classes] if classes else first, output, name=name)

    hidden = beside_classes(layers.Flatten()(image))
    hidden = layers.Dense(units, activation="relu")(hidden)
    encoder = model(image, layers.Dense(2 * latent_dim)(hidden), "encoder")
    hidden = layers.Dense(units, activation="relu")(beside_classes(code))
    made = layers.Reshape(shape)(layers.Dense(math.prod(shape))(hidden))
    return encoder, model(code, made, "decoder")


def fashion_mnist(latent_dim: int = 50) -> Pair:
    """Builds networks for images `[batch, 32, 32, 1]`, as in section 5.1, without BatchNorm."""
    layers = tf.keras.layers
    encoder = tf.keras.Sequential([layers.Input((32, 32, 1))], name="encoder")
    for filters in (32, 64, 128):
        encoder.add(layers.Conv2D(filters, 4, strides=2, padding="same"))
        encoder.add(layers.LeakyReLU(0.2))
    encoder.add(layers.Flatten())
    encoder.add(layers.Dense(2 * latent_dim))
    decoder = tf.keras.Sequential(
        [
            layers.Input((latent_dim,)),
            layers.Dense(4 * 4 * 128, activation="relu"),
            layers.Reshape((4, 4, 128)),
        ],
        name="decoder",
    )
    for filters in (64, 32):
        decoder.add(
            layers.Conv2DTranspose(filters, 4, strides=2, padding="same", activation="relu")
        )
    decoder.add(layers.Conv2DTranspose(1, 4, strides=2, padding="same"))
    return encoder, decoder
