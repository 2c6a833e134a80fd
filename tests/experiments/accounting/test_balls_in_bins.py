"""Estimates of epsilon on secret sets: near exact values and certified bounds."""

import math

import numpy as np
import pytest

import tfdp
from experiments.accounting import balls_in_bins
from experiments.accounting.balls_in_bins import Losses, Pair, estimate_deltas, estimate_epsilon
from tfdp.accounting import RandomAllocationDpEvent, random_allocation
from tfdp.accounting.bounds import Release, epsilon_interval

BUFFERED = tfdp.BufferedNoise([0.3, 0.2], [0.9, 0.5], 5, 3)


def deltas_of_samples(means, sigma, epsilon, samples=200_000):
    """Both deltas and their standard errors, from all steps, without importance sampling."""
    rng = np.random.default_rng(7)
    found = []
    for with_it in (True, False):
        z = sigma * rng.standard_normal([samples, means.shape[1]])
        if with_it:
            z += means[rng.integers(len(means), size=samples)]
        ratios = np.exp((z @ means.T - np.square(means).sum(axis=1) / 2) / sigma**2).mean(axis=1)
        loss = np.log(ratios) if with_it else -np.log(ratios)
        terms = np.maximum(1 - np.exp(epsilon - loss), 0)
        found.append((terms.mean(), terms.std() / math.sqrt(samples)))
    return found


def apart(estimates, others):
    """Returns the number of standard errors between both, for each direction."""
    pairs = zip(estimates, others, strict=True)
    return [abs(a - b) / math.hypot(error, other) for (a, error), (b, other) in pairs]


def matrix_means(noise, pass_steps, passes):
    """The means by the matrix C."""
    steps = pass_steps * passes
    matrix = np.zeros([steps, steps])
    for step in range(steps):
        column = np.array(noise.coefficients)[: steps - step]
        matrix[step : step + len(column), step] = column
    return np.array([matrix[:, i::pass_steps].sum(axis=1) for i in range(pass_steps)])


