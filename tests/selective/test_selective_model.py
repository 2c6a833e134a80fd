"""Accepted updates, attempts and tests, through `fit`."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import with_both, with_one
from tests.selective_support import (
    ALWAYS,
    CLASSES,
    CLASSES_OF_BOTH,
    batches,
    compiled,
    front_of,
    optimizer,
    small_model,
)
from tfdp.base.random import key_streams
from tfdp.clipping import step_check
from tfdp.step import noisy_acceptance
from tfdp.step.selective import SelectiveUpdateMixin

layers = tf.keras.layers


def flat(model):
    return support.flat(model.get_weights())


# What an accepted update is.


# The others of Keras 3 accept the same updates as these, below.
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cls", CLASSES_OF_BOTH[: len(CLASSES) + 1])
def test_if_all_is_accepted_it_is_the_optimizer_below(cls):
    """On batches of all examples, where the sampling makes no difference."""
    data = batches(expected_batch_size=64)
    arguments = {"noise_multiplier": 0.0, "learning_rate": 0.05}
    ours = compiled(optimizer(cls, data, threshold=ALWAYS, **arguments))
    ours.fit(data, steps_per_epoch=4, verbose=0)
    front = front_of(cls)
    below = getattr(front.tfdp, cls.__name__.replace("DPSUR", "DP"))
    plain = small_model(front)
    plain.compile(
        below(l2_norm_clip=0.5, **arguments, sampling=data.sampling), front.crossentropy("none")
    )
    plain.fit(data, epochs=4, verbose=0)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-5, atol=1e-6)


@tf.keras.utils.register_keras_serializable(package="tests")
class OneWeight(tf.keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.weight = self.add_weight("weight", [], initializer="zeros")

    def call(self, inputs, training=None):
        return self.weight + 0.0 * inputs[:, 0]


class Peak(tf.keras.losses.Loss):
    """A loss with a maximum: far updates to both sides are good, near ones are not."""

    def call(self, y_true, y_pred):
        return -0.5 * (y_pred - 0.02) ** 2


def accepted_weights(n=1000, **changes):
    """Returns the weight after one accepted update from zero, many times."""
    x, y = np.zeros([4, 1], "float32"), np.zeros([4], "float32")
    data = tfdp.data.poisson_batches((x, y), expected_batch_size=4)
    arguments = {
        "validation_batch_size": 4,
        "validation_noise_multiplier": 0.2,
        "validation_clip": 0.002,
        "threshold": -0.5,
        "learning_rate": 1.0,
    }
    sampling = {"sampling": data.sampling}
    model = tfdp.SelectiveModel(OneWeight())
    model.compile(tfdp.DPSURSGD(0.2, 2.0, **{**arguments, **changes, **sampling}), Peak("none"))
    found = []

    class Again(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(float(model.base_model.weight))
            model.base_model.weight.assign(0.0)

    model.fit(data, steps_per_epoch=n, verbose=0, callbacks=[Again()])
    return np.array(found)


def selected_cdf(w):
    """P[weight <= w | accepted], integrated: the gradient is 0.02, the noise 2 * 0.2 / 4."""
    grid = np.linspace(-0.8, 0.8, 20_001)
    clipped = np.clip((-0.5 * (grid - 0.02) ** 2 + 0.5 * 0.02**2) / 0.002, -1, 1)
    accepted = scipy.stats.norm.cdf((-0.5 - clipped) / (2 * 0.2))
    mass = np.cumsum(scipy.stats.norm.pdf(grid, -0.02, 0.1) * accepted)
    return np.interp(w, grid, mass / mass[-1])


@pytest.mark.slow
def test_the_distribution_of_accepted_updates():
    assert scipy.stats.kstest(accepted_weights(), selected_cdf).pvalue > 1e-4


# The distributions are 0.14 and 0.17 apart; 1,000 draws show 0.07, give or take 0.016.
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"validation_noise_multiplier": 1.2}, {"threshold": 0.5}],
)
def test_another_distribution_is_told_from_it(changes):
    assert scipy.stats.kstest(accepted_weights(**changes), selected_cdf).pvalue < 1e-4


# What an attempt draws.


@with_both
@pytest.mark.quick_cases(1)
def test_every_attempt_draws_new_batches_and_new_noise(front, monkeypatch):
    keys, draw = [], tfdp.data.poisson.PoissonSource.draw

    def recorded(self, key, sampling):
        with step_check.own_operations():  # Python code is refused elsewhere.
            size = sampling.expected_batch_size
            tf.numpy_function(lambda k: keys.append((tuple(k), size)), [key], [])
        return draw(self, key, sampling)

    monkeypatch.setattr(tfdp.data.poisson.PoissonSource, "draw", recorded)
    model = compiled(optimizer(front.tfdp.DPSURSGD, noise_seed=None), diagnostics=True)
    history = model.fit(batches(seed=None), steps_per_epoch=20, verbose=0).history
    attempts = round(20 * history["non_private_attempts"][0])
    assert attempts > 20
    assert len(keys) == len(set(keys)) == 2 * attempts
    assert {size for _, size in keys} == {16, 8}
    assert model.optimizer._noise.count == 2 * attempts  # Also for groups, if any.
    assert model.optimizer._test_noise.count == attempts


@with_one
@pytest.mark.slow
def test_noise_that_is_rolled_back_with_the_rest_is_caught(front, monkeypatch):
    monkeypatch.setattr(SelectiveUpdateMixin, "kept_variables", lambda self: [])
    monkeypatch.setattr(key_streams, "all_variables", lambda: [])
    model = compiled(optimizer(front.tfdp.DPSURSGD, noise_seed=None), diagnostics=True)
    history = model.fit(batches(seed=None), steps_per_epoch=20, verbose=0).history
    attempts = round(20 * history["non_private_attempts"][0])
    assert model.optimizer._noise.count < 2 * attempts


@pytest.mark.slow
def test_the_batches_are_poisson_samples():
    """Who moved its weight was in the batch: each example with probability q, independently."""
    n = 40
    x, y = np.eye(n, dtype="float32"), np.zeros(n, int)
    data = batches(x, y, expected_batch_size=10, seed=None)
    base = tf.keras.Sequential([layers.Dense(2, kernel_initializer="zeros", use_bias=False)])
    model = compiled(
        optimizer(data=data, threshold=ALWAYS, noise_multiplier=0.0, learning_rate=10.0), base
    )
    sizes, together = [], np.zeros([n, n])

    class Look(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = base.layers[0].kernel
            members = np.abs(kernel.numpy()[:, 0]) > 1e-3
            sizes.append(members.sum())
            together[:] += np.outer(members, members)
            kernel.assign(tf.zeros_like(kernel))

    model.fit(data, steps_per_epoch=400, verbose=0, callbacks=[Look()])
    alone = np.diag(together)
    assert scipy.stats.binomtest(int(alone.sum()), 400 * n, 0.25).pvalue > 1e-5
    pairs = (together.sum() - alone.sum()) / 2
    assert abs(pairs / (400 * n * (n - 1) / 2) - 1 / 16) < 0.01
    assert 5.5 < np.var(sizes) < 10  # n q (1 - q) = 7.5


@pytest.mark.quick_cases(1)
@with_both
def test_the_test_sees_no_dropout_and_one_batch(front, monkeypatch):
    """Both losses are of one batch and of the same network: equal weights, equal losses."""
    seen, accepts = [], SelectiveUpdateMixin.accepts
    layers = front.keras.layers

    def spy(self, old, new, mask, position):
        tf.numpy_function(lambda a, b: seen.append((a, b)), [old.rows, new.rows], [])
        return accepts(self, old, new, mask, position)

    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", spy)
    tf.random.set_seed(None)
    base = front.keras.Sequential([layers.Dense(5), layers.Dropout(0.5), layers.Dense(3)])
    model = compiled(optimizer(front.tfdp.DPSURSGD, learning_rate=0.0), base)
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    for old, new in seen:
        np.testing.assert_array_equal(old, new)
    assert not np.array_equal(seen[0][0], seen[1][0])


# The noise of the test.


def acceptance_of_equal_losses(front):
    """P-value of how many attempts are accepted where the update changes nothing."""
    changes = {"learning_rate": 0.0, "threshold": 0.5, "selective_release": "per_attempt"}
    model = compiled(optimizer(front.tfdp.DPSURSGD, noise_seed=None, **changes))
    history = model.fit(batches(seed=None), steps_per_epoch=200, verbose=0).history
    expected = scipy.stats.norm.cdf(0.5 / 2)  # The noise is 2 C_v, the threshold 0.5 C_v.
    return scipy.stats.binomtest(round(200 * history["accepted"][0]), 200, expected).pvalue


@pytest.mark.quick_cases(1)
@with_both
def test_equal_losses_are_accepted_as_often_as_the_noise_says(front):
    assert acceptance_of_equal_losses(front) > 1e-9


@pytest.mark.slow
@with_one
def test_a_test_without_noise_is_caught(front, monkeypatch):
    monkeypatch.setattr(noisy_acceptance, "add_gaussian_noise", lambda sums, *_: sums)
    assert acceptance_of_equal_losses(front) < 1e-9
