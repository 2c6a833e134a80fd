"""Small models, one for each rule of the one-pass engine and for what has none."""

import numpy as np
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine

layers = tf.keras.layers
N = 7
RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, N)
VECTORS = RNG.normal(size=(N, 5)).astype("float32")
IMAGES = RNG.normal(size=(N, 8, 8, 2)).astype("float32")
VOLUMES = RNG.normal(size=(N, 4, 4, 3, 2)).astype("float32")
SEQUENCES = RNG.normal(size=(N, 6, 4)).astype("float32")
TOKENS = np.where(np.arange(6) < RNG.integers(2, 7, (N, 1)), RNG.integers(1, 9, (N, 6)), 0)


def sequential(*stack):
    return lambda: tf.keras.Sequential([*[make() for make in stack], layers.Dense(3)])


def attention():
    x = layers.Input([6, 4])
    attended = layers.MultiHeadAttention(2, 4)(x, x)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + attended))
    return tf.keras.Model(x, layers.Dense(3)(pooled))


def masked_attention():
    tokens = layers.Input([6], dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return tf.keras.Model(tokens, layers.Dense(3)(layers.GlobalMaxPooling1D()(attended)))


def two_inputs():
    first, second = layers.Input([5]), layers.Input([5])
    shared = layers.Dense(4, activation="tanh")
    return tf.keras.Model(
        [first, second], layers.Dense(3)(layers.Concatenate()([shared(first), shared(second)]))
    )


def shared_convolution():
    x = layers.Input([8, 8, 2])
    shared = layers.Conv2D(2, 3, padding="same")
    return tf.keras.Model(x, layers.Dense(3)(layers.Flatten()(shared(tf.tanh(shared(x))))))


def shared_embedding():
    tokens = layers.Input([6], dtype="int32")
    table = layers.Embedding(9, 4)
    both = table(tokens) * table((tokens + 1) % 9)
    return tf.keras.Model(tokens, layers.Dense(3)(layers.Flatten()(both)))


class TiedEmbedding(tf.keras.Model):
    """The table is looked up and, transposed, used as the last layer."""

    def __init__(self):
        super().__init__()
        normal = tf.keras.initializers.RandomNormal(stddev=1.0)
        self.table = layers.Embedding(9, 4, embeddings_initializer=normal)
        self.hidden = layers.Dense(4, activation="tanh")

    def call(self, tokens):
        pooled = tf.reduce_mean(self.hidden(self.table(tokens)), axis=1)
        return tf.matmul(pooled, self.table.embeddings, transpose_b=True)


class TimeMajor(tf.keras.layers.Layer):
    """A matrix product on [time, batch, features]."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], 3])
        self.b = self.add_weight("b", [3])

    def call(self, x):
        return tf.transpose(tf.transpose(x, [1, 0, 2]) @ self.w - self.b, [1, 0, 2])


class Division(tf.keras.layers.Layer):
    """An operation that has no rule of its own, of data and weights."""

    def build(self, shape):
        self.w = self.add_weight("w", shape[1:], initializer=tf.keras.initializers.Constant(2.0))

    def call(self, x):
        return x / self.w


class WeightNormalization(tf.keras.layers.Layer):
    """Something else than a view is computed from the weights."""

    def build(self, shape):
        self.v = self.add_weight("v", [shape[-1], 4])
        self.g = self.add_weight("g", [4], initializer="ones")

    def call(self, x):
        return x @ (self.v * self.g / tf.norm(self.v, axis=0))


class WeightsTwice(tf.keras.layers.Layer):
    """An operation that gets the weights as two of its inputs."""

    def build(self, shape):
        self.w = self.add_weight("w", shape[1:], initializer=tf.keras.initializers.Constant(2.0))

    def call(self, x):
        w = self.w.value()
        return x * tf.where(x > 0, w, w)


class Cell(tf.keras.layers.Layer):
    """A recurrent cell of one's own, with weights that are used in several ways."""

    state_size = output_size = 4

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], 8])
        self.u = self.add_weight("u", [4, 4])
        self.scale = self.add_weight("scale", [4], initializer="ones")
        self.table = self.add_weight("table", [3, 4], initializer="uniform")

    def call(self, x, states):
        h, gate = tf.split(x @ self.w, 2, axis=1)
        h = tf.tanh(h + states[0] @ (self.u * self.scale) + self.scale)
        h = h * tf.sigmoid(gate) + tf.gather(self.table, tf.argmax(x[:, :3], 1))
        return h, [h]


