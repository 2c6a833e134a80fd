"""The sign optimizers against the papers' algorithms and Keras."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import compiled, small_data, small_model, without_noise

X, Y = small_data(64)


def data():
    return tf.data.Dataset.from_tensors((X, Y, np.ones(64, bool)))


def train(optimizer, epochs=5, model=None):
    model = compiled(optimizer, model)
    model.fit(data(), epochs=epochs, verbose=0)
    return support.flat(model.get_weights())


class SignsOfNoisySum(tfdp.DPSGD):
    """Records the signs of the noisy sums that a sign optimizer with the same seed sees."""

    def _transform_private_gradient(self, gradient):
        return tf.sign(gradient)


class KerasAdamOfSigns(tfdp.DPAdam):
    """Keras Adam, with both moments, fed with the signs."""

    def _transform_private_gradient(self, gradient):
        return tf.sign(gradient)


def test_sign_sgd_moves_every_coordinate_by_the_learning_rate():
    before = support.flat(small_model().get_weights())
    after = train(tfdp.DPSignSGD(1.0, 1.0, 64, learning_rate=0.125), epochs=1)
    np.testing.assert_allclose(np.abs(after - before), 0.125, rtol=1e-4)


def test_sign_sgd_is_the_sign_of_the_noisy_sum():
    arguments = {"learning_rate": 0.01, "noise_seed": 3, "momentum": 0.9}
    ours = train(tfdp.DPSignSGD(0.1, 1.0, 64, **arguments))
    np.testing.assert_array_equal(ours, train(SignsOfNoisySum(0.1, 1.0, 64, **arguments)))
    assert not np.allclose(ours, train(tfdp.DPSGD(0.1, 1.0, 64, **arguments)))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_sign_adam_is_keras_adam_fed_with_signs(betas):
    arguments = {"learning_rate": 0.01, "noise_seed": 3, "beta_1": betas[0], "beta_2": betas[1]}
    ours = train(tfdp.DPSignAdam(0.1, 1.0, 64, **arguments), epochs=20)
    keras = train(KerasAdamOfSigns(0.1, 1.0, 64, **arguments), epochs=20)
    np.testing.assert_allclose(ours, keras, rtol=1e-4, atol=1e-6)


def test_sign_adam_without_noise_is_keras_adam_also_on_zero_gradients():
    def dead_units():
        model = small_model()
        model.layers[1].set_weights([0 * w for w in model.layers[1].get_weights()])
        return model

    ours = train(without_noise(tfdp.DPSignAdam, 64), model=dead_units())
    keras = train(without_noise(KerasAdamOfSigns, 64), model=dead_units())
    np.testing.assert_allclose(ours, keras, rtol=1e-5, atol=1e-7)


def test_sign_adam_spends_no_slot_on_the_constant_variance():
    optimizer = tfdp.DPSignAdam(1.0, 1.0, 64)
    train(optimizer, epochs=1)
    assert optimizer.get_slot_names() == ["m"]


@pytest.mark.parametrize("cls", [tfdp.DPSignSGD, tfdp.DPSignAdam])
def test_signs_do_not_depend_on_the_batch_size_constant(cls):
    few, many = (train(cls(0.1, 1.0, n, noise_seed=3)) for n in (10, 1000))
    np.testing.assert_array_equal(few, many)


def test_sign_sgd_on_the_papers_parabola():
    """Algorithm 1 on f(x) = x^2 / 2 from x = 1 (figure 1): steps of 0.1, then around zero."""
    x = tf.Variable([1.0])
    optimizer = without_noise(tfdp.DPSignSGD, 1, learning_rate=0.1)

    @tf.function
    def step(scale):
        with tf.GradientTape() as tape:
            loss = scale * x**2 / 2
        optimizer.minimize(loss, [x], tape=tape)

    path = []
    for _ in range(14):
        step(tf.constant([1.0]))
        path.append(x.numpy()[0])
    np.testing.assert_allclose(path[:9], 1 - 0.1 * np.arange(1, 10), atol=1e-5)
    assert np.all(np.abs(path[10:]) < 0.11)
