"""The private choice of hyperparameters releases one run, and states what it cost."""

import json
import re

import pytest
import tensorflow as tf
from absl import flags

import tfdp
from experiments import private_selection, tune
from experiments.private_selection import parse_grid
from experiments.settings import RefusedError, resolve
from tfdp.accounting import PrivacyLedger, Repetitions


def _parse(*arguments):
    values = flags.FlagValues()
    tune.define_flags(values)
    values(["tune", "--private_selection", *arguments])
    return values


def _settings(**given):
    return resolve({"eval_split": "validation", "epochs": 1, **given})


@pytest.mark.slow
def test_all_of_it_on_digits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Repetitions, "draw", lambda self: 1)
    private_selection.run(_parse("--epochs=1", f"--output_dir={tmp_path}"))
    printed = capsys.readouterr().out
    assert re.search(r"Differential privacy: epsilon = (2\.99\d*|3) at", printed)
    assert printed.count("held-out examples") == 1 and "test set" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        *("model.keras", "privacy.txt", "ledger.json", "selection")
    }
    ledger = PrivacyLedger.from_dict(json.loads((tmp_path / "ledger.json").read_text()))
    assert 2.9 < ledger.epsilon(1e-5).epsilon <= 3.0
    model = tf.keras.models.load_model(tmp_path / "model.keras")
    assert model.output_shape == (None, 10)
    assert str(tfdp.privacy_statement(model, 1e-5)) == (tmp_path / "privacy.txt").read_text()


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
