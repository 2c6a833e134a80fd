"""Examples of Keras 3 models stay apart: mixing is refused, and random streams are secret."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfdp
from tests.keras3.support import compiled, open_batches
from tests.support import small_data
from tfdp.clipping.loss_graph import random_streams

N, FEATURES = 24, 50
X = np.ones([N, FEATURES], "float32")


class Function(layers.Layer):
    """A layer that applies a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, x):
        return self._function(x)


def noise(draw):
    return lambda: Function(lambda x: x + ops.cast(draw(ops.shape(x)), x.dtype))


KNOWN = {
    "dropout": lambda: layers.Dropout(0.5, seed=1),
    "spatial dropout": lambda: keras.Sequential(
        [layers.Reshape([10, 5]), layers.SpatialDropout1D(0.5, seed=1), layers.Flatten()]
    ),
    "noise layer": lambda: layers.GaussianNoise(1.0, seed=1),
    "gaussian dropout": lambda: layers.GaussianDropout(0.5, seed=1),
    "alpha dropout": lambda: layers.AlphaDropout(0.5, seed=1),
    "uniform": noise(lambda shape: keras.random.uniform(shape, seed=1)),
    "normal": noise(lambda shape: keras.random.normal(shape, seed=1)),
    "truncated normal": noise(lambda shape: keras.random.truncated_normal(shape, seed=1)),
    "integers": noise(lambda shape: keras.random.randint(shape, 0, 9, seed=1)),
}


def updates(makers, data):
    """Returns, for each layer of a model that has them side by side, two updates of the weights
    behind it: sums of the values that it returns."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([FEATURES])
    denses = [layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in makers]
    outputs = [dense(maker()(inputs)) for maker, dense in zip(makers, denses, strict=True)]
    model = keras.Model(inputs, sum(outputs))
    optimizer = tfdp.keras3.DPSGD(1e6, 0.0, learning_rate=1.0, sampling=data.sampling)
    compiled(optimizer, model, loss=lambda y, out: ops.sum(out, axis=1))
    weights = [[dense.get_weights()[0] for dense in denses]]
    for _ in range(2):
        model.fit(data.take(1), verbose=0)
        weights.append([dense.get_weights()[0] for dense in denses])
    return [
        [N * (a - b)[:, 0] for a, b in itertools.pairwise(values)]
        for values in zip(*weights, strict=True)
    ]


def batches(**kwargs):
    return tfdp.data.poisson_batches(
        (X, X), expected_batch_size=N, steps_per_epoch=2, padding="none", **kwargs
    )


def repeated(names):
    """Names of what draws the same numbers again: with an equal seed, or in an equal step."""
    first, second = (updates([KNOWN[name] for name in names], batches()) for _ in range(2))
    return {
        name
        for name, one, other in zip(names, first, second, strict=True)
        if any(np.abs(a - b).max() < 0.01 for a, b in itertools.combinations(one + other, 2))
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [["dropout", "uniform"], list(KNOWN)], ids=["two", "all"])
def test_streams_are_secret(names):
    """Equal seeds draw other numbers: those of a stream that is not the layer's."""
    assert not repeated(names)


@pytest.mark.slow
def test_known_streams_are_caught(monkeypatch):
    monkeypatch.setattr(random_streams, "make_secret", lambda loss, stream: None)
    assert repeated(KNOWN) == set(KNOWN)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "draw",
    [
        lambda shape: keras.random.gamma(shape, 1.0, seed=1),
        lambda shape: keras.random.binomial(shape, 3.0, 0.5, seed=1),
        lambda shape: keras.random.shuffle(ops.ones(shape), seed=1),
    ],
)
def test_what_cannot_be_made_secret_is_refused(draw):
    with pytest.raises(ValueError, match=r"random numbers must|mixes examples"):
        updates([noise(draw)], batches())


class Counts(layers.Layer):
    """Keeps a statistic of the batch, in a variable that no metric has."""

    def build(self, shape):
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.total.assign_add(ops.sum(x))
        return x


MIXING = {
    "batch mean": lambda: Function(lambda x: x - ops.mean(x, axis=0)),
    "batch normalization": layers.BatchNormalization,
    "shuffled rows": lambda: Function(lambda x: x[::-1]),
    "attention over the batch": lambda: Function(
        lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)
    ),
    "a statistic": Counts,
    "stateful rnn": lambda: keras.Sequential(
        [layers.Reshape([2, 2]), layers.SimpleRNN(3, stateful=True)]
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_is_refused(name):
    x, y = small_data(8)
    batch = {"batch_size": 8} if name == "stateful rnn" else {}
    model = keras.Sequential([keras.Input([4], **batch), MIXING[name](), layers.Dense(3)])
    compiled(tfdp.keras3.DPSGD(1.0, 1.0, 8), model)
    before = [w.numpy() for w in model.trainable_variables]
    with pytest.raises(ValueError):
        model.fit(open_batches(x, y), verbose=0)
    for old, new in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())


def test_losses_that_mix_examples_are_refused():
    x, y = small_data(8)
    model = keras.Sequential([keras.Input([4]), layers.Dense(3)])
    loss = lambda y, out: ops.max(out)  # noqa: E731
    compiled(tfdp.keras3.DPSGD(1.0, 1.0, 8), model, loss=loss)
    with pytest.raises(ValueError, match="`loss`"):
        model.fit(open_batches(x, y), verbose=0)
