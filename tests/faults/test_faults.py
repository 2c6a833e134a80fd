"""Trainings that are killed resume, and count what was published."""

import pytest

from tests.faults import trials
from tests.front_ends import needs_keras_3
from tests.without_keras_2 import needs_keras_2

pytestmark = pytest.mark.slow

# Kills in the middle of the training, and then when it has ended and the model is not yet saved.
_FAULTS = ["step:5", "fitted"]


@needs_keras_3
def test_a_killed_training_resumes_and_has_counted_what_was_published(tmp_path):
    outcome = trials.trial("fit", tmp_path / "run", _FAULTS)
    assert outcome.problems == []
    assert outcome.kills == 2


@needs_keras_3
def test_mutant_that_deletes_the_backup_before_the_model_is_saved_is_caught(tmp_path):
    kept = trials.source("fit")
    deleted = kept.replace("delete_checkpoint=False", "delete_checkpoint=True")
    assert deleted != kept
    outcome = trials.trial("fit", tmp_path / "run", _FAULTS, deleted)
    assert any("below" in problem for problem in outcome.problems)


@needs_keras_3
def test_a_killed_selection_resumes_and_names_only_weights_that_are_whole(tmp_path):
    outcome = trials.trial("tune", tmp_path / "run", ["event:14"])
    assert outcome.problems == []
    assert outcome.kills == 1


_EARLY = """
from tfdp.training.tuning import kept
checkpoint = kept._checkpoint

def early(model):
    sys._getframe(1).f_locals["self"]._write()
    if kind == "event":
        end()
    return checkpoint(model)

kept._checkpoint = early
"""


@needs_keras_3
def test_mutant_that_names_weights_before_they_are_written_is_caught(tmp_path):
    source = trials.source("tune")
    mutant = source.replace("begin()\ntuned", f"{_EARLY}begin()\ntuned")
    assert mutant != source
    outcome = trials.trial("tune", tmp_path / "run", ["event:1000"], mutant)
    assert any("selection.json" in problem for problem in outcome.problems)


@needs_keras_3
def test_saves_run_without_a_fault(tmp_path):
    run = trials.whole("save", tmp_path / "save")
    assert run.events > 0 and run.changes > 0


@needs_keras_2
def test_a_killed_training_of_keras_2_resumes_and_has_counted_what_was_published(tmp_path):
    outcome = trials.trial("fit_keras_2", tmp_path / "run", ["step:3"])
    assert outcome.problems == []
    assert outcome.kills == 1


@needs_keras_2
def test_mutant_that_backs_up_as_often_as_it_publishes_is_caught_in_keras_2(tmp_path):
    kept = trials.source("fit_keras_2")
    rarer = kept.replace("save_freq=1", "save_freq=2")
    assert rarer != kept
    # A kill, and one after the first step of the training that resumes.
    outcome = trials.trial("fit_keras_2", tmp_path / "run", ["step:3", "step:3"], rarer)
    assert any("resumes with epsilon" in problem for problem in outcome.problems)


def test_examples_are_whole_after_kills(tmp_path):
    outcome = trials.trial("write_examples", tmp_path / "run", ["event:30", "event:20"])
    assert outcome.problems == []
    assert outcome.kills == 2


def test_records_are_whole_after_kills(tmp_path):
    outcome = trials.trial("records", tmp_path / "run", ["event:9", "change:5"])
    assert outcome.problems == []
    assert outcome.kills >= 1  # The other process may notice the change too late.


def test_examples_are_whole_after_writes_that_failed(tmp_path):
    outcome = trials.trial("write_examples", tmp_path / "run", ["size:150", "size:250"])
    assert outcome.problems == []
    assert outcome.kills == 2


def test_mutant_that_misses_writes_that_fail_is_caught(tmp_path):
    source = trials.source("write_examples")
    mutant = source.replace("begin()\n", "written._save = np.save\nbegin()\n")
    assert mutant != source
    outcome = trials.trial("write_examples", tmp_path / "run", ["size:150"], mutant)
    assert any("not whole" in problem for problem in outcome.problems)


def test_examples_that_two_write_at_a_time_are_whole(tmp_path):
    assert trials.pair("write_examples", tmp_path / "run") == []


def test_files_that_are_cut_are_seen(tmp_path):
    (tmp_path / "result.json").write_text('{"epsilon": 1')
    (tmp_path / "metrics.csv").write_text("epoch,step")
    (tmp_path / "model.keras").write_bytes(b"PK\x03\x04")
    assert trials.look(tmp_path).unreadable == ["metrics.csv", "model.keras", "result.json"]
