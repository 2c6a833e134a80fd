"""Rare large losses taken apart: exact for two steps, and bounds that are near for many."""

import functools
import math

import numpy as np
import pytest
from scipy import optimize, special

from tests.accounting import reference
from tfdp.accounting import composition, loss_grid, rare_losses
from tfdp.accounting.dominating_pairs import sampled_gaussian
from tfdp.accounting.rare_losses import Above, Below, Capped, RareLosses

# q, sigma, steps, delta: the bounds were up to 25 times apart.
_HARD = [
    (1.92e-6, 0.605, 309_852, 1.6e-12),
    (1.56e-6, 0.43, 5_331_719, 6.8e-10),
    (1.28e-5, 0.906, 8, 4.9e-15),
    (1.45e-5, 0.601, 213_642, 3.9e-7),
    (4.11e-5, 0.626, 25_099, 2.7e-9),
    (1.41e-5, 1.02, 539_651, 3.8e-13),
    (8.19e-6, 0.408, 1_659_571, 3.2e-14),
]


def _one_step(epsilon, q, sigma):
    """Delta of one step in the direction "remove" at any epsilons, by the Neyman-Pearson lemma."""
    excess = np.expm1(np.minimum(epsilon, 700.0)) + q
    z = sigma**2 * (np.log(np.maximum(excess, 1e-300)) - math.log(q)) + 0.5
    above, shifted = special.ndtr(-z / sigma), special.ndtr((1 - z) / sigma)
    return np.where(
        excess > 0,
        (1 - q) * above + q * shifted - np.exp(epsilon) * above,
        -np.expm1(epsilon),
    )


def _two_steps(epsilon, q, sigma):
    """Delta of two steps: the integral of that of one over the loss of the other."""
    z = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    mixture, _ = reference.log_densities(z, q, sigma)
    change = np.log1p(q * np.expm1((2 * z - 1) / (2 * sigma**2)))
    return (z[1] - z[0]) * np.exp(mixture) @ _one_step(epsilon - change, q, sigma)


def _check_two_steps(q, sigma, delta):
    exact = optimize.brentq(lambda e: _two_steps(e, q, sigma) - delta, 1e-6, 60.0, xtol=1e-9)
    directions = [(sampled_gaussian(q, sigma).remove, 2)]
    with np.errstate(all="ignore"):
        most = RareLosses(directions, False, delta, 1.5 * exact).epsilon(delta)
        least = RareLosses(directions, True, delta, 1.5 * exact).epsilon(delta)
    assert exact * (1 - 1e-7) <= most < 1.005 * exact
    assert 0.995 * exact < least <= exact * (1 + 1e-7)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "case", [(1e-5, 0.5, 1e-8), (1e-3, 0.6, 1e-7), (1e-6, 0.45, 1e-12), (0.02, 0.5, 1e-4)]
)
def test_two_steps_are_enclosed(case):
    _check_two_steps(*case)


@functools.cache
def _most(q, sigma, steps, delta):
    return composition.epsilon([(sampled_gaussian(q, sigma), steps)], delta)


@functools.cache
def _least(q, sigma, steps, delta):
    return composition.least_epsilon([(sampled_gaussian(q, sigma), steps)], delta)


@pytest.mark.slow
@pytest.mark.parametrize("case", _HARD)
def test_bounds_are_near_each_other(case):
    q, sigma, steps, delta = case
    least, most = _least(*case), _most(*case)
    assert 0.995 * most < least <= most
    found = composition.delta([(sampled_gaussian(q, sigma), steps)], most)
    assert found == pytest.approx(delta, rel=0.02)


def _by_one_event(q, sigma, steps, delta):
    """Epsilon, at least: how well the event tells that some step has a loss above a bound."""
    z = np.linspace(0.0, 1 + 12 * sigma, 20_001)
    lower = special.ndtr(-z / sigma)
    upper = (1 - q) * lower + q * special.ndtr((1 - z) / sigma)
    with_it, without = (-np.expm1(steps * np.log1p(-p)) for p in (upper, lower))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nanmax(np.where(with_it > delta, np.log((with_it - delta) / without), 0.0))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", _HARD)
def test_no_bound_is_below_what_one_event_shows(case):
    assert _by_one_event(*case) <= _most(*case)


@pytest.mark.slow
def test_one_event_shows_nearly_all_of_an_epsilon():
    assert _by_one_event(*_HARD[1]) > 0.998 * _most(*_HARD[1])


@pytest.mark.slow
def test_an_inversion_integral_is_between_the_bounds():
    """A third method, which takes no losses apart and has no grid of them."""
    q, sigma, steps, delta = _HARD[1]
    epsilons = (3.64, _least(*_HARD[1]), _most(*_HARD[1]))
    found = [reference.rarely_large_delta(e, q, sigma, steps) for e in epsilons]
    assert found[0] > 1.3 * delta
    assert found[1] >= delta * (1 - 1e-5) and found[2] <= delta * (1 + 1e-5)


