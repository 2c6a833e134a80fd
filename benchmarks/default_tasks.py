"""Small learning tasks of many kinds, on which the defaults of `make_private` are judged.

A task is public data, a Keras 3 model that a user might write without a thought of privacy, and a
score in percent. The rules behind the defaults were fitted on the tasks that are marked `fitted`;
the others judge them.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np

from experiments import datasets

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

ACCURACY, AUC, EXPLAINED = "accuracy", "auc", "explained variance"


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
      name: Its name.
      fitted: Whether rules were fitted on it.
      load: Gets the folder of TensorFlow Datasets. Returns x and y to train on, and to test on.
      build: Returns a new model.
      epochs: Number of epochs.
      score: One of `ACCURACY`, `AUC` and `EXPLAINED`.
    """

    name: str
    fitted: bool
    load: Callable[[str | None], Split]
    build: Callable[[], keras.Model]
    epochs: int = 5
    score: str = ACCURACY

    @property
    def loss(self) -> keras.losses.Loss:
        """The loss of the model's logits or predictions."""
        if self.score == ACCURACY:
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if self.score == AUC:
            return keras.losses.BinaryCrossentropy(from_logits=True)
        return keras.losses.MeanSquaredError()

    def measure(self, y: np.ndarray, predicted: np.ndarray) -> float:
        """Returns the score of predictions, in percent; 0 if they are not finite."""
        if not np.isfinite(predicted).all():
            return 0.0
        if self.score == ACCURACY:
            return 100 * float(np.mean(predicted.argmax(axis=1) == y))
        if self.score == AUC:
            ranks = np.argsort(np.argsort(predicted.ravel())) + 1.0
            positive = int(y.sum())
            above = ranks[y.ravel() == 1].sum() - positive * (positive + 1) / 2
            return 100 * float(above / (positive * (len(y) - positive)))
        errors = ((y - predicted.reshape(y.shape)) ** 2).mean()
        return 100 * max(0.0, 1 - float(errors / ((y - y.mean(axis=0)) ** 2).mean()))


def _images(name: str, most: int | None, data_dir: str | None) -> Split:
    data = datasets.load(name, data_dir=data_dir)
    return data.train_x[:most], data.train_y[:most], data.eval_x, data.eval_y


def _digits(data_dir: str | None) -> Split:
    data = datasets.load("digits")
    return data.train_x, data.train_y, data.eval_x, data.eval_y


def _reviews(most: int, data_dir: str | None) -> Split:
    data = datasets.load("imdb_reviews", data_dir=data_dir)
    chosen = np.random.default_rng(0).permutation(data.size)[:most]
    return data.train_x[chosen], data.train_y[chosen], data.eval_x[::5], data.eval_y[::5]


def _patches(name: str, most: int | None, data_dir: str | None) -> Split:
    data = datasets.load(name, data_dir=data_dir, features="patches")
    return data.train_x[:most], data.train_y[:most], data.eval_x, data.eval_y


def _cancer(data_dir: str | None) -> Split:
    """Malignant or benign, by 30 measurements, each divided by a public bound."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = np.log1p(x).astype(np.float32) / 4.0
    return _split(x, y.astype(np.float32)[:, np.newaxis], 400)


def _generated(make: Callable[[np.random.Generator], tuple], size: int, _: str | None) -> Split:
    x, y = make(np.random.default_rng(1))
    return _split(x, y, size)


def _split(x: np.ndarray, y: np.ndarray, size: int) -> Split:
    order = np.random.default_rng(2).permutation(len(x))
    train, test = order[:size], order[size:]
    return x[train], y[train], x[test], y[test]


def _categories(random: np.random.Generator) -> tuple:
    """Six columns of categories, of which pairs decide among four classes."""
    x = random.integers(0, 20, [30_000, 6])
    tables = random.normal(size=[6, 20, 8])
    hidden = np.tanh(sum(tables[i][x[:, i]] for i in range(6)))
    logits = 3 * hidden @ random.normal(size=[8, 4]) + random.gumbel(size=[len(x), 4])
    return (x + 20 * np.arange(6)).astype(np.int32), logits.argmax(axis=1)


def _imbalanced(random: np.random.Generator) -> tuple:
    """Columns of numbers of several sizes; one row in twenty is positive."""
    x = random.normal(size=[120_000, 20]).astype(np.float32)
    score = x[:, 0] + x[:, 1] * x[:, 2] + np.abs(x[:, 3]) - 0.5 * x[:, 4] ** 2
    score += random.normal(size=len(x))
    y = (score > np.quantile(score, 0.95)).astype(np.float32)[:, np.newaxis]
    return x, y


def _series(random: np.random.Generator) -> tuple:
    """Waves of 64 points in noise; their shapes and frequencies make five classes."""
    y = random.integers(0, 5, 24_000)
    time = np.arange(64) / 64
    phase = random.uniform(size=[len(y), 1]) + time * (3 + 2 * (y[:, np.newaxis] // 2))
    sine, square = np.sin(2 * np.pi * phase), np.sign(np.sin(2 * np.pi * phase))
    x = np.where((y % 2 == 0)[:, np.newaxis], sine, square)
    x = x + random.normal(size=x.shape)
    return x[..., np.newaxis].astype(np.float32), y


def _regression(random: np.random.Generator) -> tuple:
    """Friedman's function of ten uniform columns, as a number of the order of 1."""
    x = random.uniform(size=[25_000, 10]).astype(np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = (y + 10 * x[:, 3] + 5 * x[:, 4] + random.normal(size=len(x)) - 14) / 5
    return x, y.astype(np.float32)[:, np.newaxis]


def _pictures(most: int, data_dir: str | None) -> Split:
    x, _, test_x, _ = _images("fashion_mnist", most, data_dir)
    x, test_x = (value.reshape(len(value), -1) for value in (x, test_x))
    return x, x, test_x, test_x


def _perceptron(classes: int, width: int = 64) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [layers.Flatten(), layers.Dense(width, activation="relu"), layers.Dense(classes)]
    )


