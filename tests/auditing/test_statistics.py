"""Bounds are valid on mechanisms of known epsilon, and about as strong as they can be."""

import numpy as np
import pytest
from dp_accounting import pld
from scipy import stats

from tfdp.auditing import one_run, statistics
from tfdp.auditing.statistics import METHODS, epsilon_lower_bound, epsilon_of_mu

SIMULATIONS, DELTA = 1000, 1e-5


def mu_of(epsilon, delta=DELTA):
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_mu(middle, delta) < epsilon else (low, middle)
    return low


# Mechanisms with an epsilon that is known: scores of n canaries, of which some are in.


def gaussian(coins, random, epsilon, delta):
    return random.normal(size=coins.size) + mu_of(epsilon, delta) * coins


def rounded_gaussian(coins, random, epsilon, delta):
    return np.round(gaussian(coins, random, epsilon, delta))


def randomized_response(coins, random, epsilon, delta):
    """The strongest of all mechanisms; with the probability delta, it tells the truth."""
    right = random.random(coins.size) < 1 / (1 + np.exp(-epsilon))
    told = random.random(coins.size) < delta
    return np.where(told, np.where(coins, 9.0, -9.0), np.where(right, coins, ~coins))


def spread_response(coins, random, epsilon, delta):
    """The same, with so many thresholds that are equally good."""
    return randomized_response(coins, random, epsilon, delta) + random.random(coins.size) / 2


def constant(coins, random, epsilon, delta):
    """Nothing is learnt: the order in which canaries are listed must not tell anything."""
    return np.zeros(coins.size)


def infinite(coins, random, epsilon, delta):
    return np.where(random.random(coins.size) < 0.5, np.inf, -np.inf)


def exceeding(mechanism, method, epsilon, canaries, delta=DELTA, share=0.5):
    """In how many simulations the bound exceeds the true epsilon."""
    count = 0
    for seed in range(SIMULATIONS):
        random = np.random.default_rng(seed)
        coins = random.random(canaries) < share
        scores = mechanism(coins, random, epsilon, delta)
        found = epsilon_lower_bound(scores[coins], scores[~coins], delta, method=method)
        count += found > epsilon
    return count


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


@pytest.mark.slow
def test_guesses_are_not_chosen_by_what_they_find(monkeypatch):
    """Mutant: the best of all numbers of guesses, each at the full significance."""
    assert exceeding(spread_response, "one_run", 1.0, 60, delta=0.0) <= 0.05 * SIMULATIONS
    monkeypatch.setitem(one_run._SHARES, "one_run", tuple(np.arange(1, 31) / 30))
    correct = one_run.pure_bound
    monkeypatch.setattr(one_run, "pure_bound", lambda *a: correct(*a[:4], 0.05))
    assert exceeding(spread_response, "one_run", 1.0, 60, delta=0.0) > 0.08 * SIMULATIONS


def test_equal_scores_are_no_evidence(monkeypatch):
    """Mutant: scores of "in" stand before others that are equal, as they are listed."""
    seen, unseen = np.zeros(50), np.zeros(50)
    assert one_run.correct_guesses(seen, unseen, 100) == 0
    assert exceeding(constant, "one_run", 0.0, 60) == 0
    monkeypatch.setattr(one_run, "correct_guesses", guesses_as_listed)
    assert exceeding(constant, "one_run", 0.0, 60) == SIMULATIONS


def guesses_as_listed(seen, unseen, count):
    scores = np.concatenate([unseen, seen])
    is_in = np.arange(scores.size) >= unseen.size
    ordered = is_in[np.argsort(scores, kind="stable")]
    return int(ordered[scores.size - count // 2 :].sum() + (~ordered[: count // 2]).sum())


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
    assert epsilon_of_mu(1e-6, 0.01) == 0.0
    assert epsilon_of_mu(1.0, 0.0) == np.inf


def test_p_values_without_delta_are_those_of_binomials():
    expected = stats.binom(100, np.e / (1 + np.e)).sf(79)
    assert one_run.p_value(1000, 100, 80, 1.0, 0.0) == pytest.approx(expected)
    assert one_run.p_value(1000, 100, 80, 1.0, 1e-3) > expected


def test_p_values_of_a_mechanism_that_fails_with_probability_delta():
    """Which, with the probability 2 delta m / i, tells i coins more: the bound of the theorem."""
    canaries, delta, told = 200, 1e-3, 20
    random = np.random.default_rng(0)
    correct = random.binomial(canaries, np.e / (1 + np.e), size=100_000)
    correct += np.where(random.random(correct.size) < canaries * delta / told, told, 0)
    for least in (150, 160, 165):
        share = np.mean(correct >= least)
        assert share <= one_run.p_value(canaries, canaries, least, 1.0, delta)


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
