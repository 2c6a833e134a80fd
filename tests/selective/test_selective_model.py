"""Attempts, tests and rollbacks, through `fit`."""

import functools

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, with_both
from tests.selective_support import (
    ALWAYS,
    CLASSES,
    CLASSES_OF_BOTH,
    NEVER,
    X,
    Y,
    batches,
    compiled,
    front_of,
    optimizer,
    small_model,
    state,
)
from tfdp._random import key_streams
from tfdp._selective.shadows import Shadows
from tfdp.clipping import step_check
from tfdp.optimizers import selection_test
from tfdp.optimizers.selective import SelectiveUpdateMixin

layers = tf.keras.layers


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


def flat(model):
    return support.flat(model.get_weights())


# A rejected attempt leaves no trace.


def remembers(front):
    """A layer with a count and a moving average of a weight, which are not of the batch."""

    class Remembers(front.keras.layers.Layer):
        def build(self, shape):
            weight = functools.partial(self.add_weight, shape=shape[-1:], initializer="ones")
            self.scale = weight(name="scale")
            self.calls = weight(name="calls", trainable=False)
            self.average = weight(name="average", trainable=False)

        def call(self, inputs, training=None):
            if training:
                self.calls.assign_add(tf.ones_like(self.calls))
                self.average.assign(0.9 * self.average + 0.1 * self.scale)
            return inputs * self.scale

    return Remembers()


