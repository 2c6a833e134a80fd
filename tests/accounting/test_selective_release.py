"""Selective release: what it costs, by what can be observed."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from tests.accounting import reference
from tfdp.accounting import (
    PldAccountant,
    RdpAccountant,
    SelectiveReleaseDpEvent,
    accountants,
    composition,
    observability,
    selective_release,
)
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.selective_release import (
    acceptance_bounds,
    default_max_attempts,
    parameters_for_acceptance,
    selective_truncation_probability,
)

Gaussian = dp_accounting.GaussianDpEvent
_DELTA = 1e-5
_UPDATE, _SELECTION = sampled_gaussian(2048 / 60000, 4.0), sampled_gaussian(256 / 60000, 1.3)
_EVENT = SelectiveReleaseDpEvent(_UPDATE, _SELECTION)


def _rdp(event, mode, orders=(2.0, 8.0, 32.0)):
    return RdpAccountant(orders, selective_release=mode).compose(event).rdp


# The event.


def test_acceptance_bounds_are_the_probabilities_at_the_ends():
    assert acceptance_bounds(1.3, -1.0) == (special.ndtr(-1 / 1.3), 0.5)
    rng = np.random.default_rng(0)
    for sigma, beta in ((0.8, -1.0), (1.3, 0.0), (0.5, 2.0)):
        low, high = acceptance_bounds(sigma, beta)
        noise = 2 * sigma * rng.standard_normal(200_000)
        for change, exact in ((1.0, low), (-1.0, high)):
            assert abs((change + noise < beta).mean() - exact) < 5e-3
    assert acceptance_bounds(0.0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1.0,), "validation_noise_multiplier"),
        ((math.nan,), "validation_noise_multiplier"),
        ((1.0, math.nan), "threshold"),
        ((1.0, math.inf), "threshold"),
    ],
)
def test_acceptance_bounds_refuse_impossible_arguments(arguments, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        acceptance_bounds(*arguments)


@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
def test_nests_and_composes_itself(mode):
    nested = dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent([_EVENT, Gaussian(8.0)]), 5
    )
    flat = 15 * _rdp(_EVENT, mode) + 15 * _rdp(Gaussian(8.0), mode)
    orders = (2.0, 8.0, 32.0)
    accountant = RdpAccountant(orders, selective_release=mode).compose(nested, 3)
    np.testing.assert_allclose(accountant.rdp, flat, rtol=1e-12)


@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
def test_a_plain_gaussian_is_a_batch_of_everything(mode):
    plain = SelectiveReleaseDpEvent(Gaussian(10.0), Gaussian(5.0))
    sampled = SelectiveReleaseDpEvent(sampled_gaussian(1.0, 10.0), sampled_gaussian(1, 5.0))
    assert (_rdp(plain, mode) == _rdp(sampled, mode)).all()


@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
@pytest.mark.parametrize(
    "part",
    [
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0)),
        dp_accounting.UnsupportedDpEvent(),
        _EVENT,
    ],
)
def test_other_mechanisms_are_refused_by_name(mode, part):
    for make in (RdpAccountant, PldAccountant):
        for event in (
            SelectiveReleaseDpEvent(part, _SELECTION),
            SelectiveReleaseDpEvent(_UPDATE, part),
        ):
            accountant = make(selective_release=mode)
            assert accountant._maybe_compose(event, 1, False).invalid_event == part
            with pytest.raises(dp_accounting.UnsupportedEventError, match="must each be a"):
                accountant.compose(event)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
def test_both_accountants_charge_what_can_be_observed(mode):
    for make in (RdpAccountant, PldAccountant):
        assert make(selective_release=mode).compose(_EVENT).get_epsilon(_DELTA) > 0


@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
def test_no_noise_costs_everything(mode):
    for event in (
        SelectiveReleaseDpEvent(sampled_gaussian(0.1, 0.0), _SELECTION),
        SelectiveReleaseDpEvent(_UPDATE, sampled_gaussian(0.1, 0.0)),
    ):
        assert (_rdp(event, mode) == math.inf).all()
        assert PldAccountant(selective_release=mode).compose(event).get_epsilon(0.1) == math.inf


@pytest.mark.parametrize("mode", observability.OBSERVABILITY)
def test_no_sampling_costs_nothing(mode):
    event = SelectiveReleaseDpEvent(sampled_gaussian(0.0, 1.0), sampled_gaussian(0.0, 1.0))
    assert _rdp(event, mode).max() < 1e-9
    assert PldAccountant(selective_release=mode).compose(event).get_epsilon(_DELTA) == 0


@settings(max_examples=30, deadline=None)
@given(
    q=st.floats(0, 1),
    sigma=st.floats(0.3, 30),
    validation_q=st.floats(0, 1),
    validation_sigma=st.floats(0.05, 30),
    threshold=st.floats(-3, 3),
)
def test_every_cost_covers_the_update_alone(q, sigma, validation_q, validation_sigma, threshold):
    event = SelectiveReleaseDpEvent(
        sampled_gaussian(q, sigma), sampled_gaussian(validation_q, validation_sigma), threshold
    )
    alone = _rdp(event.update, "conditional") * (1 - 1e-7) - 2e-12
    for mode in observability.OBSERVABILITY:
        assert (_rdp(event, mode) >= alone).all()


# Accepted updates only.


def _searched(order):
    """A divergence that some acceptance probabilities have."""
    update = reference.SelectedUpdate(2048 / 60000, 4.0, 256 / 60000)
    rng = np.random.default_rng(0)
    return update.search(*acceptance_bounds(1.3), order, False, rng)


@pytest.mark.parametrize("order", [2, 8])
def test_mutant_that_charges_the_published_cost_is_caught(order):
    (ours,) = _rdp(_EVENT, "conditional", [order])
    (published,) = sum(_rdp(part, "conditional", [order]) for part in (_UPDATE, _SELECTION))
    assert published < _searched(order) <= ours <= 1.001 * _searched(order)


def test_pld_of_accepted_updates_is_that_of_one_composed():
    accountant = PldAccountant(selective_release="conditional").compose(_EVENT, 20)
    accountant.compose(dp_accounting.SelfComposedDpEvent(_EVENT, 15), 2)
    once = selective_release.conditional_pair(_EVENT)
    expected = composition.epsilon([(once, 50)], _DELTA)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-6)
    rdp = RdpAccountant().compose(_EVENT, 50).get_epsilon(_DELTA)
    assert 0.8 * rdp < expected < rdp
    # No selection is one way to select.
    plain = PldAccountant().compose(_UPDATE, 50).get_least_epsilon(_DELTA)
    assert accountant.get_least_epsilon(_DELTA) == pytest.approx(plain)


# Every attempt observed.


def _grid_of_bits(q, sigma, beta):
    low, high = acceptance_bounds(sigma, beta)
    for p, other in itertools.product(np.linspace(low, high, 9), repeat=2):
        yield p, (1 - q) * p + q * other


def _bernoulli_divergence(p, r, order):
    terms = [x**order * y ** (1 - order) for x, y in ((p, r), (1 - p, 1 - r))]
    return math.log(sum(terms)) / (order - 1)


def _largest_bit_divergence(q, sigma, beta, order):
    return max(
        max(_bernoulli_divergence(p, r, order), _bernoulli_divergence(r, p, order))
        for p, r in _grid_of_bits(q, sigma, beta)
    )


_BITS = [(256 / 60000, 1.3, -1.0), (0.2, 0.8, 0.0), (1.0, 2.0, 1.5), (0.05, 0.6, -2.0)]


@pytest.mark.parametrize(("q", "sigma", "beta"), _BITS)
def test_bit_is_the_largest_divergence_of_any_pair(q, sigma, beta):
    event = SelectiveReleaseDpEvent(_UPDATE, sampled_gaussian(q, sigma), beta)
    orders = (1.1, 2.0, 7.5)
    exact = [_largest_bit_divergence(q, sigma, beta, order) for order in orders]
    ours = selective_release.bit_rdp(event, orders)
    np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=1e-12)
    assert (ours >= np.array(exact) - 1e-13).all()
    # A bit says less than the noisy number that it is made of.
    assert (ours <= _rdp(event.selection, "conditional", orders) + 1e-11).all()


def test_mutant_that_drops_one_minus_q_v_is_caught():
    q, sigma, beta = 0.5, 0.8, 0.0
    event = SelectiveReleaseDpEvent(_UPDATE, sampled_gaussian(q, sigma), beta)
    low, high = acceptance_bounds(sigma, beta)
    dropped = max(
        _bernoulli_divergence(*pair, 2.0)
        for p, other in ((low, high), (high, low))
        for pair in itertools.permutations((p, min(p + q * other, 0.999)))
    )
    exact = _largest_bit_divergence(q, sigma, beta, 2.0)
    np.testing.assert_allclose(selective_release.bit_rdp(event, (2.0,)), exact, rtol=1e-6)
    assert abs(dropped / exact - 1) > 0.1


def test_an_attempt_costs_the_update_and_the_bit():
    q, sigma, beta = _BITS[1]
    event = SelectiveReleaseDpEvent(sampled_gaussian(0.1, 1.5), sampled_gaussian(q, sigma), beta)
    for order in (1.5, 2.0, 9.0):
        exact = reference.renyi_divergence(0.1, 1.5, order)
        exact += _largest_bit_divergence(q, sigma, beta, order)
        np.testing.assert_allclose(_rdp(event, "per_attempt", [order]), exact, rtol=1e-6)


def _delta_of_an_attempt(event, epsilon, p, r):
    """Of the update and the bit, with acceptance r with the example and p without it."""
    q, sigma = selective_release.parameters(event.update)
    z = np.arange(-12 * sigma, 1 + 12 * sigma, sigma / 2000)
    mixture, base = (np.exp(x) * sigma / 2000 for x in reference.log_densities(z, q, sigma))
    return max(
        sum(
            np.maximum(f * x - math.exp(epsilon) * g * y, 0).sum()
            for x, y in ((u, v), (1 - u, 1 - v))
        )
        for f, g, u, v in ((mixture, base, r, p), (base, mixture, p, r))
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bit", _BITS)
def test_pld_of_an_attempt_bounds_the_exact_delta(bit):
    q, sigma, beta = bit
    event = SelectiveReleaseDpEvent(sampled_gaussian(0.1, 1.5), sampled_gaussian(q, sigma), beta)
    accountant = PldAccountant(selective_release="per_attempt").compose(event)
    for epsilon in (0.0, 0.05, 0.3, 0.8):
        exact = max(_delta_of_an_attempt(event, epsilon, p, r) for p, r in _grid_of_bits(*bit))
        assert exact - 1e-10 <= accountant.get_delta(epsilon) <= 1.1 * exact + 1e-4


@pytest.mark.parametrize("kept", [0, 1])
def test_mutant_with_one_part_of_an_attempt_is_caught(kept, monkeypatch):
    pairs = accountants._upper_pairs
    monkeypatch.setattr(accountants, "_upper_pairs", lambda *event: pairs(*event)[kept:][:1])
    with pytest.raises(AssertionError):
        test_pld_of_an_attempt_bounds_the_exact_delta(_BITS[1])


def test_an_attempt_costs_at_least_its_test():
    accountant = PldAccountant(selective_release="per_attempt").compose(_EVENT, 100)
    least, most = accountant.get_least_epsilon(_DELTA), accountant.get_epsilon(_DELTA)
    assert 0.01 < least < most
    event = SelectiveReleaseDpEvent(sampled_gaussian(0.1, 1.5), _SELECTION)
    again = PldAccountant(selective_release="per_attempt").compose(event, 100)
    assert again.get_least_epsilon(_DELTA) == pytest.approx(least, rel=1e-9)


def test_pld_and_rdp_of_attempts_agree():
    rdp = RdpAccountant(selective_release="per_attempt").compose(_EVENT, 500).get_epsilon(_DELTA)
    pld = PldAccountant(selective_release="per_attempt").compose(_EVENT, 500).get_epsilon(_DELTA)
    assert 0.8 * rdp < pld < rdp


def test_the_usual_grid_is_priced_in_all_modes():
    for mode in observability.OBSERVABILITY:
        rdp = _rdp(_EVENT, mode, DEFAULT_RDP_ORDERS)
        assert (rdp > 0).all() and not np.isnan(rdp).any()


# Truncation.


def test_default_cap_is_the_smallest_that_is_almost_never_reached():
    for least in (0.9, 0.25, 0.05, 1e-4):
        cap = default_max_attempts(least)
        assert math.exp(cap * math.log1p(-least)) <= 1e-30 * (1 + 1e-9)
        assert math.exp((cap - 1) * math.log1p(-least)) > 1e-30
    assert default_max_attempts(1) == 1


def test_truncation_of_an_accepted_update_is_that_of_all_its_attempts():
    rng = np.random.default_rng(0)
    tau_t, tau_v, least, cap = 0.003, 0.002, 0.25, 12
    attempts = np.minimum(rng.geometric(least, 200_000), cap)
    truncated = rng.random((len(attempts), cap)) < 1 - (1 - tau_t) * (1 - tau_v)
    seen = (truncated & (np.arange(cap) < attempts[:, np.newaxis])).any(axis=1)
    capped = rng.geometric(least, 200_000) > cap
    stated = selective_truncation_probability(tau_t, tau_v, least, cap)
    assert (seen | capped).mean() <= stated <= (seen | capped).mean() + 0.005
    # A charge per accepted update, not per attempt, would be too small.
    assert tau_t + tau_v < 0.5 * seen.mean()


def test_truncation_stays_a_probability():
    stated = selective_truncation_probability(1e-16, 1e-16, 1e-30, 10)
    assert 0.99 < stated < 1
    assert selective_truncation_probability(0, 0, 1.0, 1) == 0
    assert selective_truncation_probability(0, 0, 0.3) == pytest.approx(1e-16, rel=0.5)
    assert 1 - 1e-15 < selective_truncation_probability(0, 0, 0.0, max_attempts=9) < 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((1.0, 0.0, 0.5), "update_truncation"),
        ((0.0, -1.0, 0.5), "validation_truncation"),
        ((0.0, 0.0, -0.1), "least_acceptance"),
        ((0.0, 0.0, 0.5, 0), "max_attempts"),
    ],
)
def test_truncation_refuses_impossible_arguments(arguments, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        selective_truncation_probability(*arguments)


@settings(max_examples=30, deadline=None)
@given(least=st.floats(1e-6, 0.9), share=st.floats(0.01, 0.99))
def test_parameters_for_acceptance_are_the_inverse_of_the_bounds(least, share):
    largest = least + share * (0.999 - least)
    found = acceptance_bounds(*parameters_for_acceptance(least, largest))
    np.testing.assert_allclose(found, (least, largest), rtol=1e-6)


@pytest.mark.parametrize(("least", "largest"), [(0.5, 0.5), (0.6, 0.5), (0.0, 0.5), (0.5, 1.0)])
def test_acceptance_that_no_test_has_is_refused(least, largest):
    with pytest.raises(ValueError, match="Argument `l"):
        parameters_for_acceptance(least, largest)
