"""The published cost is below a lower bound on epsilon, and the bound of tfdp above it."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
from absl import flags
from scipy import stats

from experiments.accounting import published as published_accounting
from experiments.dpsur import counterexample
from experiments.dpsur.counterexample import (
    check_simulation,
    costs,
    critical_distance,
    draw,
    simulate,
)
from experiments.dpsur.distributions import Instance, least_epsilon, renyi, renyi_of_test
from tfdp.accounting import RdpAccountant

ROOT = Path(__file__).absolute().parents[3]
INSTANCE = Instance()
FULL_BATCH = Instance(
    batch_size=60000, noise_multiplier=1.0, validation_noise_multiplier=0.8, cut=1.8
)
# The test accepts one half, whatever it sees: nothing is selected.
UNSELECTED = Instance(
    batch_size=60000, noise_multiplier=3.0, validation_noise_multiplier=1e9, threshold=0.0
)


def gaussian_epsilon(sigma, delta):
    """Exact, of one Gaussian mechanism (Balle and Wang 2018)."""

    def excess(epsilon):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return stats.norm.cdf(a - b) - math.exp(epsilon) * stats.norm.cdf(-a - b) - delta

    return scipy.optimize.brentq(excess, 0, 100)


# The lower bound.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("updates", [1, 4, 100])
def test_lower_bound_is_below_the_exact_epsilon_of_a_gaussian_and_near(updates):
    exact = gaussian_epsilon(3 / math.sqrt(updates), 1e-5)
    assert exact - 7e-3 <= least_epsilon(UNSELECTED, updates, 1e-5) <= exact


@pytest.mark.slow
def test_mutant_that_rounds_losses_up_is_caught(monkeypatch):
    monkeypatch.setattr(np, "floor", np.ceil)
    with pytest.raises(AssertionError):
        test_lower_bound_is_below_the_exact_epsilon_of_a_gaussian_and_near(100)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("updates", "reference"), [(500, 1.655), (2000, 3.51)])
def test_reference_values_are_reached(updates, reference):
    assert reference <= least_epsilon(INSTANCE, updates, 1e-5) <= 1.05 * reference


@pytest.mark.parametrize("example", [False, True])
def test_masses_are_those_of_the_distribution(example):
    edges = INSTANCE.edges()
    masses = INSTANCE.masses(edges, example)
    assert abs(masses.sum() - 1) < 1e-11
    np.testing.assert_allclose(np.cumsum(masses), INSTANCE.cdf(edges[1:], example), atol=1e-11)


@pytest.mark.parametrize("order", [2.0, 8.0])
def test_renyi_divergence_is_the_integral(order):
    sigma, q, edge = 2.5, INSTANCE.q, 1.4 * 2.5
    low, high = INSTANCE.acceptance_bounds

    def moment(w):
        a = high if abs(w) > edge else low
        p = stats.norm.pdf(w, 0, sigma)
        with_example = (1 - q) * p + q * stats.norm.pdf(w, 1, sigma)
        ratio = with_example / p * INSTANCE.acceptance(False) / INSTANCE.acceptance(True)
        return p * a / INSTANCE.acceptance(False) * (ratio**order - 1)

    value, _ = scipy.integrate.quad(moment, -40, 40, points=[-edge, edge], epsabs=1e-13, limit=500)
    np.testing.assert_allclose(renyi(INSTANCE, order), math.log1p(value) / (order - 1), rtol=1e-5)


# Against the costs.


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "updates"), [(INSTANCE, 500), (FULL_BATCH, 1)])
def test_published_epsilon_is_too_small_and_the_conditional_is_not(instance, updates):
    p = costs(instance, updates, 1e-5)
    assert p.published < p.true_at_least
    assert all(p.true_at_least <= epsilon for epsilon in p.conditional.values())
    assert p.attempts == math.ceil(updates / instance.acceptance(False))


@pytest.mark.parametrize("order", [2.0, 4.0, 8.0])
def test_published_renyi_divergence_of_one_update_is_too_small(order):
    (published,) = published_accounting.renyi(INSTANCE.event, [order])
    (bound,) = RdpAccountant([order]).compose(INSTANCE.event).rdp
    assert published < renyi(INSTANCE, order) <= bound


def test_theorem_4_1_holds_without_sampling_and_5_5_fails_with_it():
    full = dataclasses.replace(INSTANCE, validation_batch_size=60000)
    for instance, fails in ((full, False), (INSTANCE, True)):
        (charged,) = published_accounting.renyi_of_test(instance.event, [2.0])
        assert (renyi_of_test(instance, 2.0) > charged) == fails


# The simulation.


def test_simulated_updates_follow_the_distribution_and_not_the_unselected_one():
    rows = check_simulation(INSTANCE, updates=2, runs=20_000, seed=3)
    assert [row[0] for row in rows] == ["D", "D", "D + {x}", "D + {x}"]
    for row in rows:
        from_distribution, from_unselected, attempts, expected = map(float, row[2:])
        assert from_distribution < critical_distance(20_000) < from_unselected / 5
        assert abs(attempts / expected - 1) < 0.03


def test_the_example_moves_what_is_accepted():
    without, with_it = (
        simulate(FULL_BATCH, example, updates=1, runs=20_000, seed=1)[0][:, 0]
        for example in (False, True)
    )
    assert abs(without.mean()) < 0.05 and with_it.mean() > 1
    edges = np.array([-1.8, 1.8])
    for w, example in ((without, False), (with_it, True)):
        shares = [(w < edge).mean() for edge in edges]
        np.testing.assert_allclose(shares, FULL_BATCH.cdf(edges, example), atol=0.015)


def test_mutant_without_selection_is_caught(monkeypatch):
    monkeypatch.setattr(
        counterexample, "_test", lambda instance, example, old, new, rng: new == new
    )
    with pytest.raises(AssertionError):
        test_simulated_updates_follow_the_distribution_and_not_the_unselected_one()


# The command.


def parse(*arguments):
    values = flags.FlagValues()
    counterexample.define_flags(values)
    values(["dpsur_counterexample", *arguments])
    return values


@pytest.mark.slow
def test_command_prints_tables_and_draws(tmp_path, capsys):
    path = tmp_path / "new" / "picture.png"
    counterexample.run(parse("--updates=5,20", "--runs=1000", f"--plot={path}"))
    text = capsys.readouterr().out
    assert "published, not an upper bound" in text and "| 20 | " in text and "numpy" in text
    assert "| D + {x} | 2 |" in text and str(path) in text
    assert matplotlib.image.imread(path).std() > 0.01


def test_curves_are_labelled_at_their_ends():
    all_costs = [costs(INSTANCE, updates, 1e-5) for updates in (5, 20)]
    panel = draw(INSTANCE, all_costs, 1e-5).axes[1]
    labels = [text.get_text() for text in panel.texts]
    assert any(label.startswith("published,\nnot an upper bound") for label in labels)
    assert len(labels) == len(panel.lines) == 4
    for line, text in zip(panel.lines, panel.texts, strict=True):
        assert text.xy == (20, line.get_ydata()[-1])


@pytest.mark.parametrize("argument", ["--noise_multiplier=0", "--cut=-1", "--threshold=nan"])
def test_flags_out_of_range_are_refused(argument):
    with pytest.raises(flags.IllegalFlagValueError, match=argument.split("=")[0]):
        parse(argument)


@pytest.mark.slow
def test_unexpected_arguments_are_refused():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "experiments.dpsur.counterexample", "updates=3"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "updates=3" in done.stderr
