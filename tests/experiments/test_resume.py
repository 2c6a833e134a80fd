import csv
import io
import shutil

import numpy as np
import pytest
import tensorflow as tf

from experiments import training
from experiments.settings import RefusedError
from tests import forks
from tests.experiments.classify_support import classify_here

FIXED = ("--seed=5", "--insecure_fixed_noise")


class Interrupted(Exception):
    """In the place of a kill."""


@pytest.fixture
def no_global_determinism(monkeypatch):
    """Keeps a setting that cannot be undone from the other tests of this process."""
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)


def state(folder):
    """Weights, optimizer state and ledger of a finished run, and its metrics without the times."""
    model = tf.keras.models.load_model(folder / "model.keras")
    optimizer = model.optimizer
    optimizer._create_all_weights(model.trainable_variables)
    ledger = optimizer.ledger.to_dict() if hasattr(optimizer, "ledger") else None
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    rows = [{name: row[name] for name in row if name != "seconds"} for row in rows]
    # The record has a random number for each optimizer; its total is in the ledger.
    weights = [w.numpy() for w in optimizer.weights if "privacy_record" not in w.name]
    return [*model.get_weights(), *weights], ledger, rows


# Rounding of sums whose order threads decide, if TensorFlow's determinism is not switched on.
ROUNDING = 1e-5


def assert_same(folder, other, rounding=0.0):
    (arrays, ledger, rows), (other_arrays, other_ledger, other_rows) = state(folder), state(other)
    assert len(arrays) == len(other_arrays) > 8
    for array, other_array in zip(arrays, other_arrays, strict=True):
        np.testing.assert_allclose(array, other_array, rtol=rounding, atol=rounding)
    assert ledger == other_ledger and len(rows) == len(other_rows)
    for row, other_row in zip(rows, other_rows, strict=True):
        numbers, other_numbers = (
            [float(text or "nan") for text in r.values()] for r in (row, other_row)
        )
        np.testing.assert_allclose(numbers, other_numbers, rtol=10 * rounding)


def interrupt(monkeypatch, after_epochs, *arguments):
    """Runs it in this process until the epoch after `after_epochs` has been trained."""
    with monkeypatch.context() as patch:
        end_epoch = training.Training.end_epoch

        def stop(self, *args):
            if len(self.rows) == after_epochs:
                raise Interrupted
            return end_epoch(self, *args)

        patch.setattr(training.Training, "end_epoch", stop)
        with pytest.raises(Interrupted):
            classify_here(*arguments)


def run_and_copy_before_the_end(folder, monkeypatch, *arguments):
    """Runs it in `whole`; `part` is what a kill would leave before the second epoch is saved."""
    with monkeypatch.context() as patch:
        end_epoch = training.Training.end_epoch

        def copy(self, *args):
            if len(self.rows) == 1:
                shutil.copytree(folder / "whole", folder / "part")
            return end_epoch(self, *args)

        patch.setattr(training.Training, "end_epoch", copy)
        classify_here(f"--output_dir={folder / 'whole'}", *arguments)
    assert not (folder / "part" / "result.json").exists()


# The first two arguments are folders. The second gets what a kill before the third epoch is saved
# would leave in the first.
RUN = """
import os, runpy, shutil, sys
from experiments import training

folder, left = sys.argv.pop(1), sys.argv.pop(1)
end_epoch = training.Training.end_epoch

def copy(self, *args):
    if len(self.rows) == 2:
        shutil.copytree(folder, left)
    return end_epoch(self, *args)

if not os.path.exists(left):
    training.Training.end_epoch = copy
sys.argv.append(f"--output_dir={folder}")
runpy.run_module("experiments.classify", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path):
    """To the last bit, as TensorFlow's determinism is switched on."""
    folders = tmp_path / "whole", tmp_path / "part"
    flags = ("--epochs=4", "--method=dpsignsgd", *FIXED)
    arguments = [(*folders, *flags), (*folders[::-1], *flags)]
    whole, resumed = forks.run_each(RUN, arguments, "import experiments.training")
    for process in (whole, resumed):
        assert process.status == 0, process.errors
        assert "epsilon = 2.99" in process.output or "epsilon = 3.0000" in process.output
    assert "1/4" in whole.errors and "2/4" in resumed.errors and "1/4" not in resumed.errors
    assert_same(*folders)
    assert not (tmp_path / "part" / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--method=dpadam", "--chunk_size=100"),
        ("--method=dpsgd", "--num_microbatches=32"),
        ("--method=dpsur_sgd", "--validation_batch_size=40"),
        ("--method=sgd",),
    ],
)
def test_every_kind_of_run_resumes(tmp_path, monkeypatch, no_global_determinism, arguments):
    arguments = ("--epochs=2", *FIXED, *arguments)
    run_and_copy_before_the_end(tmp_path, monkeypatch, *arguments)
    classify_here(f"--output_dir={tmp_path / 'part'}", *arguments)
    assert_same(tmp_path / "whole", tmp_path / "part", ROUNDING)


@pytest.mark.slow
def test_comparison_notices_a_run_that_draws_its_first_batches_again(
    tmp_path, monkeypatch, no_global_determinism
):
    """The mutant of the test above: sampling that starts anew when a run is resumed."""
    arguments = ("--epochs=2", *FIXED)
    run_and_copy_before_the_end(tmp_path, monkeypatch, *arguments)
    batches = training.tfdp.data.poisson_batches
    monkeypatch.setattr(
        training.tfdp.data,
        "poisson_batches",
        lambda data, **options: batches(data, **{**options, "first_step": 0}),
    )
    classify_here(f"--output_dir={tmp_path / 'part'}", *arguments)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "whole", tmp_path / "part", ROUNDING)


@pytest.mark.slow
def test_a_run_killed_after_its_last_epoch_is_only_finished(tmp_path, monkeypatch):
    arguments = (f"--output_dir={tmp_path}", "--epochs=2")
    with monkeypatch.context() as patch:

        def fail(*_):
            raise Interrupted

        patch.setattr(training.RunFolder, "write_curve", fail)
        with pytest.raises(Interrupted):
            classify_here(*arguments)
    (tmp_path / "metrics.csv").unlink()  # As if killed before it was written.
    result = classify_here(*arguments)
    assert result["ledger"]["releases"][0]["count"] == result["steps"]
    _, ledger, rows = state(tmp_path)
    assert ledger == result["ledger"] and len(rows) == 2
    assert float(rows[-1]["epsilon"]) == result["epsilon"]


def test_an_interrupted_run_refuses_other_privacy_parameters(tmp_path, monkeypatch):
    folder = f"--output_dir={tmp_path}"
    interrupt(monkeypatch, 1, folder, "--epochs=3")
    kept = (tmp_path / "metrics.csv").read_text()
    for other, name in (
        ("--target_epsilon=5", "target_epsilon"),
        ("--l2_norm_clip=0.5", "l2_norm_clip"),
        ("--expected_batch_size=100", "expected_batch_size"),
    ):
        with pytest.raises(RefusedError, match=f"began with --{name}=.*{other}"):
            classify_here(folder, "--epochs=3", other)
    with pytest.raises(RefusedError, match="--epochs=4"):
        classify_here(folder, "--epochs=4")
    assert (tmp_path / "metrics.csv").read_text() == kept
