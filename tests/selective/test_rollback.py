"""Random streams by which an accepted update would tell how many were rejected."""

import pytest
import tensorflow as tf

from tfdp.training.selective.rollback import check_randomness

layers = tf.keras.layers


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
