"""Variational autoencoders of Keras 3: what Keras 2 does not have. The rest: `tests/term_wise`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import vae_support
from tests.front_ends import FRONT_ENDS
from tests.vae_support import SEED, X, batches, flat, not_private, optimizer

layers = keras.layers
KERAS_3 = FRONT_ENDS[-1]


def vae(**changes):
    return vae_support.vae(KERAS_3, **changes)


def with_layers(*more, **changes):
    """One whose encoder has more layers."""
    keras.utils.set_random_seed(0)
    encoder = keras.Sequential([layers.Input([6]), layers.Dense(5), *more, layers.Dense(4)])
    return vae(encoder=encoder, **changes)


def compiled(model):
    return vae_support.compiled(model, noise_seed=SEED)


# Layers that draw random numbers.


def test_random_numbers_of_layers_are_secret():
    """Those of a seed would be a known function of a row's place in the batch."""
    found = []
    for seed in (1, 2):
        dropout = layers.Dropout(0.5, seed=seed)
        model = compiled(with_layers(dropout, divergence=None))
        model.fit(batches(), verbose=0)
        found.append(flat(model))
        assert dropout.seed_generator.state.numpy().tolist() == [seed, 2]  # Two steps.
    np.testing.assert_array_equal(*found)


# Layers that keep what they see.


class Counts(layers.Layer):
    """Counts the examples of which a value is positive."""

    def build(self, shape):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.float32)))
        return x


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [Counts, layers.BatchNormalization])
def test_layers_that_keep_a_statistic_are_refused(make):
    model = compiled(with_layers(make(), divergence=None))
    with pytest.raises(ValueError, match="writes a statistic of the batch into its variable"):
        model.fit(batches(), verbose=0)
    assert model.optimizer.ledger.steps == 0


# Optimizers.


def test_without_privacy_losses_are_scaled_as_the_optimizer_wants_it():
    """Else the steps of mixed_float16 would be 32768 times too small."""
    moved = []
    for wrap in (lambda inner: inner, keras.optimizers.LossScaleOptimizer):
        model = vae(aggregation="none", decoder=vae_support.network(2, 6, front=KERAS_3))
        model._draws = lambda model=model: vae_support.tables(model)
        before = flat(model)
        not_private(model, wrap(keras.optimizers.SGD(0.1))).fit(X, batch_size=64, verbose=0)
        moved.append(flat(model) - before)
    assert np.abs(moved[0]).max() > 1e-3
    np.testing.assert_allclose(*moved, rtol=1e-3, atol=1e-5)


def test_a_two_term_loss_is_given_to_minimize():
    own, weight = optimizer(tfdp.keras3.DPSGD), keras.Variable(1.0)

    def step(give):
        @tf.function
        def traced(x):
            aggregation = tfdp.clipping.TermWiseAggregation(1.0, 2)
            give(tfdp.clipping.TwoTermLoss(lambda x: x[:, 0] * weight, None, (x,), aggregation))

        traced(next(iter(batches()))[0])

    with pytest.raises(ValueError, match="Received a TwoTermLoss: give it to `minimize`"):
        step(own.scale_loss)
    step(lambda loss: own.minimize(loss, [weight]))
    assert own.released_steps() == (1, 0) and float(weight) != 1


def test_any_optimizer_of_keras_goes_with_it():
    own = tfdp.keras3.DPOptimizer(keras.optimizers.Lion(), 1.0, 1.1, 16)
    vae().compile(own)


def test_it_is_exported(tmp_path):
    model = vae()
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(X), model.reconstruct(X), rtol=1e-5, atol=1e-6)