def test_a_sum_of_parts_is_that_of_all():
    q, sigma, steps, delta = _HARD[4]
    pair = sampled_gaussian(q, sigma)
    whole = _most(*_HARD[4])
    parts = [(pair, steps // 3), (sampled_gaussian(q, sigma), steps - steps // 3)]
    assert composition.epsilon(parts, delta) == pytest.approx(whole, rel=1e-3)
    assert 0.995 * whole < composition.least_epsilon(parts, delta) <= whole


@pytest.mark.slow
def test_steps_of_two_kinds():
    """More noise in some of the steps costs less."""
    q, sigma, steps, delta = _HARD[4]
    half = [(sampled_gaussian(q, sigma), steps // 2), (sampled_gaussian(q, 1.05 * sigma), steps)]
    all_of_the_first = composition.epsilon([(sampled_gaussian(q, sigma), 3 * steps // 2)], delta)
    least, most = composition.least_epsilon(half, delta), composition.epsilon(half, delta)
    assert 0.995 * most < least <= most < all_of_the_first


def test_parts_of_a_direction():
    whole = sampled_gaussian(0.01, 0.7).remove
    losses, bound = np.linspace(-0.05, 3.0, 30), 1.234
    all_masses = whole.masses(losses)
    below, above = (kind(whole, bound).masses(losses) for kind in (Below, Above))
    capped = Capped(whole, bound).masses(losses)
    for name in ("upper", "lower"):
        values = [getattr(m, name) for m in (all_masses, below, above, capped)]
        np.testing.assert_allclose(values[1] + values[2], values[0], rtol=1e-9, atol=1e-15)
        assert values[3].sum() == pytest.approx(values[0].sum(), rel=1e-12)
        place = np.searchsorted(losses, bound)
        assert not values[1][place + 1 :].any() and not values[2][:place].any()
        assert not values[3][place + 1 :].any() and values[3][place] >= values[0][place]


def test_infinite_losses_are_not_rare():
    infinite = sampled_gaussian(1.0, 0.001).remove
    with np.errstate(all="ignore"):
        assert RareLosses([(infinite, 10**6)], True, 1e-9, 10.0).epsilon(1e-9) <= 10.0
        assert RareLosses([(infinite, 10**6)], False, 1e-9, 10.0).epsilon(1e-9) == math.inf


# Mutants.


def _mutant(monkeypatch, change):
    made = RareLosses.__init__

    def init(self, *arguments):
        made(self, *arguments)
        change(self)

    monkeypatch.setattr(RareLosses, "__init__", init)


def test_mutant_that_forgets_rare_losses_is_caught(monkeypatch):
    _mutant(monkeypatch, lambda self: self._masses.fill(0.0))
    with pytest.raises(AssertionError):
        _check_two_steps(1e-5, 0.5, 1e-8)


def test_mutant_that_forgets_pairs_is_caught(monkeypatch):
    """Takes a case in which a pair of rare losses has a tenth of delta."""
    case = (0.02, 0.5, 1e-4)
    monkeypatch.setattr(rare_losses, "_PAIRS", 10.0)
    exact = optimize.brentq(lambda e: _two_steps(e, *case[:2]) - case[2], 1e-6, 60.0, xtol=1e-9)
    directions = [(sampled_gaussian(*case[:2]).remove, 2)]
    with np.errstate(all="ignore"):
        bounded = RareLosses(directions, False, case[2], 3 * exact).epsilon(case[2])
        assert bounded > exact
        _mutant(monkeypatch, lambda self: setattr(self, "_pairs", 0.0))
        assert RareLosses(directions, False, case[2], 3 * exact).epsilon(case[2]) < exact


@pytest.mark.slow
def test_mutant_whose_losses_are_independent_of_the_others_is_caught(monkeypatch):
    """Losses of all steps beside the rare one, and not of all others."""
    _mutant(monkeypatch, lambda self: setattr(self, "_rest", None))
    q, sigma, steps, delta = _HARD[3]
    directions = [(sampled_gaussian(q, sigma).remove, steps)]
    least = composition.least_epsilon([(sampled_gaussian(q, sigma), steps)], delta)
    with np.errstate(all="ignore"):
        assert RareLosses(directions, False, delta, 0.2).epsilon(delta) < 0.99 * least


def _check_coarse_part():
    """A grid that is too coarse for a part of the outcomes: no outcome may be given to it."""
    part = Below(sampled_gaussian(0.1, 1.0).remove, 0.3)
    masses = part.masses(np.append(np.linspace(-0.12, 0.3, 20_001), 0.4))
    piece = loss_grid.grid(part, 1.0, 1e-12, True)
    for epsilon in (-5.0, -1.0, -0.1, 0.0, 0.2):
        exact = np.maximum(masses.upper - math.exp(epsilon) * masses.lower, 0.0).sum()
        bound = np.maximum(-np.expm1(epsilon - piece.losses), 0.0) @ piece.mass
        assert bound <= exact + 1e-9


def test_lower_bounds_of_parts():
    _check_coarse_part()
