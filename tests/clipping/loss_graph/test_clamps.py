"""Clamps that have one value are replaced by it, and no others."""

import pytest
import tensorflow as tf

from tfdp.clipping.loss_graph import clamps


def traced(function, *specs):
    """A function after `resolve`, and the types of the operations that its result needs."""
    types = []

    def run(*inputs):
        result = tf.identity(function(*inputs))
        clamps.resolve([result])
        types.extend(op.type for op in clamps.cone([result])[0])
        return result

    return tf.function(run, input_signature=specs, autograph=False).get_concrete_function(), types


INTEGER, NUMBER = tf.TensorSpec([], tf.int32), tf.TensorSpec([])
RESOLVED = {
    "limit": lambda x, n: tf.minimum(5, tf.maximum(5, x)),
    "lower limit": lambda x, n: tf.minimum(3, tf.maximum(5, x)),
    "other order": lambda x, n: tf.minimum(tf.maximum(x, 5), 5),
    "same tensor": lambda x, n: tf.minimum(n, tf.maximum(n, x)),
}
KEPT = {
    "higher limit": (lambda x, n: tf.minimum(7, tf.maximum(5, x)), INTEGER),
    "another tensor": (lambda x, n: tf.minimum(n, tf.maximum(n + 1, x)), INTEGER),
    "minimum of minimum": (lambda x, n: tf.minimum(5, tf.minimum(5, x)), INTEGER),
    "maximum of maximum": (lambda x, n: tf.maximum(5, tf.maximum(5, x)), INTEGER),
    # Not a number stays one.
    "floats": (lambda x, n: tf.minimum(5.0, tf.maximum(5.0, x)), NUMBER),
    # The result is as long as x.
    "vectors": (lambda x, n: tf.minimum(5, tf.maximum(5, x)), tf.TensorSpec([None], tf.int32)),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_one_value(name):
    function = RESOLVED[name]
    resolved, types = traced(function, INTEGER, INTEGER)
    assert "Maximum" not in types
    for x in (-9, 0, 3, 5, 6, 2**31 - 1):
        arguments = tf.constant(x), tf.constant(4)
        assert resolved(*arguments) == function(*arguments)


@pytest.mark.parametrize("name", KEPT)
def test_several_values(name):
    function, spec = KEPT[name]
    _, types = traced(function, spec, INTEGER)
    assert {"Maximum", "Minimum"} & set(types)


def test_a_limit_that_is_not_one_is_caught(monkeypatch):
    """Mutant: the limits are not compared."""
    monkeypatch.setattr(clamps, "_at_most", lambda a, b: True)
    with pytest.raises(AssertionError):
        test_several_values("higher limit")


def test_bins_of_the_largest_category_only_are_counted():
    def count(ids):
        return tf.math.bincount(ids, minlength=3, maxlength=3, axis=-1)

    spec = tf.TensorSpec([None, 2], tf.int32)
    resolved, types = traced(count, spec)
    assert "Max" not in types
    for ids in ([[0, 1]], [[2, 2], [0, 9]], [[0, 0]]):
        assert (resolved(tf.constant(ids)).numpy() == count(tf.constant(ids)).numpy()).all()
    assert resolved(tf.zeros([0, 2], tf.int32)).shape == [0, 3]
