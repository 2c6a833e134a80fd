"""The update is made of noisy gradients and public numbers; all else in it is refused."""

import contextlib
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.clipping.private_steps import CLIP, SPEC
from tfdp.clipping import step_check, update_error
from tfdp.clipping.loss_graph import data_flow, own_operations

schedules = tf.keras.optimizers.schedules
UPDATE = "The update must be made of the noisy gradient, public numbers, and variables"
SIDE_EFFECTS = "must have no side effects"


class Step:
    """A private step; what `read` returns of it gets into the update by the way of a case.

    Args:
      read: Gets this object, whose `loss`, `x`, `metric` and `iterator` it may read.
      way: Makes the optimizer of the arguments of a class, and of a function that returns what
        `read` does.
      **kwargs: Arguments of the optimizer.
    """

    def __init__(self, read, way, **kwargs):
        self.metric = tf.keras.metrics.Mean(name="tracker")
        self.kept = tf.Variable(0.0, trainable=False, name="kept")
        self.iterator = iter(tf.data.Dataset.range(9))
        self.loss = self.x = None
        self.weights = tf.Variable(tf.ones([3]), name="weights")
        arguments = {"l2_norm_clip": CLIP, "noise_multiplier": 1.0, "expected_batch_size": 1}
        self.optimizer = way(self, lambda: tf.cast(read(self), tf.float32), {**arguments, **kwargs})

    def __call__(self, x, mask):
        self.x = x
        self.loss = tf.square(tf.linalg.matvec(x, self.weights) - 1.0) * tf.cast(mask, tf.float32)
        self.metric.update_state(self.loss)
        self.optimizer.minimize(self.loss, [self.weights])

    def trace(self):
        tf.function(self, input_signature=SPEC, autograph=False).get_concrete_function()


# Ways into the update.


class Rate(schedules.LearningRateSchedule):
    def __init__(self, read):
        self.read = read

    def __call__(self, step):
        return 0.1 / (1.0 + self.read())


def schedule(step, read, arguments):
    return tfdp.DPAdam(learning_rate=Rate(read), **arguments)


def callable_rate(step, read, arguments):
    return tfdp.DPSGD(learning_rate=lambda: read(), **arguments)


def decay(step, read, arguments):
    return tfdp.DPSGD(learning_rate=Rate(read), weight_decay=0.1, **arguments)


def constraint(step, read, arguments):
    class Shrink(tf.keras.constraints.Constraint):
        def __call__(self, w):
            return w / (1.0 + read())

    step.weights = tf.Variable(tf.ones([3]), name="weights", constraint=Shrink())
    return tfdp.DPSGD(**arguments)


def transformed(step, read, arguments):
    class Scaled(tfdp.DPSGD):
        def _transform_private_gradient(self, gradient):
            return gradient * read()

    return Scaled(**arguments)


def condition(step, read, arguments):
    def rate():
        return tf.cond(read() > 1.0, lambda: tf.constant(0.1), lambda: tf.constant(0.2))

    return tfdp.DPSGD(learning_rate=rate, **arguments)


def loop(step, read, arguments):
    def rate():
        return tf.while_loop(lambda r: r < read(), lambda r: [r + 1.0], [tf.constant(0.1)])[0]

    return tfdp.DPSGD(learning_rate=rate, **arguments)


def nested_function(step, read, arguments):
    return tfdp.DPSGD(learning_rate=tf.function(read), **arguments)


def written_elsewhere(step, read, arguments):
    """The constraint changes no weights, but keeps what it reads."""

    def keep(w):
        step.kept.assign(read())
        return w

    step.weights = tf.Variable(tf.ones([3]), name="weights", constraint=keep)
    return tfdp.DPSGD(**arguments)


def written_in_a_branch(step, read, arguments):
    """What is written is public; whether it is written is not."""

    def keep(w):
        tf.cond(read() > 1.0, lambda: step.kept.assign(1.0), lambda: step.kept)
        return w

    step.weights = tf.Variable(tf.ones([3]), name="weights", constraint=keep)
    return tfdp.DPSGD(**arguments)


WAYS = {
    schedule: "learning rate `Rate`",
    callable_rate: "learning rate `<lambda>`",
    decay: "learning rate `Rate`",
    constraint: "constraint `Shrink`",
    transformed: "optimizer `Scaled`",
    condition: "learning rate `rate`",
    loop: "learning rate `rate`",
    written_elsewhere: "constraint `keep`",
    written_in_a_branch: "constraint `keep`",
}

# What must not get there, and how messages call it.


def loss(step):
    return tf.reduce_mean(step.loss)


def metric(step):
    return step.metric.result()


def rows(step):
    return tf.shape(step.x)[0]


def sums(step):
    """Sums without noise, which the optimizer keeps for the next part of a logical batch."""
    return tf.reduce_sum(next(iter(step.optimizer._accumulators.values())).sums[0])


def secret(step):
    return step.optimizer._noise.secret()[0]


def iterator(step):
    return next(step.iterator)


PRIVATE = {
    loss: "the loss",
    metric: "the metric '",
    rows: "the number of rows of the batch",
    sums: "the variable of tfdp '",
    secret: "the variable of tfdp 'secret_key",
    iterator: "what depends on the batch",
}


def assert_refused(read, way, words, source, **kwargs):
    with pytest.raises(ValueError, match=UPDATE) as caught:
        Step(read, way, **kwargs).trace()
    assert f"the {words}, made at {__file__}:" in str(caught.value), way.__name__
    assert f"which reads {source}" in str(caught.value), read.__name__


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_and_a_metric_must_not_get_into_the_update(way):
    assert_refused(loss, way, WAYS[way], "the loss")
    assert_refused(metric, way, WAYS[way], "the metric '")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("read", [rows, sums, secret])
