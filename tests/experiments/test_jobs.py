"""Many runs, several at a time, that survive each other and a kill."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

import tfdp
from experiments import jobs, records, training
from experiments.settings import resolve
from experiments.tables import grid
from tests.experiments.jobs_support import WorkersHere

ROOT = Path(__file__).absolute().parents[2]
QUICK = {"epochs": 1, "expected_batch_size": 719, "dataset": "digits"}


def job(row="DPSGD", **given):
    settings = resolve({**QUICK, "seed": 0, "target_epsilon": 2.0, **given})
    return grid.Job("digits", row, settings.target_epsilon if settings.private else None, settings)


GOOD = job()
SELECTIVE = job("DPSUR", method="dpsur_sgd", validation_batch_size=40)
NOT_PRIVATE = job("SGD", method="sgd")
# No noise is enough for it: it is refused when the noise is calibrated.
HOPELESS = job("DPSGD", target_epsilon=0.001, delta=1e-90)


def places_in(folder):
    return jobs.Places(folder / "record.jsonl", folder / "unfinished", None, None)


@pytest.fixture
def here(monkeypatch):
    """Runs jobs in this process; returns those that were begun."""
    workers = WorkersHere(1)
    monkeypatch.setattr(jobs, "_Workers", lambda *_: workers)
    return workers.ran


@pytest.fixture
def at_once(here, monkeypatch):
    """In the place of runs: lines without any training."""
    monkeypatch.setattr(jobs, "_run", lambda job, places: line(job))
    return here


def line(job, **others):
    return {
        **{"dataset": job.dataset, "row": job.row, "target_epsilon": job.target_epsilon},
        **{"seed": job.settings.seed, "settings": dataclasses.asdict(job.settings), **others},
    }


# Runs in processes of their own.


def find(places, job):
    (found,) = [line for line in records.read(places.record) if job.matches(line)]
    return found


@pytest.mark.slow
def test_every_job_gets_a_line_but_one_that_fails(tmp_path, monkeypatch):
    places = places_in(tmp_path)
    todo = [HOPELESS, GOOD, SELECTIVE, GOOD, NOT_PRIVATE]
    (failure,) = jobs.run_all(todo, places, processes=2)
    assert failure.startswith(f"{HOPELESS.key}: RefusedError: --target_epsilon=0.001 at")
    assert len(records.read(places.record)) == 3
    assert list(places.runs.iterdir()) == []  # Runs that ended leave nothing.
    assert find(places, NOT_PRIVATE)["epsilon"] is None
    check_what_was_run_and_what_it_cost(find(places, GOOD))
    check_nothing_is_told_of_attempts(find(places, SELECTIVE))

    before = places.record.read_bytes()
    monkeypatch.setattr(jobs, "_Workers", None)
    assert jobs.run_all([GOOD, SELECTIVE, NOT_PRIVATE], places) == []  # They are not run again.
    assert places.record.read_bytes() == before
    assert jobs.outstanding([HOPELESS, GOOD, HOPELESS], places.record) == [HOPELESS]


def check_what_was_run_and_what_it_cost(found):
    assert found["settings"] == dataclasses.asdict(GOOD.settings)
    assert (found["dataset"], found["row"], found["seed"]) == ("digits", "DPSGD", 0)
    ledger = tfdp.accounting.PrivacyLedger.from_dict(found["ledger"])
    assert ledger.steps == found["steps"] == 2
    bound = ledger.epsilon(found["delta"])
    assert bound.epsilon == found["epsilon"] <= found["target_epsilon"] == 2.0
    assert dict(bound.by_accountant) == found["epsilon_by_accountant"]
    assert set(found["epsilon_by_accountant"]) == {"RDP", "PLD"}
    assert set(found["accuracy_by_class"]) == set("0123456789")
    assert found["evaluated_on"] == "test" and found["evaluation_examples"] == 359
    assert found["versions"]["tfdp"] == tfdp.__version__
    assert {"python", "tensorflow", "dp-accounting"} <= set(found["versions"])
    assert found["seconds"] > 0 and found["parameters"] == 6_090


def tells_of_attempts(line):
    """Whether something in a line depends on how many attempts were rejected."""
    text = json.dumps(line).replace("max_attempts", "")
    return line.get("seconds") is not None or "attempts" in text


def check_nothing_is_told_of_attempts(found):
    assert found["ledger"]["selective_release"] == "conditional"
    assert not tells_of_attempts(found)
    # Mutants.
    assert tells_of_attempts({**found, "seconds": 1.5})
    assert tells_of_attempts({**found, "ledger": {**found["ledger"], "attempts": 7}})


def test_a_process_that_dies_takes_no_other_job_with_it(tmp_path, monkeypatch):
    """`BrokenProcessPool` is what the pool answers from then on: it must be replaced."""

    class Pool:
        made = 0

        def __init__(self, *_):
            Pool.made += 1
            self.workers, self.broken = WorkersHere(1), False

        def submit(self, run, job, places):
            if self.broken:
                raise BrokenProcessPool("broken")
            self.broken = job is HOPELESS
            future = self.workers.begin(job, places)
            if self.broken:
                future = type(future)()
                future.set_exception(BrokenProcessPool("A process ended abruptly."))
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(jobs.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(jobs, "_run", lambda job, places: line(job))
    places = places_in(tmp_path)
    failures = jobs.run_all([HOPELESS, GOOD, NOT_PRIVATE], places)
    assert failures == [f"{HOPELESS.key}: BrokenProcessPool: A process ended abruptly."]
    assert len(records.read(places.record)) == Pool.made == 2


# In this process.


def test_runs_begin_in_their_order_and_each_once(tmp_path, at_once):
    todo = [NOT_PRIVATE, GOOD, SELECTIVE, GOOD]
    assert jobs.run_all(todo, places_in(tmp_path)) == []
    assert at_once == [NOT_PRIVATE, GOOD, SELECTIVE]
    assert [x["row"] for x in records.read(places_in(tmp_path).record)] == ["SGD", "DPSGD", "DPSUR"]


def test_a_budget_of_nothing_begins_nothing(tmp_path, at_once):
    failures = jobs.run_all([GOOD, SELECTIVE], places_in(tmp_path), budget_minutes=0)
    assert at_once == [] and records.read(places_in(tmp_path).record) == []
    assert failures == [f"{j.key}: not begun, {jobs.OUT_OF_TIME}." for j in (GOOD, SELECTIVE)]
    jobs.tell(failures)  # Not an error.


def test_what_would_end_too_late_is_not_begun(tmp_path, at_once, monkeypatch):
    """Runs of DPSGD take four minutes, of SGD one; of others, what the others took."""
    now = [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])

    def take_time(job, places):
        now[0] += 60 * {"DPSGD": 4, "SGD": 1}.get(job.row, 0)
        return line(job)

    monkeypatch.setattr(jobs, "_run", take_time)
    todo = [NOT_PRIVATE, GOOD, job(seed=1), SELECTIVE, job("SGD", method="sgd", seed=1)]
    failures = jobs.run_all(todo, places_in(tmp_path), budget_minutes=7)
    # After 5 of 7 minutes: not another of 4, not one between 1 and 4, but another of 1.
    assert at_once == [todo[0], todo[1], todo[4]]
    assert [failure.split(":")[0] for failure in failures] == [todo[2].key, todo[3].key]


def test_a_failure_ends_the_program_with_an_error(capsys):
    jobs.tell([])
    with pytest.raises(SystemExit) as end:
        jobs.tell([f"a: not begun, {jobs.OUT_OF_TIME}.", "b: RefusedError: no"])
    assert end.value.code == 1
    assert "b: RefusedError: no" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_ended_before_its_line_was_written_is_not_run_again(tmp_path, here, monkeypatch):
    places = places_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(jobs.records, "append", lambda *_: 1 / 0)  # In the place of a kill.
        (failure,) = jobs.run_all([GOOD], places)
    assert "ZeroDivisionError" in failure
    result = json.loads((places.runs / GOOD.key / "result.json").read_text())
    monkeypatch.setattr(jobs, "data_of", None)
    assert jobs.run_all([GOOD], places) == []
    assert find(places, GOOD)["ledger"] == result["ledger"]
    assert list(places.runs.iterdir()) == []


# Kills.

LONG = job(epochs=15)
SCRIPT = """
from pathlib import Path
from experiments import jobs, records, training
from experiments.settings import resolve
from experiments.tables import grid

