"""Correlated noise: its coefficients, their error, and calibration."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import scipy.linalg

import tfdp
from tfdp import correlated_noise
from tfdp.accounting import event_codec
from tfdp.correlated_noise import BandedNoise, BufferedNoise

STEPS = 40


def matrix(noise, steps=STEPS):
    column = np.pad(noise.coefficients, (0, max(0, steps - len(noise.coefficients))))[:steps]
    return scipy.linalg.toeplitz(column, np.zeros(steps))


def error_of_matrix(noise, momentum, steps=STEPS):
    """The error by dense matrices: of the weights that gradient descent makes of the noise."""
    velocity = np.tril(momentum ** np.subtract.outer(np.arange(steps), np.arange(steps)).clip(0))
    moves = np.tril(np.ones([steps, steps])) @ velocity @ np.linalg.inv(matrix(noise, steps))
    return np.linalg.norm(moves) / math.sqrt(steps)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "noise",
    [
        *map(BandedNoise, ([1.0], [3.0, 1.0, 0.5], [1.0, -0.3])),
        BufferedNoise([0.0], [0.5], 20, 2),
        BufferedNoise([0.3, 0.2, 0.1], [0.9, 0.0, 0.9], 8, 5),
        BufferedNoise([1.2, 0.3], [0.5, 0.999], 8, 6),
    ],
)
def test_error_is_that_of_the_matrices(noise, momentum):
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


# Buffers.


def some_buffered_noise():
    rng = np.random.default_rng(0)
    for cycle_length, cycles in ((2, 1), (3, 3), (4, 2), (2, 5)):
        weights = rng.exponential(size=2)
        weights *= rng.random() / weights.sum()
        yield BufferedNoise(weights, rng.random(2), cycle_length, cycles)
    yield BufferedNoise.optimal(cycle_length=3, cycles=3, buffers=2)


def matrix_of_segments(noise, lengths):
    """C where the noise began anew after so many steps each."""
    return scipy.linalg.block_diag(*(matrix(noise, length) for length in lengths))


def begun(noise, lengths):
    """The cycles that are begun in the segments."""
    return sum(-(-length // noise.cycle_length) for length in lengths)


def worst_cost(noise, matrix, lengths):
    """The largest squared norm of what an example adds to C g, in any places and directions.

    In a segment it is in steps that are a multiple of the cycle length apart, in some of them.
    """
    rng, total, at = np.random.default_rng(1), 0.0, 0
    for length in lengths:
        worst = 0.0
        for place in range(min(noise.cycle_length, length)):
            steps = at + np.arange(place, length, noise.cycle_length)
            for taken in itertools.product([0.0, 1.0], repeat=len(steps)):
                directions = rng.normal(size=[20, len(steps), 2])
                directions /= np.linalg.norm(directions, axis=2, keepdims=True)
                directions[0] = [1.0, 0.0]
                added = matrix[:, steps] @ (directions * np.array(taken)[:, np.newaxis])
                worst = max(worst, np.sum(added**2, axis=(1, 2)).max())
        total, at = total + worst, at + length
    return total


def some_segments(noise):
    """Lengths of segments: all prefixes of the cycles, and restarts anywhere."""
    rng = np.random.default_rng(2)
    yield from ([length] for length in range(1, noise.renewal + 1))
    for _ in range(5):
        yield [int(length) for length in rng.integers(1, noise.renewal + 1, size=3)]


def test_cycles_cost_at_most_a_gaussian_each():
    for noise in some_buffered_noise():
        for lengths in some_segments(noise):
            cost = worst_cost(noise, matrix_of_segments(noise, lengths), lengths)
            assert cost <= begun(noise, lengths), (noise, lengths)
        # As large as it may be: the bound is not loose.
        assert cost_of_all(noise) == pytest.approx(noise.cycles, rel=1e-5)


def cost_of_all(noise, matrix_of=matrix):
    return worst_cost(noise, matrix_of(noise, noise.renewal), [noise.renewal])


def test_mutants_cost_more():
    def with_unit_column(noise, steps):
        return matrix(noise, steps) / np.linalg.norm(matrix(noise, steps)[:, 0])

    noise = BufferedNoise.optimal(cycle_length=3, cycles=2, buffers=2)
    assert cost_of_all(noise) <= 2
    assert cost_of_all(noise, with_unit_column) > 1.05 * 2
    noise = BufferedNoise.optimal(cycle_length=3, cycles=1, buffers=2)
    longer = BufferedNoise(noise.weights, noise.decays, 3, 4)  # Which does not begin anew.
    never_anew = matrix(longer, 12) * (noise.scale / longer.scale)
    assert worst_cost(noise, never_anew, [12]) > 1.2 * begun(noise, [12])
    anew = [3, 3, 3, 3]
    assert worst_cost(noise, matrix_of_segments(noise, anew), anew) <= begun(noise, anew) == 4


def test_two_buffers_are_nearly_as_good_as_all_bands():
    noise = BufferedNoise.optimal(cycle_length=234, cycles=1, buffers=2)
    k = np.arange(1, 234)
    root = BandedNoise([1.0, *np.cumprod((2 * k - 1) / (2 * k))])
    assert noise.vectors == 2
    assert noise.standard_error(234) < 1.01 * root.standard_error(234)
    bands = BandedNoise.optimal(bands=60, steps=180)  # Of the same cycles.
    noise = BufferedNoise.optimal(cycle_length=60, cycles=3, buffers=3)
    assert noise.standard_error(180) < 1.06 * bands.standard_error(180)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_optimal_buffers_are_a_minimum(momentum):
    sizes = {"cycle_length": 10, "cycles": 4}
    noise = BufferedNoise.optimal(**sizes, buffers=2, momentum=momentum)
    least = noise.standard_error(40, momentum)
    one = BufferedNoise.optimal(**sizes, buffers=1, momentum=momentum)
    assert least <= one.standard_error(40, momentum) * (1 + 1e-5)
    for i, step in itertools.product(range(4), (-0.05, -0.01, 0.01, 0.05)):
        moved = np.array([*noise.weights, *noise.decays])
        moved[i] = max(0.0, moved[i] + step)
        other = BufferedNoise(moved[:2], moved[2:], **sizes)
        assert other.standard_error(40, momentum) >= least * (1 - 3e-4)
    few = BufferedNoise.optimal(**sizes, buffers=2, momentum=momentum, steps=35)
    assert few.standard_error(35, momentum) <= noise.standard_error(35, momentum) * (1 + 1e-6)


def test_gradient_of_the_error_of_buffers():
    workload = correlated_noise._Workload.of(25, 0.9)
    at = np.array([3.0, 0.1, -0.2, 0.5])
    _, gradient = workload.log_buffered_error(at, 10, 3)
    for i, change in enumerate(1e-6 * np.eye(4)):
        high, low = (workload.log_buffered_error(at + s * change, 10, 3)[0] for s in (1, -1))
        assert gradient[i] == pytest.approx((high - low) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("cycles", [1, 7])
def test_buffered_noise_is_made_again_from_its_config(cycles):
    noise = BufferedNoise.optimal(cycle_length=5, cycles=cycles, buffers=2)
    again = correlated_noise.get(noise.get_config())
    assert again == noise and again.scale == noise.scale
    # The decays that steps compute with are those that the scale was found for.
    assert all(decay == np.float32(decay) for decay in noise.decays)
    np.testing.assert_allclose(
        noise.coefficients[:3] / noise.scale,
        [1.0, sum(noise.weights), np.dot(noise.weights, noise.decays)],
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *(({"weights": value}, "weights") for value in ([], [-0.1], [math.nan], 0.5, None, "1")),
        *(({"weights": value}, "weights") for value in ([1.9], [math.inf], [0.1] * 17, [True])),
        *(({"decays": value}, "decays") for value in ([], [1.0], [-0.1], [0.5, 0.5], [math.nan])),
        *(({"decays": value}, "decays") for value in ([1 - 1e-9], [1e300], 0.5, None)),
        *(({"cycle_length": value}, "cycle_length") for value in (1, 0, 2.5, None, 10**7)),
        *(({"cycles": value}, "cycles") for value in (0, 1.5, None, 10**6)),
    ],
)
def test_buffered_noise_that_cannot_be(change, name):
    arguments = {"weights": [0.5], "decays": [0.8], "cycle_length": 4, "cycles": 2}
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        BufferedNoise(**{**arguments, **change})


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
        (lambda: BufferedNoise([0.5], [0.8], 4, 2).standard_error(9), "steps"),
        (lambda: BufferedNoise([0.5], [0.8], 4, 2).standard_error(8, 1.0), "momentum"),
        (lambda: BufferedNoise.optimal(cycle_length=4, cycles=2, buffers=0), "buffers"),
        (lambda: BufferedNoise.optimal(cycle_length=4, cycles=2, buffers=17), "buffers"),
        (lambda: BufferedNoise.optimal(cycle_length=4, cycles=2, steps=9), "steps"),
        (lambda: BufferedNoise.optimal(cycle_length=1, cycles=2), "cycle_length"),
        (lambda: correlated_noise.get({"weights": [0.5], "decays": [0.8]}), "noise_correlation"),
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_plan_of_whole_passes_uses_buffers(momentum):
    sizes = {"steps": 190, "dataset_size": 1000, "expected_batch_size": 10, "most_bands": 5}
    budget = {"target_epsilon": 30.0, "delta": 1e-5, "momentum": momentum, **sizes}
    plan = tfdp.calibrate_correlated_noise(**budget)
    noise = plan.noise_correlation
    assert plan.cycle_length == noise.cycle_length == 100
    assert (noise.cycles, noise.vectors) == (2, 4)
    error = plan.noise_multiplier * noise.standard_error(190, momentum)
    assert plan.standard_error == pytest.approx(error)
    ledger = tfdp.accounting.PrivacyLedger()
    ledger.record(dp_accounting.GaussianDpEvent(plan.noise_multiplier), 2)
    assert 29.9 < ledger.epsilon(1e-5).epsilon <= 30.0
    assert tfdp.calibrate_correlated_noise(**budget, cycle_length=100) == plan
    shorter = tfdp.calibrate_correlated_noise(**budget, cycle_length=50)
    assert isinstance(shorter.noise_correlation, BandedNoise)
    assert plan.standard_error < 0.9 * shorter.standard_error
    few = tfdp.calibrate_correlated_noise(**{**budget, "most_bands": 1})
    assert few.noise_correlation is None


def test_plan_of_bad_arguments():
    for name, value in (("expected_batch_size", 1001), ("steps", 0), ("most_bands", 0)):
        with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
            tfdp.calibrate_correlated_noise(**{**BUDGET, "target_epsilon": 1.0, name: value})
