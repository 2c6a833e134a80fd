"""Programs of Keras 3 users on random data: what tests train, and `benchmarks.ports` times.

As in `benchmarks.programs`: each function builds a model as users write it, for `n` examples, of
the sizes that tests use. `PROGRAMS` has those that are timed.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks import own_steps
from benchmarks.timed import Timed

random = np.random.default_rng(0)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# A model, its loss, and its data: `(x, y)`, `(x, y, weights)` or `(x,)`.
Program = tuple[keras.Model, Any, tuple]


def numbers(n: int, *shape: int) -> np.ndarray:
    """Random numbers, `[n, *shape]`."""
    return random.normal(size=[n, *shape]).astype("float32")


def ids(n: int, *shape: int, below: int = 3) -> np.ndarray:
    """Random whole numbers, `[n, *shape]`."""
    return random.integers(0, below, [n, *shape])


def one_hot(n: int, length: int, number: int) -> np.ndarray:
    """Random sequences of unit vectors, `[n, length, number]`."""
    return np.eye(number, dtype="float32")[ids(n, length, below=number)]


def mlp_mixer(n: int, size: int = 8, patch: int = 2, width: int = 8, blocks: int = 2) -> Program:
    """Builds dense layers over patches, and over channels."""
    inputs = layers.Input([size, size, 3])
    patches = (size // patch) ** 2
    h = layers.Reshape([patches, width])(layers.Conv2D(width, patch, strides=patch)(inputs))
    for _ in range(blocks):
        mixed = layers.Permute([2, 1])(layers.LayerNormalization()(h))
        mixed = layers.Dense(patches)(layers.Dense(width - 2, activation="gelu")(mixed))
        h = layers.Add()([h, layers.Permute([2, 1])(mixed)])
        feed = layers.Dense(width - 2, activation="gelu")(layers.LayerNormalization()(h))
        h = layers.Add()([h, layers.Dense(width)(feed)])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(h))
    return keras.Model(inputs, outputs), LOGITS, (numbers(n, size, size, 3), ids(n))


class SpatialGate(layers.Layer):
    """Multiplies half of the channels by a projection of the other half over the patches.

    Args:
      patches: Number of patches.
    """

    def __init__(self, patches: int):
        super().__init__()
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.project = layers.Dense(patches, bias_initializer="ones")

    def call(self, x: Any) -> Any:
        """Returns `[batch, patches, channels / 2]`."""
        u, v = ops.split(x, 2, axis=-1)
        v = self.project(ops.transpose(self.norm(v), [0, 2, 1]))
        return u * ops.transpose(v, [0, 2, 1])


def gmlp(n: int, patches: int = 5, width: int = 4, blocks: int = 1) -> Program:
    """Builds blocks with a gate over the patches."""
    h = inputs = layers.Input([patches, width])
    for _ in range(blocks):
        gated = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(h))
        h = h + layers.Dense(width)(SpatialGate(patches)(gated))
    outputs = layers.Dense(3)(layers.Flatten()(h))
    return keras.Model(inputs, outputs), LOGITS, (numbers(n, patches, width), ids(n))


class Ratings(keras.Model):
    """Ratings from vectors of users and films: a product for each row.

    Args:
      users: Number of users.
      films: Number of films.
      width: Size of the vectors.
    """

    def __init__(self, users: int, films: int, width: int):
        super().__init__()
        self.users, self.films = layers.Embedding(users, width), layers.Embedding(films, width)
        self.user_bias, self.film_bias = layers.Embedding(users, 1), layers.Embedding(films, 1)

    def call(self, pairs: Any) -> Any:
        """Returns `[batch, 1]`."""
        user, film = pairs[:, 0], pairs[:, 1]
        product = ops.sum(self.users(user) * self.films(film), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(user) + self.film_bias(film))


def ratings(n: int, users: int = 9, films: int = 7, width: int = 4) -> Program:
    """Builds a recommender of films."""
    pairs = np.stack([ids(n, below=users), ids(n, below=films)], axis=1)
    stars = random.random([n, 1])
    return Ratings(users, films, width), keras.losses.BinaryCrossentropy(), (pairs, stars)


def siamese(n: int, size: int = 8, filters: tuple[int, ...] = (4,)) -> Program:
    """Builds one encoder for both images of a pair; a contrastive loss of their distance."""
    encoder = keras.Sequential([layers.Input([size, size, 1])])
    for number in filters:
        encoder.add(layers.Conv2D(number, 3, activation="tanh"))
        encoder.add(layers.AveragePooling2D(2))
    encoder.add(layers.Flatten())
    encoder.add(layers.Dense(5, activation="tanh"))
    pair = [layers.Input([size, size, 1]), layers.Input([size, size, 1])]
    distance = layers.Lambda(
        lambda t: ops.sqrt(ops.maximum(ops.sum(ops.square(t[0] - t[1]), 1, keepdims=True), 1e-7))
    )

    def contrastive(y: Any, d: Any) -> Any:
        y = ops.cast(y, d.dtype)
        return ops.mean((1 - y) * ops.square(d) + y * ops.square(ops.maximum(1 - d, 0)))

    outputs = layers.Dense(1, activation="sigmoid")(distance([encoder(p) for p in pair]))
    x = (numbers(n, size, size, 1), numbers(n, size, size, 1))
    return keras.Model(pair, outputs), contrastive, (x, ids(n, 1, below=2))


def tagging(n: int, vocabulary: int = 10, length: int = 6, width: int = 4) -> Program:
    """Builds a class for each token, by a transformer block; weights leave padding out."""
    inputs = layers.Input([length], dtype="int32")
    h = layers.Embedding(vocabulary, width)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, width // 2)(h, h))
    feed = layers.Dense(width)(layers.Dense(2 * width, activation="relu")(h))
    h = layers.LayerNormalization()(h + feed)
    x = ids(n, length, below=vocabulary)
    weights = (x != 0).astype("float32")
    return keras.Model(inputs, layers.Dense(3)(h)), LOGITS, (x, ids(n, length), weights)


def masked_tagging(
    n: int, vocabulary: int = 10, length: int = 6, width: int = 4, units: int = 3
) -> Program:
    """Builds a class for each token, by recurrent layers; padding is masked."""
    model = keras.Sequential(
        [
            layers.Embedding(vocabulary, width, mask_zero=True),
            layers.Bidirectional(layers.LSTM(units, return_sequences=True)),
            layers.Dense(3),
        ]
    )
    return model, LOGITS, (ids(n, length, below=vocabulary), ids(n, length))


def segmentation(n: int, size: int = 8, filters: int = 4) -> Program:
    """Builds a class for each pixel; pixels of the class `void` do not count."""
    inputs = layers.Input([size, size, 3])
    skip = layers.Conv2D(filters, 3, padding="same", activation="relu")(inputs)
    h = layers.SeparableConv2D(2 * filters, 3, padding="same")(layers.MaxPooling2D()(skip))
    h = layers.UpSampling2D()(layers.Activation("relu")(h))
    h = layers.Conv2DTranspose(filters, 3, padding="same")(layers.Concatenate()([h, skip]))
    void = 2

    def of_pixels(y: Any, logits: Any) -> Any:
        losses = ops.sparse_categorical_crossentropy(
            ops.where(y == void, 0, y), logits, from_logits=True
        )
        return ops.mean(ops.where(y == void, 0.0, losses), axis=(1, 2))

    model = keras.Model(inputs, layers.Conv2D(2, 1)(h))
    return model, of_pixels, (numbers(n, size, size, 3), ids(n, size, size))


def translation(n: int, length: int = 6, tokens: int = 5, units: int = 3) -> Program:
    """Builds a recurrent encoder, and a decoder that begins with its states."""
    source, target = layers.Input([None, tokens]), layers.Input([None, tokens])
    _, *states = layers.LSTM(units, return_state=True)(source)
    decoded = layers.LSTM(units, return_sequences=True)(target, initial_state=states)
    outputs = layers.Dense(tokens, activation="softmax")(decoded)
    x = (one_hot(n, length, tokens), one_hot(n, length - 1, tokens))
    y = one_hot(n, length - 1, tokens)
    return keras.Model([source, target], outputs), "categorical_crossentropy", (x, y)


def transformer_translation(
    n: int, vocabulary: int = 12, length: int = 6, width: int = 4
) -> Program:
    """Builds attention to the past of the target, and to the source."""
    source = layers.Input([length - 1], dtype="int32")
    target = layers.Input([length], dtype="int32")

    def embedded(tokens: Any) -> Any:
        places = layers.Embedding(tokens.shape[1], width)(ops.arange(tokens.shape[1]))
        return layers.Embedding(vocabulary, width)(tokens) + places

    def attend(h: Any, to: Any, **kwargs: Any) -> Any:
        attention = layers.MultiHeadAttention(2, width // 2)
        return layers.LayerNormalization()(h + attention(h, to, **kwargs))

    s, t = embedded(source), embedded(target)
    s = attend(s, s)
    t = attend(attend(t, t, use_causal_mask=True), s)
    model = keras.Model([source, target], layers.Dense(vocabulary)(t))
    x = (ids(n, length - 1, below=vocabulary), ids(n, length, below=vocabulary))
    return model, LOGITS, (x, ids(n, length, below=vocabulary))


class Tree(layers.Layer):
    """A differentiable decision tree: the classes of its leaves, by the ways there.

    Args:
      depth: Decisions on each way.
      used: Features that it uses, unit vectors `[used, features]`.
      classes: Number of classes.
    """

    def __init__(self, depth: int, used: np.ndarray, classes: int):
        super().__init__()
        self.depth, self.used = depth, used
        self.decide = layers.Dense(2**depth, activation="sigmoid")
        self.leaves = self.add_weight(shape=[2**depth, classes], initializer="random_normal")

    def call(self, x: Any) -> Any:
        """Returns probabilities `[batch, classes]`."""
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


def decision_forest(n: int, features: int = 6, trees: int = 3, depth: int = 3) -> Program:
    """Builds the mean of trees that use different features."""
    inputs, unit = layers.Input([features]), np.eye(features, dtype="float32")
    used = [unit[random.permutation(features)[: features // 2 + 1]] for _ in range(trees)]
    outputs = layers.Average()([Tree(depth, mask, 3)(inputs) for mask in used])
    loss = keras.losses.SparseCategoricalCrossentropy()
    return keras.Model(inputs, outputs), loss, (numbers(n, features), ids(n))


def time_series(n: int, length: int = 10, size: int = 3, filters: int = 4) -> Program:
    """Builds a transformer with convolutions, for classes of sequences."""
    h = inputs = layers.Input([length, 1])
    for _ in range(2):
        attended = layers.MultiHeadAttention(key_dim=size, num_heads=2)(h, h)
        h = layers.LayerNormalization(epsilon=1e-6)(attended) + h
        feed = layers.Conv1D(1, 1)(layers.Conv1D(filters, 1, activation="relu")(h))
        h = layers.LayerNormalization(epsilon=1e-6)(feed) + h
    h = layers.GlobalAveragePooling1D(data_format="channels_last")(h)
    outputs = layers.Dense(2, activation="softmax")(layers.Dense(6, activation="relu")(h))
    data = (numbers(n, length, 1), ids(n, below=2))
    return keras.Model(inputs, outputs), "sparse_categorical_crossentropy", data


def graph_network(n: int, nodes: int = 5, features: int = 3, width: int = 4) -> Program:
    """Each example is a graph: features of its nodes, and a matrix of its edges."""
    of_nodes, edges = layers.Input([nodes, features]), layers.Input([nodes, nodes])
    h = layers.Dense(width)(of_nodes)
    for _ in range(2):
        passed = ops.matmul(edges, layers.Dense(width, activation="relu")(h))
        degree = ops.maximum(ops.sum(edges, axis=2, keepdims=True), 1)
        h = layers.Dense(width, activation="tanh")(layers.Concatenate()([h, passed / degree]))
    shares = ops.softmax(layers.Dense(1)(h), axis=1)
    model = keras.Model([of_nodes, edges], layers.Dense(1)(ops.sum(shares * h, axis=1)))
    x = (numbers(n, nodes, features), (random.random([n, nodes, nodes]) < 0.5).astype("float32"))
    return model, keras.losses.BinaryCrossentropy(from_logits=True), (x, ids(n, 1, below=2))


class Endpoint(layers.Layer):
    """Adds the loss itself, from logits and targets that it gets."""

    def call(self, logits: Any, targets: Any) -> Any:
        """Returns probabilities."""
        losses = keras.losses.binary_crossentropy(targets, logits, from_logits=True)
        self.add_loss(ops.mean(losses))
        return ops.sigmoid(logits)


def endpoint(n: int, features: int = 5, units: int = 4) -> Program:
    """Builds a model whose targets are inputs."""
    inputs, targets = layers.Input([features]), layers.Input([2])
    logits = layers.Dense(2)(layers.Dense(units, activation="tanh")(inputs))
    model = keras.Model([inputs, targets], Endpoint()(logits, targets))
    return model, None, ((numbers(n, features), ids(n, 2, below=2).astype("float32")),)


class Distiller(keras.Model):
    """A small model that learns from a large one, and from the targets.

    Args:
      student: Filters of the small one.
      teacher: Filters of the large one.
    """

    def __init__(self, student: int, teacher: int):
        super().__init__()
        self.student, self.teacher = self._network(student), self._network(teacher)
        self.teacher.trainable = False

    def _network(self, filters: int) -> keras.Model:
        convolution = layers.Conv2D(filters, 3, strides=2, activation="relu")
        return keras.Sequential([convolution, layers.Flatten(), layers.Dense(3)])

    def call(self, x: Any) -> Any:
        """Returns the small model's logits."""
        return self.student(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of the targets, and the divergence from the large model."""
        soft = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        divergence = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3.0, axis=1))
        return 0.1 * LOGITS(y, y_pred) + 0.9 * 9.0 * divergence


def distillation(n: int, size: int = 8, student: int = 4, teacher: int = 6) -> Program:
    """Builds a model with a loss of its own, by which it learns from another."""
    return Distiller(student, teacher), None, (numbers(n, size, size, 1), ids(n))


def vision_transformer(
    n: int, size: int = 8, patch: int = 2, width: int = 6, blocks: int = 1
) -> Program:
    """Builds a transformer of patches."""
    inputs, patches = layers.Input([size, size, 1]), (size // patch) ** 2
    pixels = layers.Reshape([patches, patch**2])(ops.image.extract_patches(inputs, patch))
    h = layers.Dense(width)(pixels) + layers.Embedding(patches, width)(ops.arange(patches))
    for _ in range(blocks):
        h = h + layers.MultiHeadAttention(2, width // 2)(*[layers.LayerNormalization()(h)] * 2)
        h = h + layers.Dense(width, activation="gelu")(layers.LayerNormalization()(h))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(h)))
    return model, LOGITS, (numbers(n, size, size, 1), ids(n))


def table(n: int) -> tuple[dict[str, np.ndarray], keras.utils.FeatureSpace]:
    """Returns a table of numbers and categories, and what encodes it, with a cross."""
    kinds, ages = np.array(["a", "b", "c"], object)[ids(n)], ids(n, below=80).astype("float32")
    rows = {"kind": kinds, "code": ids(n, below=4), "age": ages, "size": numbers(n)}
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
    space.adapt(tf.data.Dataset.from_tensor_slices(rows).batch(min(n, 1000)))
    return rows, space


def feature_space(n: int, units: int = 4) -> Program:
    """Builds a table that is encoded in the model."""
    rows, space = table(n)
    hidden = layers.Dense(units, activation="relu")(space.get_encoded_features())
    model = keras.Model(space.get_inputs(), layers.Dense(1, activation="sigmoid")(hidden))
    return model, "binary_crossentropy", (rows, ids(n, 1, below=2))


_TEXT = {"vocabulary": 10_000, "length": 50, "width": 64}

PROGRAMS = {
    "mlp_mixer": Timed(mlp_mixer, 64, {"size": 32, "patch": 4, "width": 128, "blocks": 4}),
    "gmlp": Timed(gmlp, 64, {"patches": 64, "width": 64, "blocks": 4}),
    "vision_transformer": Timed(
        vision_transformer, 64, {"size": 32, "patch": 4, "width": 64, "blocks": 4}
    ),
    "ratings": Timed(ratings, 64, {"users": 600, "films": 9000, "width": 50}),
    "siamese": Timed(siamese, 64, {"size": 28, "filters": (8, 16)}),
    "tagging": Timed(tagging, 32, _TEXT),
    "masked_tagging": Timed(masked_tagging, 32, {**_TEXT, "units": 64}),
    "segmentation": Timed(segmentation, 32, {"size": 64, "filters": 16}),
    "translation": Timed(translation, 64, {"length": 20, "tokens": 70, "units": 128}),
    "transformer_translation": Timed(
        transformer_translation, 64, {"vocabulary": 5000, "length": 20, "width": 64}
    ),
    "decision_forest": Timed(decision_forest, 128, {"features": 64, "trees": 10, "depth": 6}),
    "time_series": Timed(time_series, 64, {"length": 100, "size": 32}),
    "graph_network": Timed(graph_network, 64, {"nodes": 30, "features": 30, "width": 64}),
    "endpoint": Timed(endpoint, 64, {"features": 784, "units": 256}),
    "distillation": Timed(distillation, 64, {"size": 28, "student": 16, "teacher": 64}),
    "feature_space": Timed(feature_space, 32, {"units": 32}),
    "trainer": Timed(own_steps.trainer, 64, {"features": 784, "units": 256}, 3),
    "variational_autoencoder": Timed(
        own_steps.variational_autoencoder, 128, {"size": 28, "filters": 32}, 3
    ),
    "diffusion": Timed(own_steps.diffusion, 32, {"size": 32, "filters": 32}, 3),
    "wgan_critic": Timed(own_steps.wgan_critic, 64, {"size": 28, "filters": 32}, 3),
    "dcgan": Timed(own_steps.dcgan, 64, {"size": 28, "filters": 32}, 3),
}
