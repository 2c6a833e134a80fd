"""The tightest bound: the smaller of both accountants, and true in spite of truncation."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import scipy.stats

from tfdp.accounting import PldAccountant, RdpAccountant, SelectiveReleaseDpEvent, bounds
from tfdp.accounting.bounds import Release, tightest_epsilon
from tfdp.accounting.event_codec import allocated_gaussian, sampled_gaussian
from tfdp.accounting.sampling import PoissonSampling

_STEP = sampled_gaussian(0.01, 1.0)
_SELECTION = dp_accounting.dp_event.RepeatAndSelectDpEvent
_DELTA = 1e-5
_SELECTIVE = SelectiveReleaseDpEvent(sampled_gaussian(0.02, 3.0), sampled_gaussian(0.005, 1.3))


def pld_delta(releases, epsilon, selective_release="conditional"):
    accountant = PldAccountant(selective_release=selective_release)
    for release in releases:
        accountant.compose(release.event, release.count)
    return accountant.get_delta(epsilon) + bounds._charge(releases, epsilon)


def about(value):
    """The value to rounding: NumPy's last bits depend on where its arrays lie in memory."""
    return pytest.approx(value, rel=1e-12)


def test_is_the_smaller_of_both_and_says_which():
    bound = tightest_epsilon([Release(_STEP, 1000)], _DELTA)
    rdp = RdpAccountant().compose(_STEP, 1000).get_epsilon(_DELTA)
    pld = PldAccountant().compose(_STEP, 1000).get_epsilon(_DELTA)
    assert bound.by_accountant == about({"RDP": rdp, "PLD": pld})
    assert (bound.accountant, bound.delta) == ("PLD", _DELTA)
    assert bound.epsilon == bound.by_accountant["PLD"]
    assert pld < rdp


def test_rdp_wins_for_many_accepted_updates():
    bound = tightest_epsilon([Release(_SELECTIVE, 500)], _DELTA)
    assert bound.accountant == "RDP"
    assert bound.epsilon == bound.by_accountant["RDP"] < bound.by_accountant["PLD"]


@pytest.mark.parametrize(
    ("event", "only"),
    [
        (dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(20.0)), "PLD"),
        (_SELECTION(_SELECTION(_STEP, 2.0, 1.0), 2.0, 1.0), "RDP"),
    ],
)
def test_an_accountant_without_support_is_left_out(event, only):
    bound = tightest_epsilon([Release(event, 3), Release(_STEP, 10)], _DELTA)
    assert set(bound.by_accountant) == {bound.accountant} == {only}
    assert 0 < bound.epsilon < math.inf


def test_unsupported_events_are_refused_with_both_reasons():
    with pytest.raises(dp_accounting.UnsupportedEventError, match=r"RDP: .*PLD: "):
        tightest_epsilon([Release(dp_accounting.UnsupportedDpEvent(), 1)], _DELTA)


def test_mutant_that_forgets_counts_is_caught():
    many = tightest_epsilon([Release(_STEP, 1000)], _DELTA).epsilon
    forgotten = tightest_epsilon([Release(_STEP, 1)], _DELTA).epsilon
    reference = dp_accounting.pld.PLDAccountant().compose(_STEP, 1000).get_epsilon(_DELTA)
    assert abs(many - reference) < 1e-3
    assert abs(forgotten - reference) > 0.5


def test_equal_releases_that_are_not_consecutive_cost_as_one():
    other = sampled_gaussian(0.02, 3.0)
    mixed = [Release(_STEP, 30), Release(other, 5)] * 20
    merged = [Release(_STEP, 600), Release(other, 100)]
    epsilon = tightest_epsilon(mixed, _DELTA).epsilon
    assert abs(epsilon - tightest_epsilon(merged, _DELTA).epsilon) < 1e-6


# Truncation.


def _least_of_truncated(epsilon, truncation):
    """The least epsilon that can be stated for what may be truncated, if it is about `epsilon`."""
    left = _DELTA - (1 + math.exp(epsilon)) * truncation
    return PldAccountant().compose(_STEP, 1000).get_epsilon(left)


@pytest.mark.parametrize("tau", [1e-20, 1e-16, 1e-12, 3e-12, 1e-10, 3e-10])
def test_truncation_is_within_the_stated_delta(tau):
    bound = tightest_epsilon([Release(_STEP, 1000, tau)], _DELTA)
    stated = bound.by_accountant["PLD"]
    assert _least_of_truncated(stated, 1000 * tau) <= stated
    clean = tightest_epsilon([Release(_STEP, 1000)], _DELTA)
    for name, epsilon in bound.by_accountant.items():
        assert clean.by_accountant[name] < epsilon < 1.1 * clean.by_accountant[name]


