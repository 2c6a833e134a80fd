"""Trainings that are killed resume, and count what was published."""

import pytest

from tests.faults import trials
from tests.front_ends import needs_keras_3

pytestmark = [needs_keras_3, pytest.mark.slow]

# Ends of a training in its second backup, and while its second weights or its model is written.
_FAULTS = ["event:12", "event:25"]


def test_a_killed_training_resumes_and_has_counted_what_was_published(tmp_path):
    outcome = trials.trial("fit", tmp_path / "run", _FAULTS)
    assert outcome.problems == []
    assert outcome.kills == len(_FAULTS)


def test_mutant_that_publishes_before_the_backup_is_caught(tmp_path):
    program = trials.source("fit").replace("callbacks=durable(folder)", "callbacks=[late]")
    program = program.replace(
        "begin()",
        """
late = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: (model.save(f"{folder}/final.keras"), end())
    if not os.path.exists(f"{folder}/final.keras")
    else None
)
begin()""",
        1,
    ).replace("epochs=2", "epochs=2 if fault == 'event:1000000' else 1")
    program = program.replace("steps_per_epoch=4", "steps_per_epoch=4 if fault != 'none' else 1")
    outcome = trials.trial("fit", tmp_path / "run", ["event:1000000"], program)
    assert any("below" in problem for problem in outcome.problems)


def test_files_that_are_cut_are_seen(tmp_path):
    (tmp_path / "result.json").write_text('{"epsilon": 1')
    (tmp_path / "metrics.csv").write_text("epoch,step")
    (tmp_path / "model.keras").write_bytes(b"PK\x03\x04")
    assert trials.look(tmp_path).unreadable == ["metrics.csv", "model.keras", "result.json"]
