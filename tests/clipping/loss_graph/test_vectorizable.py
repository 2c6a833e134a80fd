import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping.loss_graph import vectorizable

RNG = np.random.default_rng(0)
X = tf.constant(RNG.normal(size=(1, 11, 9, 2)), tf.float32)
KERNEL = tf.constant(RNG.normal(size=(3, 4, 2, 5)), tf.float32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"strides": 1, "padding": "VALID"},
        {"strides": [2, 3], "padding": "SAME"},
        {"strides": 1, "padding": "SAME", "dilations": [2, 1]},
        {"strides": 2, "padding": [[0, 0], [1, 2], [0, 3], [0, 0]]},
    ],
)
def test_convolution(options):
    @tf.function
    def gradients(x, kernel):
        y = tf.nn.conv2d(x, kernel, **options)
        upstream = tf.sin(tf.range(tf.size(y), dtype=tf.float32))
        upstream = tf.reshape(upstream, tf.shape(y))
        ours = vectorizable.gradient_of(y.op)(y.op, upstream)
        return ours, tf.gradients(y, [x, kernel], upstream)

    ours, theirs = gradients(X, KERNEL)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_operations_that_are_left_to_tensorflow():
    @tf.function
    def trace(x, big, grouped, matrix):
        assert vectorizable.gradient_of(tf.nn.conv2d(x, big, 1, "SAME").op) is None
        assert vectorizable.gradient_of(tf.nn.conv2d(x, grouped, 1, "SAME").op) is None
        assert vectorizable.gradient_of((x[0, 0] @ matrix).op) is None

    trace(X, tf.zeros([20, 20, 2, 4]), tf.zeros([3, 3, 1, 4]), tf.zeros([2, 2]))