CASES = [
    (tfdp.BandedNoise([1.0]), 6, 1, 0.8, 0.3),
    (tfdp.BandedNoise([3.0, 2.0, 1.0]), 7, 2, 2.0, 0.5),
    (tfdp.BandedNoise([3.0, 2.0, 1.0]), 3, 1, 1.0, 0.5),
    (BUFFERED, 5, 3, 2.5, 0.4),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("noise, pass_steps, passes, sigma, epsilon", CASES)
def test_deltas_are_those_of_samples_of_all_steps(noise, pass_steps, passes, sigma, epsilon):
    means = balls_in_bins.means(noise, pass_steps, passes)
    np.testing.assert_allclose(means, matrix_means(noise, pass_steps, passes), atol=1e-12)
    estimates = estimate_deltas(means, sigma, epsilon, 20_000, 1)
    assert max(apart(estimates, deltas_of_samples(means, sigma, epsilon))) < 5  # By luck: 2e-6.


def test_one_bin_is_the_gaussian():
    (remove, add) = estimate_deltas(np.ones([1, 1]), 2.0, 1.9931, 20_000, 1)
    for found in (remove, add):
        assert abs(found.value - 1e-5) < 5 * found.standard_error < 1e-6


def allocation(sigma, steps, epsilon):
    """Certified deltas of an epoch by random allocation, of each direction."""
    pair = random_allocation.pair(1.0, sigma, steps)
    return [
        np.maximum(d.upper - math.exp(epsilon) * d.lower, 0).sum() + d.infinite
        for d in (pair.remove, pair.add)
    ]


ALLOCATIONS = [(1.0, 16, 1.7), (2.0, 5, 1.0), (0.5, 64, 3.0), (6.0, 40, 0.1)]


def failures(sigma, steps, epsilon, certified=allocation):
    """The directions of which a certified delta is below an estimate, or far above."""
    means = balls_in_bins.means(None, steps, 1)
    estimates = estimate_deltas(means, sigma, epsilon, 20_000, 1)
    found = certified(sigma, steps, epsilon)
    return [
        name
        for name, one, (value, error) in zip(("remove", "add"), found, estimates, strict=True)
        if not value - 5 * error <= one <= 1.05 * (value + 5 * error) + 1e-12
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sigma, steps, epsilon", ALLOCATIONS)
def test_certified_epochs_are_not_below_estimates_and_near_them(sigma, steps, epsilon):
    """To deltas of 1e-9, which samples without importance sampling do not reach."""
    assert failures(sigma, steps, epsilon) == []


MUTANTS = {
    "a direction left out": lambda s, t, e: [allocation(s, t, e)[1]] * 2,
    "one step too many": lambda s, t, e: allocation(s, t + 1, e),
    "5% less noise counted": lambda s, t, e: allocation(1.05 * s, t, e),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_certified_price_are_found(mutant):
    assert "remove" in failures(1.0, 16, 1.7, MUTANTS[mutant])


@pytest.mark.slow
def test_epsilon_is_within_the_certified_interval():
    for steps, passes, sigma, delta in ((16, 1, 1.0, 1e-5), (16, 4, 8.0, 1e-6), (50, 2, 0.7, 1e-7)):
        release = Release(RandomAllocationDpEvent(sigma / math.sqrt(passes), steps), 1)
        interval = epsilon_interval([release], delta)
        means = balls_in_bins.means(None, steps, passes)
        found = estimate_epsilon(means, sigma, delta, 10_000, 1)
        assert 0.99 * interval.lower < found < 1.01 * interval.upper
        noise = balls_in_bins.estimate_noise(means, found, delta, 2000, 2, 1.2 * sigma)
        assert noise == pytest.approx(sigma, rel=0.02)


def mutant_of_epsilon(monkeypatch, name):
    original, drawn = Pair.__init__, Pair.losses
    changes = {
        "noise": lambda self, means, noise: original(self, means, 1.05 * noise),
        "bins": lambda self, means, noise: original(self, of_one_bin_more(means), noise),
    }
    if name == "direction":
        monkeypatch.setattr(Pair, "losses", lambda self, removes, *rest: drawn(self, False, *rest))
    else:
        monkeypatch.setattr(Pair, "__init__", changes[name])


def of_one_bin_more(means):
    return np.eye(len(means) + 1) * means[0, 0]


@pytest.mark.parametrize("mutant", ["direction", "bins", "noise"])
def test_mutants_of_the_estimate_are_found(monkeypatch, mutant):
    interval = epsilon_interval([Release(RandomAllocationDpEvent(1.0, 16), 1)], 1e-5)
    mutant_of_epsilon(monkeypatch, mutant)
    found = estimate_epsilon(balls_in_bins.means(None, 16, 1), 1.0, 1e-5, 10_000, 1)
    assert found < 0.99 * interval.lower


@pytest.mark.slow
def test_standard_errors_are_those_of_repetitions():
    means = balls_in_bins.means(tfdp.BandedNoise([2.0, 1.0]), 6, 1)
    found = [estimate_deltas(means, 1.0, 1.0, 500, seed) for seed in range(200)]
    for direction in zip(*found, strict=True):
        values, errors = np.array(direction).T
        assert 0.75 < values.std() / errors.mean() < 1.33  # 6 standard deviations of 200 values.


def test_deltas_of_losses():
    losses = Losses(np.array([[0.0, 1.0], [1.0, 2.0]]), np.array([[1.0, 1.0], [0.5, 0.5]]))
    expected = (1 - math.exp(-0.5)) * 1.5 / 4 + 0.5 * (1 - math.exp(-1.5)) / 4
    assert losses.delta(0.5).value == pytest.approx(expected)
    assert losses.delta(800.0) == (0.0, 0.0)


def test_what_has_no_estimate_is_refused():
    with pytest.raises(ValueError, match="negative entries"):
        Pair(balls_in_bins.means(tfdp.BandedNoise([1.0, -0.3]), 4, 1), 1.0)
    with pytest.raises(ValueError, match="at most 3, after which"):
        balls_in_bins.means(BUFFERED, 5, 4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(12))
def test_held_out_settings(seed):
    """Estimates between certified bounds, but for 2%: to deltas of 1e-11, in all sizes of noise."""
    rng = np.random.default_rng([91, seed])
    steps, passes = int(2 ** rng.uniform(1, 5)), int(2 ** rng.uniform(0, 3))
    sigma, delta = 10 ** rng.uniform(0, 1.5), 10 ** rng.uniform(-11, -2)
    release = Release(RandomAllocationDpEvent(sigma / math.sqrt(passes), steps), 1)
    interval = epsilon_interval([release], delta)
    means = balls_in_bins.means(None, steps, passes)
    found = estimate_epsilon(means, sigma, delta, 4000, seed)
    assert 0.98 * interval.lower <= found <= 1.02 * interval.upper + 1e-3
