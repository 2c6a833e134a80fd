"""Everyday Keras programs on random data: what tests train, and `benchmarks.ports` times.

Each function builds a model as users write it, for `n` examples. The sizes by default are those of
tests; `PROGRAMS` has the ones that are timed.
"""

from typing import Any

import numpy as np
import tensorflow as tf

import tfdp  # noqa: F401  # Makes `tf.keras` Keras 2.
from benchmarks import fine_tuning
from benchmarks.fine_tuning import Case
from benchmarks.timed import Timed

layers = tf.keras.layers
random = np.random.default_rng(0)
LOGITS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# A model, its loss, and its data: `(x, y)`.
Program = tuple[tf.keras.Model, Any, tuple[Any, Any]]


def images(n: int, size: int = 12, channels: int = 1) -> np.ndarray:
    """Random images, `[n, size, size, channels]`, between 0 and 1."""
    return random.random([n, size, size, channels], dtype="float32")


def classes(n: int, number: int = 3) -> np.ndarray:
    """Random classes, `[n]`."""
    return random.integers(0, number, n)


def convnet(n: int, size: int = 12, filters: tuple[int, ...] = (4,)) -> Program:
    """Images, convolutions, Dropout."""
    model = tf.keras.Sequential([layers.Input([size, size, 1])])
    for number in filters:
        model.add(layers.Conv2D(number, 3, activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.5))
    model.add(layers.Dense(3, activation="softmax"))
    return model, "sparse_categorical_crossentropy", (images(n, size), classes(n))


