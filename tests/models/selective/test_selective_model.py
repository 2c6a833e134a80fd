"""Attempts, tests and rollbacks, through `fit`."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.selective_support import (
    ALWAYS,
    CLASSES,
    NEVER,
    X,
    Y,
    batches,
    compiled,
    optimizer,
    state,
)
from tfdp._random import key_streams
from tfdp.clipping import step_check

layers = tf.keras.layers


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


def flat(model):
    return support.flat(model.get_weights())


# A rejected attempt leaves no trace.


class Remembers(layers.Layer):
    """Keeps a count and a moving average of a weight, as layers do that are not of the batch."""

    def build(self, shape):
        self.scale = self.add_weight("scale", shape[-1:], initializer="ones")
        self.calls = self.add_weight("calls", [], trainable=False, initializer="zeros")
        self.average = self.add_weight("average", shape[-1:], trainable=False, initializer="ones")

    def call(self, inputs, training=None):
        if training:
            self.calls.assign_add(1.0)
            self.average.assign(0.9 * self.average + 0.1 * self.scale)
        return inputs * self.scale


def with_states():
    tf.keras.backend.experimental.enable_tf_random_generator()
    try:
        tf.keras.utils.set_random_seed(1)
        return tf.keras.Sequential(
            [layers.Input([4]), layers.Dense(5), Remembers(), layers.Dropout(0.5), layers.Dense(3)]
        )
    finally:
        tf.keras.backend.experimental.disable_tf_random_generator()


def generator_state(model):
    return model.base_model.layers[2]._random_generator._generator.state.numpy()


KINDS = {
    "sgd": (tfdp.DPSURSGD, {"momentum": 0.9}),
    "adam": (tfdp.DPSURAdam, {"amsgrad": True}),
    "sign_sgd": (tfdp.DPSURSignSGD, {"momentum": 0.9}),
    "sign_adam": (tfdp.DPSURSignAdam, {}),
    "adaptive": (tfdp.DPSURSGD, {"clipping_rule": "adaptive_quantile"}),
}


def reject(kind, selective_release="conditional", threshold=NEVER):
    """A model before and after attempts that are all rejected, trained a little before."""
    cls, more = KINDS[kind]
    more = {**more, "noise_seed": None, "selective_release": selective_release}
    model = compiled(optimizer(cls, threshold=0.0, **more), with_states())
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    twin = compiled(optimizer(cls, threshold=threshold, **more), model.base_model)
    twin.optimizer.build(twin.trainable_variables)
    for own, other in zip(twin.optimizer.variables(), model.optimizer.variables(), strict=True):
        if "privacy" not in own.name:
            own.assign(other)
    before = {**state(twin), "generator": generator_state(twin)}
    if selective_release == "conditional":
        with pytest.raises(tfdp.models.TooManyAttemptsError, match="max_attempts=3"):
            twin.fit(batches(), steps_per_epoch=1, verbose=0)
    else:
        twin.fit(batches(), steps_per_epoch=3, verbose=0)
    return twin, before, {**state(twin), "generator": generator_state(twin)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_attempt_leaves_no_trace_bit_for_bit(kind):
    model, before, after = reject(kind)
    assert_same(before, after)
    # That it ended is seen, and charged; before came the three steps of the other optimizer.
    assert model.optimizer.released_steps() == (3 + 1, 0)


@pytest.mark.slow
def test_observed_attempts_leave_only_their_count():
    model, before, after = reject("sgd", "per_attempt")
    assert_same(before, after)
    assert model.optimizer.released_steps() == (3 + 3, 0)


@pytest.mark.slow
def test_a_slot_that_keeps_the_rejected_update_is_caught(monkeypatch):
    """Mutant: momentum keeps the rejected update, as in the paper's public code."""
    right = tfdp.DPSURSGD.kept_variables

    def wrong(self):
        return [*right(self), *(v for v in self.variables() if "momentum" in v.name)]

    monkeypatch.setattr(tfdp.DPSURSGD, "kept_variables", wrong)
    _, before, after = reject("sgd")
    with pytest.raises(AssertionError):
        assert_same(before, after)


@pytest.mark.slow
def test_an_accepted_update_stays():
    _, before, after = reject("sgd", "per_attempt", threshold=ALWAYS)
    assert any(np.any(before[name] != after[name]) for name in before)


# What an accepted update is.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cls", CLASSES)
def test_if_all_is_accepted_it_is_the_optimizer_below(cls):
    """On batches of all examples, where the sampling makes no difference."""
    data = batches(expected_batch_size=64)
    arguments = {"noise_multiplier": 0.0, "learning_rate": 0.05}
    ours = compiled(optimizer(cls, data, threshold=ALWAYS, **arguments))
    ours.fit(data, steps_per_epoch=4, verbose=0)
    below = getattr(tfdp, cls.__name__.replace("DPSUR", "DP"))
    plain = support.compiled(below(l2_norm_clip=0.5, **arguments, sampling=data.sampling))
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
    """Where the weight is after one accepted update from zero, many times."""
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
        def on_epoch_end(self, epoch, logs=None):
            found.append(float(model.base_model.weight))
            model.base_model.weight.assign(0.0)

    model.fit(data, epochs=n, steps_per_epoch=1, verbose=0, callbacks=[Again()])
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