def with_states(front):
    """A model whose layers have states, of random generators as well."""
    layers = front.keras.layers
    tf.keras.backend.experimental.enable_tf_random_generator()
    try:
        tf.keras.utils.set_random_seed(1)
        return front.keras.Sequential(
            [
                layers.Input([4]),
                layers.Dense(5),
                remembers(front),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )
    finally:
        tf.keras.backend.experimental.disable_tf_random_generator()


def generator_state(model):
    dropout = model.base_model.layers[2]
    if model._front_end.keras is tf.keras:
        return dropout._random_generator._generator.state.numpy()
    return dropout.seed_generator.state.numpy()


KINDS = {
    "sgd": ("DPSURSGD", {"momentum": 0.9}),
    "adam": ("DPSURAdam", {"amsgrad": True}),
    "sign_sgd": ("DPSURSignSGD", {"momentum": 0.9}),
    "sign_adam": ("DPSURSignAdam", {}),
    "adaptive": ("DPSURSGD", {"clipping_rule": "adaptive_quantile"}),
}


def reject(front, kind, selective_release="conditional", threshold=NEVER):
    """A model before and after attempts that are all rejected, trained a little before."""
    name, more = KINDS[kind]
    cls, data = getattr(front.tfdp, name), batches(padding="full")  # Layers draw by their states.
    more = {**more, "noise_seed": None, "selective_release": selective_release}
    model = compiled(optimizer(cls, data, threshold=0.0, **more), with_states(front))
    model.fit(data, steps_per_epoch=3, verbose=0)
    twin = compiled(optimizer(cls, data, threshold=threshold, **more), model.base_model)
    twin.optimizer.build(twin.trainable_variables)
    states = (one.optimizer._state_variables() for one in (twin, model))
    for own, other in zip(*states, strict=True):
        if "privacy" not in own.name:
            own.assign(other)
    before = {**state(twin), "generator": generator_state(twin)}
    if selective_release == "conditional":
        with pytest.raises(tfdp.models.TooManyAttemptsError, match="max_attempts=3"):
            twin.fit(data, steps_per_epoch=1, verbose=0)
    else:
        twin.fit(data, steps_per_epoch=3, verbose=0)
    return twin, before, {**state(twin), "generator": generator_state(twin)}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@with_both
def test_a_rejected_attempt_leaves_no_trace_bit_for_bit(front, kind):
    model, before, after = reject(front, kind)
    assert_same(before, after)
    # That it ended is seen, and charged; before came the three steps of the other optimizer.
    assert model.optimizer.released_steps() == (3 + 1, 0)


@with_both
@pytest.mark.slow
def test_observed_attempts_leave_only_their_count(front):
    model, before, after = reject(front, "sgd", "per_attempt")
    assert_same(before, after)
    assert model.optimizer.released_steps() == (3 + 3, 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kept", ["momentum", "iter"])
@with_both
def test_a_slot_that_keeps_the_rejected_update_is_caught(front, kept, monkeypatch):
    """Mutant: momentum keeps the rejected update, as in the paper's public code."""
    right = SelectiveUpdateMixin.kept_variables

    def wrong(self):
        return [*right(self), *(v for v in self._state_variables() if kept in v.name)]

    monkeypatch.setattr(SelectiveUpdateMixin, "kept_variables", wrong)
    _, before, after = reject(front, "sgd")
    with pytest.raises(AssertionError):
        assert_same(before, after)


@with_both
@pytest.mark.slow
def test_an_accepted_update_stays(front):
    _, before, after = reject(front, "sgd", "per_attempt", threshold=ALWAYS)
    changed = [name for name in before if np.any(before[name] != after[name])]
    for part in ("momentum", "iter", "calls", "average", "generator"):
        assert any(part in name for name in changed), part


# What an accepted update is.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("cls", CLASSES_OF_BOTH)
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


@with_both
@pytest.mark.quick_cases(2)
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


@with_both
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


# What is shown.


@with_both
def test_nothing_tells_how_many_attempts_there_were(front, capsys):
    seen = []

    class Logs(front.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs or {}))

    model = compiled(optimizer(front.tfdp.DPSURSGD), weighted_metrics=["accuracy"])
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
    assert int(model.optimizer.iterations) == 4


class OwnMetric:
    """Part of a model that has a mean of what it sees."""

    def __init__(self, metric):
        super().__init__()
        self.mean, self.dense = metric, None

    def build(self, shape):
        self.built = True

    def call(self, inputs):
        self.mean.update_state(inputs)
        return self.dense(inputs)


def private_means(front, kind):
    """A model with a metric in it."""
    keras = front.keras
    if kind == "add_metric":
        inputs = keras.layers.Input([4])
        base = keras.Model(inputs, keras.layers.Dense(3)(inputs))
        base.add_metric(tf.reduce_mean(inputs), name="mean")
        return base
    parent = keras.Model if kind == "model" else keras.layers.Layer
    part = type("Part", (OwnMetric, parent), {})(keras.metrics.Mean(name="mean"))
    part.dense = keras.layers.Dense(3)
    return part if kind == "model" else keras.Sequential([part])


KEEPERS = [(FRONT_ENDS[0], "add_metric")]
KEEPERS += [(front, kind) for front in FRONT_ENDS for kind in ("model", "layer")]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("front", "kind"), KEEPERS)
def test_keras_keeps_no_mean_of_private_numbers(front, kind):
    base = private_means(front, kind)
    model = compiled(optimizer(front.tfdp.DPSURSGD), base)
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    means = [layer for layer in [base, *base.layers] if hasattr(layer, "mean")]
    metrics = [*model.metrics, *(layer.mean for layer in means)]
    assert len(metrics) > 1
    for metric in metrics:
        for variable in metric.variables:
            assert float(variable) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("front", "kind"), KEEPERS)
def test_a_mean_that_is_kept_is_caught(front, kind, monkeypatch):
    """Mutant: a commit sets metrics, too."""
    right = Shadows.commit
    monkeypatch.setattr(Shadows, "commit", lambda self, last, without: right(self, last))
    with pytest.raises(AssertionError):
        test_keras_keeps_no_mean_of_private_numbers(front, kind)


@with_both
@pytest.mark.slow
def test_diagnostics_are_named_and_noted(front):
    cls = front.tfdp.DPSURSGD
    model = compiled(optimizer(cls), diagnostics=True)
    history = model.fit(batches(), epochs=2, steps_per_epoch=5, verbose=0).history
    assert set(history) == {"accepted_updates", "non_private_attempts"}
    assert all(value >= 1 for value in history["non_private_attempts"])
    assert "number of attempts" in tfdp.privacy_statement(model, 1e-3)
    assert "number of attempts" not in tfdp.privacy_statement(compiled(optimizer(cls)), 1e-3)


@with_both
def test_observed_attempts_are_all_paid_for(front):
    model = compiled(optimizer(front.tfdp.DPSURSGD, selective_release="per_attempt"))
    history = model.fit(batches(), steps_per_epoch=30, verbose=0).history
    assert 0 < history["accepted"][0] < 1
    assert int(model.optimizer.iterations) == round(30 * history["accepted"][0])
    assert model.optimizer.ledger.steps == 30