class TokenAndPosition(layers.Layer):
    """Embeds tokens and their positions.

    Args:
      vocabulary: Number of tokens.
      length: Number of positions.
      width: Size of the vectors.
    """

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)
        self.length = length

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns `[batch, length, width]`."""
        return self.tokens(x) + self.positions(tf.range(self.length))


def transformer(n: int, vocabulary: int = 20, length: int = 10, width: int = 8) -> Program:
    """Builds a text classifier: one block, with positions and Dropout."""
    inputs = layers.Input([length], dtype="int64")
    h = TokenAndPosition(vocabulary, length, width)(inputs)
    attended = layers.MultiHeadAttention(2, width // 2)(h, h)
    h = layers.LayerNormalization()(h + layers.Dropout(0.1)(attended))
    feed = layers.Dense(width)(layers.Dense(2 * width, activation="relu")(h))
    h = layers.LayerNormalization()(h + feed)
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(h))
    x = random.integers(0, vocabulary, [n, length])
    model = tf.keras.Model(inputs, outputs)
    return model, "sparse_categorical_crossentropy", (x, classes(n, 2))


def bidirectional_lstm(
    n: int, vocabulary: int = 20, length: int = 10, width: int = 6, units: int = 4
) -> Program:
    """Builds a text classifier with two recurrent layers."""
    model = tf.keras.Sequential(
        [
            layers.Input([length], dtype="int64"),
            layers.Embedding(vocabulary, width),
            layers.Bidirectional(layers.LSTM(units, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(units)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    x = random.integers(0, vocabulary, [n, length])
    return model, "binary_crossentropy", (x, classes(n, 2)[:, None])


def structured_data(n: int, units: int = 8) -> Program:
    """Builds a number and a word, which the model itself normalizes and looks up."""
    age, city = layers.Input([1], name="age"), layers.Input([1], name="city", dtype="string")
    normalize = layers.Normalization(mean=40.0, variance=100.0)
    look_up = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    h = layers.Concatenate()([normalize(age), look_up(city)])
    h = layers.Dropout(0.2)(layers.Dense(units, activation="relu")(h))
    model = tf.keras.Model({"age": age, "city": city}, layers.Dense(1, activation="sigmoid")(h))
    x = {"age": random.normal(40, 10, [n, 1]), "city": random.choice(["a", "b", "c"], [n, 1])}
    return model, "binary_crossentropy", (x, classes(n, 2)[:, None])


def text_classifier(n: int, length: int = 5, width: int = 4) -> Program:
    """Texts, which the model itself cuts into words."""
    words = ["good", "bad", "film", "a", "very", "indeed"]
    vectorize = layers.TextVectorization(vocabulary=words[:3], output_sequence_length=length)
    model = tf.keras.Sequential(
        [
            layers.Input([], dtype="string"),
            vectorize,
            layers.Embedding(5, width),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    texts = [" ".join(random.choice(words, length)) for _ in range(10)]
    return model, "binary_crossentropy", (random.choice(texts, n), classes(n, 2)[:, None])


def autoencoder(n: int, size: int = 12, filters: int = 4) -> Program:
    """Builds a loss of pixels, transposed convolutions."""
    options = {"padding": "same", "activation": "relu"}
    model = tf.keras.Sequential(
        [
            layers.Input([size, size, 1]),
            layers.Conv2D(filters, 3, strides=2, **options),
            layers.Conv2DTranspose(filters, 3, strides=2, **options),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    x = images(n, size)
    return model, "binary_crossentropy", (x, x)


def u_net(n: int, size: int = 12, filters: int = 4) -> Program:
    """Builds a class for each pixel."""
    inputs = layers.Input([size, size, 3])
    options = {"padding": "same", "activation": "relu"}
    down = layers.Conv2D(filters, 3, **options)(inputs)
    h = layers.SeparableConv2D(2 * filters, 3, **options)(layers.MaxPooling2D()(down))
    h = layers.GroupNormalization(2)(h)
    h = layers.Concatenate()([layers.UpSampling2D()(h), down])
    outputs = layers.Conv2D(3, 1, activation="softmax")(h)
    y = random.integers(0, 3, [n, size, size, 1])
    model = tf.keras.Model(inputs, outputs)
    return model, "sparse_categorical_crossentropy", (images(n, size, 3), y)


def several_outputs(n: int, features: int = 5, units: int = 6) -> Program:
    """Two outputs, with a loss each."""
    inputs = layers.Input([features])
    h = layers.Dense(units, activation="relu")(inputs)
    outputs = {
        "a": layers.Dense(3, activation="softmax", name="a")(h),
        "b": layers.Dense(1, name="b")(h),
    }
    loss = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    y = {"a": classes(n), "b": random.normal(size=[n, 1])}
    return tf.keras.Model(inputs, outputs), loss, (random.normal(size=[n, features]), y)


def time_series(n: int, length: int = 8, units: int = 4) -> Program:
    """Builds a forecast by a causal convolution and a GRU."""
    model = tf.keras.Sequential(
        [
            layers.Input([length, 2]),
            layers.Conv1D(units, 3, padding="causal", activation="relu"),
            layers.GRU(units),
            layers.Dense(1),
        ]
    )
    x = random.normal(size=[n, length, 2])
    return model, tf.keras.losses.Huber(), (x, random.random([n, 1]))


def several_labels(n: int, features: int = 6, units: int = 8) -> Program:
    """Several labels at once, and a weight regularizer."""
    model = tf.keras.Sequential(
        [
            layers.Input([features]),
            layers.Dense(units, activation="relu", kernel_regularizer="l2"),
            layers.Dense(4, activation="sigmoid"),
        ]
    )
    x = random.random([n, features], dtype="float32")
    return model, "binary_crossentropy", (x, random.integers(0, 2, [n, 4]))


class WithTrainStep(tf.keras.Model):
    """A model with a training step of its own."""

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Takes a step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def train_step(n: int, **sizes: int) -> Program:
    """Several labels, in a training step of one's own."""
    model, loss, data = several_labels(n, **sizes)
    return WithTrainStep(model.inputs, model.outputs), loss, data


