"""The accountants against exact values, and in dp_accounting's own abstract test."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.privacy_accountant_test import PrivacyAccountantTest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting import reference
from tfdp.accounting import PldAccountant, RdpAccountant
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.observability import OBSERVABILITY

Gaussian = dp_accounting.GaussianDpEvent


# dp_accounting subtracts infinities when epsilon and RDP are both infinite.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
class RdpAccountantTest(PrivacyAccountantTest):
    def _make_test_accountants(self):
        modes = [RdpAccountant(selective_release=mode) for mode in OBSERVABILITY]
        return [*modes, RdpAccountant([2, 4.5, 64])]


class PldAccountantTest(PrivacyAccountantTest):
    def _make_test_accountants(self):
        return [PldAccountant(), PldAccountant(selective_release="per_attempt")]


del PrivacyAccountantTest  # Or pytest would collect the abstract class too.


def test_rdp_of_a_gaussian_is_the_closed_form():
    accountant = RdpAccountant().compose(Gaussian(1.7), 3)
    np.testing.assert_allclose(accountant.rdp, 3 * accountant.orders / (2 * 1.7**2), rtol=1e-12)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.04), (1e-8, 50.0)])
def test_rdp_of_a_sampled_gaussian_is_the_larger_divergence(q, sigma):
    orders = [1.1, 2, 2.5, 7.7, 16]
    accountant = RdpAccountant(orders).compose(sampled_gaussian(q, sigma), 10)
    exact = [10 * reference.renyi_divergence(q, sigma, order) for order in orders]
    np.testing.assert_allclose(accountant.rdp, exact, rtol=1e-7, atol=2e-10)
    # Where dp_accounting's sum cancels to zero or less, ours stays above the true value.
    assert (accountant.rdp > 45 * np.array(orders) * q**2 / sigma**2 / 10).all()


def test_mutant_doubled_noise_is_caught_by_the_rdp_reference():
    rdp = RdpAccountant([2]).compose(sampled_gaussian(0.01, 2.0)).rdp[0]
    assert abs(rdp / reference.renyi_divergence(0.01, 1.0, 2) - 1) > 0.5


def test_default_orders_are_tight():
    dense = [1 + x / 200 for x in range(4, 400)] + [float(x) for x in range(3, 1100)]
    for sigma in (0.1, 0.3, 1.0, 10.0, 200.0):
        for delta in (1e-3, 1e-5, 1e-8):
            ours = RdpAccountant().compose(Gaussian(sigma)).get_epsilon(delta)
            best = RdpAccountant(dense).compose(Gaussian(sigma)).get_epsilon(delta)
            assert ours <= best * 1.003, (sigma, delta)
    assert DEFAULT_RDP_ORDERS[0] < 1.03
    assert DEFAULT_RDP_ORDERS[-1] > 900


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("steps", [1, 900])
def test_epsilon_of_gaussians_bounds_the_analytic_one(sigma, delta, steps):
    """T Gaussians with noise sigma sqrt(T) are one with sigma; sampled with q = 1 as well."""
    exact = reference.gaussian_epsilon(sigma, delta)
    noise = sigma * math.sqrt(steps)
    for event in (Gaussian(noise), sampled_gaussian(1.0, noise)):
        pld = PldAccountant().compose(event, steps).get_epsilon(delta)
        assert exact <= pld <= exact + 1e-3
        rdp = RdpAccountant().compose(event, steps).get_epsilon(delta)
        assert exact <= rdp <= 1.35 * exact + 1e-2


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.2, 0.7), (1e-4, 0.5)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
def test_epsilon_of_one_sampled_gaussian_bounds_the_exact_one(q, sigma, delta):
    exact = reference.sampled_gaussian_epsilon(q, sigma, delta)
    pld = PldAccountant().compose(sampled_gaussian(q, sigma)).get_epsilon(delta)
    assert exact - 1e-8 <= pld <= exact * 1.0005 + 1e-5
    rdp = RdpAccountant().compose(sampled_gaussian(q, sigma)).get_epsilon(delta)
    assert rdp >= exact


@settings(max_examples=8, deadline=None)
@given(q=st.floats(1e-4, 0.9), sigma=st.floats(0.5, 20), delta=st.floats(1e-8, 1e-3))
def test_no_accountant_goes_below_the_exact_epsilon(q, sigma, delta):
    exact = reference.sampled_gaussian_epsilon(q, sigma, delta)
    for accountant in (PldAccountant(), RdpAccountant()):
        assert accountant.compose(sampled_gaussian(q, sigma)).get_epsilon(delta) >= exact - 1e-8


def test_accountants_agree_with_dp_accountings():
    event = sampled_gaussian(0.02, 1.3)
    theirs = dp_accounting.pld.PLDAccountant().compose(event, 500).get_epsilon(1e-5)
    ours = PldAccountant().compose(event, 500)
    assert ours.get_least_epsilon(1e-5) <= theirs
    assert abs(ours.get_epsilon(1e-5) / theirs - 1) < 1e-4
    theirs = dp_accounting.rdp.RdpAccountant(DEFAULT_RDP_ORDERS).compose(event, 500)
    ours = RdpAccountant().compose(event, 500)
    assert abs(ours.get_epsilon(1e-5) - theirs.get_epsilon(1e-5)) < 1e-6


def test_composition_is_order_independent_and_counts_nested_events():
    a, b = sampled_gaussian(0.02, 1.3), Gaussian(8.0)
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.ComposedDpEvent([a, b]), 5)
    for make in (RdpAccountant, PldAccountant):
        flat = make().compose(b, 15).compose(a, 15).get_epsilon(1e-5)
        assert abs(make().compose(nested, 3).get_epsilon(1e-5) - flat) < 1e-3


def test_delta_is_the_inverse_of_epsilon():
    for accountant in (RdpAccountant(), PldAccountant()):
        accountant.compose(sampled_gaussian(0.02, 1.3), 500)
        epsilon = accountant.get_epsilon(1e-5)
        np.testing.assert_allclose(accountant.get_delta(epsilon), 1e-5, rtol=1e-3)


def test_no_noise_and_no_sampling():
    for make in (RdpAccountant, PldAccountant):
        assert make().compose(sampled_gaussian(0.1, 0.0)).get_epsilon(1e-5) == math.inf
        assert make().compose(sampled_gaussian(0.0, 1.0)).get_epsilon(1e-5) == 0


@pytest.mark.parametrize("make", [RdpAccountant, PldAccountant])
def test_calibrates_with_dp_accountings_tool(make):
    sigma = dp_accounting.calibrate_dp_mechanism(
        lambda: make(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE),
        Gaussian,
        target_epsilon=1.0,
        target_delta=1e-5,
        bracket_interval=dp_accounting.ExplicitBracketInterval(1, 20),
        tol=1e-3,
    )
    assert reference.gaussian_epsilon(sigma, 1e-5) <= 1.0


@pytest.mark.parametrize("make", [RdpAccountant, PldAccountant])
@pytest.mark.parametrize(
    "event",
    [
        Gaussian(math.nan),  # dp_accounting's RDP: epsilon 0.
        Gaussian(-1.0),  # dp_accounting's RDP: as with noise 1.
        sampled_gaussian(1.5, 1.0),
        sampled_gaussian(math.nan, 1.0),
        dp_accounting.SelfComposedDpEvent(Gaussian(1.0), 0),
        dp_accounting.ComposedDpEvent([Gaussian(1.0), Gaussian(math.nan)]),
    ],
)
def test_refuses_impossible_events(make, event):
    with pytest.raises(ValueError, match="Argument `event` must be"):
        make().compose(event)


def test_refuses_impossible_arguments():
    replace_one = dp_accounting.NeighboringRelation.REPLACE_ONE
    for make in (RdpAccountant, PldAccountant):
        with pytest.raises(ValueError, match="Argument `neighboring_relation` must be"):
            make(neighboring_relation=replace_one)
        with pytest.raises(TypeError):
            make().compose("a step")
    for make in (RdpAccountant, PldAccountant):
        for mode in ("hidden", None, 1):
            with pytest.raises(
                ValueError, match="`selective_release` must be one of 'conditional'"
            ):
                make(selective_release=mode)
    for orders in ([], [1], [2, 0.5], [math.nan]):
        with pytest.raises(ValueError, match="Argument `orders` must be"):
            RdpAccountant(orders)


@pytest.mark.parametrize("noise", [1e-300, 1e-160, 1e-20, 1e-7])
@pytest.mark.parametrize("q", [1.0, 0.01, 1e-300])
def test_noise_that_hides_nothing_costs_infinitely_much(noise, q):
    for accountant in (RdpAccountant(), PldAccountant()):
        accountant.compose(sampled_gaussian(q, noise), 1000)
        assert accountant.get_epsilon(1e-5) == math.inf
    assert PldAccountant().compose(dp_accounting.LaplaceDpEvent(noise)).get_epsilon(0.1) == math.inf


@pytest.mark.parametrize("noise", [1e13, 1e160, 1e300])
def test_noise_beyond_all_numbers_costs_no_less_than_much(noise):
    for accountant in (RdpAccountant(), PldAccountant()):
        accountant.compose(sampled_gaussian(0.01, noise), 1000).compose(Gaussian(noise))
        assert 0 <= accountant.get_epsilon(1e-5) < 1e-3


@pytest.mark.parametrize("count", [10**15 + 1, 10**30, 10**400])
@pytest.mark.parametrize("q", [1.0, 1e-4])
def test_releases_beyond_all_numbers_cost_infinitely_much(count, q):
    for accountant in (RdpAccountant(), PldAccountant()):
        accountant.compose(sampled_gaussian(q, 1.0), count)
        assert accountant.get_epsilon(1e-5) == math.inf
        nested = dp_accounting.SelfComposedDpEvent(sampled_gaussian(q, 1.0), count)
        assert type(accountant)().compose(nested, 3).get_epsilon(1e-5) == math.inf


def test_releases_in_parts_cost_as_much_as_at_once():
    step = sampled_gaussian(1e-6, 100.0)
    accountant = PldAccountant()
    for _ in range(3):
        accountant.compose(step, 4 * 10**8)
    assert accountant.get_epsilon(1e-5) == math.inf  # Too many for the grid: nothing is known.
    assert RdpAccountant().compose(step, 12 * 10**8).get_epsilon(1e-5) < 0.1


def test_who_is_hardly_ever_sampled_hardly_leaks():
    ever = 1 - 0.99**100
    accountant = PldAccountant().compose(sampled_gaussian(0.01, 0.01), 100)
    assert accountant.get_epsilon(1.001 * ever) == 0
    assert accountant.get_epsilon(0.98 * ever) > 0
    assert accountant.get_delta(0.0) == pytest.approx(ever, rel=1e-6)
    # One release of everybody is enough to leak.
    assert accountant.compose(Gaussian(0.5)).get_epsilon(1.001 * ever) > 0
