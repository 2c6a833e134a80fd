"""What a rejected attempt leaves behind: nothing."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.models.rollback import Rollback, check_randomness

layers = tf.keras.layers


class Everything:
    """A function that changes a variable in every way that training does."""

    def __init__(self):
        self.weight = tf.Variable([1.0, 2.0])
        self.write_only = tf.Variable(0, dtype=tf.int64)
        self.kept = tf.Variable(0)
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)
        self.generator = tf.random.Generator.from_seed(3)
        self.function = tf.function(self.change).get_concrete_function()

    def change(self):
        noise = self.generator.normal([2]) * self.table.lookup(tf.constant(1))
        self.weight.scatter_nd_update([[0]], [5.0])
        self.weight.assign_add(noise)
        self.write_only.assign_add(1, read_value=False)
        self.kept.assign_add(1)

    def state(self):
        return [self.weight.numpy(), self.write_only.numpy(), self.generator.state.numpy()]


def run(everything, kept, keep, rollback=Rollback):
    @tf.function
    def attempt(keep):
        before = rollback(everything.function, kept)
        everything.function()
        tf.cond(keep, lambda: None, before.restore)

    attempt(tf.constant(keep))


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_everything_is_taken_back_but_what_is_kept():
    everything = Everything()
    before = everything.state()
    run(everything, [everything.kept], keep=False)
    assert_same(everything.state(), before)
    assert everything.kept.numpy() == 1


def test_an_update_that_is_kept_stays():
    everything = Everything()
    before = everything.state()
    run(everything, [everything.kept], keep=True)
    for changed, old in zip(everything.state(), before, strict=True):
        assert not np.array_equal(changed, old)


def test_what_is_no_variable_cannot_be_taken_back():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    zero = tf.constant([0], tf.int64)

    @tf.function
    def function():
        table.insert(zero, zero)

    function = function.get_concrete_function()
    with pytest.raises(ValueError, match="no variable, and that cannot be set back"):
        tf.function(lambda: Rollback(function))()


class OnlyWatched(Rollback):
    """Mutant: variables that the function writes without reading them are forgotten."""

    def __init__(self, function, kept):
        super().__init__(function, kept)
        watched = {id(v.handle) for v in function.graph.variables}
        self._values = [(h, value) for h, value in self._values if id(h) in watched]


def test_forgetting_what_is_only_written_is_caught():
    everything = Everything()
    before = everything.state()
    run(everything, [], keep=False, rollback=OnlyWatched)
    with pytest.raises(AssertionError):
        assert_same(everything.state(), before)


def traced(model):
    model.build([None, 4])
    return tf.function(lambda x: model(x, training=True)).get_concrete_function(
        tf.TensorSpec([None, 4])
    )


@pytest.mark.parametrize("fixed", ["layer", "global"])
def test_streams_of_a_fixed_seed_are_refused(fixed):
    if fixed == "global":
        tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dropout(0.5, seed=3 if fixed == "layer" else None)])
    with pytest.raises(ValueError, match="enable_tf_random_generator"):
        check_randomness(traced(model))


def test_streams_within_functions_are_found():
    tf.random.set_seed(None)
    inner = tf.function(lambda x: x + tf.random.uniform([4], seed=5))
    function = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec([None, 4]))
    with pytest.raises(ValueError, match="fixed seed"):
        check_randomness(function)


def test_streams_that_nobody_knows_are_accepted():
    tf.random.set_seed(None)
    check_randomness(traced(tf.keras.Sequential([layers.Dropout(0.5)])))
