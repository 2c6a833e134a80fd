"""Optimizers whose ledger counts signs release nothing else: magnitudes change no state."""

import importlib

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import needs_keras_3
from tfdp import schedules
from tfdp.accounting.signed_gaussian import SignedGaussianDpEvent
from tfdp.step import noise, private_step
from tfdp.step.record import record_ledger, record_table

SIGNS = [
    ("DPSignAdam", {}),
    ("DPSignAdam", {"secure_noise": True}),
    ("DPSignAdam", {"weight_decay": 0.1}),
    ("DPSignSGD", {}),
    ("DPSignSGD", {"momentum": 0.0, "nesterov": True}),
]
NUMBERS = [
    ("DPSignSGD", {"momentum": 0.9}),
    ("DPAdam", {}),
    ("DPSGD", {}),
    ("DPSignAdam", {"compression": {"name": "top_k", "fraction": 0.5}}),
    ("DPSignAdam", {"clipping_rule": "adaptive_quantile"}),
]
_BATCHES = tfdp.data.poisson_batches(
    (np.ones([40, 3], "float32"), np.ones([40, 1], "float32")),
    expected_batch_size=10,
    padding="full",
)


def _made(package, name, options):
    cls = getattr(tfdp.keras3 if package == "keras3" else tfdp, name)
    return cls(1.0, 1.0, sampling=_BATCHES.sampling, learning_rate=0.1, **options)


def _states(package, name, options, magnitudes):
    """Variables, weights and slots, after two steps whose noisy sums are multiples of one another.

    Every magnitude has the same signs, zeros and positive numbers counting as one.
    """
    optimizer = _made(package, name, options)
    keras = tf.keras if package == "keras2" else importlib.import_module("keras")
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([3, 1], 0.3, "float32")])
    weights = model.trainable_variables
    magnitude = tf.Variable(np.zeros([3, 1], "float32"))

    def released(tensors, stddevs, dtypes):
        return [
            None if t is None else tf.cast(tf.reshape(magnitude, t.shape), dtype or t.dtype)
            for t, dtype in zip(tensors, dtypes, strict=True)
        ]

    optimizer.build(weights)

    @tf.function
    def step(x, y, mask):
        losses = tf.reduce_sum((model(x) - y) ** 2, axis=-1) * tf.cast(mask, tf.float32)
        optimizer.minimize(losses, weights)

    found = []
    variables = [getattr(v, "_value", v) for v in weights]
    state = [v for v in [*variables, *optimizer._state_variables()] if v.dtype != tf.float64]
    begin = [v.numpy() for v in state]
    draws = iter(_BATCHES)
    with noise.replaced_by(released):
        for each in magnitudes:
            for variable, first in zip(state, begin, strict=True):
                variable.assign(first)
            for _ in range(2):
                magnitude.assign(np.reshape(np.array(each, "float32"), [3, 1]))
                step(*next(draws))
            found.append([v.numpy() for v in state])
    return optimizer, found


MAGNITUDES = ([1.0, -2.0, 0.0], [100.0, -1e-3, 3.0])
PACKAGES = [
    "keras2",
    pytest.param("keras3", marks=needs_keras_3),
]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("name", "options"), SIGNS)
def test_all_state_is_a_function_of_signs(package, name, options):
    optimizer, (one, other) = _states(package, name, options, MAGNITUDES)
    assert optimizer.releases_signs
    assert isinstance(optimizer.release.event.event, SignedGaussianDpEvent)
    assert isinstance(optimizer.event, SignedGaussianDpEvent)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one[0], np.full([3, 1], 0.3, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_what_keeps_numbers_is_told_apart(package):
    """The mutant of the test above: a velocity of noisy sums shows their size."""
    optimizer, (one, other) = _states(package, "DPSignSGD", {"momentum": 0.9}, MAGNITUDES)
    assert not optimizer.releases_signs
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@needs_keras_3
def test_zero_as_an_outcome_of_its_own_is_caught(monkeypatch):
    monkeypatch.setattr(private_step, "sign_of", tf.sign)
    _, (one, other) = _states("keras3", "DPSignAdam", {}, MAGNITUDES)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("name", "options"), NUMBERS)
def test_what_releases_numbers_has_the_price_of_a_gaussian(package, name, options):
    optimizer = _made(package, name, options)
    assert not optimizer.releases_signs
    assert not isinstance(optimizer.release.event.event, SignedGaussianDpEvent)


@pytest.mark.parametrize("package", PACKAGES)
def test_without_noise_and_with_correlated_noise_no_signs_are_priced(package):
    cls = (tfdp.keras3 if package == "keras3" else tfdp).DPSignAdam
    assert not cls(1.0, 0.0, sampling=_BATCHES.sampling).releases_signs
    stages = schedules.PiecewiseConstantNoise([5], [1.0, 2.0])
    assert cls(1.0, stages, sampling=_BATCHES.sampling).releases_signs
    cyclic = tfdp.data.poisson_batches(
        np.ones([40, 3], "float32"), expected_batch_size=10, cycle_length=2
    )
    correlated = tfdp.BandedNoise([1.0, 0.5])
    assert not cls(1.0, 1.0, sampling=cyclic.sampling, noise_correlation=correlated).releases_signs
    assert cls(1.0, 1.0, sampling=cyclic.sampling).releases_signs


def test_older_records_keep_their_price():
    parameters = {"dataset_size": 100.0, "expected_batch_size": 10.0, "noise_multiplier": 1.0}
    for kind in (record_table.GAUSSIAN, record_table.GAUSSIAN_UNPADDED):
        event = record_ledger.release_of(kind, parameters).event.event
        assert type(event) is dp_accounting.GaussianDpEvent
    kinds = (record_table.GAUSSIAN, record_table.SIGNS)
    numbers, signs = (record_ledger.release_of(kind, parameters) for kind in kinds)
    assert type(signs.event.event) is SignedGaussianDpEvent
    assert signs.truncation_probability == numbers.truncation_probability
    assert numbers.truncation_probability <= 1e-30
    kind = record_table.cut_off(record_table.GAUSSIAN, 30)
    assert record_ledger.release_of(kind, parameters) == numbers
    kinds = (record_table.GAUSSIAN_UNPADDED, record_table.SIGNS_UNPADDED)
    numbers, signs = (record_ledger.release_of(kind, parameters) for kind in kinds)
    assert signs.truncation_probability == numbers.truncation_probability


@pytest.mark.parametrize("package", PACKAGES)
def test_candidates_of_dpsur_have_the_price_of_a_gaussian(package):
    module = tfdp.keras3 if package == "keras3" else tfdp
    optimizer = module.DPSURSignAdam(
        1.0,
        1.0,
        sampling=_BATCHES.sampling,
        validation_batch_size=10,
        validation_noise_multiplier=1.3,
        validation_clip=0.1,
    )
    assert not optimizer.releases_signs
    assert not isinstance(optimizer.release.event.update.event, SignedGaussianDpEvent)