class LearnedState(tf.keras.layers.Layer):
    """The first state of a loop is a weight; steps are taken from the last to the first."""

    def build(self, shape):
        self.state = self.add_weight("state", [4], initializer="uniform")
        self.cell = Cell()
        self.cell.build(shape)

    def call(self, x):
        first = tf.broadcast_to(self.state, [tf.shape(x)[0], 4])
        found = tf.TensorArray(tf.float32, 6)

        def step(t, h, found):
            h, _ = self.cell(x[:, 5 - t], [h])
            return t + 1, h, found.write(t, h)

        _, last, found = tf.while_loop(lambda t, *_: t < 6, step, [0, first, found])
        return tf.reduce_sum(found.stack(), 0) + last


class Positions(tf.keras.layers.Layer):
    """Adds vectors of a table that is looked up by position, and a class token in front."""

    def build(self, shape):
        self.table = layers.Embedding(9, shape[-1])
        self.token = self.add_weight("token", [1, 1, shape[-1]], initializer="uniform")

    def call(self, x):
        x = x + self.table(tf.range(tf.shape(x)[1]))
        return tf.concat([tf.tile(self.token, [tf.shape(x)[0], 1, 1]), x], 1)


class DistanceToCenter(tf.keras.layers.Layer):
    """Vectors of a scaled table, which is looked up as a tensor, less than a center."""

    def build(self, shape):
        self.table = self.add_weight("table", [9, 4], initializer="uniform")
        self.center = self.add_weight("center", [4], initializer="uniform")

    def call(self, tokens):
        return tf.tanh(self.center - 3 * tf.gather(2 * self.table, tokens))


class HiddenInCall(tf.keras.layers.Layer):
    """A function of its own, with weights in it."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], 4])
        self.b = self.add_weight("b", [4], initializer="uniform")
        self.function = tf.function(lambda x: tf.tanh(x @ (2 * self.w) + self.b))

    def call(self, x):
        return self.function(x)


def masked(layer):
    return lambda: tf.keras.Sequential(
        [layers.Embedding(9, 4, mask_zero=True), layer(), layers.Dense(3)]
    )


class GroupedEinsum(tf.keras.layers.Layer):
    """Every group of features has weights of its own: a label in all three terms."""

    def build(self, shape):
        self.w = self.add_weight("w", [2, 2, 3])

    def call(self, x):
        return tf.einsum("btgf,gfh->btgh", tf.reshape(x, [-1, 6, 2, 2]), self.w)


class ReorderedEinsum(tf.keras.layers.Layer):
    """The weights' axes are not in the order of data and result; they come first."""

    def build(self, shape):
        self.w = self.add_weight("w", [3, 2, 2])

    def call(self, x):
        return tf.einsum("hfg,btgf->bth", self.w, tf.reshape(x, [-1, 6, 2, 2]))


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda dy: -0.5 * dy


@tf.custom_gradient
def straight_through(x):
    slope = tf.sigmoid(x)
    return tf.round(x), lambda dy: dy * slope + tf.reduce_mean(dy, axis=-1, keepdims=True)


def open_time_axis():
    tokens = layers.Input([None], dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(9, 4, mask_zero=True)(tokens))
    return tf.keras.Model(tokens, layers.Dense(3)(layers.LSTM(5)(layers.Dense(4)(x))))