def test_other_private_values_must_not_get_into_it(read):
    steps = 2 if read is sums else None
    assert_refused(read, schedule, WAYS[schedule], PRIVATE[read], gradient_accumulation_steps=steps)


def test_a_data_set_that_it_reads_is_refused():
    with pytest.raises(ValueError, match=UPDATE):
        Step(iterator, callable_rate).trace()


def test_a_nested_function_is_looked_into():
    with pytest.raises(ValueError, match=UPDATE):
        Step(metric, nested_function).trace()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("way", [callable_rate, constraint, written_in_a_branch])
def test_parts_of_a_logical_batch_are_checked_alike(way):
    assert_refused(metric, way, WAYS[way], "the metric '", gradient_accumulation_steps=2)


def test_a_shape_that_a_metric_decides_is_refused():
    def shaped(step):
        return tf.size(tf.zeros([tf.cast(step.metric.result(), tf.int32) % 7]))

    assert_refused(shaped, callable_rate, WAYS[callable_rate], "the metric '")


def test_what_a_loss_was_before_the_step_is_named():
    def smuggled(step):
        return tf.stop_gradient(step.loss)[0]

    assert_refused(smuggled, callable_rate, WAYS[callable_rate], "the loss")


def prints(step):
    tf.print(step.loss)
    return 1.0


def calls_python(step):
    return tf.numpy_function(np.mean, [step.loss], tf.float32)


@pytest.mark.parametrize("read", [prints, calls_python])
@pytest.mark.parametrize("way", [schedule, written_elsewhere])
@pytest.mark.quick_cases(1)
def test_side_effects_of_the_update_are_refused(read, way):
    with pytest.raises(ValueError, match=SIDE_EFFECTS):
        Step(read, way).trace()


# What is public.


def iterations(step):
    return step.optimizer.iterations


def a_constant(step):
    return 3.0


def a_variable_that_nobody_writes(step):
    return step.kept


def random(step):
    return tf.random.uniform([], seed=1)


def weights(step):
    return tf.reduce_sum(tf.square(step.weights))


def static_rows(step):
    return tf.shape(step.weights)[0]


PUBLIC = [iterations, a_constant, a_variable_that_nobody_writes, random, weights, static_rows]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("read", PUBLIC)
def test_public_numbers_may_get_into_the_update(read):
    for way in [*WAYS, nested_function]:
        Step(read, way).trace()
    Step(read, schedule, gradient_accumulation_steps=2).trace()


def test_the_noisy_gradient_may_be_kept():
    class Keeps(tfdp.DPSGD):
        def _transform_private_gradient(self, gradient):
            step.kept.assign(tf.norm(gradient))
            return gradient / tf.norm(gradient)

    for steps in (None, 2):
        arguments = {"gradient_accumulation_steps": steps}
        step = Step(loss, lambda step, read, kwargs: Keeps(**kwargs), **arguments)
        step.trace()


def test_metrics_may_keep_what_they_want():
    def keep(step, read, arguments):
        def update(w):
            step.metric.update_state(read())
            return w

        step.weights = tf.Variable(tf.ones([3]), name="weights", constraint=update)
        return tfdp.DPSGD(**arguments)

    Step(loss, keep).trace()


# Names in messages.


class Called:
    def __call__(self):
        return 1.0


@pytest.mark.parametrize("function", [Called(), Called().__call__, functools.partial(Called())])
def test_code_is_found(function):
    ((words, found),) = update_error.described("learning_rate", function)
    assert words.startswith("the learning rate `")
    codes = list(update_error._codes(found))
    assert codes == [Called.__call__.__code__]


def test_what_is_not_called_has_no_name():
    assert not list(update_error.described("learning_rate", 0.1))


# Mutants.


def refuses(read=metric, way=schedule, **kwargs):
    try:
        Step(read, way, **kwargs).trace()
    except ValueError as error:
        assert re.search(UPDATE, str(error))
        return True
    return False


def test_an_update_that_counts_as_own_is_caught(monkeypatch):
    assert refuses()
    monkeypatch.setattr(step_check, "update_operations", lambda optimizer: contextlib.nullcontext())
    assert not refuses()


def test_metrics_that_count_as_public_are_caught(monkeypatch):
    assert refuses(metric)
    monkeypatch.setattr(data_flow.Flow, "_held_by", lambda self, handle: 0)
    assert not refuses(metric)


def test_conditions_that_do_not_count_are_caught(monkeypatch):
    assert refuses(metric, written_in_a_branch)
    check = step_check._check_write
    monkeypatch.setattr(
        step_check,
        "_check_write",
        lambda flow, op, inputs, control, rows: check(flow, op, inputs, 0, rows),
    )
    assert not refuses(metric, written_in_a_branch)


def test_a_mark_on_sums_without_noise_is_caught(monkeypatch):
    """Were the loss marked as released, it could get anywhere."""
    assert refuses(loss)
    mark = own_operations.mark_released
    steps = []

    def marks_all(tensors):
        mark([*tensors, steps[-1].loss])

    original = Step.__call__

    def call(self, x, mask):
        steps.append(self)
        original(self, x, mask)

    monkeypatch.setattr(Step, "__call__", call)
    monkeypatch.setattr(step_check, "mark_released", marks_all)
    assert not refuses(loss)


@pytest.mark.slow
def test_a_branch_that_counts_as_own_is_caught(monkeypatch):
    arguments = {"gradient_accumulation_steps": 2}
    assert refuses(metric, constraint, **arguments)
    monkeypatch.setattr("tfdp.step.replicas.pause_own_operations", contextlib.nullcontext)
    assert not refuses(metric, constraint, **arguments)