class Gan(tf.keras.Model):
    """The critic sees private examples; the generator sees the critic alone.

    Args:
      features: Size of an example.
      units: Size of hidden layers, or 0 for none.
      batch: Examples that the generator makes in a step.
    """

    def __init__(self, features: int, units: int, batch: int):
        super().__init__()
        hidden = [layers.Dense(units, activation="relu")] if units else []
        self.generator = tf.keras.Sequential([layers.Input([3]), *hidden, layers.Dense(features)])
        hidden = [layers.Dense(units, activation="relu")] if units else []
        self.critic = tf.keras.Sequential([layers.Input([features]), *hidden, layers.Dense(1)])
        self._batch = batch

    def compile(self, optimizer: tf.keras.optimizers.Optimizer, loss: None = None) -> None:
        """Sets the critic's optimizer; the loss is that of the class."""
        super().compile(optimizer=optimizer, loss=loss)
        self.generator_optimizer = tf.keras.optimizers.legacy.Adam()

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Takes a step of the critic, and one of the generator."""
        real, _ = data
        bce = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        noise = tf.random.normal([tf.shape(real)[0], 3])
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = bce(tf.ones_like(fake), self.critic(real)) + bce(tf.zeros_like(fake), fake)
        self.optimizer.minimize(loss, self.critic.trainable_variables, tape=tape)
        noise = tf.random.normal([self._batch, 3])
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = tf.reduce_mean(bce(tf.ones_like(fake), fake))
        self.generator_optimizer.minimize(loss, self.generator.trainable_variables, tape=tape)
        return {}


def gan(n: int, features: int = 6, units: int = 0, batch: int = 12) -> Program:
    """Builds a GAN, of which the critic is trained privately."""
    x = random.normal(size=[n, features]).astype("float32")
    return Gan(features, units, batch), None, (x, x[:, 0])


def fine_tuned(
    n: int, network: str = "mobilenet_v2", part: str = "head", size: int = 32
) -> Program:
    """Builds a network of `tf.keras.applications` that is trained in part."""
    model = fine_tuning.network(Case(network, part, size))
    return model, LOGITS, (images(n, size, 3), classes(n, fine_tuning.CLASSES))


def normalized(n: int, size: int = 12, filters: int = 4) -> Program:
    """Builds a frozen base with BatchNormalization, and a new head."""
    base = tf.keras.Sequential(
        [
            layers.Input([size, size, 3]),
            layers.Conv2D(filters, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    )
    base.trainable = False
    inputs = layers.Input([size, size, 3])
    h = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    model = tf.keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(h)))
    return model, LOGITS, (images(n, size, 3), classes(n))


_TEXT = {"vocabulary": 10_000, "length": 100, "width": 32}

PROGRAMS = {
    "convnet": Timed(convnet, 128, {"size": 28, "filters": (32, 64)}),
    "transformer": Timed(transformer, 32, _TEXT),
    "bidirectional_lstm": Timed(bidirectional_lstm, 32, {**_TEXT, "units": 32}),
    "structured_data": Timed(structured_data, 32, {"units": 32}),
    "text_classifier": Timed(text_classifier, 32, {"length": 100, "width": 16}),
    "autoencoder": Timed(autoencoder, 128, {"size": 28, "filters": 32}),
    "u_net": Timed(u_net, 16, {"size": 64, "filters": 16}),
    "several_outputs": Timed(several_outputs, 32, {"features": 64, "units": 64}),
    "time_series": Timed(time_series, 64, {"length": 48, "units": 32}),
    "several_labels": Timed(several_labels, 128, {"features": 1_000, "units": 256}),
    "train_step": Timed(train_step, 128, {"features": 1_000, "units": 256}, 3),
    "gan": Timed(gan, 64, {"features": 784, "units": 128, "batch": 64}, 3),
    "normalized": Timed(normalized, 32, {"size": 32, "filters": 32}),
    **{
        f"{network}, {part.replace('_', ' ')}": Timed(
            fine_tuned, 16, {"network": network, "part": part, "size": 96}
        )
        for network in fine_tuning.MODELS
        for part in fine_tuning.PARTS
    },
}
