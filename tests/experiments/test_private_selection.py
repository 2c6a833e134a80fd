"""The private choice of hyperparameters releases one run, and states what it cost."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from experiments import datasets, private_selection, tune
from experiments.private_selection import Outcome, Selection, parse_grid
from experiments.settings import RefusedError, resolve
from tfdp.accounting import PrivacyLedger, Repetitions

_RUNS = Repetitions("geometric", 2)


def _parse(*arguments):
    values = flags.FlagValues()
    tune.define_flags(values)
    values(["tune", "--private_selection", *arguments])
    return values


def _settings(**given):
    return resolve({"eval_split": "validation", "epochs": 1, **given})


def _selection(monkeypatch=None, runs=None, grid=None):
    rng = np.random.default_rng(1)
    x, y = rng.random((400, 8, 8, 1), np.float32), rng.integers(0, 10, 400)
    data = datasets.Data(x[:300], y[:300], x[300:], y[300:])
    selection = Selection(grid or [_settings()], data, _RUNS, 5.0)
    if runs is not None:
        monkeypatch.setattr(Repetitions, "draw", lambda self: runs)
    return selection


def _with_outcomes(monkeypatch, *scores):
    """A selection whose runs have these scores; returns it and the settings of the runs made."""
    selection, made, left = _selection(monkeypatch, len(scores)), [], list(scores)

    def outcome(settings):
        made.append(settings)
        return Outcome(settings, left[len(made) - 1], f"model {len(made)}")

    monkeypatch.setattr(selection, "_outcome", outcome)
    return selection, made


def test_the_best_of_the_drawn_runs_is_returned_and_all_are_made(monkeypatch):
    selection, made = _with_outcomes(monkeypatch, 3.0, 9.5, 7.0, 9.5)
    best, ledger = selection.run()
    assert best.model == "model 2" and len(made) == 4
    assert ledger.epsilon(1e-5).epsilon <= selection.grid[0].target_epsilon


def test_the_cost_depends_on_neither_the_number_of_runs_nor_their_scores(monkeypatch):
    found = []
    for scores in ([], [1.0], [1.0, -math.inf, 5.0]):
        selection, _ = _with_outcomes(monkeypatch, *scores)
        best, ledger = selection.run()
        found.append(ledger.to_dict())
        assert (best is None) == (not scores)
    assert found[0] == found[1] == found[2]


def test_settings_are_drawn_from_the_whole_grid_anew_for_each_run(monkeypatch):
    selection, made = _with_outcomes(monkeypatch, *[1.0] * 300)
    selection.grid = parse_grid(["learning_rate=1,2,3"], selection.grid[0])
    selection.run()
    counts = np.bincount([int(settings.learning_rate) for settings in made])[1:]
    assert counts.sum() == 300 and counts.min() > 50  # By luck: 1e-10.


def test_a_failed_run_is_an_outcome_and_is_not_repeated(monkeypatch):
    selection, made = _selection(monkeypatch, 3), []

    class Failing:
        def __init__(self, *args, **kwargs):
            made.append(1)
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    monkeypatch.setattr(private_selection, "_Run", Failing)
    best, _ = selection.run()
    assert len(made) == 3
    assert best.model is None and best.score == -math.inf


def test_scores_have_the_noise_that_is_accounted_for(monkeypatch):
    selection = _selection()

    class Right:
        def predict(self, x, batch_size, verbose):
            return np.eye(10)[selection.data.eval_y]

    noise = np.array([selection._score(Right()) for _ in range(2000)]) - 100
    assert selection._ledger().releases[1].event.noise_multiplier == 5.0
    assert abs(noise.mean()) < 6 * 5 / math.sqrt(2000)
    assert 0.85 * 5 < noise.std() < 1.15 * 5  # Nine standard errors: not half of it, nor twice.


@pytest.mark.slow
def test_mutant_with_less_noise_than_is_accounted_for_is_caught():
    selection = _selection()
    released = selection._ledger()
    selection.noise_multiplier *= 0.9
    selection._ledger = lambda: released
    with pytest.raises(RuntimeError, match="did not release what the selection accounts for"):
        selection._outcome(selection.grid[0])


@pytest.mark.slow
def test_all_of_it_on_digits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Repetitions, "draw", lambda self: 1)
    private_selection.run(_parse("--epochs=1", f"--output_dir={tmp_path}"))
    printed = capsys.readouterr().out
    assert "Differential privacy: epsilon = 2.99" in printed
    assert printed.count("held-out examples") == 1 and "test set" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        *("model.keras", "privacy.txt", "ledger.json")
    }
    ledger = PrivacyLedger.from_dict(json.loads((tmp_path / "ledger.json").read_text()))
    assert 2.9 < ledger.epsilon(1e-5).epsilon <= 3.0
    model = tf.keras.models.load_model(tmp_path / "model.keras")
    assert model.optimizer is None and model.output_shape == (None, 10)


def test_no_run_is_an_outcome(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Repetitions, "draw", lambda self: 0)
    arguments = ("--repetitions=poisson", "--epochs=1", f"--output_dir={tmp_path}")
    private_selection.run(_parse(*arguments))
    assert "There was no run." in capsys.readouterr().out
    assert not (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["epochs=1,2"], "--grid must be"),
        (["expected_batch_size=64"], "--grid must be"),
        (["learning_rate"], "--grid must be"),
        (["momentum=0", "momentum=0.9"], "--grid must be"),
        (["momentum=high"], "--grid=momentum=high"),
    ],
)
def test_what_may_not_differ_between_runs_is_refused(grid, message):
    with pytest.raises(RefusedError, match=message):
        parse_grid(grid, _settings())


def test_grid_is_all_combinations():
    grid = parse_grid(["learning_rate=1,2", "l2_norm_clip=0.1,0.3,1"], _settings())
    assert len({(s.learning_rate, s.l2_norm_clip) for s in grid}) == 6


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(RefusedError, match="--shape"):
        private_selection.run(_parse("--repetitions=negative_binomial"))
    with pytest.raises(
        RefusedError, match=r"--target_epsilon=0\.001 cannot be reached.* `score` must be"
    ):
        private_selection.run(_parse("--target_epsilon=0.001", "--score_noise_multiplier=0.1"))
