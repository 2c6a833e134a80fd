"""The update of an inner optimizer of Keras 3 is made of noisy gradients and public numbers."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.clipping.private_steps import SPEC
from tests.support import mirrored
from tfdp.clipping import step_check
from tfdp.clipping.loss_graph import data_flow

optimizers = keras.optimizers
UPDATE = "The update must be made of the noisy gradient, public numbers, and variables"


class Rate(optimizers.schedules.LearningRateSchedule):
    def __init__(self, read):
        self.read = read

    def __call__(self, step):
        return 0.1 / (1.0 + self.read())


class LossAware(optimizers.SGD):
    def __init__(self, read, **kwargs):
        super().__init__(**kwargs)
        self.read = read

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.read(), variable, learning_rate)


class Clipped(optimizers.SGD):
    """Clips by what it reads, in a branch."""

    def __init__(self, read, **kwargs):
        super().__init__(**kwargs)
        self.read = read

    def apply(self, grads, trainable_variables=None):
        most = tf.cond(self.read() > 1.0, lambda: 0.1, lambda: 0.2)
        grads = [tf.clip_by_norm(g, most) for g in grads]
        super().apply(grads, trainable_variables)


class Shrink(keras.constraints.Constraint):
    def __init__(self, read):
        self.read = read

    def __call__(self, w):
        return w / (1.0 + self.read())


class Step:
    """A private step of Keras 3; what `read` returns of it gets into the update."""

    def __init__(self, read, make, constrained=False, **kwargs):
        self.tracker = keras.metrics.Mean(name="tracker")
        self.kept = keras.Variable(0.0, trainable=False, name="kept")
        self.loss = None

        def reading():
            return tf.cast(read(self), tf.float32)

        constraint = Shrink(reading) if constrained else None
        self.layer = keras.layers.Dense(3, name="dense", kernel_constraint=constraint)
        self.layer.build([None, 3])
        self.optimizer = tfdp.keras3.DPOptimizer(
            make(reading),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=1,
            **kwargs,
        )
        self.optimizer.build(self.layer.trainable_variables)

    def __call__(self, x, mask):
        rows = tf.reduce_sum(tf.square(self.layer(x)), axis=-1) * tf.cast(mask, tf.float32)
        self.loss = tf.reduce_sum(rows)
        self.tracker.update_state(self.loss)
        self.optimizer.minimize(self.loss, self.layer.trainable_variables)

    def trace(self, **kwargs):
        tf.function(self, input_signature=SPEC, autograph=False, **kwargs).get_concrete_function()


WAYS = {
    "schedule": (lambda read: optimizers.Adam(Rate(read)), "learning rate `Rate`"),
    "callable": (lambda read: optimizers.SGD(lambda: read()), "learning rate `<lambda>`"),
    "inner optimizer": (lambda read: LossAware(read), "optimizer `LossAware`"),
    "branch": (lambda read: Clipped(read), "optimizer `Clipped`"),
    "constraint": (lambda read: optimizers.SGD(0.1), "constraint `Shrink`"),
    "average": (
        lambda read: optimizers.SGD(Rate(read), use_ema=True, weight_decay=0.1, clipnorm=1.0),
        "learning rate `Rate`",
    ),
}


def step_of(way, read, **kwargs):
    return Step(read, WAYS[way][0], constrained=way == "constraint", **kwargs)


def loss(step):
    return 2.0 * step.loss  # An operation, whose line is known.


def metric(step):
    return step.tracker.result()


def public(step):
    return tf.cast(step.optimizer.iterations.value, tf.float32) + step.kept


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("way", WAYS)
def test_only_public_numbers_get_into_the_update(way):
    for read, source in ((loss, "the loss"), (metric, "the metric 'tracker/")):
        with pytest.raises(ValueError, match=UPDATE) as caught:
            step_of(way, read).trace()
        assert f"the {WAYS[way][1]}, made at {__file__}:" in str(caught.value)
        assert f"which reads {source}" in str(caught.value)
    step_of(way, public).trace()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_also_in_parts_and_compiled(way):
    for kwargs, compiled in (({"gradient_accumulation_steps": 2}, {}), ({}, {"jit_compile": True})):
        with pytest.raises(ValueError, match=UPDATE):
            step_of(way, metric, **kwargs).trace(**compiled)
        step_of(way, public, **kwargs).trace(**compiled)


def on_replicas(way, read):
    strategy = mirrored(2)
    with strategy.scope():
        step = step_of(way, read)
    tf.function(
        lambda x, mask: strategy.run(step, (x, mask)), input_signature=SPEC, autograph=False
    ).get_concrete_function()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("way", ["schedule", "constraint", "inner optimizer"])
def test_also_on_replicas(way):
    with pytest.raises(ValueError, match=UPDATE):
        on_replicas(way, metric)
    with pytest.raises(ValueError, match=UPDATE):
        on_replicas(way, loss)
    on_replicas(way, public)


INNER = {
    name: getattr(optimizers, name)
    for name in dir(optimizers)
    if isinstance(getattr(optimizers, name), type)
    and name not in {"LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap"}
}


def of_several(read):
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.1), {".*bias": optimizers.SGD(Rate(read))})
    )


def test_an_optimizer_of_several_is_checked_alike():
    Step(public, of_several).trace()
    with pytest.raises(ValueError, match=UPDATE) as caught:
        Step(metric, of_several).trace()
    assert f"the learning rate `Rate`, made at {__file__}:" in str(caught.value)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", INNER)
def test_optimizers_of_keras_are_accepted(name):
    schedule = optimizers.schedules.CosineDecay(0.1, 10)
    for kwargs in (
        {"learning_rate": schedule, "weight_decay": 0.1, "global_clipnorm": 1.0},
        {"use_ema": True, "ema_overwrite_frequency": 2, "clipvalue": 1.0},
    ):
        kwargs = {"learning_rate": 0.1, **kwargs}
        Step(public, lambda read, kwargs=kwargs: INNER[name](**kwargs)).trace()


def refuses(way, read):
    try:
        step_of(way, read).trace()
    except ValueError as error:
        assert UPDATE in str(error)
        return True
    return False


def test_an_update_that_is_not_looked_at_is_caught(monkeypatch):
    """Mutants: writes are not checked; metrics are public."""
    assert refuses("inner optimizer", loss)
    assert refuses("constraint", metric)
    with monkeypatch.context() as patch:
        patch.setattr(step_check, "_check_write", lambda *_: None)
        assert not refuses("inner optimizer", loss)
    monkeypatch.setattr(data_flow.Flow, "_held_by", lambda self, handle: 0)
    assert not refuses("constraint", metric)
