"""Renyi divergences of the Poisson-sampled Gaussian against numerical integration."""

import dp_accounting
import numpy as np
import pytest
from scipy import special

from tests.accounting import reference
from tfdp.accounting import event_codec, sampled_gaussian

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
def test_sums_at_integer_orders_are_the_integrals(q, sigma):
    orders = (2, 3, 8, 17)
    sums = sampled_gaussian.log_moments_at_integers(q, sigma, orders)
    integrals = [sampled_gaussian.log_moment(q, sigma, float(order)) for order in orders]
    np.testing.assert_allclose(sums, integrals, rtol=1e-9, atol=1e-13)
    # Large orders, one after the other in dp_accounting.
    largest = (100, sampled_gaussian.LARGEST_INTEGER)
    accountant = dp_accounting.rdp.RdpAccountant(largest).compose(
        event_codec.sampled_gaussian(q, sigma)
    )
    sums = sampled_gaussian.log_moments_at_integers(q, sigma, largest)
    np.testing.assert_allclose(
        sums / (np.array(largest) - 1), accountant.rdp, rtol=1e-9, atol=1e-13
    )
    assert len(sampled_gaussian.log_moments_at_integers(q, sigma, ())) == 0