def test_mutant_that_ignores_truncation_is_caught():
    ignoring = tightest_epsilon([Release(_STEP, 1000)], _DELTA).epsilon
    assert _least_of_truncated(ignoring, 1000 * 1e-20) > ignoring


def test_frequent_truncation_leaves_no_guarantee():
    for tau in (1e-8, 1e-5, 0.5):
        bound = tightest_epsilon([Release(_STEP, 1000, tau)], _DELTA)
        assert bound.epsilon == math.inf


def test_truncations_of_several_releases_add_up():
    one = tightest_epsilon([Release(_STEP, 1000, 1e-10)], _DELTA).epsilon
    parts = [Release(_STEP, 500, 1.5e-10), Release(_STEP, 500, 0.5e-10)]
    assert tightest_epsilon(parts, _DELTA).epsilon == pytest.approx(one, rel=1e-12)


def test_huge_epsilons_with_truncation_do_not_overflow():
    huge = Release(sampled_gaussian(0.5, 0.05), 100)
    whole = tightest_epsilon([huge], _DELTA).epsilon
    assert 1000 < whole < math.inf
    truncated = dataclasses.replace(huge, truncation_probability=1e-16)
    assert whole <= tightest_epsilon([truncated], _DELTA).epsilon < whole * (1 + 1e-6)
    for event in (dp_accounting.GaussianDpEvent(0.05), _SELECTION(huge.event, 2.0, 1.0)):
        assert tightest_epsilon([Release(event, 100, 1e-16)], _DELTA).epsilon == math.inf


_Z = np.linspace(-9, 9, 20_001)  # Outcomes, of which the density is integrated.


def _truncated(others, q, sigma, rows, with_x, is_first):
    """Density of a noisy sum over a sample that is cut off, by all samples.

    The example x adds 1, and each other takes 1 away. If x is first, it takes the place of another.
    """
    density = np.zeros(len(_Z))
    for sampled, count in itertools.product((0, 1) if with_x else (0,), range(others + 1)):
        share = scipy.stats.binom.pmf(count, others, q)
        share *= (q if sampled else 1 - q) if with_x else 1.0
        has_x = sampled and (is_first or count < rows)
        total = has_x - min(count, rows - has_x)
        density += share * scipy.stats.norm.pdf(_Z, total, sigma)
    return density


def _hockey_stick(upper, lower, epsilon):
    excess = np.maximum(upper - math.exp(epsilon) * lower, 0.0)
    return float(excess.sum() * (_Z[1] - _Z[0]))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 6.0])
@pytest.mark.parametrize(("others", "q", "rows"), [(5, 0.3, 3), (5, 0.3, 4), (8, 0.1, 3)])
def test_the_charge_bounds_the_truth(others, q, rows, epsilon):
    """A sum of few examples, of which each moves the sum by its sign alone."""
    sigma, tau = 0.5, float(scipy.stats.binom.sf(rows, others + 1, q))
    release = Release(sampled_gaussian(q, sigma), 1)
    clean = pld_delta([release], epsilon)
    truncated = dataclasses.replace(release, truncation_probability=tau)
    stated = pld_delta([truncated], epsilon)
    assert stated == pytest.approx(clean + tau * min(1 + math.exp(epsilon), 1 / q))
    for is_first in (False, True):
        pair = [_truncated(others, q, sigma, rows, x, is_first) for x in (False, True)]
        assert _hockey_stick(*pair, epsilon) <= stated
        assert _hockey_stick(*pair[::-1], epsilon) <= stated
    # Where it is known who else was sampled: if they fill all rows, x takes the place of another.
    full = scipy.stats.binom.sf(rows - 1, others, q)
    without, moved = (scipy.stats.norm.pdf(_Z, place, sigma) for place in (-1, 1))
    taken = _hockey_stick((1 - q) * without + q * moved, without, epsilon)
    true = (1 - full) * clean + full * taken
    assert true <= stated
    assert true > 1.01 * clean  # A mutant that charges nothing is caught.


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        (sampled_gaussian(0.1, 0.2), 1),
        (sampled_gaussian(0.1, 0.2, releases_signs=True), 1),
        (dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(0.05)), 1),
        (allocated_gaussian(0.1, 0.2, 4), 4),
    ],
)
def test_a_cycle_has_a_chance_in_each_of_its_steps(event, steps):
    """An example of a set is in a batch with probability q / c."""
    tau, epsilon = 1e-9, 6.0
    clean = pld_delta([Release(event, 3)], epsilon)
    for cycle in (1, 4):
        charged = pld_delta([Release(event, 3, tau, cycle)], epsilon) - clean
        assert charged == pytest.approx(3 * tau * 10 * max(cycle, steps), rel=1e-3)


