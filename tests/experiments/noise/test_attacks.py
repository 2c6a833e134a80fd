"""The attacks succeed on noise in float32, beyond what is ideal, and not on secure noise."""

import numpy as np
import pytest
import scipy.stats

from experiments.noise import attacks
from experiments.noise.attacks import (
    ATTACKS,
    default,
    distances_of_orders,
    naive,
    secure,
    success,
)

TRIALS = 1000
# The ideal mechanism's best test, and 6 standard deviations of the trials.
LIMIT = scipy.stats.norm.cdf(1 / 8) + 3 / np.sqrt(2 * TRIALS)


@pytest.mark.parametrize("attack", ATTACKS)
def test_noise_in_float32_tells_neighbours_apart(attack):
    assert success(attack, "TensorFlow's", TRIALS) > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_secure_noise_does_not(attack):
    assert abs(success(attack, "secure", TRIALS) - 0.5) < 3 / np.sqrt(2 * TRIALS)


def off_the_grid(sums, rng):
    """Mutant: the noise is on the grid, and the sum is not."""
    return np.float32(sums + secure(np.zeros_like(sums), rng))


@pytest.mark.slow
def test_a_sum_that_is_not_on_the_grid_is_caught(monkeypatch):
    monkeypatch.setitem(attacks.MECHANISMS, "secure", off_the_grid)
    with pytest.raises(AssertionError):
        test_secure_noise_does_not(list(ATTACKS)[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mechanism", [naive, default, secure])
def test_the_noises_have_the_same_distribution(mechanism):
    noise = mechanism(np.zeros([100_000, 2], np.float32), np.random.default_rng(0))
    assert scipy.stats.kstest(noise.ravel() / 4, "norm").pvalue > 1e-6


def test_orders():
    assert distances_of_orders(wide=False)[-1] > 0.1
    assert max(distances_of_orders(wide=True)) < 1e-9