def _convolutions(classes: int, dimensions: int = 2) -> keras.Model:
    layers = keras.layers
    convolution = layers.Conv1D if dimensions == 1 else layers.Conv2D
    return keras.Sequential(
        [
            convolution(16, 5, strides=2, activation="relu"),
            convolution(32, 5, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(classes),
        ]
    )


def _embedded(columns_vocabulary: int) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Embedding(columns_vocabulary, 8),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(4),
        ]
    )


def _pooled() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Embedding(datasets.VOCABULARY_SIZE, 32),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )


def _transformer() -> keras.Model:
    layers = keras.layers
    tokens = layers.Input([datasets.REVIEW_TOKENS], dtype="int32")
    x = layers.Embedding(datasets.VOCABULARY_SIZE, 32)(tokens)
    normal = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(num_heads=2, key_dim=16)(normal, normal)
    x = x + layers.Dense(32)(layers.Dense(64, activation="relu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _autoencoder() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Dense(64, activation="relu"),
            layers.Dense(16),
            layers.Dense(64, activation="relu"),
            layers.Dense(784, activation="sigmoid"),
        ]
    )


def _linear(classes: int) -> keras.Model:
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])


_partial = functools.partial
TASKS = {
    task.name: task
    for task in (
        Task("mnist_mlp", True, _partial(_images, "mnist", None), _partial(_perceptron, 10)),
        Task(
            "fashion_cnn",
            True,
            _partial(_images, "fashion_mnist", 20_000),
            _partial(_convolutions, 10),
            10,
        ),
        Task("digits_mlp", True, _digits, _partial(_perceptron, 10), 30),
        Task(
            "categories",
            True,
            _partial(_generated, _categories, 20_000),
            _partial(_embedded, 120),
            10,
        ),
        Task("imdb_pooled", True, _partial(_reviews, 25_000), _pooled, 10),
        Task(
            "regression",
            True,
            _partial(_generated, _regression, 20_000),
            _partial(_perceptron, 1),
            20,
            EXPLAINED,
        ),
        Task(
            "fashion_patches",
            False,
            _partial(_patches, "fashion_mnist", 10_000),
            _partial(_linear, 10),
            20,
        ),
        Task(
            "mnist_cnn", False, _partial(_images, "mnist", 20_000), _partial(_convolutions, 10), 10
        ),
        Task(
            "fashion_mlp",
            False,
            _partial(_images, "fashion_mnist", None),
            _partial(_perceptron, 10),
        ),
        Task("breast_cancer", False, _cancer, _partial(_perceptron, 1), 30, AUC),
        Task(
            "imbalanced",
            False,
            _partial(_generated, _imbalanced, 100_000),
            _partial(_perceptron, 1),
            5,
            AUC,
        ),
        Task("imdb_transformer", True, _partial(_reviews, 10_000), _transformer, 10),
        Task(
            "time_series",
            False,
            _partial(_generated, _series, 20_000),
            _partial(_convolutions, 5, 1),
            15,
        ),
        Task("autoencoder", False, _partial(_pictures, 20_000), _autoencoder, 10, EXPLAINED),
        Task(
            "mnist_patches", False, _partial(_patches, "mnist", 10_000), _partial(_linear, 10), 20
        ),
    )
}
