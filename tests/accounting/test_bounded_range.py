"""The cost of report-noisy-min: exact divergences never exceed it, and some attain it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from tfdp.accounting.bounded_range import bounded_range_rdp

ORDERS = [1.1, 2.0, 7.3, 40.0]


def divergence(log_p, log_q, order):
    return special.logsumexp(order * log_p + (1 - order) * log_q) / (order - 1)


def log_choice(scores, width):
    """Log probabilities of the exponential mechanism for sums of losses in [0, 1]."""
    return special.log_softmax(-width * scores)


def worst(scores, added, q, width, order):
    """The larger divergence between the choices with and without an example."""
    without, whole = log_choice(scores, width), log_choice(scores + added, width)
    sampled = whole if q == 1 else np.logaddexp(math.log1p(-q) + without, math.log(q) + whole)
    return max(divergence(sampled, without, order), divergence(without, sampled, order))


@pytest.mark.quick_cases(19)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("q", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("width", [0.1, 1.0, 4.0])
def test_the_cost_holds_and_is_attained(order, q, width):
    """Two candidates, of which the example prefers one: the best odds come close to the cost."""
    cost = bounded_range_rdp(width, q, order)
    odds = np.linspace(-5 * width - 5, 5 * width + 5, 301)
    found = max(
        worst(np.array([0.0, s / width]), np.array([0.0, 1.0]), q, width, order) for s in odds
    )
    assert 0.99 * cost - 1e-11 / (order - 1) < found <= cost


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    q=st.sampled_from([0.05, 0.5, 1.0]),
    width=st.floats(0.05, 5),
    order=st.sampled_from(ORDERS),
)
def test_no_neighbours_exceed_the_cost(seed, q, width, order):
    """Sums of losses in [0, 1] of any candidates, with an example more."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, 8)
    scores = rng.normal(size=k) * rng.choice([0.1, 1, 10])
    added = rng.integers(0, 2, k) if rng.random() < 0.5 else rng.random(k)
    assert worst(scores, added, q, width, order) <= bounded_range_rdp(width, q, order)


def test_no_poisson_samples_of_neighbours_exceed_the_cost():
    """The whole mechanism: every sample of four others, each with another split of the range."""
    rng = np.random.default_rng(1)
    for q, width in itertools.product([0.1, 0.6], [0.5, 3.0]):
        losses = rng.random((5, 3)).round(1)
        outputs = [np.zeros(3), np.zeros(3)]
        for members in itertools.product([0, 1], repeat=5):
            chosen = np.exp(log_choice(losses.T @ np.array(members), width))
            chance = math.prod(q if m else 1 - q for m in members)
            outputs[1] += chance * chosen
            if not members[0]:
                outputs[0] += chance / (1 - q) * chosen
        assert np.allclose(np.sum(outputs, axis=1), 1)
        first, second = np.log(outputs)
        for order in ORDERS:
            cost = bounded_range_rdp(width, q, order)
            assert divergence(first, second, order) <= cost
            assert divergence(second, first, order) <= cost


@pytest.mark.parametrize("width", [0.05, 1.0, 6.0])
def test_closed_forms(width):
    """Order 2; eta^2/8-zCDP; randomized response; and the largest loss under sampling."""
    for q in (0.01, 0.5, 1.0):
        exact = math.log1p(q**2 * math.sinh(width / 2) ** 2)
        assert exact <= bounded_range_rdp(width, q, 2.0) < 1.002 * exact + 2e-12
    for order in ORDERS:
        rdp = bounded_range_rdp(width, 1.0, order)
        assert rdp <= 1.001 * order * width**2 / 8 + 1e-10
        p = 1 / (1 + math.exp(-width))
        pure = divergence(np.log([p, 1 - p]), np.log([1 - p, p]), order)
        assert rdp < pure
        for q in (0.01, 0.5):
            assert bounded_range_rdp(width, q, order) < math.log1p(q * math.expm1(width))
            assert bounded_range_rdp(width, q, order) < rdp


def test_large_ranges_and_orders_do_not_overflow():
    assert 99 < bounded_range_rdp(100.0, 1.0, 1000.0) < 101
    assert bounded_range_rdp(0.0, 1.0, 2.0) == bounded_range_rdp(1.0, 0.0, 2.0) == 0
    assert 0 < bounded_range_rdp(1e-6, 0.01, 2.0) < 1e-11


def test_mutant_of_half_the_range_is_caught():
    """That of utilities that one example moves both ways (losses in [-1, 1])."""
    found = worst(np.array([0.0, 0.3]), np.array([-1.0, 1.0]), 1.0, 1.0, 7.3)
    assert bounded_range_rdp(1.0, 1.0, 7.3) < found <= bounded_range_rdp(2.0, 1.0, 7.3)


def test_mutant_that_forgets_one_end_of_the_range_is_caught():
    """With s = 0 or s = eta only, nothing would be spent at all."""
    cost = bounded_range_rdp(1.0, 0.4, 2.0)
    ends = [worst(np.array([0.0, s]), np.array([0.0, 1.0]), 0.4, 1.0, 2.0) for s in (-40.0, 40.0)]
    assert max(ends) < 1e-9 < cost
