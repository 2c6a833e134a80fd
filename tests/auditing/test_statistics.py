"""Bounds are valid on mechanisms of known epsilon, and about as strong as they can be."""

import math

import numpy as np
import pytest
from dp_accounting import pld
from scipy import stats

from tests.auditing_support import (
    DELTA,
    SIMULATIONS,
    constant,
    exceeding,
    gaussian,
    infinite,
    randomized_response,
    rounded_gaussian,
    spread_response,
)
from tfdp.auditing import statistics
from tfdp.auditing.statistics import METHODS, epsilon_lower_bound, epsilon_of_mu


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 4.0])
def test_bounds_exceed_the_epsilon_of_a_gaussian_mechanism_rarely(method, epsilon):
    assert exceeding(gaussian, method, epsilon, 200) <= 0.05 * SIMULATIONS
    assert exceeding(gaussian, method, epsilon, 7) <= 0.05 * SIMULATIONS


def test_bounds_of_a_gaussian_mechanism_are_valid():
    assert exceeding(gaussian, "gaussian", 4.0, 200) <= 0.05 * SIMULATIONS


@pytest.mark.slow
@pytest.mark.parametrize("method", ["clopper_pearson", "one_run"])
@pytest.mark.parametrize(
    "mechanism", [randomized_response, spread_response, rounded_gaussian, constant, infinite]
)
def test_bounds_exceed_the_epsilon_of_any_mechanism_rarely(mechanism, method):
    assert exceeding(mechanism, method, 1.0, 150) <= 0.05 * SIMULATIONS
    assert exceeding(mechanism, method, 1.0, 150, delta=0.01) <= 0.05 * SIMULATIONS
    assert exceeding(mechanism, method, 1.0, 5) <= 0.05 * SIMULATIONS


@pytest.mark.slow
def test_the_assumption_of_a_trade_off_curve_survives_equal_scores():
    for method in ("gaussian", "one_run_f_dp"):
        for mechanism in (rounded_gaussian, constant, infinite):
            assert exceeding(mechanism, method, 1.0, 50) <= 0.05 * SIMULATIONS


def test_no_threshold_is_chosen_by_the_scores_it_is_tested_on(monkeypatch):
    """Mutant: the largest of the bounds at all thresholds, from rates at 95% each."""
    assert exceeding(spread_response, "clopper_pearson", 1.0, 200) <= 0.05 * SIMULATIONS
    correct = statistics._error_rates

    def uncorrected(seen, unseen, significance, ranks):
        return correct(seen, unseen, significance * 2 * (seen.size + unseen.size), every_rank)

    monkeypatch.setattr(statistics, "_error_rates", uncorrected)
    assert exceeding(spread_response, "clopper_pearson", 1.0, 200) > 0.08 * SIMULATIONS


def every_rank(count):
    return range(1, count + 1)


@pytest.mark.parametrize(
    ("epsilon", "canaries", "least"),
    [
        (4.0, 1000, {"clopper_pearson": 0.69, "gaussian": 2.19, "one_run": 1.25}),
        (8.0, 1000, {"clopper_pearson": 1.78, "gaussian": 5.67, "one_run_f_dp": 3.8}),
    ],
)
def test_bounds_are_strong(epsilon, canaries, least):
    """Means over 20 trainings: what simple implementations reach, or more."""
    for method, expected in least.items():
        found = []
        for seed in range(20):
            random = np.random.default_rng(seed)
            coins = random.random(canaries) < 0.5
            scores = gaussian(coins, random, epsilon, DELTA)
            found.append(epsilon_lower_bound(scores[coins], scores[~coins], DELTA, method=method))
        assert expected <= np.mean(found) <= epsilon


@pytest.mark.parametrize("method", METHODS)
def test_what_shows_nothing_bounds_nothing(method):
    assert epsilon_lower_bound([], [1.0, 2.0], DELTA, method=method) == 0.0
    assert epsilon_lower_bound(np.arange(50.0), [], DELTA, method=method) == 0.0
    assert epsilon_lower_bound([9.0], [1.0], DELTA, method=method) == 0.0
    assert epsilon_lower_bound(np.zeros(500), np.zeros(500), DELTA, method=method) == 0.0
    backwards = epsilon_lower_bound(np.zeros(500), np.ones(500), DELTA, method=method)
    assert backwards == 0.0  # High scores mean "in".


@pytest.mark.parametrize("method", METHODS)
def test_what_tells_everything_is_bounded_by_the_number_of_canaries(method):
    few, many = (
        epsilon_lower_bound(np.ones(n), np.zeros(n), DELTA, method=method) for n in (50, 500)
    )
    assert 1.0 < few < many <= statistics.LARGEST_EPSILON


@pytest.mark.parametrize("method", METHODS)
def test_only_the_order_of_scores_counts(method):
    random = np.random.default_rng(0)
    seen, unseen = random.normal(1.5, 1, 200), random.normal(size=200)
    found = epsilon_lower_bound(seen, unseen, DELTA, method=method)
    assert found > 0
    again = epsilon_lower_bound(np.exp(seen)[::-1], np.exp(np.sort(unseen)), DELTA, method=method)
    assert found == again


def test_a_smaller_significance_bounds_less():
    random = np.random.default_rng(0)
    seen, unseen = random.normal(1.5, 1, 200), random.normal(size=200)
    for method in METHODS:
        found = [epsilon_lower_bound(seen, unseen, DELTA, s, method) for s in (1e-9, 0.01, 0.2)]
        assert found == sorted(found) and found[0] < found[-1]


def test_epsilon_of_mu_is_that_of_a_gaussian_mechanism():
    for mu in (0.1, 1.0, 3.0):
        other = pld.privacy_loss_distribution.from_gaussian_mechanism(1 / mu)
        expected = other.get_epsilon_for_delta(DELTA)
        assert epsilon_of_mu(mu, DELTA) == pytest.approx(expected, abs=2e-3)
    assert epsilon_of_mu(0.0, DELTA) == 0.0
    for mu in (math.nan, -1.0, "x"):
        with pytest.raises(ValueError, match="Argument `mu` must be"):
            epsilon_of_mu(mu, DELTA)
    assert epsilon_of_mu(1e-6, 0.01) == 0.0
    assert epsilon_of_mu(1.0, 0.0) == np.inf


def test_rates():
    seen, unseen = [3.0, 2.0, 2.0, 1.0], [2.0, 0.0, 0.0, 0.0]
    false, true = statistics.roc_curve(seen, unseen)
    assert false.tolist() == [0, 0, 0.25, 0.25, 1] and true.tolist() == [0, 0.25, 0.75, 1, 1]
    assert statistics.tpr_at_fpr(seen, unseen, 0.01) == 0.25
    assert statistics.tpr_at_fpr(seen, unseen, 0.25) == 1.0
    expected = stats.mannwhitneyu(seen, unseen).statistic / 16
    assert statistics.auc(seen, unseen) == pytest.approx(expected)
    assert statistics.advantage(seen, unseen) == 0.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_scores": [np.nan]}, "in_scores"),
        ({"out_scores": [[1.0]]}, "out_scores"),
        ({"in_scores": [], "out_scores": []}, "in_scores"),
        ({"delta": 1.0}, "delta"),
        ({"significance": 0}, "significance"),
        ({"method": "max"}, "method"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"in_scores": [1.0], "out_scores": [0.0], "delta": DELTA}
    with pytest.raises(ValueError, match=f"Argument `{message}` must"):
        epsilon_lower_bound(**{**valid, **arguments})
