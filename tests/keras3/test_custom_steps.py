"""Training steps of the user: those with `scale_loss` and `apply` are private, others refused."""

import inspect
import re
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp
from tests.keras3.support import (
    compiled,
    crossentropy,
    looped_clipped_sum,
    open_batches,
    small_model,
    update_of,
    weights,
)
from tests.support import small_data
from tfdp.keras3 import dp_optimizer

X, Y = small_data(64)


class Custom(keras.Model):
    """A model with a training step that a test gives."""

    def __init__(self, step):
        super().__init__()
        self.dense, self._step = layers.Dense(3), step

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self._step.scale(self.optimizer, loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self._step.apply(self.optimizer, gradients, self.trainable_variables, loss)
        return {"loss": loss}


class Step:
    """The documented custom step; the others differ in one thing."""

    def scale(self, optimizer, loss):
        return optimizer.scale_loss(loss)

    def apply(self, optimizer, gradients, variables, loss):
        optimizer.apply(gradients, variables)


def _with(**methods):
    return type("Step", (Step,), {k: staticmethod(v) for k, v in methods.items()})()


def _apply_the_inner(optimizer, gradients, variables, loss):
    optimizer.build(variables)
    optimizer.inner_optimizer.apply(gradients, variables)


STEPS = {
    "no scale_loss": (_with(scale=lambda o, loss: loss), "without a loss from `scale_loss`"),
    "other gradients": (
        _with(apply=lambda o, g, v, loss: o.apply(tf.gradients(loss, [w.value for w in v]), v)),
        "not those of the loss",
    ),
    "one other gradient": (
        _with(apply=lambda o, g, v, loss: o.apply([v[0] * 1.0, *g[1:]], v)),
        "not those of the loss",
    ),
    "two losses": (
        _with(scale=lambda o, loss: o.scale_loss(o.scale_loss(loss))),
        "once before each `apply`",
    ),
    "applied twice": (
        _with(apply=lambda o, g, v, loss: [o.apply(g, v), o.apply(g, v)]),
        "without a loss from `scale_loss`",
    ),
    "in another function": (
        _with(apply=lambda o, g, v, loss: tf.function(lambda: o.apply(g, v))()),
        "without a loss from `scale_loss`",
    ),
    "a loss without gradients": (
        _with(scale=lambda o, loss: o.scale_loss(tf.stop_gradient(loss))),
        "must hold one value per example",
    ),
    "never applied": (
        _with(scale=lambda o, loss: [o.scale_loss(loss), loss][1], apply=_apply_the_inner),
        "writes a statistic of the batch",
    ),
    "loss added": (
        _with(scale=lambda o, loss: o.scale_loss(loss) + loss),
        "not those of the loss",
    ),
}


def is_refused(name):
    """Returns whether a step raises its own error, and changes nothing."""
    step, message = STEPS[name]
    model = compiled(tfdp.keras3.DPSGD(1.0, 1.0, 64), Custom(step))
    model(X)
    before = weights(model)
    try:
        model.fit(open_batches(X, Y), verbose=0)
    except ValueError as error:
        return bool(re.search(message, str(error))) and np.array_equal(weights(model), before)
    return False


@pytest.mark.parametrize("name", STEPS)
def test_custom_steps_that_would_not_be_private_are_refused(name):
    assert is_refused(name)


def test_a_custom_step_with_scale_loss_is_private():
    model = Custom(Step())
    model(X)
    expected = looped_clipped_sum(model, X, Y, 0.1)
    np.testing.assert_allclose(update_of(model, X, Y), expected, rtol=1e-4, atol=1e-6)


class Critic(keras.Model):
    """A critic whose training step has a gradient penalty for each example."""

    def __init__(self):
        super().__init__()
        self.stack = [layers.Dense(3, activation="tanh"), layers.LayerNormalization()]
        self.stack += [layers.LeakyReLU(), layers.Dense(1)]

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x

    def losses_of(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            scores = self(x, training=True)
        return tf.square(tf.norm(tape.gradient(scores, x), axis=1) - 1.0) + scores[:, 0]

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.losses_of(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.constant(0.0)}


def test_a_gradient_penalty_in_a_custom_step_is_clipped_by_example():
    model = Critic()
    model(X)
    expected = 0.0
    for i in range(9):
        with tf.GradientTape() as tape:
            losses = model.losses_of(tf.constant(X[i : i + 1]))
        gradients = tape.gradient(losses, [v.value for v in model.trainable_variables])
        gradient = np.concatenate([np.ravel(g) for g in gradients])
        expected = expected + gradient / max(1.0, np.linalg.norm(gradient) / 0.1)
    found = update_of(model, X[:9], Y[:9])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert model.optimizer.clipping.report().fast_fraction == 1.0


def test_minimize_needs_no_tape():
    model = small_model()
    expected = weights(model) - looped_clipped_sum(model, X, Y, 1.0) / 64
    optimizer = tfdp.keras3.DPSGD(1.0, 0.0, 64, learning_rate=1.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64)])
    def step(x, y):
        optimizer.minimize(crossentropy()(y, model(x)), model.trainable_variables)

    step(X, Y)
    np.testing.assert_allclose(weights(model), expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_another_model_moves_nothing():
    other = small_model()
    step = _with(scale=lambda o, loss: o.scale_loss(crossentropy()(Y, other(X))))
    model = compiled(tfdp.keras3.DPSGD(1.0, 1.0, 64), Custom(step))
    with pytest.raises(ValueError):
        model.fit(open_batches(X, Y), verbose=0)


def test_apply_needs_variables():
    optimizer, model = tfdp.keras3.DPSGD(1.0, 1.0, 64), small_model()

    @tf.function
    def step(x, y):
        optimizer.scale_loss(crossentropy()(y, model(x)))
        optimizer.apply([None] * 4)

    with pytest.raises(ValueError, match="`trainable_variables` must be given"):
        step(X, Y)


# Mutants: each guard is broken in one place.

MUTANTS = {
    "takes a second loss": ("_keep", "if replicas.index() in scaled", "if False"),
    "does not watch": ("_keep", "step_check.watch(", "bool("),
    "needs no loss": ("apply", "if loss is None", "if False"),
    "keeps the loss": ("apply", ".pop(", ".get("),
    "takes other gradients": ("apply", "if any(", "if False and any("),
    "looks at one gradient": ("apply", "if any(", "if all("),
    "keeps losses for all functions": (
        "_scaled_losses",
        "tf.compat.v1.get_default_graph()",
        "self.inner_optimizer",
    ),
}
CAUGHT_BY = {
    "takes a second loss": "two losses",
    "does not watch": "never applied",
    "needs no loss": "no scale_loss",
    "keeps the loss": "applied twice",
    "takes other gradients": "other gradients",
    "looks at one gradient": "one other gradient",
    "keeps losses for all functions": "in another function",
}


def break_guard(monkeypatch, method, old, new):
    source = textwrap.dedent(inspect.getsource(getattr(tfdp.keras3.DPOptimizer, method)))
    assert source.count(old) == 1
    defined: dict = {}
    exec(source.replace(old, new), vars(dp_optimizer), defined)
    monkeypatch.setattr(tfdp.keras3.DPOptimizer, method, defined[method])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_broken_guards_are_caught(name, monkeypatch):
    assert is_refused(CAUGHT_BY[name])
    break_guard(monkeypatch, *MUTANTS[name])
    assert not is_refused(CAUGHT_BY[name])


def test_a_scaled_loss_with_gradients_is_caught(monkeypatch):
    model = Custom(Step())
    model(X)
    break_guard(monkeypatch, "scale_loss", "tf.stop_gradient(loss)", "loss")
    with pytest.raises(ValueError, match="not those of the loss"):
        update_of(model, X, Y)