class FrozenStatistics(layers.BatchNormalization):
    """Normalizes as in fine-tuning, with `training=False`; scale and shift are trained."""

    def __init__(self):
        super().__init__(
            beta_initializer=tf.keras.initializers.RandomUniform(-1, 1, seed=1),
            gamma_initializer=tf.keras.initializers.RandomUniform(0.5, 2, seed=2),
            moving_mean_initializer=tf.keras.initializers.RandomUniform(-1, 1, seed=3),
            moving_variance_initializer=tf.keras.initializers.RandomUniform(0.5, 2, seed=4),
        )

    def call(self, x):
        return super().call(x, training=False)


FLAT = layers.Flatten
# Models of which all work is done by rules, with their data.
FAST = {
    "dense": (sequential(lambda: layers.Dense(4, activation="tanh")), VECTORS),
    "dense on sequences": (
        sequential(lambda: layers.Dense(4), layers.LayerNormalization, FLAT),
        SEQUENCES,
    ),
    "roll": (
        sequential(
            lambda: layers.Conv2D(4, 3),
            lambda: layers.Lambda(lambda x: tf.roll(x, [-2, 3], [1, -2])),
            lambda: layers.Conv2D(2, 3, activation="relu"),
            FLAT,
        ),
        IMAGES,
    ),
    "fourier transform": (
        sequential(
            lambda: layers.Dense(4, activation="tanh"),
            lambda: layers.Lambda(
                lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64)))
            ),
            layers.LayerNormalization,
            FLAT,
        ),
        SEQUENCES,
    ),
    "gram": (sequential(lambda: layers.Dense(20), lambda: layers.Dense(20), FLAT), SEQUENCES),
    "time major": (sequential(TimeMajor, FLAT), SEQUENCES),
    "conv2d": (
        sequential(
            lambda: layers.Conv2D(4, 3, strides=2, activation="relu"),
            lambda: layers.GroupNormalization(2),
            layers.MaxPool2D,
            FLAT,
        ),
        IMAGES,
    ),
    "batch normalization, frozen statistics": (
        sequential(
            FrozenStatistics,
            lambda: layers.Conv2D(4, 3, activation="tanh"),
            FrozenStatistics,
            FLAT,
        ),
        IMAGES,
    ),
    "conv2d, gathered patches": (
        sequential(
            lambda: layers.Conv2D(4, 3, padding="same", activation="tanh"),
            lambda: layers.Conv2D(5, (2, 3), strides=(2, 2), padding="same"),
            lambda: layers.LayerNormalization(axis=[1, 2, 3]),
            FLAT,
        ),
        IMAGES,
    ),
    "conv2d, gram and dilation": (
        sequential(
            lambda: layers.Conv2D(8, 3, padding="same"),
            lambda: layers.Conv2D(64, (3, 2), dilation_rate=(2, 1)),
            layers.GlobalAveragePooling2D,
        ),
        IMAGES,
    ),
    "conv2d of every step": (
        sequential(
            lambda: layers.Reshape([4, 4, 4, 2]),
            lambda: layers.TimeDistributed(layers.Conv2D(3, 2)),
            FLAT,
        ),
        IMAGES,
    ),
    "conv1d": (
        sequential(lambda: layers.Conv1D(4, 3, padding="same", strides=2), FLAT),
        SEQUENCES,
    ),
    "conv1d, causal and dilated": (
        sequential(
            lambda: layers.Conv1D(4, 3, dilation_rate=2, padding="causal"),
            layers.GlobalMaxPooling1D,
        ),
        SEQUENCES,
    ),
    "conv3d": (sequential(lambda: layers.Conv3D(4, 2, padding="same"), FLAT), VOLUMES),
    "transposed convolutions": (
        sequential(
            lambda: layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
            lambda: layers.Conv2DTranspose(3, 3),
            layers.GlobalAveragePooling2D,
        ),
        IMAGES,
    ),
    "conv3d, transposed": (
        sequential(lambda: layers.Conv3DTranspose(4, 2, padding="same"), FLAT),
        VOLUMES,
    ),
    "depthwise": (
        sequential(lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), layers.PReLU, FLAT),
        IMAGES,
    ),
    "depthwise, large kernels": (
        sequential(
            lambda: layers.DepthwiseConv2D(5, padding="same", depth_multiplier=2),
            lambda: layers.DepthwiseConv2D([4, 3], 2, "same"),
            FLAT,
        ),
        IMAGES,
    ),
    "depthwise, dilated": (
        sequential(lambda: layers.DepthwiseConv2D(2, dilation_rate=2, padding="same"), FLAT),
        IMAGES,
    ),
    "conv2d, of single pixels": (
        sequential(
            lambda: layers.Conv2D(3, 1),
            lambda: layers.Conv2D(20, 1, strides=2),
            lambda: layers.Conv2D(2, 1),
            FLAT,
        ),
        IMAGES,
    ),
    "separable": (
        sequential(lambda: layers.SeparableConv2D(4, 3), lambda: layers.Reshape([-1])),
        IMAGES,
    ),
    "embedding": (
        sequential(lambda: layers.Embedding(9, 4, input_length=6), layers.LayerNormalization, FLAT),
        TOKENS,
    ),
    "embedding, masked": (
        sequential(lambda: layers.Embedding(9, 4, mask_zero=True), layers.GlobalAveragePooling1D),
        TOKENS,
    ),
    "einsum dense": (
        sequential(
            lambda: layers.EinsumDense("abc,cd->abd", [None, 5], bias_axes="d"),
            layers.GlobalAveragePooling1D,
        ),
        SEQUENCES,
    ),
    "einsum, grouped": (sequential(GroupedEinsum, FLAT), SEQUENCES),
    "einsum, reordered": (sequential(ReorderedEinsum, FLAT), SEQUENCES),
    "attention": (attention, SEQUENCES),
    "attention, masked": (masked_attention, TOKENS),
    "lstm": (
        sequential(lambda: layers.Embedding(9, 4, mask_zero=True), lambda: layers.LSTM(5)),
        TOKENS,
    ),
    "lstm, both directions": (
        sequential(
            lambda: layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GlobalAveragePooling1D,
        ),
        SEQUENCES,
    ),
    "lstm, unrolled": (sequential(lambda: layers.LSTM(4, unroll=True)), SEQUENCES),
    "gru": (sequential(lambda: layers.GRU(5)), SEQUENCES),
    "simple rnn": (sequential(lambda: layers.SimpleRNN(4)), SEQUENCES),
    "rnn of a cell": (
        sequential(lambda: layers.RNN(Cell(), return_sequences=True), FLAT),
        SEQUENCES,
    ),
    "rnn of a cell, masked": (masked(lambda: layers.RNN(Cell(), go_backwards=True)), TOKENS),
    "rnn of several cells": (
        sequential(lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(4)])),
        SEQUENCES,
    ),
    "lstm, other activations": (
        sequential(lambda: layers.LSTM(4, activation="relu", recurrent_activation="hard_sigmoid")),
        SEQUENCES,
    ),
    "gru, reset before": (masked(lambda: layers.GRU(4, reset_after=False)), TOKENS),
    "gru, reset before, unrolled": (
        sequential(lambda: layers.GRU(4, reset_after=False, unroll=True)),
        SEQUENCES,
    ),
    "convolutional lstm": (
        sequential(lambda: layers.Reshape([4, 4, 4, 2]), lambda: layers.ConvLSTM2D(3, 2), FLAT),
        IMAGES,
    ),
    "learned first state": (sequential(LearnedState), SEQUENCES),
    "recurrent layers, open time axis": (
        sequential(
            lambda: layers.Embedding(9, 4),
            lambda: layers.SimpleRNN(4, return_sequences=True),
            lambda: layers.Bidirectional(layers.RNN(Cell())),
        ),
        TOKENS,
    ),
    "hidden in a call": (sequential(HiddenInCall), SEQUENCES[:, 0]),
    "positions and a class token": (sequential(Positions, FLAT), SEQUENCES),
    "distance to a center": (sequential(DistanceToCenter, FLAT), TOKENS),
    "computed weights": (sequential(WeightNormalization), VECTORS),
    "batch normalization of vectors, frozen statistics": (
        sequential(lambda: layers.Dense(4), FrozenStatistics),
        VECTORS,
    ),
    "grouped convolution": (
        sequential(
            lambda: layers.Conv2D(4, 3, groups=2, padding="same"),
            lambda: layers.Conv2D(8, (3, 2), strides=(1, 2), groups=4),
            FLAT,
        ),
        IMAGES,
    ),
    "grouped convolution of sequences": (
        sequential(lambda: layers.Conv1D(6, 3, dilation_rate=2, groups=2, padding="same"), FLAT),
        SEQUENCES,
    ),
    "grouped convolution of volumes": (
        sequential(lambda: layers.Conv3D(4, 2, groups=2), FLAT),
        VOLUMES,
    ),
    **{
        f"locally connected, {rank}d, {implementation}": (
            sequential(lambda layer=layer, i=implementation: layer(3, 3, implementation=i), FLAT),
            data,
        )
        for rank, layer, data in (
            (1, layers.LocallyConnected1D, SEQUENCES),
            (2, layers.LocallyConnected2D, IMAGES),
        )
        for implementation in (1, 2, 3)
    },
    "division": (sequential(lambda: layers.Dense(4, "tanh"), Division), VECTORS),
    "swish": (
        sequential(lambda: layers.Dense(4, "swish"), lambda: layers.Dense(4, "swish")),
        VECTORS,
    ),
    "custom gradients": (
        sequential(
            lambda: layers.Dense(4),
            lambda: layers.Lambda(reversed_gradient),
            lambda: layers.Dense(4),
            lambda: layers.Lambda(straight_through),
        ),
        VECTORS,
    ),
    "open time axis": (open_time_axis, TOKENS),
    "shared layer, two inputs": (two_inputs, (VECTORS, VECTORS[::-1].copy())),
    "shared convolution": (shared_convolution, IMAGES),
    "shared embedding": (shared_embedding, TOKENS),
    "tied embedding": (TiedEmbedding, TOKENS),
}

