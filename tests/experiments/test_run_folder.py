"""The folder of a run: one process at a time writes to it, and every file is whole."""

import gc
import multiprocessing

import pytest

from experiments.report import RunFolder
from experiments.settings import RefusedError, resolve


def locked_elsewhere(path):
    """Returns whether another process is refused the folder."""
    process = multiprocessing.get_context("fork").Process(target=_lock, args=(path,))
    process.start()
    process.join()
    return process.exitcode == 3


def _lock(path):
    import os

    from experiments import report

    report._locks.clear()
    try:
        RunFolder(path).lock()
    except RefusedError as error:
        os._exit(3 if "--output_dir must be a folder that no other process" in str(error) else 4)
    os._exit(0)


@pytest.mark.slow
def test_one_process_at_a_time(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(resolve({}))
    assert locked_elsewhere(tmp_path / "run")
    assert not locked_elsewhere(tmp_path)
    RunFolder(tmp_path / "run").begin(resolve({}))  # The same process resumes.
    assert locked_elsewhere(tmp_path / "run")
    del folder
    gc.collect()
    assert not locked_elsewhere(tmp_path / "run")


def test_a_folder_that_is_not_locked_is_not_refused(tmp_path):
    assert not locked_elsewhere(tmp_path / "run")


class Interrupted(Exception):
    pass


class Model:
    def __init__(self, fails):
        self.fails = fails

    def save(self, path):
        path.write_text("half")
        if self.fails:
            raise Interrupted
        path.write_text("whole")


def test_a_model_is_written_whole(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(Interrupted):
        folder.write_model(Model(fails=True))
    assert not folder.model.exists()
    folder.write_model(Model(fails=False))
    assert folder.model.read_text() == "whole"
    with pytest.raises(Interrupted):
        folder.write_model(Model(fails=True))
    assert folder.model.read_text() == "whole"
