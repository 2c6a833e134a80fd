"""Adam whose second moment is corrected for the noise, against its formula and Keras's Adam."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import keras as keras_3
from tests.front_ends import needs_keras_3, with_both
from tests.keras3 import support as support_3
from tests.support import compiled, small_data, small_model
from tfdp.schedules import PiecewiseConstantNoise

pytestmark = pytest.mark.rewritten_graphs

X, Y = small_data(64)
BATCHES = tf.data.Dataset.from_tensors((X, Y, np.ones(64, bool)))
WEIGHTS = 2000
NOISE = {"l2_norm_clip": 0.5, "noise_multiplier": 2.0, "expected_batch_size": 8, "noise_seed": 3}


class NoiseLeftIn(tfdp.DPAdamBC):
    """Mutant: nothing is subtracted."""

    noise_variance = 0.0


class NoiseOfTheSum(tfdp.DPAdamBC):
    """Mutant: the variance is that of the sum, not of the mean."""

    @property
    def noise_variance(self):
        return self.noise_stddev**2


def path(optimizer, steps, scale=1.0):
    """The weights before and after each of some steps along a gradient that is always the same."""
    w = tf.Variable(tf.zeros([WEIGHTS]))
    x = scale * np.linspace(-1, 1, WEIGHTS, dtype=np.float32)[np.newaxis]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape=tape)

    found = [w.numpy()]
    for _ in range(steps):
        step(tf.constant(np.repeat(x, 4, axis=0)))
        found.append(w.numpy())
    return np.array(found, np.float64)


def expected_path(gradients, variance, least, rate=0.01, beta_1=0.9, beta_2=0.99, epsilon=1e-7):
    m = v = w = np.zeros(WEIGHTS)
    found = [w]
    for t, g in enumerate(gradients, 1):
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        second = np.maximum(v / (1 - beta_2**t) - variance, least * variance)
        w = w - rate * m / (1 - beta_1**t) / (np.sqrt(second) + epsilon)
        found.append(w)
    return np.array(found)


@pytest.mark.parametrize(
    ("cls", "right"), [(tfdp.DPAdamBC, True), (NoiseLeftIn, False), (NoiseOfTheSum, False)]
)
def test_it_is_the_formula(cls, right):
    """Noisy mean gradients are the steps of DPSGD with the same noise."""
    gradients = -np.diff(path(tfdp.DPSGD(**NOISE, learning_rate=1.0), 6, 50.0), axis=0)
    moments = {"beta_1": 0.9, "beta_2": 0.99, "least_second_moment": 0.2}
    found = path(cls(**NOISE, learning_rate=0.01, **moments), 6, 50.0)
    expected = expected_path(gradients, variance=(2.0 * 0.5 / 8) ** 2, least=0.2)
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-5) == right
    assert not np.allclose(found, expected_path(gradients, 0.0, 0.2), rtol=1e-3, atol=1e-3) or (
        cls is NoiseLeftIn
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_microbatches": 4, "engine": "vectorized"},
        {"clipping_rule": "automatic"},
        {"secure_noise": True},
    ],
    ids=str,
)
def test_the_variance_that_is_subtracted_is_that_of_the_noise(kwargs):
    """Of gradients that are zero, the second moment is the noise's: chi-squared over weights."""
    optimizer = tfdp.DPAdamBC(**NOISE, beta_2=0.5, **kwargs)
    w = tf.Variable(tf.zeros([WEIGHTS]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, w)
        optimizer.minimize(loss, [w], tape=tape)

    step(tf.zeros([4, WEIGHTS]))
    second = optimizer.get_slot(w, "v").numpy().mean() / (1 - 0.5)
    deviation = math.sqrt(2 / WEIGHTS)
    assert second == pytest.approx(optimizer.noise_variance, rel=4 * deviation)


@pytest.mark.slow
def test_without_noise_it_is_adam():
    paths = [
        path(cls(float("inf"), 0.0, 8, learning_rate=0.01, epsilon=1e-12), 5)
        for cls in (tfdp.DPAdamBC, tfdp.DPAdam)
    ]
    np.testing.assert_allclose(*paths, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_coordinates_move_as_without_noise():
    """Adam divides a step by the root of 2 where a gradient is as large as the noise."""
    speeds = {}
    for cls in (tfdp.DPAdam, tfdp.DPAdamBC):
        optimizer = cls(1.0, 0.01, 1, learning_rate=0.001, noise_seed=1)
        w = tf.Variable(tf.zeros([WEIGHTS]))

        @tf.function
        def step(x, w=w, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.linalg.matvec(x, w)
            optimizer.minimize(loss, [w], tape=tape)

        for _ in range(400):
            step(tf.fill([1, WEIGHTS], 0.01))
        speeds[cls] = -w.numpy().mean() / (400 * 0.001)
    assert speeds[tfdp.DPAdam] == pytest.approx(math.sqrt(0.5), rel=0.03)
    assert speeds[tfdp.DPAdamBC] == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
@with_both
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_variables_of_other_types_are_trained(front, dtype):
    """In bfloat16, 0.999 is 1."""
    layers = front.keras.layers
    model = front.keras.Sequential([layers.Input([4]), layers.Dense(3, dtype=dtype)])
    before = support.flat(model.get_weights()).astype(float)
    model.compile(front.tfdp.DPAdamBC(1.0, 1.1, 64, learning_rate=0.1), front.crossentropy())
    model.fit(BATCHES, epochs=3, verbose=0)
    moved = np.abs(support.flat(model.get_weights()).astype(float) - before)
    assert np.all(np.isfinite(moved)) and moved.max() > 0.05


@needs_keras_3
def test_keras_3_makes_the_same_update():
    arguments = {"learning_rate": 0.02, "noise_seed": 3, "least_second_moment": 0.5}
    ours = compiled(tfdp.DPAdamBC(0.5, 1.1, 32, **arguments), loss=support.crossentropy("auto"))
    other = support_3.compiled(tfdp.keras3.DPAdamBC(0.5, 1.1, 32, **arguments))
    for model in (ours, other):
        model.fit(support_3.open_batches(X, Y, 32), epochs=3, verbose=0)
    np.testing.assert_allclose(
        support_3.weights(other), support_3.weights(ours), rtol=1e-4, atol=2e-6
    )
    assert np.abs(support_3.weights(ours) - support_3.weights(small_model())).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, pytest.param(3, marks=needs_keras_3)])
def test_a_file_has_all_of_it(tmp_path, version):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16)
    module, make, load = (
        (tfdp, compiled, tf.keras.models.load_model)
        if version == 2
        else (tfdp.keras3, support_3.compiled, keras_3.models.load_model)
    )
    cls = module.DPAdamBC
    model = make(cls(1.0, 1.1, sampling=batches.sampling, least_second_moment=0.7, epsilon=1e-3))
    model.fit(batches, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    again = load(tmp_path / "model.keras")
    loaded = again.optimizer
    loaded.build(again.trainable_variables)
    assert type(loaded) is cls and loaded.get_config() == model.optimizer.get_config()
    assert loaded.ledger.to_dict() == model.optimizer.ledger.to_dict()
    assert loaded.get_config()["least_second_moment"] == 0.7
    moments, its = (_moments(optimizer) for optimizer in (model.optimizer, loaded))
    assert len(moments) == 8
    for mine, other in zip(moments, its, strict=True):
        np.testing.assert_array_equal(mine, other)


def _moments(optimizer):
    """Keras 2 has a method, Keras 3 a list."""
    found = optimizer.variables
    variables = found() if callable(found) else found
    return [v.numpy() for v in variables if "dense" in v.name]


@pytest.mark.parametrize("module", ["tfdp", pytest.param("tfdp.keras3", marks=needs_keras_3)])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"noise_multiplier": PiecewiseConstantNoise([10], [2.0, 1.0])},
        {"clipping_rule": "adaptive_quantile"},
        {"compression": tfdp.contrib.TopK(0.1)},
        {"least_second_moment": 0.0},
        {"least_second_moment": float("nan")},
        {"amsgrad": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_refusals(module, kwargs):
    cls = tfdp.DPAdamBC if module == "tfdp" else tfdp.keras3.DPAdamBC
    (name,) = kwargs
    given = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 8, **kwargs}
    with pytest.raises(ValueError, match=f"Argument `{name}` must be .*Received: {name}="):
        cls(**given)


def test_correlated_noise_is_refused():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=8, cycle_length=4)
    noise = tfdp.BandedNoise([1.0, 0.5])
    with pytest.raises(ValueError, match="`noise_correlation` must be None for tfdp"):
        tfdp.DPAdamBC(1.0, 1.0, sampling=batches.sampling, noise_correlation=noise)


def test_a_loss_of_two_terms_is_refused():
    vae = tfdp.TermWiseVAE(
        encoder=tf.keras.Sequential([tf.keras.layers.Dense(4, input_shape=[4])]),
        decoder=tf.keras.Sequential([tf.keras.layers.Dense(4, input_shape=[2])]),
        prior=tfdp.priors.StandardNormal(2),
        divergence="mmd",
        batch_clip=0.1,
        num_groups=2,
    )
    batches = tfdp.data.poisson_batches((X, X), expected_batch_size=16)
    vae.compile(tfdp.DPAdamBC(1.0, 1.0, sampling=batches.sampling))
    with pytest.raises(ValueError, match="must not be given a TwoTermLoss"):
        vae.fit(batches, epochs=1, verbose=0)
