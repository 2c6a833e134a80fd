"""Epsilon of compositions against closed forms and the exact reference: never below, and near."""

import math

import dp_accounting
import numpy as np
import pytest

from tests.accounting import reference
from tfdp.accounting import composition as module
from tfdp.accounting import dominating_pairs, loss_grid, loss_sum
from tfdp.accounting.dominating_pairs import sampled_gaussian

# q, sigma, steps, delta: tiny deltas, tiny losses, large epsilons.
_CASES = [
    (8.4e-4, 2.44, 11_485, 2.7e-12),
    (2e-3, 0.8, 100_000, 1e-12),
    (1e-6, 1.0, 1_000_000, 1e-7),
    (1e-4, 3.0, 1_000_000, 1e-6),
    (256 / 60000, 0.52, 10_000, 1e-5),
]
_REFERENCE_ERROR = 1e-6


def _bounds(q, sigma, steps, delta):
    parts = [(sampled_gaussian(q, sigma), steps)]
    return module.least_epsilon(parts, delta), module.epsilon(parts, delta)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", _CASES)
def test_hard_cases_are_enclosed(case):
    exact = reference.composed_epsilon(*case)
    least, most = _bounds(*case)
    assert 0.999 * exact < least < exact < most < 1.001 * exact


def _drawn(seed, count):
    """Parameters over the whole range whose exact epsilon, also returned, is in [1e-3, 100]."""
    rng = np.random.default_rng(seed)
    while count:
        q, delta = 10 ** rng.uniform(-6, 0), 10 ** rng.uniform(-15, -1)
        sigma, steps = 10 ** rng.uniform(math.log10(0.4), 2), int(10 ** rng.uniform(0.4, 7))
        exact = reference.composed_epsilon(q, sigma, steps, delta)
        if exact is not None and 1e-3 <= exact <= 100:
            count -= 1
            yield (q, sigma, steps, delta), exact


@pytest.mark.slow
def test_a_hundred_drawn_cases_are_bounded_within_half_a_percent():
    for i, (case, exact) in enumerate(_drawn(14, 100)):
        parts = [(sampled_gaussian(*case[:2]), case[2])]
        most = module.epsilon(parts, case[3])
        assert exact * (1 - _REFERENCE_ERROR) <= most <= 1.005 * exact, case
        if i % 10 == 0:
            least = module.least_epsilon(parts, case[3])
            assert least <= exact * (1 + _REFERENCE_ERROR), case


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("sigma", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-6, 0.1])
@pytest.mark.parametrize("steps", [1, 7, 10**5])
def test_gaussians_are_enclosed(sigma, delta, steps):
    """T Gaussians with noise sigma sqrt(T) are one with sigma."""
    exact = reference.gaussian_epsilon(sigma, delta)
    least, most = _bounds(1.0, sigma * math.sqrt(steps), steps, delta)
    assert least <= exact * (1 + 1e-9) + 1e-12
    assert exact * (1 - 1e-9) <= most <= 1.002 * exact + 1e-5


def test_different_gaussians_are_one():
    parts = [(sampled_gaussian(1.0, s), n) for s, n in ((10.0, 40), (3.0, 2), (50.0, 1000))]
    sigma = 1 / math.sqrt(40 / 100 + 2 / 9 + 1000 / 2500)
    exact = reference.gaussian_epsilon(sigma, 1e-9)
    assert 0.999 * exact < module.least_epsilon(parts, 1e-9) < exact
    assert exact < module.epsilon(parts, 1e-9) < 1.001 * exact


def test_different_steps_are_enclosed():
    """Against dp_accounting, whose grid rounds up."""
    steps = [(0.01, 1.0, 100), (0.02, 3.0, 1000)]
    theirs = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for q, sigma, count in steps:
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(event, count)
    parts = [(sampled_gaussian(q, sigma), count) for q, sigma, count in steps]
    expected = theirs.get_epsilon(1e-6)
    assert 0.999 * expected < module.least_epsilon(parts, 1e-6) < expected
    assert module.epsilon(parts, 1e-6) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("q", [1.0, 0.1])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_laplace_is_enclosed(q, scale):
    """Balle, Barthe, Gaboardi 2018: 1 - e^((epsilon - 1 / scale) / 2), amplified by sampling."""
    parts = [(dominating_pairs.sampled_laplace(q, scale), 1)]
    for part in (0.2, 0.8):
        epsilon = part * math.log1p(q * math.expm1(1 / scale))
        whole = math.log1p(math.expm1(epsilon) / q)
        delta = -q * math.expm1((whole - 1 / scale) / 2)
        assert delta <= module.delta(parts, epsilon) <= 1.01 * delta
        assert module.least_epsilon(parts, delta) <= epsilon * (1 + 1e-9)
        assert epsilon <= module.epsilon(parts, delta) <= 1.002 * epsilon


