import pytest
import tensorflow as tf

from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.vectorized import faulty_products


@pytest.fixture(autouse=True)
def with_onednn(monkeypatch):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)


def operations(x, y, **kwargs):
    """The graph of a product of placeholders of those shapes."""

    def run(x, y):
        return tf.matmul(x, y, **kwargs)

    specs = [tf.TensorSpec(shape) for shape in (x, y)]
    return tf.function(run, input_signature=specs).get_concrete_function().graph.get_operations()


# Those were found to be wrong, or to crash.
REFUSED = [
    ([None, 1, 4, 3], [3, 3]),
    ([5, 1, 4, 3], [1, 3, 3]),
    ([None, 1, 4, 3], [1, 1, 3, 3]),
    ([None, None, 4, 3], [3, 3]),
    (None, [3, 3]),
]
RIGHT = [
    ([None, 3], [3, 3]),
    ([None, 4, 3], [3, 3]),
    ([None, 2, 4, 3], [3, 3]),
    ([3, 3], [None, 1, 3, 4]),
    ([None, 1, 4, 3], [None, 1, 3, 4]),
    ([None, 8, 4, 3], [None, 8, 3, 4]),
    ([None, None, 4, 3], [None, None, 3, 4]),
    ([1, 1, 4, 3], [3, 3]),
]


@pytest.mark.parametrize(("x", "y"), REFUSED)
def test_refused(x, y):
    with pytest.raises(ValueError, match=r"oneDNN computes wrongly.*Received .*Write it with"):
        faulty_products.check(operations(x, y))


@pytest.mark.parametrize(("x", "y"), RIGHT)
def test_accepted(x, y):
    faulty_products.check(operations(x, y))


def test_accepted_where_onednn_is_off(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    faulty_products.check(operations(*REFUSED[0]))


W = tf.Variable(tf.ones([3, 3]))


def in_branch(x):
    return tf.cond(tf.shape(x)[0] > 2, lambda: x @ W, lambda: x)


def in_loop(x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x @ W), [0, x])[1]


FORWARD = {
    "plain": lambda x: x @ W,
    "nested": tf.function(lambda x: x @ W),
    "branch": in_branch,
    "loop": in_loop,
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("make", [OnePassEngine, VectorizedEngine])
def test_engines_refuse_the_users_own(make, name):
    @tf.function(input_signature=[tf.TensorSpec([None, 1, 4, 3])])
    def run(x):
        losses = tf.reduce_sum(FORWARD[name](x), [1, 2, 3])
        return make(1.0).clipped_sum(losses, [W], tf.constant([1, 2], tf.int64)).gradients

    with pytest.raises(ValueError, match="oneDNN computes wrongly"):
        run.get_concrete_function()
