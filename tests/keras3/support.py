"""Small models of Keras 3, and what is compared with Keras 2."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests import support


def small_model(seed: int = 0) -> keras.Model:
    """The model of `tests.support.small_model`, with its weights."""
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    )
    model.set_weights(support.small_model(seed).get_weights())
    return model


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def compiled(optimizer, model=None, **kwargs) -> keras.Model:
    model = model or small_model()
    kwargs.setdefault("loss", crossentropy())
    model.compile(optimizer=optimizer, **kwargs)
    return model


def weights(model) -> np.ndarray:
    return support.flat(model.get_weights())


def update_of(model, x, y, expected_batch_size=1, **kwargs) -> np.ndarray:
    """The clipped sum that one step of `fit` subtracts: learning rate 1, no noise."""
    optimizer = tfdp.keras3.DPSGD(
        kwargs.pop("l2_norm_clip", 0.1), 0.0, expected_batch_size, learning_rate=1.0
    )
    compiled(optimizer, model, **kwargs)
    before = support.flat(w.numpy() for w in model.trainable_variables)
    model.fit(open_batches(x, y), verbose=0)
    return before - support.flat(w.numpy() for w in model.trainable_variables)


def open_batches(x, y, size=None) -> tf.data.Dataset:
    """Batches whose number of rows is open, as those of `poisson_batches`."""
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.batch(size or len(y))


def looped_clipped_sum(model, x, y, l2_norm_clip, loss=None) -> np.ndarray:
    """The clipped sum, one eager example at a time."""
    loss = loss or crossentropy()
    total = 0.0
    for i in range(len(y)):
        with tf.GradientTape() as tape:
            value = loss(y[i : i + 1], model(x[i : i + 1], training=True))
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        gradient = support.flat(tf.convert_to_tensor(g) for g in gradients)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / l2_norm_clip)
    return total
