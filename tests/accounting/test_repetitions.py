"""The number of runs follows its distribution, and the best run costs no more than is stated."""

import itertools
import math
import random

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize, stats

from tfdp.accounting import PldAccountant, RdpAccountant, Repetitions, accountants

_DELTA = 1e-5
_DISTRIBUTIONS = [
    Repetitions("logarithmic", 10),
    Repetitions("geometric", 10),
    Repetitions("geometric", 2),
    Repetitions("negative_binomial", 10, 0.5),
    Repetitions("poisson", 10),
]


def _gamma(repetitions):
    """The parameter of a truncated negative binomial distribution, found by its mean."""
    shape = repetitions.eta

    def excess(gamma):
        if shape == 0:
            return (1 / gamma - 1) / -math.log(gamma) - repetitions.mean
        return shape * (1 - gamma) / gamma / (1 - gamma**shape) - repetitions.mean

    return optimize.brentq(excess, 1e-9, 1 - 1e-9, xtol=1e-14)


def _reference(repetitions, k):
    """Probabilities of the numbers `k` of runs by SciPy."""
    if repetitions.distribution == "poisson":
        return stats.poisson.pmf(k, repetitions.mean)
    gamma = _gamma(repetitions)
    if repetitions.distribution == "logarithmic":
        return stats.logser.pmf(k, 1 - gamma)
    untruncated = stats.nbinom.pmf(k, repetitions.eta, gamma)
    return np.where(k > 0, untruncated / (1 - gamma**repetitions.eta), 0.0)


# The distribution.


@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
def test_probabilities(repetitions):
    k = np.arange(60)
    found = [repetitions.probability(int(number)) for number in k]
    np.testing.assert_allclose(found, _reference(repetitions, k), rtol=1e-7)


@pytest.mark.parametrize("mean", [1, 1 + 1e-13, 1 + 1e-6, 3.7])
@pytest.mark.parametrize("shape", [1e-3, 0.5, 7.0, 1e3])
def test_the_mean_is_at_most_what_is_accounted_for(mean, shape):
    repetitions = Repetitions("negative_binomial", mean, shape)
    probabilities = [repetitions.probability(k) for k in range(150)]
    assert math.fsum(probabilities) == pytest.approx(1, abs=1e-9)
    found = math.fsum(k * p for k, p in enumerate(probabilities))
    assert found <= mean * (1 + 1e-14)
    assert found == pytest.approx(mean, rel=1e-6)


def _p_value(draws, repetitions):
    """Chi-squared test that `draws` follow the distribution of `repetitions`."""
    edges = [0, 1, 2, 4, 7, 11, 16, 25, 5000]
    counts, _ = np.histogram(draws, edges)
    expected = [
        _reference(repetitions, np.arange(*cell)).sum() for cell in itertools.pairwise(edges)
    ]
    expected = np.maximum(len(draws) * np.array(expected), 1e-3)
    possible = (counts > 0) | (expected > 1e-2)
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return stats.chi2.sf(statistic, possible.sum() - 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
def test_draws_follow_the_distribution_and_no_other(repetitions):
    draws = [repetitions.draw() for _ in range(3000)]
    assert _p_value(draws, repetitions) > 1e-6
    others = [r for r in _DISTRIBUTIONS if r != repetitions]
    others.append(Repetitions(repetitions.distribution, 1.5 * repetitions.mean, repetitions.shape))
    assert all(_p_value(draws, other) < 1e-6 for other in others)


def test_draws_are_not_fixed_by_seeds():
    def draws():
        random.seed(1)
        np.random.seed(1)
        return [Repetitions("geometric", 1e5).draw() for _ in range(2)]

    assert draws() != draws()


# The price: Gaussian noise, and the score by which an adversary would choose.


def _best_of(probabilities, repetitions):
    """Probabilities of being the best run, of outputs from the worst to the best.

    By the derivative of the generating function: its differences would not be precise enough.
    """
    better = np.cumsum(probabilities[::-1])[::-1] - probabilities / 2
    if repetitions.distribution == "poisson":
        return repetitions.mean * np.exp(-repetitions.mean * better) * probabilities
    gamma, shape = _gamma(repetitions), repetitions.eta
    others = (gamma / (gamma + (1 - gamma) * better)) ** (shape + 1)
    return repetitions.mean * others * probabilities


def _attacks(repetitions, sigma):
    """Yields the best run's probabilities on two neighbors, for scores and directions.

    A score ranks outputs that are likelier without the example first, then those that give the
    example away, then all others: many runs make the second kind much rarer if it is not there.
    """
    y, step = np.linspace(-12 * sigma, 12 * sigma + 1, 40_001, retstep=True)
    for here, there in ((1, 0), (0, 1)):
        towards = y if here else 1 - y
        p, q = (stats.norm.pdf(y, mean, sigma) * step for mean in (here, there))
        for least in 0.5 + sigma * np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0]):
            for telling in 0.5 + sigma * np.array([2.5, 3.0, 3.5, 4.0]):
                score = np.where(towards < least, 2, np.where(towards > telling, 1, 0))
                order = np.argsort(score, kind="stable")
                yield tuple(_best_of(d[order] / d.sum(), repetitions) for d in (p, q))