def test_selections_are_charged_on_both_data_sets():
    """Updates are tested on other samples, and a selection has other runs: not given the others."""
    tau, epsilon = 1e-9, 6.0
    for event in (_SELECTIVE, dp_accounting.GaussianDpEvent(0.3)):
        clean = pld_delta([Release(event, 3)], epsilon, "per_attempt")
        charged = pld_delta([Release(event, 3, tau)], epsilon, "per_attempt") - clean
        assert charged == pytest.approx(3 * tau * (1 + math.exp(epsilon)), rel=1e-3)


# Selective release.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(0.24, 1000, 1e-5), (0.85, 10**6, 1e-15), (2.0, 10**7, 1e-15)]
)
def test_large_epsilons_are_exact_without_padding(sigma, steps, delta):
    """Epsilons of 60 to 100, with the truncation of a batch without padding."""
    event = sampled_gaussian(256 / 60000, sigma)
    tau = PoissonSampling(60000, 256).truncation_probability
    whole = bounds.pld_epsilon([Release(event, steps)], delta)
    assert 60 < whole < 100
    assert bounds.pld_epsilon([Release(event, steps, tau)], delta) < whole * (1 + 1e-6)
    # With padding, it has no bound where delta is tiny.
    tau = PoissonSampling(60000, 256, padding="full").truncation_probability
    padded = bounds.pld_epsilon([Release(event, steps, tau)], delta)
    assert padded == math.inf if delta < 1e-12 else padded < whole * (1 + 1e-6)


def test_truncation_costs_little_at_small_epsilons():
    """A thousandth of delta for it would add 40%."""
    event, delta = dp_accounting.GaussianDpEvent(3.97), 0.1
    exact = bounds.pld_epsilon([Release(event, 1)], delta)
    assert 0 < exact < 0.001
    assert bounds.pld_epsilon([Release(event, 1, 1e-30)], delta) < exact * 1.001


def test_selective_release_is_priced_by_what_can_be_observed():
    releases = [Release(_SELECTIVE, 100)]
    for mode in ("conditional", "per_attempt"):
        bound = tightest_epsilon(releases, _DELTA, mode)
        assert set(bound.by_accountant) == {"RDP", "PLD"}
        rdp = RdpAccountant(selective_release=mode).compose(_SELECTIVE, 100)
        assert bound.by_accountant["RDP"] == about(rdp.get_epsilon(_DELTA))
    assert tightest_epsilon(releases, _DELTA) == tightest_epsilon(releases, _DELTA, "conditional")


def test_nested_selective_release_is_priced_as_its_parts():
    nested = dp_accounting.SelfComposedDpEvent(_SELECTIVE, 100)
    for mode in ("conditional", "per_attempt"):
        bound = tightest_epsilon([Release(nested, 1), Release(_STEP, 10)], _DELTA, mode)
        rdp = RdpAccountant(selective_release=mode).compose(_SELECTIVE, 100).compose(_STEP, 10)
        assert bound.by_accountant["RDP"] == about(rdp.get_epsilon(_DELTA))
    ordinary = tightest_epsilon([Release(_STEP, 10)], _DELTA, "per_attempt")
    assert ordinary == tightest_epsilon([Release(_STEP, 10)], _DELTA)


def test_an_unknown_observability_is_refused():
    with pytest.raises(ValueError, match="Argument `selective_release` must be one of"):
        tightest_epsilon([], _DELTA, "hidden")


@pytest.mark.parametrize(("q", "sigma"), [(0.5, 0.02), (0.5, 0.1), (0.9, 0.01), (1e-6, 0.02)])
def test_large_losses_have_a_pld(q, sigma):
    releases = (Release(sampled_gaussian(q, sigma), 10),)
    assert bounds.pld_epsilon(releases, _DELTA) <= bounds.rdp_epsilon(releases, _DELTA)


def test_repeated_questions_are_answered_from_memory(monkeypatch):
    releases = [Release(_STEP, 12_345)]
    first = tightest_epsilon(releases, _DELTA)
    monkeypatch.delattr(bounds, "_composed")
    assert tightest_epsilon(releases, _DELTA) == first
    with pytest.raises(NameError, match="_composed"):
        tightest_epsilon(releases, 2 * _DELTA)
