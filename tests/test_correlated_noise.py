"""Correlated noise: its coefficients, their error, and calibration."""

import math

import numpy as np
import pytest
import scipy.linalg

import tfdp
from tfdp import correlated_noise
from tfdp.accounting import event_codec
from tfdp.correlated_noise import BandedNoise

STEPS = 40


def matrix(noise, steps=STEPS):
    column = np.pad(noise.coefficients, (0, max(0, steps - noise.bands)))[:steps]
    return scipy.linalg.toeplitz(column, np.zeros(steps))


def error_of_matrix(noise, momentum, steps=STEPS):
    """The error by dense matrices: of the weights that gradient descent makes of the noise."""
    velocity = np.tril(momentum ** np.subtract.outer(np.arange(steps), np.arange(steps)).clip(0))
    moves = np.tril(np.ones([steps, steps])) @ velocity @ np.linalg.inv(matrix(noise, steps))
    return np.linalg.norm(moves) / math.sqrt(steps)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("coefficients", [[1.0], [3.0, 1.0, 0.5], [1.0, -0.3]])
def test_error_is_that_of_the_matrices(coefficients, momentum):
    noise = BandedNoise(coefficients)
    expected = error_of_matrix(noise, momentum)
    assert noise.standard_error(STEPS, momentum) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimal_coefficients_are_a_minimum(momentum):
    errors = []
    for bands in (1, 2, 5, 20):
        noise = BandedNoise.optimal(bands=bands, steps=STEPS, momentum=momentum)
        assert noise.bands == bands
        errors.append(noise.standard_error(STEPS, momentum))
        for i in range(bands):
            for step in (-1e-3, 1e-3):
                moved = np.array(noise.coefficients)
                moved[i] += step
                assert BandedNoise(moved).standard_error(STEPS, momentum) >= errors[-1] * (1 - 1e-8)
    assert sorted(errors, reverse=True) == errors and errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize("given", [[1e-300], [1e200, 1e200], [0.1] * 99, [2.0, -1.0, 0.3]])
def test_norm_of_a_column_is_at_most_one(given):
    noise = BandedNoise(given)
    assert 1 - 1e-9 < math.fsum(c**2 for c in noise.coefficients) <= 1
    assert BandedNoise(**noise.get_config()) == noise == correlated_noise.get(noise.get_config())


@pytest.mark.parametrize(
    "given",
    [
        *([], "1", 1.0, None, [0.0, 1.0], [-1.0], [1.0, math.nan], [math.inf], [1.0] * 513, [True]),
        *([1.0, 1.1], [1.0, 0.0, -1.5]),  # With which noise grows without end.
    ],
)
def test_coefficients_that_cannot_be(given):
    with pytest.raises(ValueError, match="`coefficients` must be a sequence of 1 to 512 numbers"):
        BandedNoise(given)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: BandedNoise.optimal(bands=0, steps=5), "bands"),
        (lambda: BandedNoise.optimal(bands=513, steps=5), "bands"),
        (lambda: BandedNoise.optimal(bands=2, steps=0), "steps"),
        (lambda: BandedNoise.optimal(bands=2, steps=5, momentum=1.0), "momentum"),
        (lambda: BandedNoise([1.0]).standard_error(10**7), "steps"),
        (lambda: correlated_noise.get(lambda t: t), "noise_correlation"),
        (lambda: correlated_noise.get({"coefficients": [1.0], "more": 1}), "noise_correlation"),
    ],
)
def test_bad_arguments(make, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        make()


BUDGET = {"delta": 1e-5, "steps": 90, "dataset_size": 1000, "expected_batch_size": 100}


def test_plan_keeps_to_the_budget_and_beats_independent_noise():
    plan = tfdp.calibrate_correlated_noise(target_epsilon=8.0, **BUDGET)
    cycles = math.ceil(90 / plan.cycle_length)
    ledger = tfdp.accounting.PrivacyLedger()
    q = plan.cycle_length / 10
    ledger.record(event_codec.sampled_gaussian(q, plan.noise_multiplier), cycles)
    assert 7.9 < ledger.epsilon(1e-5).epsilon <= 8.0
    assert plan.noise_correlation.bands == plan.cycle_length > 1
    error = plan.noise_multiplier * plan.noise_correlation.standard_error(90)
    assert plan.standard_error == pytest.approx(error)
    independent = tfdp.calibrate_noise_multiplier(
        target_epsilon=8.0, delta=1e-5, steps=90, sampling_probability=0.1
    )
    expected = independent * BandedNoise([1.0]).standard_error(90)
    assert plan.independent_error == pytest.approx(expected, rel=2e-3)
    assert plan.standard_error < 0.9 * plan.independent_error


def test_plan_of_a_small_epsilon_is_independent_noise():
    plan = tfdp.calibrate_correlated_noise(target_epsilon=0.1, **{**BUDGET, "steps": 1000})
    assert plan.cycle_length == 1 and plan.noise_correlation is None
    assert plan.standard_error == plan.independent_error


def test_plan_of_bad_arguments():
    for name, value in (("expected_batch_size", 1001), ("steps", 0), ("most_bands", 0)):
        with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
            tfdp.calibrate_correlated_noise(**{**BUDGET, "target_epsilon": 1.0, name: value})
