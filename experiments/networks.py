"""The networks that the experiments train, one function per data set.

None of them has BatchNorm: it mixes examples, so that no gradient belongs to one of them. Logits
are float32 under every policy of mixed precision, or losses would be coarse.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfdp  # noqa: F401  # Makes `tf.keras` Keras 2.
from experiments import datasets

ACTIVATIONS_OF_KERAS = ("relu", "tanh")
ACTIVATIONS = (*ACTIVATIONS_OF_KERAS, "tempered_sigmoid")
HEADS = ("linear", "conv")
PUBLISHED, RESIDUAL = "published", "residual"
ARCHITECTURES = (PUBLISHED, RESIDUAL)  # Networks on images.

Activation = Callable[[], tf.keras.layers.Layer]


@tf.keras.utils.register_keras_serializable(package="tfdp_experiments")
class TemperedSigmoid(tf.keras.layers.Layer):
    """The bounded activation `scale / (1 + exp(-temperature * x)) - offset`.

    Bounded activations keep gradients short, so that clipping takes less from them. The default
    is tanh.

    Args:
      scale: Distance s between the limits, positive.
      temperature: Inverse temperature T, positive.
      offset: Minus the lower limit, o.
      **kwargs: As in `tf.keras.layers.Layer`.

    References:
      - Papernot et al., 2021, Tempered Sigmoid Activations for Deep Learning with Differential
        Privacy (https://arxiv.org/abs/2007.14191).
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale
        self.temperature = temperature
        self.offset = offset

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Applies the activation; the shape stays."""
        return self.scale * tf.sigmoid(self.temperature * inputs) - self.offset

    def get_config(self) -> dict:
        """Returns the arguments that make this layer again."""
        return {
            **super().get_config(),
            "scale": self.scale,
            "temperature": self.temperature,
            "offset": self.offset,
        }


def make_activation(
    name: str,
    scale: float = 2.0,
    temperature: float = 2.0,
    offset: float = 1.0,
    keras: Any = tf.keras,
) -> Activation:
    """Returns a function that makes layers of the activation `name`, one of `ACTIVATIONS`."""
    if name == "tempered_sigmoid":  # Keras 2 only.
        return lambda: TemperedSigmoid(scale, temperature, offset)
    if name not in ACTIVATIONS:
        raise ValueError(f"Argument `name` must be one of {ACTIVATIONS}. Received: {name=}.")
    return lambda: keras.layers.Activation(name)


def digits(activation: Activation, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 10]` of images `[batch, 8, 8, 1]`, by 6,090 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            activation(),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3),
            activation(),
            layers.Flatten(),
            layers.Dense(10, dtype="float32"),
        ],
        name="digits",
    )


def mnist(activation: Activation, centred: bool = True, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 10]` of images `[batch, 28, 28, 1]` in [0, 1], by 26,010 parameters.

    With `centred`, pixels are brought to [-1, 1] by constants: weights that look at zeros have no
    gradient, and most of a drawing is background. (Means of the training set would be private.)

    The network of the published tables for MNIST and Fashion-MNIST (Tramer and Boneh, 2021,
    https://arxiv.org/abs/2011.11660, table 4).
    """
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            *([layers.Rescaling(2.0, offset=-1.0)] if centred else ()),
            layers.ZeroPadding2D(2),
            layers.Conv2D(16, 8, strides=2),
            activation(),
            layers.MaxPooling2D(2, 1),
            layers.Conv2D(32, 4, strides=2),
            activation(),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32),
            activation(),
            layers.Dense(10, dtype="float32"),
        ],
        name="mnist",
    )


def cifar10(activation: Activation, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 10]` of images `[batch, 32, 32, 3]` in [0, 1], by 550,570 parameters.

    Pixels are brought to [-2, 2] by constants: their standard deviation is then about 1.

    The network of the published tables for CIFAR-10 (Papernot et al., 2021,
    https://arxiv.org/abs/2007.14191, table 2; Tramer and Boneh, 2021).
    """
    layers = keras.layers
    blocks = []
    for filters in (32, 64, 128):
        for _ in range(2):
            blocks += [layers.Conv2D(filters, 3, padding="same"), activation()]
        blocks.append(layers.MaxPooling2D(2))
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Rescaling(4.0, offset=-2.0),
            *blocks,
            layers.Flatten(),
            layers.Dense(128),
            activation(),
            layers.Dense(10, dtype="float32"),
        ],
        name="cifar10",
    )


def imdb(activation: Activation, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 2]` of token ids `[batch, 80]`."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((datasets.REVIEW_TOKENS,), dtype="int32"),
            layers.Embedding(datasets.VOCABULARY_SIZE, 100),
            layers.Dense(32),
            activation(),
            layers.Bidirectional(layers.LSTM(32, return_sequences=True)),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16),
            activation(),
            layers.Dense(2, dtype="float32"),
        ],
        name="imdb_reviews",
    )


