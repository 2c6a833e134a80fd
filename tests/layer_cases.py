"""A small model for every layer of `tf.keras.layers`, and data that it can be trained on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

layers = tf.keras.layers
EXAMPLES = 24

# What a name of `tf.keras.layers` is that is not a layer to put into a model by itself.
ABSTRACT = {
    "experimental.preprocessing.PreprocessingLayer": "base class",
    "AbstractRNNCell": "base class",
    "InputSpec": "no layer",
    "Layer": "base class",
    "Wrapper": "base class",
}


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=[EXAMPLES, *shape]).astype("float32")


def _ids(*shape: int, below: int = 4) -> np.ndarray:
    return np.random.default_rng(1).integers(0, below, [EXAMPLES, *shape])


def _words(*shape: int) -> np.ndarray:
    texts = np.array(["red", "green", "blue sky", "a green tree by the sea"])
    return texts[_ids(*shape)]


class Case:
    """A layer, data for it, and how to make a model of it.

    Args:
      x: An array `[examples, ...]`, or several.
      make: Makes the layer.
      inside: Whether to put a layer with weights in front of it, so that gradients pass through.
      call: How to call the layer on the tensors that it gets; by default with all of them.
    """

    def __init__(
        self,
        x: Any,
        make: Callable[[], Callable],
        inside: bool = True,
        call: Callable[..., tf.Tensor] | None = None,
    ):
        self.x, self.inside = x, inside
        self._make, self._call = make, call or (lambda layer, *tensors: layer(*tensors))

    def features(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        """Returns what the layer makes of tensors like `x`, as `[batch, features]`."""
        outputs = [_flat(t) for t in tf.nest.flatten(self._call(self._make(), *tensors))]
        return outputs[0] if len(outputs) == 1 else layers.Concatenate()(outputs)


def model_of(cases: Sequence[Case]) -> tuple[tf.keras.Model, list[np.ndarray]]:
    """Makes a model of two classes that uses layers, side by side.

    Returns:
      The model, and its data: cases of the same array have one input.
    """
    arrays = {id(a): a for case in cases for a in tf.nest.flatten(case.x)}
    inputs = {i: layers.Input(a.shape[1:], dtype=tf.as_dtype(a.dtype)) for i, a in arrays.items()}
    scaled = {i: _scaled(t) for i, t in inputs.items() if any(c.inside for c in cases)}
    features = []
    for case in cases:
        given = scaled if case.inside else inputs
        features.append(case.features([given[id(a)] for a in tf.nest.flatten(case.x)]))
    joined = features[0] if len(features) == 1 else layers.Concatenate()(features)
    return tf.keras.Model(list(inputs.values()), layers.Dense(2)(joined)), list(arrays.values())


def _scaled(tensor: tf.Tensor) -> tf.Tensor:
    """A layer with weights that keeps the shape."""
    if not tensor.dtype.is_floating:
        return tensor
    return layers.Dense(tensor.shape[-1], use_bias=False)(tensor)


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    """The features of each example, `[batch, features]`."""
    if not tensor.dtype.is_floating:  # Ids.
        tensor = layers.Embedding(64, 3)(tensor)
    while tensor.shape.rank > 2 and None in tensor.shape[1:]:
        tensor = layers.Lambda(lambda t: tf.reduce_mean(t, 1))(tensor)
    return tensor if tensor.shape.rank == 2 else layers.Flatten()(tensor)


def _of_list(layer: Callable, *tensors: tf.Tensor) -> tf.Tensor:
    return layer(list(tensors))


FEATURES, SEQUENCE, IMAGE, VOLUME = (
    _numbers(6),
    _numbers(5, 4),
    _numbers(6, 6, 2),
    _numbers(4, 4, 4, 2),
)
PIXELS = np.abs(IMAGE)
VIDEO = _numbers(3, 5, 5, 2)


def _dense_features() -> Callable:
    column = tf.feature_column
    words = column.categorical_column_with_vocabulary_list("x", ["red", "green"])
    return layers.DenseFeatures([column.embedding_column(words, 3)])


def _every(names: str, x: Any, *args: Any, **kwargs: Any) -> dict[str, Case]:
    """Cases of classes that are made and used alike."""
    return {
        name: Case(x, lambda name=name: getattr(layers, name)(*args, **kwargs))
        for name in names.split()
    }


def _merging(names: str) -> dict[str, Case]:
    return {
        name: Case([FEATURES, FEATURES], getattr(layers, name), call=_of_list)
        for name in names.split()
    }


CASES: dict[str, Case] = {
    # Core.
    **_every("Dense", FEATURES, 3),
    "Activation": Case(FEATURES, lambda: layers.Activation("tanh")),
    "EinsumDense": Case(
        SEQUENCE, lambda: layers.EinsumDense("abc,cd->abd", [None, 3], bias_axes="d")
    ),
    "Embedding": Case(_ids(5), lambda: layers.Embedding(4, 3)),
    **_every("Identity Flatten Softmax ReLU LeakyReLU ELU PReLU ThresholdedReLU", FEATURES),
    "Lambda": Case(FEATURES, lambda: layers.Lambda(tf.square)),
    "Masking": Case(SEQUENCE, lambda: lambda t: layers.LSTM(3)(layers.Masking()(t)), inside=False),
    "Permute": Case(SEQUENCE, lambda: layers.Permute([2, 1])),
    "RepeatVector": Case(FEATURES, lambda: layers.RepeatVector(2)),
    "Reshape": Case(FEATURES, lambda: layers.Reshape([2, 3])),
    "InputLayer": Case(FEATURES, lambda: lambda t: t),
    "DenseFeatures": Case(_words(), _dense_features, call=lambda layer, t: layer({"x": t})),
    # Merging.
    **_merging("Add Average Concatenate Maximum Minimum Multiply Subtract"),
    "Dot": Case([FEATURES, FEATURES], lambda: layers.Dot(1), call=_of_list),
    # Attention.
    "Attention": Case(
        [SEQUENCE, SEQUENCE], lambda: layers.Attention(use_scale=True), call=_of_list
    ),
    "AdditiveAttention": Case([SEQUENCE, SEQUENCE], layers.AdditiveAttention, call=_of_list),
    "MultiHeadAttention": Case(
        SEQUENCE, lambda: layers.MultiHeadAttention(2, 3), call=lambda layer, t: layer(t, t)
    ),
    # Convolutions.
    **_every("Conv1D SeparableConv1D Conv1DTranspose LocallyConnected1D", SEQUENCE, 3, 2),
    **_every("DepthwiseConv1D", SEQUENCE, 2),
    **_every("Conv2D SeparableConv2D Conv2DTranspose LocallyConnected2D", IMAGE, 3, 2),
    **_every("DepthwiseConv2D", IMAGE, 2),
    **_every("Conv3D Conv3DTranspose", VOLUME, 3, 2),
    # Pooling, sizes.
    **_every(
        "AveragePooling1D MaxPooling1D GlobalAveragePooling1D GlobalMaxPooling1D UpSampling1D "
        "ZeroPadding1D Cropping1D",
        SEQUENCE,
    ),
    **_every(
        "AveragePooling2D MaxPooling2D GlobalAveragePooling2D GlobalMaxPooling2D UpSampling2D "
        "ZeroPadding2D Cropping2D",
        IMAGE,
    ),
    **_every(
        "AveragePooling3D MaxPooling3D GlobalAveragePooling3D GlobalMaxPooling3D UpSampling3D "
        "ZeroPadding3D",
        VOLUME,
    ),
    **_every("Cropping3D", VOLUME, 1),
    # Normalization, regularization.
    **_every("BatchNormalization LayerNormalization UnitNormalization", FEATURES),
    "BatchNormalization, trainable=False": Case(
        FEATURES, lambda: layers.BatchNormalization(trainable=False)
    ),
    **_every("GroupNormalization", IMAGE, 2),
    "SpectralNormalization": Case(FEATURES, lambda: layers.SpectralNormalization(layers.Dense(3))),
    **_every("ActivityRegularization", FEATURES, l2=0.1),
    **_every("Dropout AlphaDropout GaussianDropout GaussianNoise", FEATURES, 0.5),
    **_every("SpatialDropout1D", SEQUENCE, 0.5),
    **_every("SpatialDropout2D", IMAGE, 0.5),
    **_every("SpatialDropout3D", VOLUME, 0.5),
    # Recurrent.
    **_every("SimpleRNN GRU LSTM", SEQUENCE, 3),
    "GRU, reset_after=False": Case(SEQUENCE, lambda: layers.GRU(3, reset_after=False)),
    "LSTM, recurrent_dropout=0.5": Case(SEQUENCE, lambda: layers.LSTM(3, recurrent_dropout=0.5)),
    "RNN": Case(SEQUENCE, lambda: layers.RNN(layers.LSTMCell(3))),
    "SimpleRNNCell": Case(SEQUENCE, lambda: layers.RNN(layers.SimpleRNNCell(3))),
    "GRUCell": Case(SEQUENCE, lambda: layers.RNN(layers.GRUCell(3))),
    "LSTMCell": Case(SEQUENCE, lambda: layers.RNN(layers.LSTMCell(3))),
    "StackedRNNCells": Case(
        SEQUENCE,
        lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(3)])),
    ),
    "Bidirectional": Case(SEQUENCE, lambda: layers.Bidirectional(layers.LSTM(3))),
    "TimeDistributed": Case(SEQUENCE, lambda: layers.TimeDistributed(layers.Dense(3))),
    **_every("ConvLSTM1D", _numbers(3, 5, 2), 2, 2),
    **_every("ConvLSTM2D", VIDEO, 2, 2),
    **_every("ConvLSTM3D", _numbers(2, 3, 3, 3, 2), 2, 2),
    # Preprocessing.
    "Normalization": Case(FEATURES, lambda: layers.Normalization(mean=0.5, variance=2.0)),
    "Discretization": Case(FEATURES, lambda: layers.Discretization([-1.0, 0.0, 1.0]), inside=False),
    "CategoryEncoding": Case(_ids(1), lambda: layers.CategoryEncoding(4, output_mode="one_hot")),
    "CategoryEncoding, multi_hot": Case(_ids(3), lambda: layers.CategoryEncoding(4)),
    "Hashing": Case(_words(3), lambda: layers.Hashing(8)),
    "HashedCrossing": Case([_words(1), _ids(1)], lambda: layers.HashedCrossing(8), call=_of_list),
    "IntegerLookup": Case(_ids(3), lambda: layers.IntegerLookup(vocabulary=[1, 3])),
    "StringLookup": Case(_words(3), lambda: layers.StringLookup(vocabulary=["red", "green"])),
    "StringLookup, multi_hot": Case(
        _words(3),
        lambda: layers.StringLookup(vocabulary=["red", "green"], output_mode="multi_hot"),
    ),
    "TextVectorization": Case(
        _words(1),
        lambda: layers.TextVectorization(vocabulary=["red", "green"], output_sequence_length=4),
    ),
    "TextVectorization, of any length": Case(
        _words(1), lambda: layers.TextVectorization(vocabulary=["red", "green"])
    ),
    "TextVectorization, multi_hot": Case(
        _words(1),
        lambda: layers.TextVectorization(vocabulary=["red", "green"], output_mode="multi_hot"),
    ),
    **_every("CenterCrop RandomCrop Resizing", PIXELS, 4, 4),
    **_every("Rescaling", PIXELS, 0.5),
    **_every("RandomFlip", PIXELS),
    **_every("RandomRotation RandomZoom RandomBrightness", PIXELS, 0.2),
    "RandomContrast": Case(PIXELS, lambda: layers.RandomContrast(0.2), inside=False),
    **_every("RandomHeight RandomWidth", PIXELS, 0.2),
    **_every("RandomTranslation", PIXELS, 0.2, 0.2),
    # Experimental.
    "experimental.RandomFourierFeatures": Case(
        FEATURES, lambda: layers.experimental.RandomFourierFeatures(4)
    ),
    "experimental.SyncBatchNormalization": Case(
        FEATURES, layers.experimental.SyncBatchNormalization
    ),
    "experimental.DynamicLookup": Case(
        _words(3),
        lambda: layers.experimental.DynamicLookup(
            8, initial_vocabulary=tf.constant(["red", "green"])
        ),
    ),
    "experimental.DynamicEmbedding": Case(
        _words(3),
        lambda: layers.experimental.DynamicEmbedding(
            8, 2, initial_vocabulary=tf.constant(["red", "green"]), input_length=3
        ),
    ),
}
