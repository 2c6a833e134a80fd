"""Programs of kinds that Keras 3 users write: their clipped sums are those of a loop."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
import tfdp.keras3
from tests import support

N, CLIP = 7, 0.1
random = np.random.default_rng(0)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(*shape):
    return random.normal(size=[N, *shape]).astype("float32")


def ids(*shape, below=3):
    return random.integers(0, below, [N, *shape])


def mlp_mixer():
    """Dense layers over patches, and over channels."""
    inputs = layers.Input([8, 8, 3])
    h = layers.Reshape([16, 8])(layers.Conv2D(8, 2, strides=2)(inputs))
    for _ in range(2):
        mixed = layers.Permute([2, 1])(layers.LayerNormalization()(h))
        mixed = layers.Dense(16)(layers.Dense(6, activation="gelu")(mixed))
        h = layers.Add()([h, layers.Permute([2, 1])(mixed)])
        feed = layers.Dense(6, activation="gelu")(layers.LayerNormalization()(h))
        h = layers.Add()([h, layers.Dense(8)(feed)])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(h))
    return keras.Model(inputs, outputs), LOGITS, (numbers(8, 8, 3), ids())


class SpatialGate(layers.Layer):
    """Half of the channels, times a projection of the other half over the patches."""

    def __init__(self, patches):
        super().__init__()
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.project = layers.Dense(patches, bias_initializer="ones")

    def call(self, x):
        u, v = ops.split(x, 2, axis=-1)
        v = self.project(ops.transpose(self.norm(v), [0, 2, 1]))
        return u * ops.transpose(v, [0, 2, 1])


def gmlp():
    inputs = layers.Input([5, 4])
    gated = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(inputs))
    h = inputs + layers.Dense(4)(SpatialGate(5)(gated))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(h))), LOGITS, (numbers(5, 4), ids())


class Ratings(keras.Model):
    """Ratings from vectors of users and films: a product for each row."""

    def __init__(self):
        super().__init__()
        self.users, self.films = layers.Embedding(9, 4), layers.Embedding(7, 4)
        self.user_bias, self.film_bias = layers.Embedding(9, 1), layers.Embedding(7, 1)

    def call(self, pairs):
        user, film = pairs[:, 0], pairs[:, 1]
        product = ops.sum(self.users(user) * self.films(film), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.film_bias(film))


def ratings():
    return Ratings(), keras.losses.BinaryCrossentropy(), (ids(2, below=7), random.random([N, 1]))


def siamese():
    """One encoder for both images of a pair; a contrastive loss of their distance."""
    encoder = keras.Sequential(
        [
            layers.Input([8, 8, 1]),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(5, activation="tanh"),
        ]
    )
    pair = [layers.Input([8, 8, 1]), layers.Input([8, 8, 1])]
    distance = layers.Lambda(
        lambda t: ops.sqrt(ops.maximum(ops.sum(ops.square(t[0] - t[1]), 1, keepdims=True), 1e-7))
    )

    def contrastive(y, d):
        y = ops.cast(y, d.dtype)
        return ops.mean((1 - y) * ops.square(d) + y * ops.square(ops.maximum(1 - d, 0)))

    outputs = layers.Dense(1, activation="sigmoid")(distance([encoder(p) for p in pair]))
    x = (numbers(8, 8, 1), numbers(8, 8, 1))
    return keras.Model(pair, outputs), contrastive, (x, ids(1, below=2))


def tagging():
    """A class for each token, by a transformer block; weights leave padding out."""
    inputs = layers.Input([6], dtype="int32")
    h = layers.Embedding(10, 4)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 3)(h, h))
    h = layers.LayerNormalization()(h + layers.Dense(4)(layers.Dense(6, activation="relu")(h)))
    x = ids(6, below=10)
    return keras.Model(inputs, layers.Dense(3)(h)), LOGITS, (x, ids(6), (x != 0).astype("float32"))


def masked_tagging():
    """A class for each token, by recurrent layers; padding is masked."""
    model = keras.Sequential(
        [
            layers.Embedding(10, 4, mask_zero=True),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.Dense(3),
        ]
    )
    return model, LOGITS, (ids(6, below=10), ids(6))


def segmentation():
    """A class for each pixel; pixels of the class `void` do not count."""
    inputs = layers.Input([8, 8, 3])
    skip = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    h = layers.SeparableConv2D(6, 3, padding="same")(layers.MaxPooling2D()(skip))
    h = layers.UpSampling2D()(layers.Activation("relu")(h))
    h = layers.Conv2DTranspose(4, 3, padding="same")(layers.Concatenate()([h, skip]))
    void = 2

    def of_pixels(y, logits):
        losses = ops.sparse_categorical_crossentropy(
            ops.where(y == void, 0, y), logits, from_logits=True
        )
        return ops.mean(ops.where(y == void, 0.0, losses), axis=(1, 2))

    model = keras.Model(inputs, layers.Conv2D(2, 1)(h))
    return model, of_pixels, (numbers(8, 8, 3), ids(8, 8))


def translation():
    """A recurrent encoder, and a decoder that begins with its states."""
    source, target = layers.Input([None, 5]), layers.Input([None, 4])
    _, *states = layers.LSTM(3, return_state=True)(source)
    decoded = layers.LSTM(3, return_sequences=True)(target, initial_state=states)
    outputs = layers.Dense(4, activation="softmax")(decoded)
    x = (np.eye(5, dtype="float32")[ids(6, below=5)], np.eye(4, dtype="float32")[ids(5, below=4)])
    y = np.eye(4, dtype="float32")[ids(5, below=4)]
    return keras.Model([source, target], outputs), "categorical_crossentropy", (x, y)


def transformer_translation():
    """Attention to the past of the target, and to the source."""
    source, target = layers.Input([5], dtype="int32"), layers.Input([6], dtype="int32")

    def embedded(tokens, length):
        places = layers.Embedding(length, 4)(ops.arange(length))
        return layers.Embedding(12, 4)(tokens) + places

    s, t = embedded(source, 5), embedded(target, 6)
    s = layers.LayerNormalization()(s + layers.MultiHeadAttention(2, 2)(s, s))
    t = layers.LayerNormalization()(t + layers.MultiHeadAttention(2, 2)(t, t, use_causal_mask=True))
    t = layers.LayerNormalization()(t + layers.MultiHeadAttention(2, 2)(t, s))
    model = keras.Model([source, target], layers.Dense(12)(t))
    return model, LOGITS, ((ids(5, below=12), ids(6, below=12)), ids(6, below=12))


class Tree(layers.Layer):
    """A differentiable decision tree: the classes of its leaves, by the ways there."""

    def __init__(self, depth, used, classes):
        super().__init__()
        self.depth, self.used = depth, used
        self.decide = layers.Dense(2**depth, activation="sigmoid")
        self.leaves = self.add_weight(shape=[2**depth, classes], initializer="random_normal")

    def call(self, x):
        x = ops.matmul(x, ops.transpose(self.used))
        right = ops.expand_dims(self.decide(x), 2)
        both = ops.concatenate([right, 1 - right], axis=2)
        way = ops.ones([ops.shape(x)[0], 1, 1])
        first = 1
        for level in range(self.depth):
            way = ops.tile(ops.reshape(way, [-1, 2**level, 1]), [1, 1, 2])
            way = way * both[:, first : first + 2**level]
            first += 2**level
        way = ops.reshape(way, [-1, 2**self.depth])
        return ops.matmul(way, keras.activations.softmax(self.leaves))


def decision_forest():
    """The mean of trees that use different features."""
    inputs = layers.Input([6])
    used = [np.eye(6, dtype="float32")[random.permutation(6)[:4]] for _ in range(3)]
    trees = [Tree(3, mask, 3)(inputs) for mask in used]
    model = keras.Model(inputs, layers.Average()(trees))
    return model, keras.losses.SparseCategoricalCrossentropy(), (numbers(6), ids())


def time_series():
    """A transformer with convolutions, for classes of sequences."""
    inputs = layers.Input([10, 1])
    h = inputs
    for _ in range(2):
        attended = layers.MultiHeadAttention(key_dim=3, num_heads=2)(h, h)
        h = layers.LayerNormalization(epsilon=1e-6)(attended) + h
        feed = layers.Conv1D(1, 1)(layers.Conv1D(4, 1, activation="relu")(h))
        h = layers.LayerNormalization(epsilon=1e-6)(feed) + h
    h = layers.GlobalAveragePooling1D(data_format="channels_last")(h)
    outputs = layers.Dense(2, activation="softmax")(layers.Dense(6, activation="relu")(h))
    return (
        keras.Model(inputs, outputs),
        "sparse_categorical_crossentropy",
        (numbers(10, 1), ids(below=2)),
    )


def graph_network():
    """Each example is a graph: features of its nodes, and a matrix of its edges."""
    nodes, edges = layers.Input([5, 3]), layers.Input([5, 5])
    h = layers.Dense(4)(nodes)
    for _ in range(2):
        passed = ops.matmul(edges, layers.Dense(4, activation="relu")(h))
        degree = ops.maximum(ops.sum(edges, axis=2, keepdims=True), 1)
        h = layers.Dense(4, activation="tanh")(layers.Concatenate()([h, passed / degree]))
    shares = ops.softmax(layers.Dense(1)(h), axis=1)
    model = keras.Model([nodes, edges], layers.Dense(1)(ops.sum(shares * h, axis=1)))
    x = (numbers(5, 3), (random.random([N, 5, 5]) < 0.5).astype("float32"))
    return model, keras.losses.BinaryCrossentropy(from_logits=True), (x, ids(1, below=2))


class Endpoint(layers.Layer):
    """Adds the loss itself, from logits and targets that it gets."""

    def call(self, logits, targets):
        losses = keras.losses.binary_crossentropy(targets, logits, from_logits=True)
        self.add_loss(ops.mean(losses))
        return ops.sigmoid(logits)


def endpoint():
    inputs, targets = layers.Input([5], name="inputs"), layers.Input([2], name="targets")
    logits = layers.Dense(2)(layers.Dense(4, activation="tanh")(inputs))
    model = keras.Model([inputs, targets], Endpoint()(logits, targets))
    return model, None, ((numbers(5), ids(2, below=2).astype("float32")), None)


class Distiller(keras.Model):
    """A small model that learns from a large one, and from the targets."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(3)])
        self.teacher = keras.Sequential([layers.Dense(9, activation="relu"), layers.Dense(3)])
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        divergence = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3.0, axis=1))
        return 0.1 * LOGITS(y, y_pred) + 0.9 * 9.0 * divergence