@tf.keras.utils.register_keras_serializable(package="tfdp_experiments")
class StandardizedConv2D(tf.keras.layers.Conv2D):
    """A convolution with a standardized kernel: each filter has mean 0 and norm `gain`.

    The kernel is a function of weights, not of examples, so that each example has a gradient of its
    own.

    References:
      - Qiao et al., 2019, Micro-Batch Training with Batch-Channel Normalization and Weight
        Standardization (https://arxiv.org/abs/1903.10520).
    """

    def build(self, input_shape: Any) -> None:
        """Creates the kernel, and a gain for each filter."""
        super().build(input_shape)
        self.gain = self.add_weight(name="gain", shape=[self.filters], initializer="ones")

    def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Convolves with the standardized kernel."""
        axes = list(range(kernel.shape.rank - 1))
        centred = kernel - tf.reduce_mean(kernel, axes, keepdims=True)
        squares = tf.reduce_sum(tf.square(centred), axes, keepdims=True)
        standardized = self.gain * centred * tf.math.rsqrt(squares + 1e-6)
        return super().convolution_op(inputs, standardized)


def residual(shape: tuple[int, int, int], activation: Activation) -> tf.keras.Model:
    """Logits `[batch, 10]` of images, by a residual network of seven convolutions and three skips.

    Kernels are standardized, and channels normalized in groups within an image: batch normalization
    would mix examples.

    Args:
      shape: Shape of an image, `(height, width, channels)`, with values in [0, 1].
      activation: Activation after each normalization.

    Returns:
      The network; on images of one channel, 78,090 parameters.

    References:
      - He et al., 2016, Deep Residual Learning for Image Recognition
        (https://arxiv.org/abs/1512.03385).
      - De et al., 2022, Unlocking High-Accuracy Differentially Private Image Classification through
        Scale (https://arxiv.org/abs/2204.13650): group normalization and standardized kernels.
    """
    layers = tf.keras.layers

    def normalised(x: Any, filters: int, size: int, strides: int) -> Any:
        x = StandardizedConv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.GroupNormalization(8)(x)

    inputs = layers.Input(shape)
    x = layers.Rescaling(2.0, offset=-1.0)(inputs)
    x = activation()(normalised(x, 16, 3, 2))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        branch = activation()(normalised(x, filters, 3, strides))
        branch = normalised(branch, filters, 3, 1)
        skip = x if strides == 1 else normalised(x, filters, 1, strides)
        x = activation()(layers.Add()([branch, skip]))
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, layers.Dense(10, dtype="float32")(x), name="residual")


def head_on_features(
    shape: tuple[int, ...], head: str, activation: Activation, keras: Any = tf.keras
) -> Any:
    """Logits `[batch, 10]` of the features of images.

    Args:
      shape: Shape of an image's features, `(height, width, channels)`.
      head: "linear", multinomial logistic regression; or "conv", a convolution before it (81
        channels of 7 x 7: 19,530 parameters).
      activation: Activation of the convolution.
      keras: The package, `tf.keras` or `keras`.

    Returns:
      The network. The features are normalized already.

    References:
      - Tramer and Boneh, 2021, Differentially Private Learning Needs Better Features (or Much More
        Data) (https://arxiv.org/abs/2011.11660).
    """
    if head not in HEADS:
        raise ValueError(f"Argument `head` must be one of {HEADS}. Received: {head=}.")
    layers = keras.layers
    convolution = [layers.Conv2D(16, 3, padding="same"), activation()]
    return keras.Sequential(
        [
            layers.Input(shape),
            *(convolution if head == "conv" else ()),
            layers.Flatten(),
            layers.Dense(10, dtype="float32"),
        ],
        name=f"features_{head}",
    )


NETWORKS = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": mnist,
    "cifar10": cifar10,
    "imdb_reviews": imdb,
}
