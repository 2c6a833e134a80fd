"""The functions of a TwoTermLoss write nothing, and read nothing that was written."""

import numpy as np
import pytest
import tensorflow as tf

from tests.clipping.batch_losses.term_checks import (
    AGGREGATIONS,
    FUNCTIONS,
    KEEPS_A_STATISTIC,
    SIDE_EFFECTS,
    TERMS,
    clipped,
    clipped_in_graph,
    refused,
    same,
    using,
)
from tests.two_term_support import SEED
from tfdp.clipping import (
    OnePassEngine,
)

layers = tf.keras.layers


# Variables and metrics: what they hold of the batch.


def with_function(write):
    return lambda variable, x: tf.function(lambda x: write(variable, x), autograph=False)(x)


def assign(variable, x):
    return variable.assign(tf.reduce_max(x))


def in_a_branch(variable, x):
    """Only the choice of the branch depends on the data."""
    return tf.cond(
        tf.reduce_max(x) > 10, lambda: variable.assign(50.0), lambda: variable.assign(1.0)
    )


def in_a_loop(variable, x):
    return tf.while_loop(
        lambda i: i < tf.cast(tf.reduce_max(x), tf.int32),
        lambda i: (i + 1 + 0 * tf.cast(variable.assign_add(1.0), tf.int32),),
        [0],
    )


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    "write",
    [
        assign,
        lambda variable, x: variable.assign_add(tf.reduce_max(x)),
        with_function(assign),
        with_function(with_function(assign)),
        lambda variable, x: variable.assign(tf.reduce_max(x), read_value=False),
        in_a_branch,
        in_a_loop,
    ],
    ids=["assign", "assign_add", "function", "nested function", "not read", "branch", "loop"],
)
def test_variables_that_the_step_writes_the_data_into(write, term):
    variable = tf.Variable(0.0)

    def changes(model, x, y, mask):
        write(variable, x)
        return using(term, model, lambda: variable)

    refused(KEEPS_A_STATISTIC, changes)


@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize("write", [assign, with_function(assign)], ids=["assign", "function"])
def test_variables_that_a_term_writes_the_data_into(write, term):
    variable = tf.Variable(0.0)

    def changes(model, x, y, mask):
        def writes(x, *rest):
            write(variable, x)
            return getattr(model, term)(x, *rest)

        return {term: writes}

    refused(KEEPS_A_STATISTIC, changes)


@pytest.mark.slow
def test_variables_may_count_steps():
    step = tf.Variable(2.0)

    def changes(model, x, y, mask):
        step.assign_add(1.0)
        return using("batch_wise", model, lambda: step)

    same(changes, lambda model, *_: using("batch_wise", model, lambda: 3.0))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("writer", ["step", "sample_wise"])
def test_metrics_may_not_be_read(writer, called, term):
    metric = tf.keras.metrics.Mean()
    read = tf.function(metric.result) if called else metric.result

    def changes(model, x, y, mask):
        changed = using(term, model, read)
        if writer == "step":
            metric.update_state(x)
            return changed
        sample_wise = changed.get("sample_wise", model.sample_wise)

        def updates(x, y):
            metric.update_state(x)
            return sample_wise(x, y)

        return {**changed, "sample_wise": updates}

    refused("must (use|depend on) no metric, which holds statistics of the", changes)


def test_an_ordinary_loss_may_not_depend_on_a_metric_either():
    metric, engine = tf.keras.metrics.Mean(), OnePassEngine(0.5)

    def step(changes, model, x, y, mask):
        metric.update_state(x)
        losses = metric.total * model.sample_wise(x, y) * tf.cast(mask, tf.float32)
        engine.clipped_sum(losses, model.trainable_variables, tf.constant(SEED, tf.int64))
        return []

    with pytest.raises(ValueError, match="The loss must depend on no metric"):
        clipped(step=step)


def test_variables_that_an_enclosing_function_writes_the_data_into():
    variable = tf.Variable(0.0)

    def step(changes, model, x, y, mask):
        assign(variable, x)
        inner = tf.function(
            lambda x, y, mask: clipped_in_graph(changes, model, x, y, mask), autograph=False
        )
        return inner(x, y, mask)

    def changes(model, x, y, mask):
        return using("sample_wise", model, lambda: variable)

    refused(KEEPS_A_STATISTIC, changes, step=step)


def test_metrics_read_by_the_step_may_not_be_used():
    metric = tf.keras.metrics.Mean()

    def changes(model, x, y, mask):
        metric.update_state(x)
        mean = metric.result()
        return using("sample_wise", model, lambda: mean)

    refused("The loss must depend on no metric", changes)


@pytest.mark.slow
def test_metrics_may_be_written():
    metric = tf.keras.metrics.Mean()

    def changes(model, x, y, mask):
        metric.update_state(x)
        return {}

    same(changes)
    assert metric.result() != 0


# Side effects.


def by_table(x):
    with tf.init_scope():
        table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    table.insert(0, tf.reduce_max(x))
    return lambda x: tf.reshape(table.lookup(0), [])


def by_queue(x):
    with tf.init_scope():
        queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])
    queue.enqueue(tf.reduce_max(x))
    return lambda x: tf.reshape(queue.dequeue(), [])


def by_numpy(x):
    return lambda x: tf.reshape(tf.numpy_function(np.max, [x], tf.float32), [])


def by_numpy_that_claims_no_state(x):
    return lambda x: tf.reshape(tf.numpy_function(np.max, [x], tf.float32, stateful=False), [])


def by_python(x):
    return lambda x: tf.reshape(tf.py_function(tf.reduce_max, [x], tf.float32), [])


def by_print(x):
    def number(x):
        with tf.control_dependencies([tf.print(x)]):
            return tf.constant(1.0)

    return number


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize(
    "make",
    [by_table, by_queue, by_numpy, by_numpy_that_claims_no_state, by_python, by_print],
)
def test_side_effects_are_refused(make, term):
    def changes(model, x, y, mask):
        number = make(x)
        return {term: lambda x, *rest: number(x) * getattr(model, term)(x, *rest)}

    refused(SIDE_EFFECTS, changes)


@pytest.mark.slow
@pytest.mark.parametrize("term", FUNCTIONS)
def test_assertions_are_no_side_effects(term):
    def changes(model, x, y, mask):
        def checked(x, *rest):
            check = tf.debugging.Assert(model.head.kernel[0, 0] < 99, ["too large"])
            with tf.control_dependencies([check]):
                return getattr(model, term)(x, *rest)

        return {term: checked}

    same(changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_dropout_and_random_numbers_inside(aggregation):
    dropout = layers.Dropout(0.5)

    def changes(model, x, y, mask):
        def noisy(x):
            return dropout(x, training=True) + tf.random.normal(tf.shape(x))

        return {
            "sample_wise": lambda x, y: model.sample_wise(noisy(x), y),
            "batch_wise": lambda x, *rest: model.batch_wise(noisy(x), *rest),
            "aggregation": aggregation,
        }

    (noisy, _), (plain, _) = clipped(changes), clipped(lambda *_: {"aggregation": aggregation})
    assert np.all(np.isfinite(noisy)) and np.all(np.abs(noisy - plain) > 1e-4)
