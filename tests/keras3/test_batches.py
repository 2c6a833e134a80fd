"""Poisson batches of users, augmented rows and weighted classes, with Keras 3."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.keras3.support import compiled, crossentropy, small_model, weights
from tests.support import flat, small_data

X, Y = small_data(12)
CLIP = 0.1


def step_on_all(class_weight=None, parts=(X, Y), **kwargs):
    """Returns the clipped sum of a step whose batch has all examples, and its statement."""
    kwargs.setdefault("expected_batch_size", 12)
    data = tfdp.data.poisson_batches(parts, steps_per_epoch=1, **kwargs)
    model = compiled(tfdp.keras3.DPSGD(CLIP, 0.0, learning_rate=1.0, sampling=data.sampling))
    before = weights(model)
    model.fit(data, class_weight=class_weight, verbose=0)
    assert model.optimizer.released_steps() == (1, 0)
    return (before - weights(model)) * data.sampling.expected_batch_size, data.sampling


def looped(groups, weight=(1.0, 1.0, 1.0)):
    """Returns the sum of the clipped gradients of the mean losses of groups of rows."""
    model, total = small_model(), 0.0
    for rows in groups:
        with tf.GradientTape() as tape:
            loss = crossentropy("none")(Y[rows], model(X[rows])) * np.float32(weight)[Y[rows]]
            loss = tf.reduce_mean(loss)
        gradient = flat(tape.gradient(loss, [v.value for v in model.trainable_variables]))
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


@pytest.mark.slow
def test_the_examples_of_a_user_are_clipped_together():
    users = np.arange(12) % 4
    found, sampling = step_on_all(expected_batch_size=4, privacy_unit=users, examples_per_user=3)
    expected = looped([np.flatnonzero(users == user) for user in range(4)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert sampling.unit == "user"
    assert np.abs(expected - looped([[i] for i in range(12)])).max() > 0.01


def test_the_rows_of_an_example_are_clipped_together():
    found, _ = step_on_all(augmentations=3, transform=lambda x, y: (x, y))
    np.testing.assert_allclose(found, looped([[i] for i in range(12)]), rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "full"])
def test_class_weights_are_weights_of_examples(padding):
    found, _ = step_on_all({0: 0.25, 1: 0.0, 2: 2.0}, padding=padding)
    expected = looped([[i] for i in range(12)], (0.25, 0.0, 2.0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_class_weights_and_weights_are_refused_together():
    with pytest.raises(ValueError, match="`class_weight` and `sample_weight`"):
        step_on_all({0: 1.0, 1: 1.0, 2: 1.0}, (X, Y, np.ones(12)))


def layers_in_a_transform():
    """Returns a transform of random layers and functions of Keras 3, which keep states of seeds."""
    noise = keras.layers.GaussianNoise(1.0, seed=1)
    flip = keras.layers.RandomFlip("horizontal", seed=1)
    seeds = keras.random.SeedGenerator(1)

    def transform(x, y):
        image = flip(tf.reshape(tf.range(64.0), [8, 8, 1]), training=True)
        drawn = keras.random.normal([], seed=seeds) + keras.random.uniform([])
        x = tf.cond(x[0] > 0, lambda: noise(x, training=True), lambda: noise(x + 1, training=True))
        return x + drawn + image[0, 0, 0], y

    return transform


def test_layers_draw_secret_numbers_for_each_row():
    def drawn():
        keras.utils.set_random_seed(1)
        transform = layers_in_a_transform()
        data = tfdp.data.poisson_batches((X, Y), expected_batch_size=12, transform=transform)
        return np.concatenate([x for _ in range(2) for x, _ in data.as_numpy_iterator()])

    both = np.concatenate([drawn(), drawn()])
    assert len(np.unique(both, axis=0)) == len(both) == 2 * 2 * len(X)