def distillation():
    return Distiller(), None, (numbers(5), ids())


def vision_transformer():
    inputs = layers.Input([8, 8, 1])
    patches = layers.Reshape([16, 4])(ops.image.extract_patches(inputs, 2))
    h = layers.Dense(6)(patches) + layers.Embedding(16, 6)(ops.arange(16))
    h = h + layers.MultiHeadAttention(2, 3)(*[layers.LayerNormalization()(h)] * 2)
    h = h + layers.Dense(6, activation="gelu")(layers.LayerNormalization()(h))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(h)))
    return model, LOGITS, (numbers(8, 8, 1), ids())


def feature_space():
    """A table of numbers and categories, preprocessed in the model, with a cross."""
    kinds, ages = np.array(["a", "b", "c"])[ids()], ids(below=80).astype("float32")
    table = {"kind": kinds, "code": ids(below=4), "age": ages, "size": numbers()}
    space = keras.utils.FeatureSpace(
        {
            "kind": keras.utils.FeatureSpace.string_categorical(),
            "code": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=3),
            "size": keras.utils.FeatureSpace.float_normalized(),
        },
        crosses=[keras.utils.FeatureSpace.cross(("kind", "code"), crossing_dim=8)],
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(table).batch(N))
    hidden = layers.Dense(4, activation="relu")(space.get_encoded_features())
    model = keras.Model(space.get_inputs(), layers.Dense(1, activation="sigmoid")(hidden))
    return model, "binary_crossentropy", (table, ids(1, below=2))


