import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients.depthwise import Window

PADS = {"none": [(0, 0), (0, 0)], "some": [(1, 0), (2, 1)]}


def case(kernel, stride, multiplier, pads, each=2, n=3, channels=4):
    """A window, and inputs and output gradients of n examples of `each` images."""
    rng = np.random.default_rng(0)
    height, width = (
        (size + sum(pad) - k) // stride + 1
        for size, pad, k in zip((9, 10), pads, kernel, strict=True)
    )
    window = Window([*kernel, channels, multiplier], [stride, stride], [1, 1], pads)
    x = rng.normal(size=[n, each, 9, 10, channels])
    g = rng.normal(size=[n, each, height, width, channels * multiplier])
    return window, tf.constant(x), tf.constant(g)


def expected(window, x, g):
    """TensorFlow's gradient, example by example."""
    explicit = [0, 0, *window.pads[0], *window.pads[1], 0, 0]
    gradients = [
        tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=x[i],
            filter_sizes=window.kernel,
            out_backprop=g[i],
            strides=[1, *window.strides, 1],
            padding="EXPLICIT",
            explicit_paddings=explicit,
        )
        for i in range(len(x))
    ]
    return np.reshape(gradients, [len(x), -1])


@pytest.mark.parametrize("kernel", [[1, 1], [3, 3], [5, 4]], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("pads", PADS)
def test_gradients_are_tensorflows_example_by_example(kernel, stride, multiplier, pads):
    window, x, g = case(kernel, stride, multiplier, PADS[pads])
    for function in (window.gradients, window._folded, window._by_pixel):
        np.testing.assert_allclose(function(x, g), expected(window, x, g), atol=1e-10)


@pytest.mark.parametrize("function", ["_folded", "_by_pixel"])
def test_no_examples(function):
    window, x, g = case([3, 3], 1, 1, PADS["none"])
    run = tf.function(
        getattr(window, function),
        autograph=False,
        input_signature=[tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, g)],
    )
    assert run(x[:0], g[:0]).shape == [0, 36]


@pytest.mark.parametrize("function", ["_folded", "_by_pixel"])
def test_no_example_moves_another(function):
    window, x, g = case([3, 3], 1, 2, PADS["some"])
    before = getattr(window, function)(x, g).numpy()
    x = tf.concat([x[:1], x[1:2] * np.nan, x[2:]], 0)
    after = getattr(window, function)(x, g).numpy()
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert np.isnan(after[1]).all()
