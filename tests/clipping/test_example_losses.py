import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import VECTORS, Y
from tfdp.clipping import per_example_losses

layers = tf.keras.layers


class Opaque(layers.Layer):
    """An operation that the proof does not know; it keeps examples apart."""

    def call(self, x):
        return tf.math.bessel_i0e(x) * tf.reduce_max(x, axis=-1, keepdims=True)


class OpaqueMixing(layers.Layer):
    """Takes the first example's values to all, by an operation that the proof does not know."""

    def call(self, x):
        return x + tf.roll(tf.math.bessel_i0e(x), 1, axis=0)


def model_of(*stack):
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential([layers.Dense(4), *stack, layers.Dense(3)])
    model(VECTORS[:1])
    return model


def losses_of(model, function, **arguments):
    spec = (support.open_spec(VECTORS), tf.TensorSpec([None], tf.int64))

    def run(x, y):
        return function(support.crossentropy(**arguments)(y, model(x)))

    return tf.function(run, input_signature=spec)


def moved(model, function):
    """How much each loss moves when the first example does."""
    losses, other = losses_of(model, function), VECTORS.copy()
    other[0] += 3
    return np.abs(losses(other, Y) - losses(VECTORS, Y))


@pytest.mark.parametrize("stack", [[], [Opaque()]])
def test_losses_are_those_of_the_model(stack):
    model = model_of(*stack)
    found = losses_of(model, per_example_losses)(VECTORS, Y)
    np.testing.assert_allclose(found, support.crossentropy()(Y, model(VECTORS)), rtol=1e-5)


def test_losses_that_are_proven_are_returned_as_they_are():
    def check(losses):
        assert per_example_losses(losses) is losses
        return losses

    losses_of(model_of(), check)(VECTORS, Y)


@pytest.mark.parametrize("layer", [Opaque(), OpaqueMixing()])
def test_an_example_moves_its_own_loss_alone(layer):
    distances = moved(model_of(layer), per_example_losses)
    assert distances[0] > 1e-3 and not distances[1:].any()


def test_mutant_that_trusts_the_model_is_caught():
    assert moved(model_of(OpaqueMixing()), lambda losses: losses)[1] > 1e-3


def test_a_model_that_mixes_examples_is_refused():
    mixing = model_of(layers.Lambda(lambda x: x - tf.reduce_mean(x, 0, keepdims=True)))
    with pytest.raises(ValueError, match="example"):
        moved(mixing, per_example_losses)


def test_what_is_no_vector_of_losses_is_refused():
    with pytest.raises(ValueError, match=r"`losses` must be a tensor `\[rows\]`"):
        losses_of(model_of(), per_example_losses, reduction="sum")(VECTORS, Y)
    with pytest.raises(ValueError, match="`losses` must be without terms"):
        regularized = model_of()
        moved(regularized, lambda x: per_example_losses(x + tf.nn.l2_loss(regularized.weights[0])))
