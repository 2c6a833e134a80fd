"""Small private steps, and whether they are refused."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support

layers = tf.keras.layers

CLIP = 0.01
X = np.ones([9, 3], "float32")
ALL = np.ones(9, bool)
BUT_ONE = np.arange(9) > 0
SPEC = [tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.bool)]

SIDE_EFFECTS = "must have no side effects"
STATISTIC = "writes a statistic of the batch into its variable '{}'"
NO_METRIC = "The loss must depend on no metric"
SCALAR = "Data must have a first dimension, the example. Received a loss that depends on the scalar"
NOT_IN_A_BRANCH = "must not be called in a branch"
MIXED_OUTSIDE = "must be called in the function that gets the batch"


def none(_):
    return 0


class Training:
    """A private step without noise, whose loss has a factor for each row, or for all."""

    def __init__(self, factor=lambda x, mask: 1.0, engine="one_pass"):
        self.weights = tf.Variable(tf.zeros([3]), name="weights")
        self.optimizer = tfdp.DPSGD(CLIP, 0.0, 1, learning_rate=1.0, engine=engine)
        self.factor = factor

    def step(self, x, mask, factor=None):
        factor = self.factor(x, mask) if factor is None else factor
        with tf.GradientTape() as tape:
            losses = tf.square(tf.linalg.matvec(x, self.weights) - 1.0) * factor
            losses = losses * tf.cast(mask, tf.float32)
        self.optimizer.minimize(losses, [self.weights], tape=tape)


def update(training, call=None, mask=ALL, jit_compile=None):
    """What the weights are after one step."""
    call = call or training.step
    tf.function(call, input_signature=SPEC, autograph=False, jit_compile=jit_compile)(X, mask)
    return training.weights.numpy()


def movement(make):
    """How far one example moves the clipped sum. `make` returns a training and what to call."""
    updates = [update(*make(), mask=mask) for mask in (ALL, BUT_ONE)]
    return np.linalg.norm(updates[0] - updates[1])


def side(mask):
    """A statistic of the batch: the sign says whether the first row is an example."""
    return tf.sign(tf.reduce_sum(tf.cast(mask, tf.float32)) - 8.5)


def refused(message, make, **kwargs):
    with pytest.raises(ValueError, match=message):
        update(*make(), **kwargs)


def assert_leaks(make):
    """Without its check, an attack moves the sum further than its clip."""
    assert movement(make) > 3 * CLIP


def model_and_batches(layer, **kwargs):
    x, y = support.small_data()
    padding = "buckets" if kwargs.get("jit_compile") else "none"
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=12, seed=1, padding=padding)
    model = tf.keras.Sequential([layers.Input([4]), layer, layers.Dense(3)])
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling, noise_seed=1)
    support.compiled(optimizer, model, **kwargs)
    return model, batches