def _least_epsilon(repetitions, sigma):
    """The largest epsilon at `_DELTA` that one of the attacks shows."""

    def epsilon(p, q):
        def log_gap(e):
            return math.log(max(np.maximum(p - math.exp(e) * q, 0).sum(), 1e-300) / _DELTA)

        return optimize.brentq(log_gap, 0, 60) if log_gap(0) > 0 else 0.0

    return max(epsilon(p, q) for p, q in _attacks(repetitions, sigma))


def _bounds(repetitions, sigma):
    run = dp_accounting.GaussianDpEvent(sigma)
    one = PldAccountant().compose(run)
    by_profile = repetitions.profile_epsilon(one.get_epsilon, one.get_delta, _DELTA)
    return by_profile, RdpAccountant().compose(repetitions.event(run)).get_epsilon(_DELTA)


@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_no_attack_is_above_the_bounds_and_the_best_is_near(repetitions, sigma):
    by_profile, by_rdp = _bounds(repetitions, sigma)
    least = _least_epsilon(repetitions, sigma)
    assert least <= by_profile <= by_rdp
    assert by_profile < 1.25 * least


class _ForgetsRuns(Repetitions):
    """A mutant: delta is not divided among the runs."""

    def profile_epsilon(self, epsilon_at, delta_at, delta):
        return super().profile_epsilon(lambda d: epsilon_at(d * self.mean), delta_at, delta)


class _ForgetsShift(Repetitions):
    """A mutant: the other runs are taken to tell nothing."""

    def profile_epsilon(self, epsilon_at, delta_at, delta):
        return epsilon_at(delta / self.mean)

    def rdp(self, orders, run_rdp):
        return run_rdp + math.log(self.mean) / (orders - 1)


@pytest.mark.parametrize("repetitions", [_DISTRIBUTIONS[1], _DISTRIBUTIONS[2]])
def test_mutants_of_the_profile_are_caught(repetitions):
    least = _least_epsilon(repetitions, 1.0)
    for mutant in (_ForgetsRuns, _ForgetsShift):
        assert _bounds(mutant(repetitions.distribution, repetitions.mean), 1.0)[0] < least


@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
def test_renyi_divergences_of_attacks_are_below_the_bound(repetitions):
    orders = np.array(accountants.DEFAULT_RDP_ORDERS)
    run = orders / 2
    bound = repetitions.rdp(orders, run)
    mutant = _ForgetsShift(repetitions.distribution, repetitions.mean, repetitions.shape)
    wrong, caught = mutant.rdp(orders, run), False
    for i in (20, 40, 60):
        largest = 0.0
        for p, q in _attacks(repetitions, 1.0):
            known = (p > 1e-250) & (q > 1e-250)
            moment = np.log(np.sum(p[known] ** orders[i] * q[known] ** (1 - orders[i])))
            largest = max(largest, moment / (orders[i] - 1))
        assert largest <= bound[i]
        caught |= largest > wrong[i]
    assert caught


@pytest.mark.parametrize("repetitions", [*_DISTRIBUTIONS, Repetitions("poisson", 300)])
def test_rdp_is_that_of_dp_accounting(repetitions):
    event = repetitions.event(dp_accounting.GaussianDpEvent(3.0))
    orders = accountants.DEFAULT_RDP_ORDERS
    theirs = dp_accounting.rdp.RdpAccountant(orders).compose(event).rdp
    ours = RdpAccountant(orders).compose(event).rdp
    if repetitions.distribution == "poisson":  # Ours does not decrease with the order, besides.
        theirs = np.minimum.accumulate(theirs[::-1])[::-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-7)


