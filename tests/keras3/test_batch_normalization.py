"""Replacement of BatchNormalization of Keras 3, where it is called otherwise than in Keras 2."""

import keras
import numpy as np
import pytest

import tfdp

layers = keras.layers


def test_calls_with_a_mask_and_a_training_mode():
    inputs = keras.Input([5, 4])
    hidden = layers.Dense(8)(layers.Masking()(inputs))
    hidden = layers.BatchNormalization()(hidden, training=True)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(hidden))
    new = tfdp.keras3.replace_batch_normalization(model)
    assert isinstance(new.layers[3], layers.GroupNormalization)
    x = np.ones([2, 5, 4], "float32")
    x[0, 3:] = 0.0
    np.testing.assert_allclose(new(x)[:1], new(x[:1]), atol=1e-6)


def test_the_model_is_compiled_still_where_it_cannot_be_copied():
    model = keras.Sequential([keras.Input([3]), layers.Dense(2)])
    model.compile("sgd", "mse")

    def fail(layer):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        tfdp.keras3.batch_normalization._clone(model, fail)
    assert model.compiled
