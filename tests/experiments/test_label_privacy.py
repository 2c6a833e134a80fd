"""Labels that were randomized: the correction helps, and no run is done twice."""

import numpy as np
import pytest
from absl import flags

from experiments import datasets, label_privacy, records
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    label_privacy.define_flags(values)
    values(["label_privacy", *arguments])
    return values


def _run(**changed):
    given = {"loss": "corrected", "epsilon": 2.0, "epochs": 1, "expected_batch_size": 256}
    given |= {"validation_examples": 287, "split": "test", "learning_rate": 0.01, "seed": 0}
    return label_privacy.Run(**{**given, **changed})


class _Stop(Exception):
    pass


@pytest.mark.parametrize("mutant", [False, True])
def test_training_sees_randomized_labels_alone(monkeypatch, mutant):
    seen = []

    class Model:
        def compile(self, *arguments):
            pass

        def fit(self, x, y, *arguments, **kwargs):
            seen.append(y)
            raise _Stop

    monkeypatch.setitem(label_privacy.networks.NETWORKS, "digits", lambda activation: Model())
    if mutant:  # Labels that are not randomized.
        keep = label_privacy.tfdp.data.RandomizedLabels
        monkeypatch.setattr(label_privacy.tfdp.data, "randomized_response_labels", keep)
    with pytest.raises(_Stop):
        label_privacy.train(_run())
    # With 10 classes, exp(2) / (exp(2) + 9) = 0.45 are kept: 30 deviations from all.
    kept = np.mean(seen[0] == datasets.load("digits").train_y)
    assert (0.35 < kept < 0.55) != mutant


@pytest.mark.slow
def test_a_table_a_picture_and_no_run_twice(tmp_path, monkeypatch):
    record = tmp_path / "record"
    arguments = ("--epsilons=4", "--learning_rates=0.01", "--seeds=1", "--epochs=3")
    values = _parse(*arguments, f"--record={record}")
    found = label_privacy.compare(values)
    assert list(found) == [("corrected", 4.0), ("usual", 4.0)]
    lines = records.read(record)
    assert len(lines) == 4 and all(line["epsilon"] == 4 for line in lines)
    assert all(one.mean > 30 for one in found.values())

    def none_is_left(run):
        raise AssertionError(run)

    monkeypatch.setattr(label_privacy, "train", none_is_left)
    assert label_privacy.compare(values) == found
    assert len(label_privacy.table(found).splitlines()) == 3
    label_privacy.draw(found, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_refusals():
    with pytest.raises(RefusedError, match="--epsilons must be positive"):
        label_privacy.compare(_parse("--epsilons=0"))
    with pytest.raises(RefusedError, match=r"--epsilons: .*epsilon"):
        label_privacy.train(_run(epsilon=50.0))
