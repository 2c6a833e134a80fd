import csv
import io

import pytest
import tensorflow as tf

from experiments import training
from experiments.datasets import load
from experiments.methods import make_training
from experiments.report import RunFolder
from experiments.settings import resolve

FIXED = {"dataset": "digits", "seed": 5, "insecure_fixed_noise": True}


@pytest.fixture(autouse=True)
def no_global_determinism(monkeypatch):
    """Keeps a setting that cannot be undone from the other tests of this process."""
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)


def make(path, every_epoch, **flags):
    settings = resolve({**FIXED, **flags})
    data, folder = load("digits"), RunFolder(path)
    return make_training(settings, data, folder, progress=False, every_epoch=every_epoch)


def column(path, name):
    rows = csv.DictReader(io.StringIO((path / "metrics.csv").read_text()))
    return [row[name] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "epochs"), [("dpsgd", 3), ("dpsur_sgd", 2), ("sgd", 2), ("dpagd", 3)]
)
def test_the_last_model_is_the_same_whether_or_not_those_before_it_were_evaluated(
    tmp_path, method, epochs
):
    every = make(tmp_path / "every", True, method=method, epochs=epochs).run()
    last = make(tmp_path / "last", False, method=method, epochs=epochs).run()
    assert last["accuracy"] > 0.3
    # Up to sums whose order threads decide.
    assert last["accuracy"] == pytest.approx(every["accuracy"], abs=0.003)
    assert last["loss"] == pytest.approx(every["loss"], abs=1e-3)
    for name in ("epsilon", "ledger", "steps"):
        assert last.get(name) == every.get(name)
    *before, at_last = column(tmp_path / "last", "accuracy")
    assert at_last and not any(before) and all(column(tmp_path / "every", "accuracy"))
    assert column(tmp_path / "last", "step") == column(tmp_path / "every", "step")
    assert (tmp_path / "last" / "curve.png").exists()


@pytest.mark.slow
def test_a_run_killed_before_its_only_evaluation_makes_it_later(tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.Training, "_evaluate", killed)
        make(tmp_path, False, method="dpsgd", epochs=3).run()
    assert column(tmp_path, "accuracy") == ["", "", ""]
    run = make(tmp_path, False, method="dpsgd", epochs=3)
    result = run.run()
    assert len(run.rows) == 3 and result["accuracy"] > 0.3
    assert column(tmp_path, "accuracy") == ["", "", str(result["accuracy"])]