@pytest.mark.parametrize("case", [(0.01, 1.0), (0.3, 0.6), (1e-4, 0.5)])
def test_one_step_is_enclosed(case):
    for delta in (1e-3, 1e-5, 1e-7):
        exact = reference.sampled_gaussian_epsilon(*case, delta)
        least, most = _bounds(*case, 1, delta)
        assert least <= exact + 1e-9
        assert exact - 1e-9 <= most <= 1.001 * exact + 1e-5


@pytest.mark.parametrize("case", [(0.01, 1.0, 1000), (1e-3, 0.7, 5000)])
def test_delta_is_the_inverse(case):
    parts = [(sampled_gaussian(*case[:2]), case[2])]
    for delta in (1e-3, 1e-9, 1e-15):
        assert module.delta(parts, module.epsilon(parts, delta)) == pytest.approx(delta, rel=0.01)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("q", "sigma"),
    [
        *((q, sigma) for sigma in (1.0, 1e5) for q in (1e-7, 1e-3, 1 - 1e-9, 1.0)),
        *((q, 0.02) for q in (1e-3, 1 - 1e-9, 1.0)),
    ],
)
def test_extremes_are_bounded_in_the_right_order(q, sigma):
    for steps in (1, 1000):
        for delta in (1e-15, 0.1):
            least, most = _bounds(q, sigma, steps, delta)
            assert 0 <= least <= most * (1 + 1e-12)
    assert module.epsilon([(sampled_gaussian(q, sigma), 1)], 1.0) == 0
    assert module.epsilon([(sampled_gaussian(q, sigma), 1)], 0.0) == math.inf


def test_a_profile_is_delta_at_each_epsilon():
    for parts in (
        [(sampled_gaussian(0.01, 1.0), 1000)],
        [(sampled_gaussian(0.02, 0.6), 3), (sampled_gaussian(1.0, 2.0), 1)],
    ):
        profile = module.DeltaProfile(parts)
        for epsilon in (0.0, 1.0, 1.1, 2.5, 0.95):
            found = profile(epsilon)
            assert found == pytest.approx(module.delta(parts, epsilon), rel=1e-3)
            assert module.least_epsilon(parts, found) <= epsilon
    assert module.DeltaProfile([])(0.0) == 0.0


def test_nothing_costs_nothing():
    assert module.epsilon([], 1e-5) == module.least_epsilon([], 1e-5) == module.delta([], 0.0) == 0


@pytest.mark.parametrize("interval", [0.3, 0.02, 1e-3])
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.5, 0.6), (1.0, 2.0)])
def test_polygons_enclose_the_hockey_stick(q, sigma, interval):
    pair = sampled_gaussian(q, sigma)
    for epsilon in (0.0, 0.013, 0.3, 1.1, 2.7):
        exact = reference.hockey_stick(q, sigma, epsilon)
        for below in (False, True):
            deltas = []
            for direction in (pair.add, pair.remove):
                piece = loss_grid.grid(direction, interval, 1e-18, below)
                excess = -np.expm1(epsilon - piece.losses)
                deltas.append(piece.infinite + np.maximum(excess, 0) @ piece.mass)
            if below:
                assert max(deltas) <= exact * (1 + 1e-9) + 1e-15
            else:
                assert max(deltas) >= exact * (1 - 1e-9) - 1e-15