if __name__ == "__main__":
    settings = resolve({given!r})
    places = jobs.Places(Path({record!r}), Path({runs!r}), None, None)
    print(jobs.run_all([grid.Job("digits", "DPSGD", 2.0, settings)], places))
"""


def start(folder, job):
    """Calls `run_all` as a user does."""
    places = places_in(folder)
    given = dataclasses.asdict(job.settings)
    script = folder / "start.py"
    script.write_text(SCRIPT.format(given=given, record=str(places.record), runs=str(places.runs)))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until(condition, seconds=120):
    """Whether it becomes true in time; long only on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def processes(parent=None, pids=()):
    """Workers that are not dead: children of `parent`, or among `pids`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = path.read_text().rpartition(")")[2].split()[:2]
            command = path.with_name("cmdline").read_bytes()
        except OSError:  # It has ended meanwhile.
            continue
        if state != "Z" and b"spawn_main" in command:
            found.append((int(path.parent.name), int(its_parent)))
    return [pid for pid, its_parent in found if pid in pids or its_parent == parent]


@pytest.fixture
def killed(tmp_path):
    """Starts a run, kills its parent after a condition, and waits until no worker is left."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")

    started = []

    def start_and_kill(job, condition):
        parent = start(tmp_path, job)
        assert wait_until(lambda: processes(parent=parent.pid))
        assert wait_until(condition)
        workers = processes(parent=parent.pid)
        started.extend(workers)
        assert workers
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_until(lambda: not processes(pids=workers), 30)
        assert records.read(places_in(tmp_path).record) == []

    yield start_and_kill
    for pid in processes(pids=started):  # If the test has failed.
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_parent_that_is_killed_while_its_worker_starts_leaves_none(tmp_path, killed, here):
    killed(GOOD, lambda: True)
    assert jobs.run_all([GOOD], places_in(tmp_path)) == []
    find(places_in(tmp_path), GOOD)


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_no_worker_and_the_next_resumes(
    tmp_path, killed, here, monkeypatch
):
    places = places_in(tmp_path)
    checkpoint = places.runs / LONG.key / "checkpoint" / "checkpoint"
    killed(LONG, checkpoint.exists)
    epochs, end_epoch = [], training.Training.end_epoch

    def count(self, *args):
        epochs.append(end_epoch(self, *args))
        return epochs[-1]

    monkeypatch.setattr(training.Training, "end_epoch", count)
    assert jobs.run_all([LONG], places) == []
    assert 0 < len(epochs) < LONG.settings.epochs
    assert find(places, LONG)["steps"] == epochs[-1].step == 2 * LONG.settings.epochs
