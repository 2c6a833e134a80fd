"""The proof of which rows belong to which example, for layers of Keras: see `test_analysis`."""

import pytest
import tensorflow as tf

from tests.clipping.row_checks import I, M, T, Traced, V, integers
from tfdp.clipping.row_analysis.states import Rows

layers, raw = tf.keras.layers, tf.raw_ops


def of(layer, call):
    """A function that uses one layer, however often it is traced."""
    return lambda x: call(layer, x)


def in_training(layer):
    return lambda x: layer(x, training=True)


def attention():
    return of(layers.MultiHeadAttention(2, 3), lambda layer, x: layer(x, x, use_causal_mask=True))


KERAS = {
    "Dense": (V, layers.Dense(3, "tanh")),
    "Dense on sequences": (T, layers.Dense(3, "gelu")),
    "EinsumDense": (M, layers.EinsumDense("...ij,jk->...ik", [2, 4], bias_axes="k")),
    "Conv1D": ((None, 5, 6), layers.Conv1D(3, 2, padding="causal")),
    "Conv2D": (I, layers.Conv2D(3, 2, dilation_rate=2, groups=1)),
    "Conv3D": ((None, 4, 4, 4, 2), layers.Conv3D(3, 2)),
    "Conv2DTranspose": (I, layers.Conv2DTranspose(3, 2, 2)),
    "Conv2DTranspose, any size": ((None, None, None, 2), layers.Conv2DTranspose(3, 2, 2)),
    "Conv1DTranspose": ((None, 5, 6), layers.Conv1DTranspose(3, 2, 2)),
    "DepthwiseConv2D": (I, layers.DepthwiseConv2D(2)),
    "SeparableConv2D": (I, layers.SeparableConv2D(3, 2)),
    "MaxPooling2D": (I, layers.MaxPooling2D()),
    "AveragePooling1D": ((None, 6, 2), layers.AveragePooling1D()),
    "GlobalMaxPooling2D": (I, layers.GlobalMaxPooling2D()),
    "GlobalAveragePooling1D": (T, layers.GlobalAveragePooling1D()),
    "UpSampling2D": (I, layers.UpSampling2D(interpolation="bilinear")),
    "Resizing": (I, layers.Resizing(3, 5)),
    "ZeroPadding2D": (I, layers.ZeroPadding2D()),
    "Cropping2D": (I, layers.Cropping2D()),
    "LayerNormalization": (V, layers.LayerNormalization()),
    "LayerNormalization of sequences": (T, layers.LayerNormalization()),
    "GroupNormalization": (I, layers.GroupNormalization(2)),
    "UnitNormalization": (V, layers.UnitNormalization()),
    "BatchNormalization, inference": (
        I,
        layers.BatchNormalization(),
    ),
    "Dropout": (T, in_training(layers.Dropout(0.5))),
    "SpatialDropout1D": (T, in_training(layers.SpatialDropout1D(0.5))),
    "GaussianNoise": (V, in_training(layers.GaussianNoise(0.5))),
    "AlphaDropout": (V, in_training(layers.AlphaDropout(0.5))),
    "Embedding": (V, of(layers.Embedding(5, 3), lambda layer, x: layer(integers(x)))),
    "attention": (T, attention()),
    "attention on static": ((None, 5, 6), attention()),
    "Attention": (T, of(layers.Attention(), lambda layer, x: layer([x, x]))),
    "AdditiveAttention": (T, of(layers.AdditiveAttention(), lambda layer, x: layer([x, x]))),
    "RepeatVector": (V, layers.RepeatVector(3)),
    "Permute": (M, layers.Permute([2, 1])),
    "Reshape": (V, layers.Reshape([-1, 2])),
    "Flatten": (M, layers.Flatten()),
    "Dot": (M, of(layers.Dot(2), lambda layer, x: layer([x, x]))),
    "Masking": (T, layers.Masking()),
    "PReLU": (I, layers.PReLU(shared_axes=[1, 2])),
    "ELU": (V, layers.ELU()),
    "ThresholdedReLU": (V, layers.ThresholdedReLU()),
    "Softmax": (V, layers.Softmax()),
    "TimeDistributed": ((None, 5, 4, 2), layers.TimeDistributed(layers.Conv1D(3, 2))),
    "unrolled GRU": ((None, 3, 6), layers.GRU(2, unroll=True, reset_after=False)),
    "SimpleRNN": (T, layers.SimpleRNN(2, return_sequences=True)),
    "RNN": (T, layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)], go_backwards=True)),
    "GRU, reset before": (
        (None, 3, 6),
        layers.GRU(2, reset_after=False, return_sequences=True),
    ),
    "LSTM with relu": (T, layers.LSTM(2, activation="relu", recurrent_activation="tanh")),
    "Bidirectional": (T, layers.Bidirectional(layers.SimpleRNN(2))),
    "ConvLSTM1D": ((None, 3, 4, 2), layers.ConvLSTM1D(2, 2)),
    "grouped Conv2D": (I, layers.Conv2D(4, 2, groups=2)),
    "LocallyConnected1D": ((None, 5, 6), layers.LocallyConnected1D(2, 3)),
    "LocallyConnected2D": (I, layers.LocallyConnected2D(2, 3)),
    "LocallyConnected2D, dense": (I, layers.LocallyConnected2D(2, 3, implementation=2)),
    "LocallyConnected2D, sparse": (I, layers.LocallyConnected2D(2, 3, implementation=3)),
    "unrolled LSTM": ((None, 3, 6), layers.LSTM(2, unroll=True, return_sequences=True)),
    "mse": (V, lambda x: tf.keras.losses.mse(x, tf.square(x))),
    "huber": (V, lambda x: tf.keras.losses.Huber(reduction="none")(x, tf.square(x))),
    "crossentropy": (
        V,
        lambda x: tf.keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1, reduction="none"
        )(tf.nn.softmax(x), x, sample_weight=x[:, 0] > 0),
    ),
    "sparse crossentropy": (
        (None, 3, 6),
        lambda x: tf.keras.losses.sparse_categorical_crossentropy(integers(x)[..., 0], x, True),
    ),
    "binary crossentropy": (
        V,
        lambda x: tf.keras.losses.binary_crossentropy(tf.sigmoid(x), x, from_logits=True),
    ),
    "cosine similarity": (V, lambda x: tf.keras.losses.cosine_similarity(x, tf.square(x))),
    "kl divergence": (V, lambda x: tf.keras.losses.kl_divergence(tf.abs(x), tf.square(x))),
}


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("name", KERAS)
def test_keras(name):
    shape, function = KERAS[name]
    traced = Traced(function, shape)
    assert isinstance(traced.state, Rows) and traced.state.axis == 0, traced.state
    traced.check()
