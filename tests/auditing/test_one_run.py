"""Guesses of coins: how many may be correct, and what is contradicted by more."""

import numpy as np
import pytest
import scipy.stats

from tests.auditing_support import SIMULATIONS, constant, exceeding, spread_response
from tfdp.auditing import one_run


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


def test_p_values_without_delta_are_those_of_binomials():
    expected = scipy.stats.binom(100, np.e / (1 + np.e)).sf(79)
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


def test_gaussian_bounds_are_valid_for_the_best_mechanism():
    """The probability of so many correct guesses is what is bounded, at the true mu."""
    mu, canaries = 1.0, 100
    right = scipy.stats.norm.cdf(mu / 2)  # Each guess by the sign of a score, on its own.
    for significance in (0.05, 0.01):
        contradicted = [
            one_run.is_contradicted(canaries, canaries, c, np.array([mu]), significance)[0]
            for c in range(canaries + 1)
        ]
        least = contradicted.index(True)
        assert all(contradicted[least:]) and right * canaries < least < canaries
        assert scipy.stats.binom(canaries, right).sf(least - 1) <= significance


def test_numbers_of_guesses_are_even_and_fixed():
    assert one_run.guess_counts(1000, "one_run") == [50, 100, 250, 500, 1000]
    assert one_run.guess_counts(1000, "one_run_f_dp") == [300, 600, 1000]
    assert one_run.guess_counts(7, "one_run") == [2, 6]
    assert one_run.guess_counts(1, "one_run") == [1]
