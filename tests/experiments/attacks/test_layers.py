"""Displacements of layers show members where there is something to see."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import networks
from experiments.attacks import layers
from experiments.datasets import Data
from tests.experiments.attacks.test_attackers import CLASSES, classifier, data
from tfdp import auditing


def learnt(both):
    model = classifier()
    model.fit(both.train_x, both.train_y, epochs=30, batch_size=64, verbose=0)
    return model


def aucs(model, shadow_model, shadow, target):
    parts = target.train_x, target.train_y, target.eval_x, target.eval_y
    names, (inside, outside) = layers.displacements(model, shadow_model, shadow, parts, 0)
    assert inside.shape == (len(target.train_y), len(names))
    return [auditing.auc(a, b) for a, b in zip(inside.T, outside.T, strict=True)]


@pytest.mark.slow
def test_each_layer_shows_members_that_were_learnt_by_heart():
    """At chance, an AUC of 600 and 600 has a standard deviation of 0.017; 0.12 is seven."""
    target, shadow, nobody = data(600, 600), data(600, 600, seed=1), data(600, 600, seed=2)
    model, shadow_model = learnt(target), learnt(shadow)
    seen = aucs(model, shadow_model, shadow, target)
    assert len(seen) == 2 and min(seen) > 0.68
    # None of these is a member.
    assert np.abs(np.array(aucs(model, shadow_model, shadow, nobody)) - 0.5).max() < 0.12
    # Mutant: a proxy that is the target itself.
    assert aucs(model, model, shadow, target)[0] == 0.5


def linear(seed):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([tf.keras.layers.Input([20]), tf.keras.layers.Dense(CLASSES)])


def test_of_a_linear_model_it_is_the_displacement_of_its_weights():
    model, shadow_model, both = linear(0), linear(1), data(7, 5)
    names, (found,) = layers.displacements(
        model, shadow_model, both, (both.train_x, both.train_y), 0
    )
    assert names == [model.layers[0].name]
    kernel, bias = (
        a - b for a, b in zip(model.get_weights(), shadow_model.get_weights(), strict=True)
    )
    # The softmax leaves open what is added to all classes: their sum is zero.
    kernel, bias = kernel - kernel.mean(axis=1, keepdims=True), bias - bias.mean()
    expected = [kernel[:, y] @ x + bias[y] for x, y in zip(both.train_x, both.train_y, strict=True)]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_influences_add_up_to_the_logit():
    """W z + b, with integrated gradients from zero as W and g(0) as b, is g(z)."""
    model, both = classifier(), data(3, 1)
    x, y = both.train_x, both.train_y
    steps = (np.arange(2000) + 0.5) / 2000

    def logit(inputs, label):
        logits = model(inputs)
        return logits[:, label] - tf.reduce_mean(logits, axis=1)

    expected = []
    for z, label in zip(x, y, strict=True):
        path = tf.constant((steps[:, np.newaxis] * z).astype(np.float32))
        with tf.GradientTape() as tape:
            tape.watch(path)
            value = logit(path, label)
        influence = tape.gradient(value, path).numpy().mean(axis=0)
        expected.append(influence @ z + logit(np.zeros([1, 20], np.float32), label)[0].numpy())
    np.testing.assert_allclose(layers._evidence(model, x, y), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_networks_of_the_tables_can_be_cut(name, monkeypatch):
    """Nothing of the target changes, and layers that are too wide are left out."""
    monkeypatch.setattr(tf.keras.Sequential, "fit", lambda *_, **__: None)
    model = networks.NETWORKS[name](networks.make_activation("relu"))
    shadow_model = networks.NETWORKS[name](networks.make_activation("relu"))
    x = np.ones([4, *model.input_shape[1:]], model.inputs[0].dtype.as_numpy_dtype)
    shadow = Data(x, np.array([0, 1, 1, 0]), x, np.array([0, 1, 0, 1]))
    before = model.get_weights()
    names, (found,) = layers.displacements(model, shadow_model, shadow, (x, shadow.train_y), 0)
    weighted = [layer.name for layer in model.layers if layer.trainable_weights]
    wide = {"cifar10": 2}.get(name, 0)
    assert len(names) == len(weighted) - wide and found.shape == (4, len(names))
    assert np.isfinite(found).all()
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
