"""Sweeps over DPSUR's parameters."""

import csv
import io

import matplotlib.image
import pytest
from absl import flags

from experiments.dpsur import sweep
from experiments.settings import RefusedError
from tfdp.accounting import acceptance_bounds

QUICK = ["--epochs=1", "--validation_batch_size=20", "--seeds=1"]


def parse(*arguments):
    values = flags.FlagValues()
    sweep.define_flags(values)
    values(["dpsur_sweep", *arguments])
    return values


@pytest.mark.slow
def test_a_sweep_compares_at_one_epsilon_and_is_not_repeated(tmp_path, capsys, monkeypatch):
    arguments = [f"--output_dir={tmp_path}", "--values=1.5,2", *QUICK]
    rows = sweep.sweep(parse(*arguments))
    methods = [row["method"] for row in rows]
    assert methods == ["dpsgd", "dpsur_sgd", "dpsur_sgd"]
    assert all(2.9 < row["epsilon"] <= 3 for row in rows)
    noise = {row["value"]: row["noise_multiplier"] for row in rows}
    assert noise[None] < noise[1.5] < noise[2.0]  # Selection has a cost.
    shown = list(csv.DictReader(io.StringIO((tmp_path / "sweep.csv").read_text())))
    assert [float(row["accuracy"]) for row in shown] == [row["accuracy"] for row in rows]
    assert matplotlib.image.imread(tmp_path / "sweep.png").ndim == 3
    monkeypatch.setattr(sweep, "Training", None)
    assert sweep.sweep(parse(*arguments)) == rows
    assert "| dpsur_sgd | 1.5 |" in capsys.readouterr().out


@pytest.mark.parametrize("parameter", sweep.VALUES)
def test_every_parameter_is_swept_alone(parameter):
    values = sweep.VALUES[parameter]
    found = sweep.points({"method": "dpsur_adam", "dataset": "mnist"}, parameter, values, [3])
    below = [point for point in found if point.method == "dpadam"]
    selective = [point for point in found if point.method == "dpsur_adam"]
    assert [point.value for point in selective] == values
    assert len(below) == (len(values) if parameter == "learning_rate" else 1)
    assert len({point.name for point in found}) == len(found)
    if parameter == "spread":
        for point in selective:
            least, largest = acceptance_bounds(
                point.settings.validation_noise_multiplier, point.settings.threshold
            )
            assert largest / least == pytest.approx(point.value)
            assert largest == pytest.approx(0.99)
    else:
        assert [getattr(point.settings, parameter) for point in selective] == values
        assert all(
            (parameter == "threshold" or point.settings.threshold == -1)
            and point.settings.validation_clip == (point.value if "clip" in parameter else 1e-3)
            for point in selective
        )


@pytest.mark.slow
def test_a_test_that_costs_more_than_there_is_is_left_out(tmp_path, capsys):
    arguments = ["--epochs=1", "--seeds=1", "--validation_batch_size=500", "--values=1.1,9"]
    rows = sweep.sweep(parse(f"--output_dir={tmp_path}", "--target_epsilon=2", *arguments))
    assert [row["value"] for row in rows] == [None, 1.1]
    assert "dpsur_sgd_9_seed1: left out. --target_epsilon=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method=dpsgd"], "--method must be one of dpsur_sgd"),
        (["--values=1.5,many"], "--values must be numbers"),
        (["--parameter=learning_rate", "--values=-1"], "--values must be positive"),
        (["--parameter=validation_batch_size", "--values=1.5"], "--values must be positive int"),
        (["--seeds="], "--seeds must be integers"),
        (["--seeds=1.5"], "--seeds must be integers"),
        (["--values=0.9"], "--values of the spread must be above 1"),
    ],
)
def test_what_cannot_be_swept_is_refused(arguments, complaint):
    with pytest.raises(RefusedError, match=complaint):
        sweep.sweep(parse(*arguments))