@pytest.mark.parametrize("interval", [0.3, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize(("q", "sigma"), [(1e-5, 0.5), (1e-3, 1.0), (0.1, 3.0)])
def test_lower_polygons_of_losses_that_are_small_for_the_grid(q, sigma, interval):
    pair = sampled_gaussian(q, sigma)
    for direction in (pair.add, pair.remove):
        piece = loss_grid.grid(direction, interval, 1e-25, True)
        rough = loss_grid.grid(direction, q / 100, 1e-25, False)
        assert np.all(np.abs(np.diff(piece.losses) / interval % 1 - 0.5) > 0.49)
        excess = [
            np.maximum(-np.expm1(x - p.losses[:, np.newaxis]), 0.0).T @ p.mass
            for p in (piece, rough)
            for x in [np.concatenate([-np.geomspace(1e-8, 5, 200), np.geomspace(1e-8, 9, 200)])]
        ]
        assert np.all(excess[0] <= excess[1] * (1 + 1e-12) + 1e-15)
        moments = [float(p.log_moments(np.array([2.0]))[0]) for p in (piece, rough)]
        assert moments[0] <= moments[1] + 1e-13


def test_a_lower_polygon_is_dominated_by_any_outcomes():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size = rng.integers(1, 12)
        knots = np.cumsum(rng.exponential(10 ** rng.uniform(-4, 0.5), size)) + rng.normal()
        losses = knots + rng.normal(size=size) * 10 ** rng.uniform(-6, 0)
        upper = rng.dirichlet(np.full(size, 0.3)) * (rng.random(size) < 0.9)
        lower = upper * np.exp(-losses)
        piece = loss_grid._dominated(upper, lower, knots)
        assert set(piece.losses) <= {*knots, 0.0} and np.all(piece.mass >= 0)
        e = np.exp(np.concatenate([knots, losses, rng.normal(size=50) * 3, [-700.0]]))
        exact = np.maximum(upper - np.outer(e, lower), 0.0).sum(axis=1)
        bound = np.maximum(1 - np.outer(e, np.exp(-piece.losses)), 0.0) @ piece.mass
        assert np.all(bound <= exact + 1e-13)


# Mutants.


def _is_caught(case=_CASES[0]):
    """Returns whether a bound is on the wrong side of the exact epsilon."""
    exact = reference.composed_epsilon(*case)
    least, most = _bounds(*case)
    return most < exact or least > exact


@pytest.mark.slow
def test_nothing_is_caught_without_a_mutant():
    assert not any(_is_caught(case) for case in _CASES)


def test_mutant_of_one_direction_is_caught(monkeypatch):
    directions = module._directions
    monkeypatch.setattr(module, "_directions", lambda *arguments: directions(*arguments)[:1])
    assert _is_caught()


def test_mutant_that_rounds_losses_down_is_caught(monkeypatch):
    discretize = loss_grid.discretize
    monkeypatch.setattr(
        loss_grid, "discretize", lambda direction, losses, *_: discretize(direction, losses, True)
    )
    assert _is_caught()


def test_mutant_lower_bound_of_the_upper_polygon_is_caught(monkeypatch):
    monkeypatch.setattr(loss_grid, "_masses_of_polygon", lambda upper, *_: upper)
    with pytest.raises(AssertionError):
        test_a_lower_polygon_is_dominated_by_any_outcomes()


def test_mutant_that_forgets_the_offset_of_the_knots_is_caught(monkeypatch):
    anchored = loss_grid._anchored

    def mutant(*arguments):
        piece, farther = anchored(*arguments)
        moved = loss_grid.Discrete(piece.losses - piece.offset, piece.mass, piece.infinite)
        return moved, farther

    monkeypatch.setattr(loss_grid, "_anchored", mutant)
    with pytest.raises(AssertionError):
        test_lower_polygons_of_losses_that_are_small_for_the_grid(1e-3, 1.0, 1e-2)


def test_mutant_that_forgets_what_is_left_out_is_caught(monkeypatch):
    case = (0.01, 1.0, 1, 1e-5)
    monkeypatch.setattr(loss_sum, "_LEFT_OUT", 0.9)
    assert not _is_caught(case)
    discretize = loss_grid.discretize

    def mutant(*arguments):
        kept = discretize(*arguments)
        return loss_grid.Discrete(kept.losses, kept.mass, 0.0)

    monkeypatch.setattr(loss_grid, "discretize", mutant)
    assert _is_caught(case)


def test_mutant_that_forgets_what_is_outside_of_the_window_is_caught(monkeypatch):
    """The window ends below epsilon, so that nothing seems to be above it."""
    window = loss_sum._window

    def narrow(pieces, counts, theta):
        low, high = window(pieces, counts, theta)
        return low, low + 0.4 * (high - low)

    monkeypatch.setattr(loss_sum, "_window", narrow)
    assert _is_caught()


def test_mutant_without_tilt_is_not_precise(monkeypatch):
    tilt = loss_sum._tilt
    monkeypatch.setattr(module, "_LARGE_ERROR", math.inf)
    monkeypatch.setattr(loss_sum, "_tilt", lambda *arguments: (1e-3, *tilt(*arguments)[1:]))
    exact = reference.composed_epsilon(*_CASES[0])
    assert _bounds(*_CASES[0])[1] > 1.5 * exact
