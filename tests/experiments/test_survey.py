"""Systems of a survey are compared with DP-SGD, each with its best learning rate, and resumed."""

import pytest
from absl import flags

from experiments import records, survey
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    survey.define_flags(values)
    values(["survey", *arguments])
    return values


def _run(name, **changes):
    given = {
        "system": name,
        "epsilon": 4.0,
        "delta": 1e-5,
        "epochs": 1,
        "expected_batch_size": 512,
        "validation_examples": 287,
        "split": "test",
        "learning_rate": survey.SYSTEMS[name].learning_rate,
        "seed": 0,
    }
    return survey.Run(**(given | changes))


def test_a_row_for_each_system_and_no_run_twice(tmp_path, monkeypatch):
    # The best at the second factor, 2, of each learning rate.
    monkeypatch.setattr(
        survey, "train", lambda run: (60.0 * (run.learning_rate > 0.1) + run.seed, 3.9)
    )
    flags_of_it = ["--systems=DP-SGD,random layers (half)", "--epsilons=4", "--seeds=2"]
    values = _parse(*flags_of_it, "--epochs=1", "--expected_batch_size=512")
    monkeypatch.setattr(survey, "_FACTORS", (1e-9, 2.0))
    record = tmp_path / "record.jsonl"
    rows = survey.compare(values, survey.Runs(record))
    assert [(row.system, len(row.found.accuracies)) for row in rows] == [
        ("DP-SGD", 2),
        ("random layers (half)", 2),
    ]
    assert all(row.found.learning_rate == 0.3 for row in rows)
    assert [line["epsilon"] for line in records.read(record)] == [3.9] * 8

    def none_is_left(run):
        raise AssertionError(run)

    monkeypatch.setattr(survey, "train", none_is_left)
    assert survey.compare(values, survey.Runs(record)) == rows
    assert len(survey.table(rows).splitlines()) == 4
    survey.draw(rows, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("DP-SGD", "random layers (half)", "correlated noise", "noise schedule"),
        *("users of 4 images", "DPSUR", "PATE"),
    ],
)
def test_a_run_stays_within_its_budget(name):
    accuracy, spent = survey.train(_run(name))
    assert 0 <= accuracy <= 100
    assert 3.9 < spent <= 4.0


def test_an_epsilon_above_the_budget_is_an_error():
    ledger = survey.tfdp.accounting.PrivacyLedger()
    ledger.record(survey.tfdp.DPSGD(1.0, 0.5, 8).event)
    with pytest.raises(RuntimeError, match="A run has an epsilon of"):
        survey._spent(ledger, _run("DP-SGD"))


@pytest.mark.parametrize(
    "flag", ["--epsilons=a", "--epsilons=-1", "--systems=SGD", "--expected_batch_size=5000"]
)
def test_what_cannot_be_is_refused(flag, tmp_path):
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        survey.compare(_parse(flag), survey.Runs(tmp_path / "record"))
    assert not (tmp_path / "record").exists()
