"""The Poisson-sampled Gaussian against numerical integration and dp_accounting."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import special

from tests.accounting import reference
from tfdp.accounting import sampled_gaussian

_CASES = [(0.01, 1.0), (256 / 60000, 1.1), (0.5, 0.6), (0.2, 4.0), (1e-4, 0.7)]


@pytest.mark.parametrize(("q", "sigma"), _CASES)
@pytest.mark.parametrize("order", [1.02, 1.5, 2.75, 9.3])
def test_log_moment_is_the_integral(q, sigma, order):
    computed = sampled_gaussian.log_moment(q, sigma, order)
    exact = (order - 1) * reference.renyi_divergence(q, sigma, order)
    np.testing.assert_allclose(computed, exact, rtol=1e-8, atol=1e-12)
    # The other direction is never larger, as the theorem that allows to ignore it says.
    assert (order - 1) * reference.renyi_divergence(
        q, sigma, order, remove=True
    ) <= computed + 1e-11


@pytest.mark.parametrize(("q", "sigma"), _CASES)
@pytest.mark.parametrize("order", [2, 3, 8, 17])
def test_log_moment_is_the_sum_of_theorem_5_at_integer_orders(q, sigma, order):
    k = np.arange(order + 1)
    binomials = special.binom(order, k) * (1 - q) ** (order - k) * q**k
    exact = special.logsumexp(np.log(binomials) + k * (k - 1) / (2 * sigma**2))
    computed = sampled_gaussian.log_moment(q, sigma, float(order))
    np.testing.assert_allclose(computed, exact, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("q", "sigma"), _CASES)
def test_privacy_loss_is_the_hockey_stick_divergence_in_the_worse_direction(q, sigma):
    loss = sampled_gaussian.privacy_loss(q, sigma, 1e-4)
    for epsilon in (0.0, 0.01, 0.3, 1.0, 2.5):
        exact = reference.hockey_stick(q, sigma, epsilon)
        computed = loss.get_delta_for_epsilon(epsilon)
        # Never below the exact value, but for the rounding of the reference's integral.
        assert exact * (1 - 1e-9) - 1e-15 <= computed <= exact * (1 + 1e-3) + 1e-8


@pytest.mark.parametrize("wrong", [1 / 2, 2 / 3, 3 / 2, 2])
def test_mutant_wrong_noise_is_caught(wrong):
    with pytest.raises(AssertionError):
        loss = sampled_gaussian.privacy_loss(0.01, 1.0 * wrong, 1e-4)
        exact = reference.hockey_stick(0.01, 1.0, 0.3)
        assert exact * (1 - 1e-9) <= loss.get_delta_for_epsilon(0.3) <= exact * (1 + 1e-3) + 1e-8


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.9, 2.0), (1e-5, 5.0)])
def test_privacy_loss_equals_dp_accountings(q, sigma):
    ours = sampled_gaussian.privacy_loss(q, sigma, 1e-3)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=1e-3, sampling_prob=q
    )
    for a, b in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        grid = list(np.linspace(-0.5, 2, 26))
        np.testing.assert_allclose(
            a.get_delta_for_epsilon(grid), b.get_delta_for_epsilon(grid), rtol=1e-7, atol=1e-9
        )


@pytest.mark.parametrize("sigma", [0.02, 1e4])
@pytest.mark.parametrize("q", [1e-9, 1 - 1e-9])
def test_extreme_parameters_give_proper_distributions(q, sigma):
    interval = 1.0 if sigma < 1 else 1e-4
    loss = sampled_gaussian.privacy_loss(q, sigma, interval)
    delta = loss.get_delta_for_epsilon(0.0)
    total_variation = q * math.erf(1 / (2 * sigma) / math.sqrt(2))
    assert total_variation - 1e-12 <= delta <= 1
    assert delta <= 1.5 * total_variation + interval