def test_a_bound_does_not_depend_on_which_orders_are_asked_for():
    event = _DISTRIBUTIONS[0].event(dp_accounting.GaussianDpEvent(3.0))
    some = accountants.DEFAULT_RDP_ORDERS[60:63]
    whole = RdpAccountant().compose(event).rdp[60:63]
    np.testing.assert_allclose(RdpAccountant(some).compose(event).rdp, whole, rtol=1e-12)


def test_a_mean_of_one_is_one_run():
    for repetitions in (Repetitions("geometric", 1), Repetitions("negative_binomial", 1, 7.0)):
        run = PldAccountant().compose(dp_accounting.GaussianDpEvent(2.0))
        epsilon = repetitions.profile_epsilon(run.get_epsilon, run.get_delta, _DELTA)
        assert epsilon == run.get_epsilon(_DELTA)
        assert {repetitions.draw() for _ in range(20)} == {1}


@pytest.mark.parametrize("repetitions", [_DISTRIBUTIONS[1], _DISTRIBUTIONS[4]])
@pytest.mark.parametrize("noise", [0.05, 1e3])
def test_extreme_noise(repetitions, noise):
    by_profile, by_rdp = _bounds(repetitions, noise)
    least = PldAccountant().compose(dp_accounting.GaussianDpEvent(noise)).get_epsilon(_DELTA)
    assert least <= by_profile and least <= by_rdp
    assert (by_rdp < 0.1) == (noise == 1e3)


def test_a_tiny_cost_is_not_an_error():
    """dp_accounting's accountant takes the logarithm of zero."""
    event = _DISTRIBUTIONS[4].event(dp_accounting.GaussianDpEvent(1e9))
    assert 0 < RdpAccountant().compose(event).get_epsilon(_DELTA) < 0.01
    with pytest.raises(ValueError, match="domain"):
        dp_accounting.rdp.RdpAccountant().compose(event)


@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
def test_runs_without_privacy_have_none(repetitions):
    event = repetitions.event(dp_accounting.NonPrivateDpEvent())
    assert RdpAccountant().compose(event).get_epsilon(_DELTA) == math.inf
    assert repetitions.profile_epsilon(lambda d: math.inf, lambda e: 1.0, _DELTA) == math.inf


@pytest.mark.parametrize("repetitions", _DISTRIBUTIONS)
def test_an_event_knows_its_distribution(repetitions):
    event = repetitions.event(dp_accounting.GaussianDpEvent(3.0))
    assert Repetitions.of_event(event) == repetitions


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("binomial", 10), "distribution"),
        (("geometric", 0.9), "mean"),
        (("poisson", math.nan), "mean"),
        (("poisson", math.inf), "mean"),
        (("geometric", True), "mean"),
        (("geometric", 10, 1.0), "shape"),
        (("negative_binomial", 10), "shape"),
        (("negative_binomial", 10, 0), "shape"),
        (("negative_binomial", 10, math.inf), "shape"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises(ValueError, match=rf"Argument `{name}` must be .* Received: {name}="):
        Repetitions(*arguments)


def test_probability_of_no_number_is_refused():
    for runs in (-1, 1.5, True):
        with pytest.raises(ValueError, match="Argument `runs` must be"):
            Repetitions("geometric", 3).probability(runs)


@pytest.mark.parametrize(("mean", "shape"), [(0.5, 1), (10, -1), (10, math.nan), (math.inf, 1)])
def test_a_refused_event_leaves_what_was_composed(mean, shape):
    """dp_accounting's accountant forgets it: it raises in the middle."""
    step = dp_accounting.GaussianDpEvent(1.0)
    accountant = RdpAccountant().compose(step, 5)
    before = accountant.get_epsilon(_DELTA)
    with pytest.raises(ValueError, match="Argument `"):
        accountant.compose(RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(9.0), mean, shape))
    assert accountant.get_epsilon(_DELTA) == pytest.approx(before, rel=1e-12)
    theirs = dp_accounting.rdp.RdpAccountant().compose(step, 5)
    with pytest.raises((ValueError, ZeroDivisionError)):
        theirs.compose(RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(9.0), mean, shape))
    assert theirs.get_epsilon(_DELTA) < before / 2