def test_every_attempt_draws_new_batches_and_new_noise(monkeypatch):
    keys, draw = [], tfdp.data.poisson.PoissonSource.draw

    def recorded(self, key, sampling):
        with step_check.own_operations():  # Python code is refused elsewhere.
            size = sampling.expected_batch_size
            tf.numpy_function(lambda k: keys.append((tuple(k), size)), [key], [])
        return draw(self, key, sampling)

    monkeypatch.setattr(tfdp.data.poisson.PoissonSource, "draw", recorded)
    model = compiled(optimizer(noise_seed=None), diagnostics=True)
    history = model.fit(batches(seed=None), steps_per_epoch=20, verbose=0).history
    attempts = round(20 * history["non_private_attempts"][0])
    assert attempts > 20
    assert len(keys) == len(set(keys)) == 2 * attempts
    assert {size for _, size in keys} == {16, 8}
    assert model.optimizer._noise.count == 2 * attempts  # Also for groups, if any.
    assert model.optimizer._test_noise.count == attempts


@pytest.mark.slow
def test_noise_that_is_rolled_back_with_the_rest_is_caught(monkeypatch):
    monkeypatch.setattr(tfdp.DPSURSGD, "kept_variables", lambda self: [])
    monkeypatch.setattr(key_streams, "all_variables", lambda: [])
    model = compiled(optimizer(noise_seed=None), diagnostics=True)
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
        def on_epoch_end(self, epoch, logs=None):
            kernel = base.layers[0].kernel
            members = np.abs(kernel.numpy()[:, 0]) > 1e-3
            sizes.append(members.sum())
            together[:] += np.outer(members, members)
            kernel.assign(tf.zeros_like(kernel))

    model.fit(data, epochs=400, steps_per_epoch=1, verbose=0, callbacks=[Look()])
    alone = np.diag(together)
    assert scipy.stats.binomtest(int(alone.sum()), 400 * n, 0.25).pvalue > 1e-5
    pairs = (together.sum() - alone.sum()) / 2
    assert abs(pairs / (400 * n * (n - 1) / 2) - 1 / 16) < 0.01
    assert 5.5 < np.var(sizes) < 10  # n q (1 - q) = 7.5


def test_the_test_sees_no_dropout_and_one_batch(monkeypatch):
    """Both losses are of one batch and of the same network: equal weights, equal losses."""
    seen, accepts = [], tfdp.DPSURSGD.accepts

    def spy(self, old, new, mask, position):
        tf.numpy_function(lambda a, b: seen.append((a, b)), [old.rows, new.rows], [])
        return accepts(self, old, new, mask, position)

    monkeypatch.setattr(tfdp.DPSURSGD, "accepts", spy)
    tf.random.set_seed(None)
    base = tf.keras.Sequential([layers.Dense(5), layers.Dropout(0.5), layers.Dense(3)])
    model = compiled(optimizer(learning_rate=0.0), base)
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    for old, new in seen:
        np.testing.assert_array_equal(old, new)
    assert not np.array_equal(seen[0][0], seen[1][0])


# What is shown.


def test_nothing_tells_how_many_attempts_there_were(capsys):
    seen = []

    class Logs(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs or {}))

    model = compiled(optimizer(), weighted_metrics=["accuracy"])
    history = model.fit(
        batches(), epochs=2, steps_per_epoch=2, validation_data=(X, Y), callbacks=[Logs()]
    )
    assert set(history.history) == {"accepted_updates", "val_loss", "val_accuracy"}
    assert seen == [{"accepted_updates": i} for i in (1, 2, 3, 4)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines if line.startswith("Epoch")] == [
        "Epoch 1/2: 2 accepted updates",
        "Epoch 2/2: 2 accepted updates",
    ]
    assert "ms/step" not in "".join(lines) and "ETA" not in "".join(lines)
    assert model.optimizer.iterations.numpy() == 4


def test_keras_keeps_no_mean_of_private_numbers():
    inputs = layers.Input([4])
    base = tf.keras.Model(inputs, layers.Dense(3)(inputs))
    base.add_metric(tf.reduce_mean(inputs), name="mean")
    model = compiled(optimizer(), base)
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert model.metrics
    for metric in model.metrics:
        for variable in metric.variables:
            assert float(variable) == 0


@pytest.mark.slow
def test_diagnostics_are_named_and_noted():
    model = compiled(optimizer(), diagnostics=True)
    history = model.fit(batches(), epochs=2, steps_per_epoch=5, verbose=0).history
    assert set(history) == {"accepted_updates", "non_private_attempts"}
    assert all(value >= 1 for value in history["non_private_attempts"])
    assert "number of attempts" in tfdp.privacy_statement(model, 1e-3)
    assert "number of attempts" not in tfdp.privacy_statement(compiled(optimizer()), 1e-3)


def test_observed_attempts_are_all_paid_for():
    model = compiled(optimizer(selective_release="per_attempt"))
    history = model.fit(batches(), steps_per_epoch=30, verbose=0).history
    assert 0 < history["accepted"][0] < 1
    assert model.optimizer.iterations.numpy() == round(30 * history["accepted"][0])
    assert model.optimizer.ledger.steps == 30
