import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping.shared_tensors import constant, reshaped, shared


def test_equal_constants_are_one_operation():
    graph = tf.Graph()
    with graph.as_default():
        assert constant([1, 2]) is constant((1, 2)) is constant(np.array([1, 2]))
        different = [constant([1, 2]), constant([2, 1]), constant([[1, 2]]), constant([1])]
        different += [constant(1), constant(1, tf.float32), constant(1, tf.int64)]
    assert len({t.name for t in different}) == len(different)
    with tf.Graph().as_default():
        assert constant([1, 2]).graph is not graph


def test_constants_wait_for_nothing():
    """Tests that they wait for nothing: other users may have to run first."""
    with tf.Graph().as_default(), tf.control_dependencies([tf.no_op()]):
        assert not constant(7).op.control_inputs


def test_what_is_shared_does_not_keep_the_graph_alive():
    graph = tf.Graph()
    with graph.as_default():
        shared("key", lambda: tf.zeros([3]) + constant(1.0, tf.float32))
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


CASES = {
    "open first size": ([None, 2, 3], [-1, 6]),
    "nothing to do": ([None, 2, 3], [-1, 2, 3]),
    "static": ([4, 3], [2, 6]),
    "scalar": ([1], []),
    "more axes": ([None, 6], [-1, 1, 2, 3]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("expanded", [False, True])
def test_reshaped(name, expanded):
    spec, shape = CASES[name]
    x = np.arange(24.0)[: int(np.prod([s or 4 for s in spec]))].reshape([s or 4 for s in spec])

    @tf.function(input_signature=[tf.TensorSpec(spec, tf.float64)])
    def in_graph(x):
        return reshaped(tf.expand_dims(x, 1) if expanded else x, shape)

    np.testing.assert_array_equal(in_graph(x), x.reshape(shape))
    np.testing.assert_array_equal(reshaped(tf.constant(x), shape), x.reshape(shape))


def test_reshaped_to_a_number_of_rows():
    specs = [tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3, 0]), tf.TensorSpec([None] * 3)]

    @tf.function(input_signature=specs)
    def in_graph(x, empty, unknown):
        n = tf.shape(x)[0]
        several = [reshaped(x, [n, 3, 2]), reshaped(x, [n, -1, 2]), reshaped(empty, [n, 0, 5])]
        return [*several, reshaped(unknown, [n, -1, 2])]

    found = in_graph(tf.zeros([4, 6]), tf.zeros([4, 3, 0]), tf.zeros([4, 2, 3]))
    assert [t.shape.as_list() for t in found] == [[4, 3, 2], [4, 3, 2], [4, 0, 5], [4, 3, 2]]
