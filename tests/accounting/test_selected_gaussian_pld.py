"""The privacy-loss distributions of one accepted update: above every search, and tight."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from tests.accounting import reference
from tfdp.accounting import composition, dominating_pairs, loss_grid, selected_gaussian
from tfdp.accounting import selected_gaussian_pld as module
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS
from tfdp.accounting.selective_release import acceptance_bounds

# q, sigma, validation q, log(B / A).
_PAPER = (2048 / 60000, 4.0, 256 / 60000, 0.8173)
_STRONG = (0.3, 1.0, 0.2, 1.5)
_CASES = [
    _PAPER,
    _STRONG,
    (8192 / 50000, 5.67, 256 / 50000, 1.2),
    (0.01, 1.0, 0.01, 0.8),
    (1.0, 10.0, 1.0, 0.6),
    (1.0, 1.0, 0.5, 2.5),
    (0.2, 3.0, 0.0, 2.5),
    (0.0, 1.0, 0.3, 1.5),
    (0.05, 0.3, 0.05, 1.0),
]
# B / A > e^5.
_EXTREME = [
    (0.03, 2.0, 1e-9, 10.4),
    (0.03, 2.0, 1e-5, 12.1),
    (0.03, 2.0, 0.004, 10.4),
    (0.03, 2.0, 0.004, 19.3),
    (0.3, 0.7, 0.5, 7.0),
    (0.0, 1.0, 1e-4, 15.0),
    (1.0, 5.0, 0.0, 20.0),
]


def _profile(case, remove, epsilons):
    """Delta by the module at `epsilons`, before composition."""
    setting = module._Setting(*case[:3], math.exp(case[3]))
    add, taken = (module._polygon(setting, r) for r in (False, True))
    own, other = (taken, add) if remove else (add, taken)
    atoms = module._atoms(own, other)
    excess = atoms.upper - np.multiply.outer(np.exp(epsilons), atoms.lower)
    return atoms.infinite + np.maximum(excess, 0).sum(axis=1)


def _epsilon(case, count=1):
    return composition.epsilon([(module.dominating_pair(*case), count)], 1e-5)


def _hockey_stick(update, a, b, remove, epsilon):
    """The divergence of two distributions on cells, by its definition. a and b: [..., cells]."""
    without, with_it = (p / p.sum(axis=-1, keepdims=True) for p in update.distributions(a, b))
    upper, lower = (without, with_it) if remove else (with_it, without)
    return np.maximum(upper - math.exp(epsilon) * lower, 0).sum(axis=-1)


def _by_thresholds(case, remove, epsilon):
    """The largest divergence with a = B outside an interval and b = B beyond a point inside.

    The integrals are exact. All thresholds on a coarse grid, and from the best ones uphill.
    """
    q, sigma, validation_q, log_spread = case
    corners = np.array([[1, 0, 0, 1], [0, 0, 1, 1]])
    a, b = np.exp(log_spread * corners)
    a_with = (1 - validation_q) * a + validation_q * b

    def value(thresholds):
        ends = np.full((*thresholds.shape[:-1], 1), np.inf)
        z = np.concatenate([-ends, np.sort(thresholds, axis=-1), ends], axis=-1)
        p, shifted = _probabilities(z), _probabilities(z - 1 / sigma)
        without, with_it = p * a, ((1 - q) * p + q * shifted) * a_with
        without, with_it = (m / m.sum(axis=-1, keepdims=True) for m in (without, with_it))
        upper, lower = (without, with_it) if remove else (with_it, without)
        return np.maximum(upper - math.exp(epsilon) * lower, 0).sum(axis=-1)

    grid = np.linspace(-8, 8 + 1 / sigma, 30)
    coarse = np.array(list(itertools.combinations_with_replacement(grid, 3)))
    values = value(coarse)
    starts = coarse[np.argsort(values)[[-1, -5, -25]]]
    return max(_climbed_from(value, start) for start in starts)


def _climbed_from(value, start):
    for size in (0.5, -0.1):  # Twice: simplices collapse.
        simplex = start + size * np.eye(4, 3, k=-1)
        options = {"xatol": 1e-6, "fatol": 1e-16, "initial_simplex": simplex}
        found = optimize.minimize(lambda z: -value(z), start, method="Nelder-Mead", options=options)
        start = found.x
    return -found.fun


def _probabilities(z):
    """Of the normal distribution, between neighbors."""
    low, high = z[..., :-1], z[..., 1:]
    below = special.ndtr(high) - special.ndtr(low)
    return np.where(low > 0, special.ndtr(-low) - special.ndtr(-high), below)


def _climbed(case, remove, epsilon, rng):
    """The largest divergence that changing cell after cell finds, from random a and b."""
    update = reference.SelectedUpdate(*case[:3], cells=80)
    a, b = np.exp(case[3] * rng.integers(2, size=(2, 80)))
    corners = np.exp(case[3] * np.array(list(itertools.product((0, 1), repeat=2))))
    best, before = _hockey_stick(update, a, b, remove, epsilon), -1.0
    while best > before:
        before = best
        for i in rng.permutation(80):
            options = np.repeat(np.stack([a, b])[:, np.newaxis], 4, axis=1)
            options[:, :, i] = corners.T
            values = _hockey_stick(update, *options, remove, epsilon)
            if values.max() > best:
                best = values.max()
                a, b = options[:, values.argmax()]
    return best


def _epsilons(case):
    """Privacy losses that occur, of both signs."""
    setting = module._Setting(*case[:3], math.exp(case[3]))
    quantiles = setting.log_ratio(setting.sigma * np.array([-2.0, 0.0, 1.0, 3.0]))
    return [*quantiles, quantiles[-1] + case[2] * case[3] / 2]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("case", _CASES)
def test_is_above_the_best_that_thresholds_find_and_close(case, remove):
    _check_against_thresholds(case, remove, [-e if remove else e for e in _epsilons(case)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", _EXTREME)
def test_is_close_however_large_the_spread(case):
    for remove in (False, True):
        _check_against_thresholds(case, remove, (0.1, 2.0, 5.0))


def _check_against_thresholds(case, remove, epsilons):
    for epsilon, bound in zip(epsilons, _profile(case, remove, epsilons), strict=True):
        found = _by_thresholds(case, remove, epsilon)
        assert found * (1 - 1e-12) - 1e-15 <= bound <= (1 + 2e-3) * found + 1e-9


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("case", _CASES)
def test_is_above_what_climbing_from_random_functions_finds(case, remove):
    rng = np.random.default_rng(0)
    for epsilon in _epsilons(case)[1:4]:
        epsilon = -epsilon if remove else epsilon
        (bound,) = _profile(case, remove, [epsilon])
        # On 80 cells; it stops short of the best now and then.
        assert 0.9 * bound - 1e-4 <= _climbed(case, remove, epsilon, rng) <= bound + 1e-15


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    q=st.floats(0, 1),
    sigma=st.floats(0.3, 20),
    validation_q=st.floats(0, 1),
    log_spread=st.floats(0, 6),
    epsilon=st.floats(-2, 2),
    remove=st.booleans(),
    data=st.data(),
)
def test_no_step_functions_exceed_it(q, sigma, validation_q, log_spread, epsilon, remove, data):
    values = st.lists(st.floats(1, math.exp(log_spread)), min_size=24, max_size=24)
    a, b = (np.repeat(data.draw(values), 10) for _ in range(2))
    update = reference.SelectedUpdate(q, sigma, validation_q)
    found = _hockey_stick(update, a, b, remove, epsilon)
    if q == validation_q == 0:
        assert found <= max(0, -math.expm1(epsilon)) + 1e-12
    else:
        (bound,) = _profile((q, sigma, validation_q, log_spread), remove, [epsilon])
        assert found <= bound + 1e-13


# Composition.


def _counterexample(update_q, sigma, spread, threshold, interval=1e-4):
    """An added example moves the update only, which is kept rather if |w| > threshold * sigma."""
    update = reference.SelectedUpdate(update_q, sigma, 0.0, cells=2001)
    w = np.concatenate([[-9], np.linspace(-6, 6, 2000)[:-1] + 3 / 999.5, [9]])
    a = np.where(np.abs(w) > threshold, spread, 1.0)
    without, with_it = (np.log(p / p.sum()) for p in update.distributions(a, a))
    return privacy_loss_distribution.from_two_probability_mass_functions(
        dict(enumerate(without)), dict(enumerate(with_it)), False, interval
    )


@pytest.mark.parametrize(("count", "least"), [(500, 1.65), (2000, 3.5)])
def test_covers_counterexamples_to_the_published_theorem(count, least):
    case = (2048 / 60000, 2.5, 256 / 60000, math.log(0.5 / 0.158655))
    true_loss = _counterexample(*case[:2], math.exp(case[3]), 1.4)
    true_epsilon = true_loss.self_compose(count).get_epsilon_for_delta(1e-5)
    assert true_epsilon >= least
    ours = _epsilon(case, count)
    assert true_epsilon < ours < 1.35 * true_epsilon


def _rdp_epsilon(case, count):
    rdp = count * selected_gaussian.rdp(*case, DEFAULT_RDP_ORDERS)
    return dp_accounting.rdp.compute_epsilon(DEFAULT_RDP_ORDERS, rdp, 1e-5)[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("count", "most"), [(1, 0.7), (10, 0.97), (384, 1.005)])
def test_is_below_the_renyi_bound_or_near_it(count, most):
    """One a per epsilon is more freedom than one per order: many updates bring it above."""
    assert _epsilon(_PAPER, count) <= most * _rdp_epsilon(_PAPER, count)


@pytest.mark.parametrize(
    ("validation_sigma", "validation_q", "expected"),
    [(0.24, 1e-9, 0.3496), (0.22, 1e-5, 1.162), (0.24, 0.004, 5.077), (0.17, 0.004, 14.26)],
)
def test_least_noise_of_the_test(validation_sigma, validation_q, expected):
    """`docs/selective_release.md`."""
    least, largest = acceptance_bounds(validation_sigma)
    ours = _epsilon((0.03, 2.0, validation_q, math.log(largest / least)))
    assert ours == pytest.approx(expected, rel=1e-3)


def test_discretization_is_never_below_the_profile():
    pair, epsilons = module.dominating_pair(*_STRONG), np.linspace(-0.8, 1.5, 50)
    knots = np.arange(-4000, 4001) * 1e-3
    for remove, direction in ((False, pair.add), (True, pair.remove)):
        exact = _profile(_STRONG, not remove, epsilons)
        above = loss_grid.discretize(direction, knots)
        excess = -np.expm1(epsilons[:, np.newaxis] - above.losses)
        ours = above.infinite + np.maximum(excess, 0) @ above.mass
        assert (ours >= exact - 1e-12).all()
        assert (ours <= exact * (1 + 1e-3) + 1e-6).all()


# Numerical errors.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", [*_CASES, *_EXTREME[2:5]])
def test_more_intervals_change_nothing_that_is_reported(case, monkeypatch):
    epsilons = _epsilons(case)
    value = _profile(case, False, epsilons)
    monkeypatch.setattr(module, "_PRECISION", module._PRECISION / 9)
    finer = _profile(case, False, epsilons)
    assert (value >= finer * (1 - 1e-12) - 1e-15).all()
    assert (value <= finer * (1 + 1e-4) + 1e-12).all()


def _without_cuts(monkeypatch, interval):
    monkeypatch.setattr(module, "_MOST_CUTS", 1)
    monkeypatch.setattr(module, "_INTERVAL", interval)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("interval", [2, 0.3])
@pytest.mark.parametrize("case", [*_CASES[:4], *_EXTREME[2:4]])
def test_few_intervals_are_never_below(case, interval, monkeypatch):
    fine = [_profile(case, remove, _epsilons(case)) for remove in (False, True)]
    _without_cuts(monkeypatch, interval)
    for remove in (False, True):
        found = _profile(case, remove, _epsilons(case))
        assert (found >= fine[remove] * (1 - 1e-4) - 1e-12).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_price_is_a_bound(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    found = _by_thresholds(_STRONG, False, 0.3)
    solve = module._solve

    def wrong(setting, remove, deviation, *near):
        levels = solve(setting, remove, deviation, *near)
        price = levels.price * np.exp(rng.normal(scale=0.01, size=len(deviation)))
        power = module._power(setting, remove, levels.level, price, levels.attained)
        return dataclasses.replace(levels, price=price, power=power)

    monkeypatch.setattr(module, "_solve", wrong)
    _without_cuts(monkeypatch, 0.01)
    assert found <= _profile(_STRONG, False, [0.3])[0] <= 1.1 * found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("q", "sigma"), [(0.01, 1.0), (0.3, 4.0), (1e-5, 2.0), (1 - 1e-9, 2.0), (0.1, 0.5), (0.01, 1e3)]
)
def test_without_spread_it_is_the_sampled_gaussian(q, sigma):
    case = (q, sigma, 0.3, 0.0)
    plain = dominating_pairs.sampled_gaussian(q, sigma)
    for epsilon in (0.0, 0.01, 0.3, 1.0):
        exact = reference.hockey_stick(q, sigma, epsilon)
        computed = max(_profile(case, remove, [epsilon])[0] for remove in (False, True))
        assert exact * (1 - 1e-9) - 1e-12 <= computed <= exact * (1 + 5e-3) + 1e-10
    least, most = composition.least_epsilon([(plain, 300)], 1e-5), _epsilon(case, 300)
    assert least <= most <= 1.002 * least + 1e-4


def test_without_validation_batch_and_noise_only_the_bit_is_left():
    """q = 0: the acceptance tells as much as two constants, seen or not, can differ by."""
    assert module.dominating_pair(0.0, 0.0, 0.3, 1.5) is not None
    for remove in (False, True):
        deltas = _profile((0.0, 1.0, 0.3, 1.5), remove, [0.0, 1.5])
        assert deltas[0] > 0.01
        assert deltas[1] < 1e-9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("sigma", "q"),
    [
        (1.0, 0.01),
        *itertools.product((0.05, 0.1, 1e9), (0.0, 1e-12, 1 - 1e-12)),
        *((1e4, q) for q in (0.01, 1.0)),
    ],
)
def test_extreme_parameters_give_proper_distributions(q, sigma):
    update = q * math.erf(1 / (2 * sigma) / math.sqrt(2))
    for validation_q, spread in ((1e-9, 1.0), (1.0, 0.0), (1.0, 5.0), (0.5, 20.0)):
        pair = module.dominating_pair(q, sigma, validation_q, spread)
        if pair is None:
            assert sigma == 0.05 or spread == 20
            continue
        assert update - 1e-12 <= composition.delta([(pair, 1)], 0.0) <= 1 + 1e-12
        assert composition.epsilon([(pair, 1)], 1e-5) >= 0


def test_all_loss_may_be_infinite():
    for case in ((0.1, 0.0, 0.1, 1.0), (0.1, 1.0, 0.1, math.inf), (0.1, 1.0, 0.1, 20.1)):
        assert module.dominating_pair(*case) is None


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    q=st.floats(1e-4, 1),
    sigma=st.floats(0.5, 20),
    validation_q=st.floats(1e-4, 1),
    log_spread=st.floats(0.01, 4),
    epsilon=st.floats(-1, 1),
    remove=st.booleans(),
    factor=st.floats(1.01, 2),
)
def test_more_noise_costs_less_and_all_else_costs_more(
    q, sigma, validation_q, log_spread, epsilon, remove, factor
):
    def delta(*case):
        return _profile(case, remove, [epsilon])[0]

    ours = delta(q, sigma, validation_q, log_spread) * (1 + 3e-3) + 1e-11
    assert delta(q, sigma * factor, validation_q, log_spread) <= ours
    assert delta(q / factor, sigma, validation_q, log_spread) <= ours
    assert delta(q, sigma, validation_q / factor, log_spread) <= ours
    assert delta(q, sigma, validation_q, log_spread / factor) <= ours


# Mutants.


def _is_caught(case=_STRONG, epsilons=(-0.3, 0.3)):
    """Whether thresholds find more than the bound says."""
    return any(
        _by_thresholds(case, remove, epsilon) > _profile(case, remove, [epsilon])[0]
        for remove in (False, True)
        for epsilon in epsilons
    )


@pytest.mark.slow
def test_nothing_is_caught_without_a_mutant():
    assert not _is_caught()


@pytest.mark.slow
@pytest.mark.parametrize("case", [_STRONG, _EXTREME[2]])
def test_mutant_that_proves_levels_but_not_what_is_between_them_is_caught(case, monkeypatch):
    """The best price of each end, and the polygon is inscribed."""
    _without_cuts(monkeypatch, 1)
    assert not _is_caught(case)
    arc = module._arc
    monkeypatch.setattr(module, "_arc", lambda *ends: arc(*ends[:-1], np.ones_like(ends[0])))
    assert _is_caught(case)


@pytest.mark.parametrize("case", [_STRONG, _EXTREME[2]])
def test_mutant_that_takes_what_is_attained_for_what_is_proven_is_caught(case, monkeypatch):
    _without_cuts(monkeypatch, 1)
    monkeypatch.setattr(module, "_power", lambda *arguments: arguments[-1])
    assert _is_caught(case)


def test_mutant_whose_arc_bends_the_wrong_way_is_caught(monkeypatch):
    _without_cuts(monkeypatch, 1)
    arc = module._arc
    monkeypatch.setattr(module, "_arc", lambda *ends: arc(*ends[:-1], 1 / ends[-1]))
    assert _is_caught()


def test_mutant_with_b_equal_to_a_is_caught(monkeypatch):
    monkeypatch.setattr(module, "_mixed", lambda a, b, validation_q: a)
    assert _is_caught()


def test_mutant_that_drops_one_minus_q_is_caught(monkeypatch):
    monkeypatch.setattr(module, "_mixed", lambda a, b, q: a + q * b)
    assert _is_caught()


@pytest.mark.parametrize("kept", [False, True])
def test_mutant_of_one_direction_is_caught(kept, monkeypatch):
    polygon = module._polygon
    monkeypatch.setattr(module, "_polygon", lambda setting, remove: polygon(setting, kept))
    # "Remove" is larger here, if not at all epsilons.
    assert _is_caught(_STRONG if kept else (0.76, 5.64, 0.14, 0.84), (0.2,))


def test_mutant_without_the_other_directions_polygon_is_caught(monkeypatch):
    atoms, nothing = module._atoms, np.zeros((2, 1))
    monkeypatch.setattr(module, "_atoms", lambda own, other: atoms(own, nothing))
    assert _is_caught()


def test_mutant_with_twice_the_noise_is_caught():
    q, sigma, *rest = _STRONG
    assert _profile((q, 2 * sigma, *rest), False, [0.3])[0] < _by_thresholds(_STRONG, False, 0.3)
