"""Selective methods on the command line."""

import contextlib
import csv
import io

import pytest
import tensorflow as tf

import tfdp
from experiments import training
from experiments.settings import SELECTIVE_METHODS, RefusedError
from tests.experiments.classify_support import classify_here

FLAGS = [
    "--method=dpsur_sgd",
    "--validation_batch_size=40",
    "--validation_noise_multiplier=0.7",
    "--validation_clip=0.01",
    "--threshold=0.5",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder, its result, and what was shown."""
    folder, shown = tmp_path_factory.mktemp("finished"), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        result = classify_here(f"--output_dir={folder}", "--epochs=2", "--seed=3", *FLAGS)
    return folder, result, shown.getvalue()


@pytest.mark.slow
def test_it_trains_with_the_parameters_of_the_flags(finished):
    folder, result, _ = finished
    model = tf.keras.models.load_model(folder / "model.keras")
    optimizer = model.optimizer
    assert type(model) is tfdp.SelectiveModel and type(optimizer) is tfdp.DPSURSGD
    assert optimizer.validation_batch_size == 40
    assert optimizer.validation_noise_multiplier == 0.7
    assert (optimizer.validation_clip, optimizer.threshold) == (0.01, 0.5)
    assert optimizer.ledger.steps == result["steps"]


def test_epsilon_is_the_true_bound(finished):
    _, result, _ = finished
    ledger = tfdp.accounting.PrivacyLedger.from_dict(result["ledger"])
    (release,) = ledger.releases
    assert isinstance(release.event, tfdp.accounting.SelectiveReleaseDpEvent)
    assert ledger.epsilon(1e-5).epsilon == result["epsilon"]
    assert 0.99 * 3 < result["epsilon"] <= 3


def test_neither_times_nor_attempts_are_kept(finished):
    folder, result, _ = finished
    assert result["seconds"] is None
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    assert [row["seconds"] for row in rows] == ["", ""]
    for name in ("metrics.csv", "result.json", "flags.txt"):
        assert "attempts" not in (folder / name).read_text().replace("max_attempts", "")
    assert "rejected attempts, their number" in " ".join(
        (folder / "privacy.txt").read_text().split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", SELECTIVE_METHODS[1:])
def test_every_method_runs(method, tmp_path):
    result = classify_here(f"--output_dir={tmp_path}", f"--method={method}", "--epochs=1")
    assert 0 <= result["accuracy"] <= 1 and result["epsilon"] <= 3


def test_observed_attempts_are_paid_for(tmp_path):
    result = classify_here(
        f"--output_dir={tmp_path}", "--epochs=1", "--selective_release=per_attempt", *FLAGS
    )
    assert result["ledger"]["selective_release"] == "per_attempt"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--threshold=0.5"], "--threshold must come with one of --method=dpsur_sgd"),
        (["--method=sgd", "--validation_clip=1"], "--validation_clip must come with"),
        (["--method=dpsur_sgd", "--chunk_size=64"], "--chunk_size must be left out"),
        (["--method=dpsur_sgd", "--validation_batch_size=1439"], "--validation_batch_size must be"),
        (
            ["--method=dpsur_sgd", "--threshold=-3", "--validation_noise_multiplier=0.2"],
            "--max_attempts must be given",
        ),
        (["--method=dpsur_sgd", "--target_epsilon=0.01"], "cannot be reached|spent"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, arguments, complaint):
    with pytest.raises(RefusedError, match=complaint):
        classify_here(f"--output_dir={tmp_path / 'run'}", "--epochs=1", *arguments)


TIMES = ("s/epoch", "epoch/s", "ms/step")


def test_no_times_are_shown(finished):
    _, _, shown = finished
    assert "nobody may see how many attempts" in shown and "2/2 epochs" in shown
    assert not any(time in shown for time in TIMES)


@pytest.mark.slow
def test_times_that_the_bar_of_other_methods_shows_are_caught(tmp_path, capsys, monkeypatch):
    """Mutant: the bar of a selective method shows how long an epoch takes."""
    monkeypatch.setattr(training, "_WITHOUT_TIMES", None)
    classify_here(f"--output_dir={tmp_path}", "--epochs=1", *FLAGS)
    assert any(time in capsys.readouterr().err for time in TIMES)