@with_both
@pytest.mark.slow
def test_an_attempt_that_is_not_counted_is_caught(front, monkeypatch):
    """Mutant: the count of a rejected attempt is rolled back with the rest."""
    right = SelectiveUpdateMixin.kept_variables

    def wrong(self):
        counters = set(map(id, self._released.counters))
        return [variable for variable in right(self) if id(variable) not in counters]

    monkeypatch.setattr(SelectiveUpdateMixin, "kept_variables", wrong)
    with pytest.raises(AssertionError):
        test_observed_attempts_are_all_paid_for(front)


# The noise of the test.


def acceptance_of_equal_losses(front):
    """P-value of how many attempts are accepted where the update changes nothing."""
    changes = {"learning_rate": 0.0, "threshold": 0.5, "selective_release": "per_attempt"}
    model = compiled(optimizer(front.tfdp.DPSURSGD, noise_seed=None, **changes))
    history = model.fit(batches(seed=None), steps_per_epoch=200, verbose=0).history
    expected = scipy.stats.norm.cdf(0.5 / 2)  # The noise is 2 C_v, the threshold 0.5 C_v.
    return scipy.stats.binomtest(round(200 * history["accepted"][0]), 200, expected).pvalue


@with_both
def test_equal_losses_are_accepted_as_often_as_the_noise_says(front):
    assert acceptance_of_equal_losses(front) > 1e-9


@pytest.mark.quick_cases(1)
@with_both
def test_a_test_without_noise_is_caught(front, monkeypatch):
    monkeypatch.setattr(selection_test, "add_gaussian_noise", lambda sums, *_: sums)
    assert acceptance_of_equal_losses(front) < 1e-9


# Both front ends are one implementation.


def trajectory(front, name, monkeypatch, **changes):
    """Returns each attempt's decision, the weights after each update, and the ledger."""
    decided, weights, right = [], [], SelectiveUpdateMixin.accepts

    def accepts(self, *arguments):
        accepted = right(self, *arguments)
        tf.numpy_function(lambda value: decided.append(bool(value)), [accepted], [])
        return accepted

    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", accepts)
    more = {"momentum": 0.9, "nesterov": True} if name.endswith("SGD") else {}
    more |= {"learning_rate": 0.02, **changes}
    data = batches(padding="full") if more.get("secure_noise") else batches()
    model = compiled(optimizer(getattr(front.tfdp, name), data, **more))

    def note(*_, **__):
        weights.append(flat(model))

    callback = front.keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(data, epochs=2, steps_per_epoch=4, verbose=0, callbacks=[callback])
    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", right)
    return decided, np.array(weights), model.optimizer.ledger.to_dict()


def check_front_ends_agree(name, monkeypatch, **changes):
    (decided, weights, ledger), *others = (
        trajectory(front, name, monkeypatch, **changes) for front in FRONT_ENDS
    )
    assert True in decided and False in decided
    for other in others:
        assert other[0] == decided
        np.testing.assert_allclose(other[1], weights, rtol=1e-4, atol=2e-6)
        assert other[2] == ledger
    assert np.abs(weights[0] - weights[-1]).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [cls.__name__ for cls in CLASSES])
@pytest.mark.parametrize(
    "changes", [{}, {"selective_release": "per_attempt"}, {"secure_noise": True}]
)
def test_keras_2_and_3_accept_the_same_updates(name, changes, monkeypatch):
    """The same weights, data and keys: one sequence of decisions, and the same weights."""
    check_front_ends_agree(name, monkeypatch, **changes)


@pytest.mark.slow
def test_a_front_end_that_differs_is_caught(monkeypatch):
    """Mutant: one of them tests without noise."""
    noise, calls = selection_test.add_gaussian_noise, []

    def only_once(sums, *arguments):
        calls.append(sums)
        return noise(sums, *arguments) if len(calls) == 1 else sums

    monkeypatch.setattr(selection_test, "add_gaussian_noise", only_once)
    with pytest.raises(AssertionError):
        check_front_ends_agree("DPSURSGD", monkeypatch)
