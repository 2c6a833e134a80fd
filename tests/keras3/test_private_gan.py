"""Generative adversarial networks of Keras 3, beside what `tests/training` runs with both."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS
from tests.gan_support import CLASSES, X, batches, compiled, gan

layers = keras.layers
KERAS_3 = FRONT_ENDS[-1]


def with_layer(layer):
    """One whose networks have such a layer."""
    keras.utils.set_random_seed(0)
    generator, critic = (
        keras.Sequential([layers.Input([inputs]), layers.Dense(5), layer(), layers.Dense(outputs)])
        for inputs, outputs in ((2, 4), (4, 1))
    )
    arguments = {"loss": "non_saturating", "gradient_penalty": None}
    return gan(KERAS_3, generator=generator, critic=critic, **arguments)


class Counts(layers.Layer):
    """Counts the examples of which a value is positive."""

    def build(self, shape):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.float32)))
        return x


def test_layers_that_keep_a_statistic_are_refused():
    model = compiled(with_layer(Counts))
    with pytest.raises(ValueError, match="writes a statistic of the batch into its variable"):
        model.fit(batches(X), verbose=0)
    assert model.optimizer.ledger.steps == 0


@pytest.mark.slow
def test_any_optimizer_and_layers_that_draw_random_numbers():
    model = with_layer(lambda: layers.Dropout(0.5, seed=1))
    critic_optimizer = tfdp.keras3.DPOptimizer(
        keras.optimizers.Lion(0.01), 1.0, 1.1, sampling=batches().sampling
    )
    model.compile(critic_optimizer=critic_optimizer, generator_optimizer="lion")
    before = model.get_weights()
    model.fit(batches(X), verbose=0)
    assert model.optimizer.ledger.steps == int(model.generator_optimizer.iterations) == 2
    assert all(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))


def test_it_is_exported(tmp_path):
    model = gan(KERAS_3, conditional=True)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    given = [np.ones([5, 2], "float32"), np.eye(CLASSES, dtype="float32")[[0, 1, 2, 0, 1]]]
    np.testing.assert_allclose(exported.serve(given), model.generator(given), rtol=1e-5, atol=1e-6)
