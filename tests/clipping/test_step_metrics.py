"""Metrics may be written in a training step, but nothing may read them."""

import numpy as np
import pytest
import tensorflow as tf

from tests.clipping.private_steps import NO_METRIC, Training, assert_leaks, refused, update
from tfdp.clipping.loss_graph import data_flow

metrics = tf.keras.metrics


def gathered(metric, x, mask):
    return tf.gather(metric.total[tf.newaxis], tf.cast(x[:, 0], tf.int32) - 1)


def in_function(metric, x, mask):
    return tf.function(lambda: metric.total.read_value())()


def raw(metric, x, mask):
    return tf.raw_ops.ReadVariableOp(resource=metric.total.handle, dtype=tf.float32)


def in_loop(metric, x, mask):
    return tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, metric.result()), [0, 0.0])[1]


def as_branch(metric, x, mask):
    return tf.cond(metric.result() > 8.5, lambda: 9.5, lambda: 7.5)


READS = [gathered, in_function, raw, in_loop, as_branch]


def factor_of(read):
    metric = metrics.Sum()

    def factor(x, mask):
        metric.update_state(tf.cast(mask, tf.float32))
        return read(metric, x, mask) - 8.5

    return factor


@pytest.mark.parametrize("read", READS)
def test_no_loss_may_depend_on_a_metric(read):
    refused(NO_METRIC, lambda: (Training(factor_of(read)), None))


def test_no_public_addend_may_depend_on_a_metric():
    training, metric = Training(), metrics.Sum()

    def call(x, mask):
        metric.update_state(x)
        losses = tf.linalg.matvec(x, training.weights) * tf.cast(mask, tf.float32)
        decay = metric.result() * tf.reduce_sum(training.weights**2)
        training.optimizer.minimize(
            tf.reduce_sum(losses) + decay, [training.weights], tape=tf.GradientTape()
        )

    refused(NO_METRIC, lambda: (training, call))


def test_no_gradient_may_depend_on_a_metric():
    metric = metrics.Sum()

    @tf.custom_gradient
    def scaled(losses):
        return tf.identity(losses), lambda gradient: gradient * metric.result()

    training = Training()

    def call(x, mask):
        metric.update_state(x)
        losses = scaled(tf.linalg.matvec(x, training.weights)) * tf.cast(mask, tf.float32)
        training.optimizer.minimize(losses, [training.weights], tape=tf.GradientTape())

    refused(NO_METRIC, lambda: (training, call))


def test_metrics_may_be_written_and_shown():
    training, metric = Training(), metrics.Mean()

    def call(x, mask):
        training.step(x, mask)
        metric.update_state(x)
        return metric.result()

    assert np.any(update(training, call)) and metric.result() == 1


@pytest.mark.slow
def test_reads_of_metrics_that_are_not_noticed_are_caught(monkeypatch):
    monkeypatch.setattr(data_flow, "READS", frozenset())
    assert_leaks(lambda: (Training(factor_of(gathered), "vectorized"), None))


def test_reads_in_functions_that_are_not_noticed_are_caught(monkeypatch):
    def blind(self, op, name, inputs, control):
        return [data_flow.Value()] * len(op.outputs)

    monkeypatch.setattr(data_flow.Flow, "_call", blind)
    assert_leaks(lambda: (Training(factor_of(in_function)), None))