# Models that leave some or all variables to the vectorized engine.
SLOW = {
    "weights twice": (sequential(WeightsTwice), VECTORS),
    "weights twice, and a loop": (
        sequential(WeightsTwice, lambda: layers.SimpleRNN(4)),
        SEQUENCES,
    ),
}


CLIP = 0.3


def built(make, x, seed=0):
    tf.keras.utils.set_random_seed(seed)
    model = make()
    model(tf.nest.map_structure(lambda t: t[:1], x))
    return model


class ExpectsRows(OnePassEngine):
    """Is told how many rows to expect, as the optimizers tell it."""

    def clipped_sum(self, loss, variables, seed, clip=None, expected_rows=N):
        return super().clipped_sum(loss, variables, seed, clip, expected_rows)


def assert_equals_loop(engine, make, x, atol=3e-6, **kwargs):
    """The clipped sum is that of one eager example at a time, and the clip was at work."""
    model = built(make, x)
    gradients = support.looped_gradients(model, x, Y)
    expected = support.sum_of_clipped(gradients, CLIP)
    actual = support.ClippedSum(engine, model, x, **kwargs)(x, Y)
    np.testing.assert_allclose(actual, expected, atol=atol)
    assert np.linalg.norm(sum(gradients) - expected) > 1e-2
