"""Probabilities of losses between knots, against integrals of densities."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from tfdp.accounting import dominating_pairs as module

_KNOTS = np.array([-1.5, -0.3, -0.02, -1e-3, 0.0, 0.004, 0.11, 0.9, 2.5])


def _densities(noise, q):
    if isinstance(noise, module.Gaussian):
        pdf = stats.norm(scale=noise.sigma).pdf
    else:
        pdf = stats.laplace(scale=noise.scale).pdf
    return pdf, lambda z: (1 - q) * pdf(z) + q * pdf(z - 1)


def _integral(density, upper, lower, low, high):
    """Of `density` where the log of upper / lower is in (low, high]."""
    z = np.linspace(-15, 16, 155_001)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.log(upper(z)) - np.log(lower(z))
    return integrate.trapezoid(np.where((loss > low) & (loss <= high), density(z), 0.0), z)


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("q", [0.02, 0.6, 1.0])
@pytest.mark.parametrize("noise", [module.Gaussian(0.9), module.Laplace(1.3)])
@pytest.mark.parametrize("remove", [False, True])
def test_masses_are_the_integrals_of_both_densities(noise, q, remove):
    plain, mixture = _densities(noise, q)
    upper, lower = (mixture, plain) if remove else (plain, mixture)
    masses = module.Sampled(noise, q, remove).masses(_KNOTS)
    edges = np.concatenate([[-np.inf], _KNOTS, [np.inf]])
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        for mass, density in ((masses.upper[i], upper), (masses.lower[i], lower)):
            # Edges may be off by a step of the integral.
            assert mass == pytest.approx(_integral(density, upper, lower, low, high), abs=3e-4)


@pytest.mark.parametrize("q", [1e-7, 0.01, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("remove", [False, True])
def test_ratios_of_masses_are_between_the_knots(q, sigma, remove):
    direction = module.Sampled(module.Gaussian(sigma), q, remove)
    low, high = direction.range(1e-30)
    knots = np.linspace(low, high, 300)
    masses = direction.masses(knots)
    assert masses.upper.sum() == pytest.approx(1, abs=1e-12)
    assert masses.lower.sum() == pytest.approx(1, abs=1e-12)
    assert max(masses.upper[0], masses.upper[-1]) <= 1.01e-30 + 1e-29
    upper, lower = masses.upper[1:-1], masses.lower[1:-1]
    slack = masses.upper_error[1:-1] + np.exp(knots[1:]) * masses.lower_error[1:-1]
    slack += upper * (1e-13 * np.abs(knots).max() + direction.loss_error)
    assert (upper <= np.exp(knots[1:]) * lower + slack).all()
    assert (upper >= np.exp(knots[:-1]) * lower - slack).all()


def test_hull_atoms_are_the_slopes_of_the_hull():
    points = [(0.0, 0.0), (0.1, 0.5), (0.3, 0.5), (0.4, 0.8), (1.0, 1.0)]
    atoms = module.hull_atoms([(y, x, 1 - y, 1 - x) for y, x in points])
    np.testing.assert_allclose(atoms.lower, [0.1, 0.3, 0.6])
    np.testing.assert_allclose(atoms.upper, [0.5, 0.3, 0.2])
    np.testing.assert_allclose(atoms.losses, np.log([5, 1, 1 / 3]))
    masses = atoms.masses(np.array([-2.0, -0.5, 0.5, 1.0]))
    np.testing.assert_allclose(masses.upper, [0, 0.2, 0.3, 0, 0.5])
    np.testing.assert_allclose(masses.lower, [0, 0.6, 0.3, 0, 0.1])


def test_power_at_level_zero_is_an_infinite_loss():
    atoms = module.hull_atoms([(0.0, 0.2, 1.0, 0.8), (0.5, 0.9, 0.5, 0.1), (1.0, 1.0, 0.0, 0.0)])
    assert atoms.infinite == 0.2
    assert atoms.masses(np.array([5.0])).upper[-1] == 0.2


def test_small_probabilities_are_precise_at_both_ends():
    tiny = 1e-25
    points = [(0.0, 0.0, 1.0, 1.0), (tiny, 3 * tiny, 1.0, 1.0), (1.0, 1.0, 3 * tiny, tiny)]
    atoms = module.hull_atoms([*points, (1.0, 1.0, 0.0, 0.0)])
    np.testing.assert_allclose(atoms.losses, [np.log(3), 0, -np.log(3)], atol=1e-12)
