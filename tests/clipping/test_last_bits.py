"""An example's gradient must not depend on the number of rows, not even in its last bits.

TensorFlow computes the last elements of a tensor by other code than the others, which rounds
otherwise. A loss that compares such numbers turns the last bits into whole gradients.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support

CLIP = 0.5
ROWS = 16


def numbers_that_depend_on_the_rows():
    """An input of the sigmoid, and the larger one of its values among 15 rows and 16."""
    sigmoid = tf.function(tf.sigmoid, input_signature=[tf.TensorSpec([None, 1])])
    for x in np.random.default_rng(0).uniform(0.1, 2, 1000).astype("float32"):
        few, many = (sigmoid(tf.fill([rows, 1], x)).numpy() for rows in (ROWS - 1, ROWS))
        if many.min() > few.min():
            return x, many.min()
    raise AssertionError("all rows are alike")


class Kink(tf.keras.layers.Layer):
    """Has a gradient of 1 where the sigmoid is at least a threshold, of -1 elsewhere."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def build(self, shape):
        self.weight = self.add_weight("weight", [1])

    def call(self, x):
        return tf.where(tf.sigmoid(x) >= self.threshold, self.weight, -self.weight)


def distance_of_neighbours(engine, padded):
    """How far an example moves the clipped sum of equal rows, in clips."""
    value, threshold = numbers_that_depend_on_the_rows()
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), Kink(threshold)])
    engine = tfdp.DPSGD(CLIP, 1.0, ROWS, engine=engine).clipping

    def loss(y, outputs, sample_weight):
        return outputs[:, 0] * tf.cast(sample_weight, tf.float32)

    x, y = np.full([ROWS, 1], value, "float32"), np.zeros([ROWS], "int64")
    run = support.ClippedSum(engine, model, x, loss)
    fewer = run(x, y, np.arange(ROWS) > 0) if padded else run(x[1:], y[1:])
    return float(abs(run(x, y) - fewer)[0]) / CLIP


@pytest.mark.parametrize("engine", ["one_pass", "vectorized"])
def test_an_example_moves_sums_of_as_many_rows_by_one_clip(engine):
    assert 0.99 < distance_of_neighbours(engine, padded=True) <= 1


@pytest.mark.parametrize("engine", ["one_pass", "vectorized"])
def test_with_one_row_more_it_moves_them_by_several(engine):
    """The mutant that `secure_noise` refuses, and docs/noise.md reports."""
    assert distance_of_neighbours(engine, padded=False) > 7
