"""The sign optimizers against the papers' algorithms and Keras."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import compiled, small_data, small_model, without_noise

pytestmark = pytest.mark.rewritten_graphs

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


class GradientsOnly(tfdp.DPSignSGD):
    """Mutant: the velocity is forgotten."""

    def _resource_apply_dense(self, grad, var, apply_state=None):
        self._momentum = False
        return super()._resource_apply_dense(grad, var, apply_state)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sign_sgd_moves_every_coordinate_by_the_learning_rate(momentum):
    arguments = {"learning_rate": 0.125, "momentum": momentum, "noise_seed": 3}
    path = [support.flat(small_model().get_weights())]
    path += [train(tfdp.DPSignSGD(1.0, 1.0, 64, **arguments), epochs=n) for n in (1, 2, 3)]
    np.testing.assert_allclose(np.abs(np.diff(path, axis=0)), 0.125, rtol=1e-4)


@pytest.mark.slow
def test_sign_sgd_is_the_sign_of_the_noisy_sum():
    arguments = {"learning_rate": 0.01, "noise_seed": 3}
    ours = train(tfdp.DPSignSGD(0.1, 1.0, 64, **arguments))
    np.testing.assert_array_equal(ours, train(SignsOfNoisySum(0.1, 1.0, 64, **arguments)))
    assert not np.allclose(ours, train(tfdp.DPSGD(0.1, 1.0, 64, **arguments)))


def steps_on_a_linear_loss(cls, nesterov, steps=12):
    """What each step does to 40 weights whose gradients do not depend on them.

    The noisy gradients are therefore the same for all optimizers of one seed.
    """
    w = tf.Variable(tf.zeros([40]))
    optimizer = cls(
        0.1, 1.0, 64, learning_rate=0.125, momentum=0.9, nesterov=nesterov, noise_seed=3
    )
    x = np.random.default_rng(0).normal(size=(64, 40)).astype("float32")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape=tape)

    path = [w.numpy()]
    for _ in range(steps):
        step(x)
        path.append(w.numpy())
    return np.diff(path, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_sign_sgd_with_momentum_takes_the_signs_of_sgds_steps(nesterov):
    expected = 0.125 * np.sign(steps_on_a_linear_loss(tfdp.DPSGD, nesterov))
    ours = steps_on_a_linear_loss(tfdp.DPSignSGD, nesterov)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    # Mutants: the sign before the momentum, not after it; no momentum.
    for mutant in (SignsOfNoisySum, GradientsOnly):
        wrong = steps_on_a_linear_loss(mutant, nesterov)
        assert np.mean(np.abs(wrong - expected) > 0.01) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_signs_of_the_velocity_cost_less_than_signs_of_the_gradient(momentum):
    """The variance of the way, in units of that of its mean's square, against DP-SGD's.

    Noisy gradients are N(mu, sigma^2), independent; their velocity is an autoregressive process, of
    correlation momentum^k, and the signs of two of its values have that of the arcsine law.
    """
    weights, steps, noise_multiplier = 20_000, 1000, 0.2
    w = tf.Variable(tf.zeros([weights]))
    optimizer = tfdp.DPSignSGD(
        1.0, noise_multiplier, 1, learning_rate=1.0, momentum=momentum, noise_seed=3
    )
    x = tf.fill([1, weights], -1.0 / math.sqrt(weights))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape=tape)

    for _ in range(steps):
        step(x)
    way = w.numpy()
    signal = 1 / (math.sqrt(weights) * noise_multiplier)  # mu / sigma
    found = steps * way.var() / way.mean() ** 2 * signal**2
    arcsines = sum(math.asin(momentum**k) for k in range(1, 200))
    expected = (math.pi / 2 + 2 * arcsines) * (1 - momentum) / (1 + momentum)
    assert expected == pytest.approx({0.0: 1.57, 0.9: 1.10}[momentum], abs=0.005)
    assert found == pytest.approx(expected, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_sign_adam_is_keras_adam_fed_with_signs(betas):
    arguments = {"learning_rate": 0.01, "noise_seed": 3, "beta_1": betas[0], "beta_2": betas[1]}
    ours = train(tfdp.DPSignAdam(0.1, 1.0, 64, **arguments), epochs=20)
    keras = train(KerasAdamOfSigns(0.1, 1.0, 64, **arguments), epochs=20)
    np.testing.assert_allclose(ours, keras, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
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
