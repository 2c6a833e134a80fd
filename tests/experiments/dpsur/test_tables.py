"""What the bound changes for the paper's rows, and what a test costs."""

import math

import matplotlib.image
import pytest
from absl import flags

from experiments.dpsur import tables
from experiments.dpsur.tables import (
    SETTINGS,
    TrainingPlan,
    allowed_updates,
    best_threshold,
    conditional_epsilons,
    published_updates,
    rounded_up,
    same_cost,
)
from tfdp.accounting import RdpAccountant, SelectiveReleaseDpEvent, acceptance_bounds, event_codec

FASHION = next(s for s in SETTINGS if s.name == "Fashion-MNIST" and s.claimed == 1)


def test_settings_are_the_papers():
    assert len(SETTINGS) == 16
    assert [s.claimed for s in SETTINGS[:4]] == [1, 2, 3, 4]
    assert (FASHION.batch_size, FASHION.noise_multiplier) == (2048, 4.0)
    assert [s.validation_batch_size for s in SETTINGS if s.name == "IMDB"] == [128] * 4


def test_claimed_epsilon_is_exceeded_and_fewer_updates_are_allowed():
    updates = published_updates(FASHION)
    assert updates == 651
    assert 1.25 < min(conditional_epsilons(FASHION, updates).values()) < 1.34
    allowed = allowed_updates(FASHION)
    assert 380 <= allowed < 450
    assert min(conditional_epsilons(FASHION, allowed).values()) <= 1


@pytest.mark.parametrize("beta", [-2.0, -0.5, 0.0, 0.9])
def test_only_the_ratio_of_acceptance_probabilities_is_charged(beta):
    low, high = acceptance_bounds(1.3, -1.0)
    sigma = same_cost(high / low, beta)
    a, b = acceptance_bounds(sigma, beta)
    assert math.isclose(b / a, high / low, rel_tol=1e-9)
    assert (1 / b < 1 / high) == (beta > -1)  # Fewer attempts with a larger beta.
    charged = [
        RdpAccountant([2.0, 16.0])
        .compose(
            SelectiveReleaseDpEvent(
                event_codec.sampled_gaussian(0.04, 4.0),
                event_codec.sampled_gaussian(0.005, noise),
                threshold,
            )
        )
        ._rdp
        for noise, threshold in ((1.3, -1.0), (sigma, beta))
    ]
    assert charged[0] == pytest.approx(charged[1], rel=1e-6)


@pytest.mark.parametrize("arguments", [(1.0, 0.0), (2.0, 1.0)])
def test_impossible_costs_are_refused(arguments):
    with pytest.raises(ValueError, match="must be above 1 and below 1"):
        same_cost(*arguments)


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.3])
def test_difference_of_acceptance_probabilities_is_largest_at_zero(sigma):
    assert abs(best_threshold(sigma)) < 1e-3
    at_zero, at_minus_one = (acceptance_bounds(sigma, beta) for beta in (0.0, -1.0))
    assert at_zero[1] - at_zero[0] > 1.05 * (at_minus_one[1] - at_minus_one[0])


@pytest.mark.slow
def test_larger_test_batches_need_more_noise():
    plan = TrainingPlan()
    none, small, large = plan.noise(256, 1.0), plan.noise(16, 2.0), plan.noise(256, 2.0)
    assert none == pytest.approx(3.86, abs=0.02)
    assert small == pytest.approx(4.52, abs=0.03)
    assert large == pytest.approx(5.51, abs=0.03)


def test_rounding_is_upwards():
    assert [rounded_up(x, 2) for x in (1.231, 1.23, 1.2300001)] == ["1.24", "1.23", "1.24"]


@pytest.mark.slow
def test_command_prints_tables_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tables, "SETTINGS", (FASHION,))
    monkeypatch.setattr(tables, "_FEW_ORDERS", (8.0, 12.0))
    values = flags.FlagValues()
    tables.define_flags(values)
    values(["dpsur_tables", "--validation_batch_sizes=16", f"--plot={tmp_path / 'picture.png'}"])
    tables.run(values)
    text = capsys.readouterr().out
    assert "| Fashion-MNIST | 1 | 4 | 1.3 | 651 | " in text and "| B / A | B_v = 16 |" in text
    assert matplotlib.image.imread(tmp_path / "picture.png").std() > 0.01


def test_unknown_data_sets_are_refused():
    values = flags.FlagValues()
    tables.define_flags(values)
    with pytest.raises(flags.IllegalFlagValueError, match="must be out of MNIST"):
        values(["dpsur_tables", "--data=MNIST,Mnist"])