PROGRAMS = [
    mlp_mixer,
    gmlp,
    ratings,
    siamese,
    tagging,
    masked_tagging,
    segmentation,
    translation,
    transformer_translation,
    decision_forest,
    time_series,
    graph_network,
    endpoint,
    distillation,
    vision_transformer,
    feature_space,
]


def sum_of_clipped(weights, losses):
    """The sum of the clipped gradients of losses, which are functions."""
    total = 0.0
    for loss in losses:
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, [w.value for w in weights], unconnected_gradients="zero")
        gradient = support.flat(tf.convert_to_tensor(g) for g in found)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


def looped(model, data):
    """The clipped sum, one eager example at a time."""

    def loss(i):
        given = [t for t in data if t is not None]
        x, *others = (tf.nest.map_structure(lambda a: a[i : i + 1], t) for t in given)
        y, weight, *_ = [*others, None, None]
        return model.compute_loss(x, y, model(x, training=True), weight, training=True)

    losses = [functools.partial(loss, i) for i in range(N)]
    return sum_of_clipped(model.trainable_variables, losses)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("build", PROGRAMS)
def test_clipped_sum_is_that_of_a_loop_over_examples(build):
    """One step of `fit`, in one pass."""
    keras.utils.set_random_seed(1)
    model, loss, data = build()
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer, loss)
    model(tf.nest.map_structure(lambda a: a[:1], data[0]))
    expected = looped(model, data)
    before = support.flat(w.numpy() for w in model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(data if data[1] is not None else data[:1])
    model.fit(batches.batch(N), verbose=0)
    found = before - support.flat(w.numpy() for w in model.trainable_variables)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    report = optimizer.clipping.report()
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []
