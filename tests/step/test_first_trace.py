"""A private step is not built in a trace that TensorFlow discards, and in every other one."""

import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.step.release_support import X, Y, make, steps_of, train
from tfdp.base.tf import first_trace
from tfdp.keras2 import base
from tfdp.step.private_step import PrivateStep


@pytest.fixture(autouse=True)
def steps_built(monkeypatch):
    """The private steps that were built in a graph."""
    built = []
    take_step = PrivateStep._take_step

    def count(self, *args):
        built.append(self)
        return take_step(self, *args)

    monkeypatch.setattr(PrivateStep, "_take_step", count)
    return built


def sequential(is_built=True):
    shape = {"input_shape": [4]} if is_built else {}
    return tf.keras.Sequential([tf.keras.layers.Dense(3, **shape)])


def changes(model, run):
    """Returns whether a training changes the weights."""
    before = model.trainable_variables[0].numpy()
    run()
    return (model.trainable_variables[0].numpy() != before).all()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("is_built", "metrics", "padding"),
    [
        (False, [], "none"),
        (True, [], "buckets"),
        (True, ["accuracy"], "none"),
        (False, ["accuracy"], "buckets"),
    ],
)
def test_keras_builds_one_step(steps_built, is_built, metrics, padding):
    drawn = tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=16, steps_per_epoch=3, padding=padding
    )
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=drawn.sampling, learning_rate=0.1)
    model = sequential(is_built)
    model.compile(
        optimizer, support.crossentropy(), metrics=metrics, jit_compile=padding == "buckets"
    )
    model.fit(drawn, verbose=0)
    assert len(steps_built) == 1
    assert changes(model, lambda: model.fit(drawn, verbose=0))
    assert steps_of(model) == 6
    assert len(steps_built) == 1


@pytest.mark.slow
def test_of_two_models_one_step_each_is_built(steps_built):
    for _ in range(2):
        model = sequential()
        model.compile(make(), support.crossentropy(), metrics=["accuracy"])
        train(model)
    assert len(steps_built) == 2


class WithoutMetrics(tf.keras.Sequential):
    """Has metrics that its training step does not update, and so does not build."""

    def train_step(self, data):
        x, y = data
        loss = support.crossentropy()(y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables)
        return {}


def test_metrics_that_are_never_built(steps_built):
    model = WithoutMetrics([tf.keras.layers.Dense(3, input_shape=[4])])
    model.compile(make(), support.crossentropy(), metrics=["accuracy"])
    assert changes(model, lambda: train(model))
    assert steps_of(model) == 3


def test_a_trace_that_only_seems_to_be_discarded_is_an_error(monkeypatch):
    """The mutant that does not make TensorFlow discard the trace."""
    monkeypatch.setattr(first_trace, "discard", lambda: True)
    model = WithoutMetrics([tf.keras.layers.Dense(3, input_shape=[4])])
    model.compile(make(), support.crossentropy(), metrics=["accuracy"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="no private step"):
        train(model)


class Loop:
    """A training loop of one's own, whose step creates a variable, before or after `minimize`."""

    def __init__(self, nested=False, initial_value=lambda x: 0.0, after=False):
        drawn = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, padding="full")
        self.model, self.drawn = sequential(), iter(drawn.repeat())
        self.optimizer = tfdp.DPSGD(1.0, 1.0, sampling=drawn.sampling, learning_rate=0.1)
        self.count, self.initial_value, self.after = None, initial_value, after
        inner = tf.function(self.body)
        self.step = tf.function(lambda x, y, mask: inner(x, y, mask)) if nested else inner

    def create(self, x):
        if self.count is None:
            self.count = tf.Variable(self.initial_value(x))

    def body(self, x, y, mask):
        if not self.after:
            self.create(x)
        loss = support.crossentropy()(y, self.model(x), sample_weight=mask)
        self.optimizer.minimize(loss, self.model.trainable_variables)
        self.create(x)
        self.count.assign_add(1.0)

    def run(self, steps=3):
        for _ in range(steps):
            x, y, mask = next(self.drawn)
            self.step(x, y, mask)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("after", "expected"), [(False, 1), (True, 2)])
def test_a_loop_that_creates_a_variable(steps_built, after, expected):
    loop = Loop(after=after)
    assert changes(loop.model, loop.run)
    assert len(steps_built) == expected
    assert loop.count.numpy() == 3
    assert loop.optimizer.ledger.steps == 3


def test_a_function_within_one(steps_built):
    """The inner function alone creates a variable, and alone is traced a second time."""
    loop = Loop(nested=True)
    assert changes(loop.model, loop.run)
    assert len(steps_built) == 1
    assert loop.count.numpy() == 3


def test_initial_values_of_the_batch_are_refused():
    """TensorFlow would put both traces into branches."""
    loop = Loop(initial_value=tf.reduce_sum)
    before = loop.model.get_weights()[0]
    with pytest.raises(ValueError, match="`minimize` must not be called in a branch"):
        loop.run()
    assert (loop.model.get_weights()[0] == before).all()
    assert loop.optimizer.ledger.steps == 0


@pytest.mark.slow
def test_concrete_functions(steps_built):
    loop = Loop()
    x, y, mask = next(loop.drawn)
    step = loop.step.get_concrete_function(x, y, mask)
    assert changes(loop.model, lambda: step(x, y, mask))
    assert len(steps_built) == 1


@pytest.mark.slow
def test_without_a_known_creator_every_step_is_built(steps_built, monkeypatch):
    """Mimics a TensorFlow that names it otherwise."""
    monkeypatch.setattr(first_trace, "_CREATOR", "renamed")
    model = sequential()
    model.compile(make(), support.crossentropy(), metrics=["accuracy"])
    assert changes(model, lambda: train(model))
    assert len(steps_built) == 2
    assert base._metrics_will_be_built() is False


def test_eager_code_is_no_trace():
    assert not first_trace.is_discarded()
    assert not first_trace.discard()
