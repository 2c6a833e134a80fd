"""The Renyi divergence of one accepted update: above every search, and tight."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting import reference
from tfdp.accounting import selected_gaussian
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS
from tfdp.accounting.selective_release import acceptance_bounds

# q, sigma, validation q, validation sigma, threshold, order; the best value of a two-multiplier
# search over acceptance functions, for "add" and for "remove".
_SEARCHED = [
    ((2048 / 60000, 4.0, 256 / 60000, 1.3, -1, 2), 1.5352e-4, 1.5285e-4),
    ((2048 / 60000, 4.0, 256 / 60000, 1.3, -1, 8), 6.1939e-4, 6.0610e-4),
    ((2048 / 60000, 4.0, 256 / 60000, 1.3, -1, 32), 2.5632e-3, 2.3396e-3),
    ((8192 / 50000, 5.67, 256 / 50000, 1.1, -1, 8), 6.2030e-3, 5.9020e-3),
    ((2048 / 60000, 2.15, 256 / 60000, 0.8, -1, 2), 7.600e-4, 7.455e-4),
    ((0.01, 1.0, 0.01, 1.0, 0, 2), 3.8685e-4, 3.6744e-4),
    ((1.0, 10.0, 1.0, 5.0, -1, 2), 6.6771e-2, 6.6771e-2),
    ((1.0, 10.0, 1.0, 5.0, -1, 8), 2.3669e-1, 2.3669e-1),
]
# q, sigma, validation q, validation sigma, threshold, order.
_CASES = [case for case, _, _ in _SEARCHED] + [
    (0.3, 1.0, 0.2, 0.8, -1, 4),
    (0.1, 1.5, 0.02, 1.0, -0.5, 1.5),
    (1.0, 1.0, 0.5, 0.7, -1, 3),
    (0.0, 1.0, 0.3, 0.7, -1, 3),
    (0.2, 3.0, 0.0, 0.7, -1, 3),
    (0.76, 5.64, 0.14, 1.0, -0.9, 1.0728),  # "remove" is larger here.
]


def _mechanism(q, sigma, validation_q, validation_sigma, threshold):
    low, high = acceptance_bounds(validation_sigma, threshold)
    return selected_gaussian._Mechanism(q, sigma, validation_q, math.log(high / low))


def _bound(mechanism, order, remove):
    return selected_gaussian._log_c(mechanism, order, remove) * order / (order - 1)


def _search(case, remove, seed=0):
    q, sigma, validation_q, validation_sigma, threshold, order = case
    low, high = acceptance_bounds(validation_sigma, threshold)
    update = reference.SelectedUpdate(q, sigma, validation_q)
    return update.search(low, high, order, remove, np.random.default_rng(seed))


@pytest.mark.parametrize(("case", "add", "remove"), _SEARCHED)
def test_is_at_or_above_the_values_of_another_method(case, add, remove):
    mechanism, order = _mechanism(*case[:5]), case[5]
    half_a_digit = 1 - 1e-4 / 2
    assert add * half_a_digit <= _bound(mechanism, order, False) <= 1.01 * add
    assert remove * half_a_digit <= _bound(mechanism, order, True) <= 1.01 * remove
    larger = max(_bound(mechanism, order, False), _bound(mechanism, order, True))
    assert mechanism.rdp(order) == pytest.approx(larger, rel=1e-9)  # BLAS rounds by alignment.


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("case", _CASES)
def test_is_above_the_best_that_a_search_finds_and_close(case, remove):
    found = _search(case, remove)
    bound = _bound(_mechanism(*case[:5]), case[5], remove)
    assert found <= bound <= 1.01 * found


@settings(max_examples=60, deadline=None)
@given(
    q=st.floats(0, 1),
    sigma=st.floats(0.3, 20),
    validation_q=st.floats(0, 1),
    log_spread=st.floats(0, 6),
    order=st.floats(1.01, 40),
    remove=st.booleans(),
    data=st.data(),
)
def test_no_step_functions_exceed_it(q, sigma, validation_q, log_spread, order, remove, data):
    values = st.lists(st.floats(1, math.exp(log_spread)), min_size=24, max_size=24)
    a, b = (np.repeat(data.draw(values), 10) for _ in range(2))
    update = reference.SelectedUpdate(q, sigma, validation_q)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = update.divergence(a, b, order, remove)
    bound = _bound(selected_gaussian._Mechanism(q, sigma, validation_q, log_spread), order, remove)
    assert not found > bound + 1e-12


def test_covers_a_counterexample_to_the_published_theorem():
    """T = 500 updates accepted when |w| > 1.4 sigma rather than not: at least 1.655, not 1.542."""
    case = (2048 / 60000, 2.5, 256 / 60000, 1.0, -1)
    low, high = acceptance_bounds(*case[3:])
    update = reference.SelectedUpdate(*case[:2], 0.0, cells=2001)
    w = np.concatenate([[-9], np.linspace(-6, 6, 2000)[:-1] + 3 / 999.5, [9]])
    a = np.where(np.abs(w) > 1.4, high, low)
    without, with_it = (np.log(p / p.sum()) for p in update.distributions(a, a))
    pld = privacy_loss_distribution.from_two_probability_mass_functions(
        dict(enumerate(without)), dict(enumerate(with_it)), False, 1e-4
    )
    true_epsilon = pld.self_compose(500).get_epsilon_for_delta(1e-5)
    assert true_epsilon >= 1.65
    rdp = 500 * selected_gaussian.rdp(
        case[0], case[1], case[2], math.log(high / low), DEFAULT_RDP_ORDERS
    )
    epsilon, _ = dp_accounting.rdp.compute_epsilon(DEFAULT_RDP_ORDERS, rdp, 1e-5)
    assert true_epsilon < epsilon < 1.5 * true_epsilon


# Numerical errors.


@pytest.mark.parametrize("case", _CASES)
def test_a_finer_grid_changes_nothing_that_is_reported(case, monkeypatch):
    mechanism, order = _mechanism(*case[:5]), case[5]
    value = mechanism.rdp(order)
    monkeypatch.setattr(selected_gaussian, "_COARSE", 40)
    monkeypatch.setattr(selected_gaussian, "_FINE", 200)
    assert mechanism.rdp(order) * (1 - 1e-9) <= value <= mechanism.rdp(order) * (1 + 3e-4)


def _coarse_values(monkeypatch):
    """Bounds on grids so coarse that errors of quadrature matter, and precise ones."""
    pairs = []
    for sigma in np.linspace(1, 1.3, 16):
        mechanism = selected_gaussian._Mechanism(0.1, float(sigma), 0.05, 1.5)
        with monkeypatch.context() as patch:
            patch.setattr(selected_gaussian, "_FINE", 200)
            precise = _bound(mechanism, 4.0, False)
        with monkeypatch.context() as patch:
            patch.setattr(selected_gaussian, "_COARSE", 2)
            patch.setattr(selected_gaussian, "_FINE", 2)
            pairs.append((_bound(mechanism, 4.0, False), precise))
    return pairs


def test_quadrature_is_never_below_even_on_a_coarse_grid(monkeypatch):
    assert all(coarse >= precise * (1 - 2e-5) for coarse, precise in _coarse_values(monkeypatch))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrong", [0.0, -1 / 12])
def test_mutant_without_the_margin_for_jumps_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(selected_gaussian, "_KINK", wrong)
    values = _coarse_values(monkeypatch)
    monkeypatch.undo()
    precise = [p for _, p in _coarse_values(monkeypatch)]
    pairs = zip([c for c, _ in values], precise, strict=True)
    assert any(coarse < exact * (1 - 2e-5) for coarse, exact in pairs)


def test_extreme_orders_are_never_nan_and_never_too_small():
    for q, sigma in ((1e-9, 0.3), (0.01, 0.3), (1.0, 0.3), (0.5, 0.05), (0.01, 1e4)):
        for spread in (0.0, 2.0, 9.9, 50.0, math.inf):
            rdp = selected_gaussian.rdp(q, sigma, 0.01, spread, (1.0001, 2.0, 1000.0, math.inf))
            assert not np.isnan(rdp).any() and rdp[-1] == math.inf
            # Acceptance that depends on nothing: the update alone.
            assert rdp[1] >= math.log1p(q * q * math.expm1(sigma**-2)) * (1 - 1e-6)
            k = 1000.0
            least = (k * math.log(q) + k * (k - 1) / (2 * sigma**2)) / (k - 1)
            assert rdp[2] >= least


def test_no_noise_and_no_sampling():
    orders = (1.5, 2.0, 64.0)
    assert (selected_gaussian.rdp(0.0, 0.0, 0.0, math.inf, orders) == 0).all()
    assert (selected_gaussian.rdp(0.1, 0.0, 0.1, 1.0, orders) == math.inf).all()
    assert (selected_gaussian.rdp(0.1, 1.0, 0.1, math.inf, orders) == math.inf).all()


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 4.0), (1.0, 2.0)])
def test_without_spread_it_is_the_sampled_gaussian(q, sigma):
    for order in (1.1, 2.0, 7.5, 20.0):
        exact = reference.renyi_divergence(q, sigma, order)
        (ours,) = selected_gaussian.rdp(q, sigma, 0.3, 0.0, (order,))
        assert exact - 1e-10 <= ours <= exact * (1 + 1e-4) + 1e-10


def test_tiny_probabilities_come_out_positive_and_small():
    rdp = selected_gaussian.rdp(1e-8, 1.0, 1e-8, 1.0, (1.02, 2.0, 8.0))
    assert (rdp > 0).all() and (rdp < 1e-10).all()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    q=st.floats(1e-4, 1),
    sigma=st.floats(0.5, 20),
    validation_q=st.floats(0, 1),
    log_spread=st.floats(0, 4),
    order=st.floats(1.05, 40),
    factor=st.floats(1.01, 2),
)
def test_more_noise_costs_less_and_all_else_costs_more(
    q, sigma, validation_q, log_spread, order, factor
):
    def rdp(*mechanism, at=order):
        return selected_gaussian._Mechanism(*mechanism).rdp(at)

    ours = rdp(q, sigma, validation_q, log_spread) * (1 + 1e-3) + 1e-11
    assert rdp(q, sigma * factor, validation_q, log_spread) <= ours
    assert rdp(q / factor, sigma, validation_q, log_spread) <= ours
    assert rdp(q, sigma, validation_q / factor, log_spread) <= ours
    assert rdp(q, sigma, validation_q, log_spread / factor) <= ours
    assert rdp(q, sigma, validation_q, log_spread, at=1 + (order - 1) / factor) <= ours


# Mutants.


def _is_caught(case):
    """Whether the search finds more than the bound says."""
    found = max(_search(case, remove) for remove in (False, True))
    return _mechanism(*case[:5]).rdp(case[5]) < found


_STRONG = (0.3, 1.0, 0.2, 0.8, -1, 4)


def test_mutant_without_the_validation_batch_is_caught(monkeypatch):
    """Corners with a = b only."""
    assert not _is_caught(_STRONG)
    monkeypatch.setattr(selected_gaussian, "_mixed", lambda a, b, validation_q: a)
    assert _is_caught(_STRONG)


def test_mutant_that_drops_one_minus_q_is_caught(monkeypatch):
    monkeypatch.setattr(selected_gaussian, "_mixed", lambda a, b, q: a + q * b)
    assert _is_caught(_STRONG)


@pytest.mark.parametrize(("kept", "case"), [(True, _STRONG), (False, _CASES[-1])])
def test_mutant_of_one_direction_is_caught(kept, case, monkeypatch):
    log_c = selected_gaussian._log_c
    assert not _is_caught(case)
    monkeypatch.setattr(
        selected_gaussian, "_log_c", lambda mechanism, order, remove: log_c(mechanism, order, kept)
    )
    assert _is_caught(case)


def test_mutant_with_twice_the_noise_is_caught():
    q, sigma, *rest, order = _STRONG
    assert _mechanism(q, 2 * sigma, *rest).rdp(order) < _search(_STRONG, False)
