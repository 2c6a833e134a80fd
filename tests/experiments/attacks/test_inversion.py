"""Inversions show the class where the model knows it, and measures tell members from classes."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdp
from experiments import datasets
from experiments.attacks import inversion
from experiments.datasets import Data

LABELS = np.repeat(np.arange(10), 2)


def digits():
    """Of the target, and of the shadow."""
    found = load_digits()
    x, y = (found.images / 16).astype(np.float32)[..., np.newaxis], found.target
    parts = np.split(np.random.default_rng(0).permutation(len(y)), [500, 1000, 1500])
    (a, b), (c, d), (e, f), (g, h) = ((x[part], y[part]) for part in parts)
    return Data(a, b, c, d), Data(e, f, g, h)


def network():
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [layers.Input([8, 8, 1]), layers.Flatten(), layers.Dense(32, "relu"), layers.Dense(10)]
    )


@pytest.mark.slow
def test_inversions_of_a_trained_network_are_recognised_and_of_an_untrained_one_are_not():
    target, shadow = digits()
    judge, prior = inversion.judge_of(shadow, 0), inversion.Prior.of(shadow.train_x, 0)
    trained = network()
    trained.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trained.fit(target.train_x, target.train_y, epochs=30, verbose=0)
    known, nothing = (
        inversion.measure(
            inversion.reconstruct(model, LABELS, prior, 0), LABELS, target, judge, prior
        )
        for model in (trained, network())
    )
    assert known["recognised"] > 0.8 and nothing["recognised"] < 0.4
    assert known["members"] < 0.8 * known["prior"] < nothing["members"]


def test_reconstructions_of_members_are_told_from_those_of_classes():
    """Twenty copies of members, of 500; the means of classes."""
    target, shadow = digits()
    judge, prior = inversion.judge_of(shadow, 0), inversion.Prior.of(shadow.train_x, 0)
    y = target.train_y
    members = np.array([np.flatnonzero(y == label)[i % 2] for i, label in enumerate(LABELS)])
    few = Data(target.train_x[members], y[members], target.eval_x, target.eval_y)
    means = np.stack([target.eval_x[target.eval_y == label].mean(axis=0) for label in LABELS])
    copied = inversion.measure(few.train_x, LABELS, few, judge, prior)
    of_class = inversion.measure(means, LABELS, target, judge, prior)
    assert copied["auc"] == 1.0 and abs(of_class["auc"] - 0.5) < 0.12
    assert copied["members"] < copied["others"]
    assert of_class["others"] == pytest.approx(0, abs=1e-6) and of_class["members"] > 0.01
    assert of_class["recognised"] > 0.9
    # Mutant: reconstructions that are taken for those of other classes.
    assert inversion.measure(means, (LABELS + 1) % 10, target, judge, prior)["recognised"] < 0.1


def test_the_prior_is_the_gaussian_of_the_images():
    images = np.random.default_rng(0).normal(size=(300, 2, 3, 1)) @ np.array([[2.0]])
    prior = inversion.Prior.of(images.astype(np.float32), 0)
    np.testing.assert_allclose(prior.mean, images.mean(axis=0), atol=1e-5)
    components = prior.components.reshape(len(prior.components), -1)
    covariance = np.cov(images.reshape(300, -1), rowvar=False)
    np.testing.assert_allclose(components.T @ components, covariance, atol=1e-4)


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_features_are_those_of_the_library_and_have_a_gradient(shape):
    images = np.random.default_rng(0).random([2, *shape], np.float32)
    images[1, :20] = 0.0  # Where nothing changes, a modulus has no derivative.
    features = inversion.differentiable_scattering(shape)
    variable = tf.Variable(images)
    with tf.GradientTape() as tape:
        found = features(variable)
        total = tf.reduce_sum(found * tf.sin(found))
    np.testing.assert_allclose(found, tfdp.data.scattering_features(images), atol=1e-4)
    gradient = tape.gradient(total, variable).numpy()
    assert np.isfinite(gradient).all() and np.abs(gradient[0]).max() > 1e-3


@pytest.mark.slow
def test_patches_are_those_of_the_library_and_have_a_gradient(monkeypatch):
    monkeypatch.setattr(tfdp.data.patches, "_LEAVES", 20)
    monkeypatch.setattr(datasets, "_CIFAR_10_FILTERS", 8)
    images = np.random.default_rng(0).random([2, 32, 32, 3], np.float32)
    features = inversion.differentiable_patches("cifar10", "patches+mirror")
    variable = tf.Variable(images)
    with tf.GradientTape() as tape:
        found = features(variable)
        total = tf.reduce_sum(found * tf.sin(found))
    expected = tfdp.data.patch_features(images, num_filters=8, mirror=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    gradient = tape.gradient(total, variable).numpy()
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-5


def test_packed_images_are_the_same_to_a_byte():
    images = np.random.default_rng(0).random([10, 5, 4, 3])
    np.testing.assert_allclose(inversion.unpacked(inversion.packed(images)), images, atol=0.002)
