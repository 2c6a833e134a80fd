"""Runs many trainings, several at a time, each in a folder from which it resumes after a kill."""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import tqdm

from experiments import records
from experiments.settings import Settings
from experiments.tables import grid

OUT_OF_TIME = "--budget_minutes is used up"

_KEPT = (
    *("accuracy", "loss", "accuracy_by_class", "evaluated_on", "evaluation_examples"),
    *("dataset_size", "parameters", "steps", "seconds", "epsilon", "delta"),
    *("epsilon_by_accountant", "noise_multiplier", "ledger", "versions"),
)
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs"
_WITH_TIMES = _BAR + " [{elapsed}{postfix}]"


@dataclasses.dataclass(frozen=True)
class Places:
    """Locations of the runs.

    Attributes:
      record: The file of JSON lines, one per finished run.
      runs: Folder of unfinished runs.
      data_dir: Folder of TensorFlow Datasets; None for its own default.
      features_dir: Folder of features.
    """

    record: Path
    runs: Path
    data_dir: str | None
    features_dir: str | None


# Function of a process of its own: makes a run, and returns its line for the record.
Run = Callable[[grid.Job, Places], dict[str, Any]]


def outstanding(jobs: Sequence[grid.Job], record: Path) -> list[grid.Job]:
    """Returns the jobs that have no line in the record, each once, in their order."""
    lines = records.read(record)
    unique = {job.key: job for job in jobs}
    return [job for job in unique.values() if not any(job.matches(line) for line in lines)]


def run_all(
    jobs: Sequence[grid.Job],
    places: Places,
    *,
    processes: int = 1,
    budget_minutes: float | None = None,
    run: Run | None = None,
) -> list[str]:
    """Runs what is outstanding, and adds a line to the record for each run that ends.

    A run that is interrupted resumes from its last epoch when this is called again.

    Args:
      jobs: The runs, the most informative first.
      places: Folders and files.
      processes: Number that run at a time; they share the cores.
      budget_minutes: No run is begun that is expected to end later; None: all are.
      run: What a run is: a function of a module. None: one training.

    Returns:
      What could not be run, and why, a sentence each.
    """
    waiting = outstanding(jobs, places.record)
    if not waiting:
        return []
    failures = []
    clock = _Clock(budget_minutes, processes)
    # How long attempts took says how many of them were rejected.
    hidden = any(job.settings.selective for job in waiting)
    running: dict[concurrent.futures.Future, tuple[grid.Job, float]] = {}
    with (
        _Workers(processes, run or _run) as workers,
        tqdm.tqdm(
            total=len(waiting), unit="run", bar_format=_BAR if hidden else _WITH_TIMES
        ) as bar,
    ):
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                if clock.allows(job):
                    running[workers.begin(job, places)] = job, time.monotonic()
                else:
                    failures.append(f"{job.key}: not begun, {OUT_OF_TIME}.")
            done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                job, began = running.pop(future)
                clock.took(job, time.monotonic() - began)
                try:
                    records.append(places.record, future.result())
                    shutil.rmtree(places.runs / job.key, ignore_errors=True)
                except Exception as error:  # the other runs continue
                    failures.append(f"{job.key}: {type(error).__name__}: {error}")
                bar.set_postfix_str(f"about {clock.minutes(waiting):.0f} min left", refresh=False)
                bar.update()
    return failures


class _Workers:
    """Processes that run jobs; when one dies, all are replaced."""

    def __init__(self, processes: int, run: Run):
        self._processes = processes
        self._run = run
        self._pool = self._new()

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def begin(self, job: grid.Job, places: Places) -> concurrent.futures.Future:
        """Begins a run."""
        try:
            return self._pool.submit(self._run, job, places)
        except BrokenProcessPool:
            self._pool = self._new()
            return self._pool.submit(self._run, job, places)

    def _new(self) -> concurrent.futures.ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        return concurrent.futures.ProcessPoolExecutor(self._processes, context, _set_up, (threads,))


class _Clock:
    """Estimates how long runs take, by those of the same data set and row that have ended."""

    def __init__(self, budget_minutes: float | None, processes: int):
        minutes = math.inf if budget_minutes is None else budget_minutes
        self._end = time.monotonic() + 60 * minutes
        self._processes = processes
        self._seconds: dict[tuple[str, str], list[float]] = {}

    def took(self, job: grid.Job, seconds: float) -> None:
        """Notes how long a run took."""
        self._seconds.setdefault((job.dataset, job.row), []).append(seconds)

    def allows(self, job: grid.Job) -> bool:
        """Returns whether the run is expected to end in time."""
        return time.monotonic() + self._expected(job) < self._end

    def minutes(self, waiting: Sequence[grid.Job]) -> float:
        """Returns how long runs that have not begun will take, in minutes."""
        return sum(self._expected(job) for job in waiting) / self._processes / 60

    def _expected(self, job: grid.Job) -> float:
        """Returns the median time of like runs, else of all; 0 before any has ended."""
        all_of_them = itertools.chain.from_iterable(self._seconds.values())
        like = self._seconds.get((job.dataset, job.row))
        return statistics.median(like or list(all_of_them) or [0.0])


def _set_up(threads: int) -> None:
    """In a new process: its share of the cores, and the same end as its parent's.

    A parent that is killed cannot tell; a run that continued would meet itself in its folder.
    """

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()  # it need not be alive any more
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


@functools.lru_cache(maxsize=1)
def data_of(dataset: str, eval_split: str, held_out: int, features: str, places: Places) -> Any:
    """Returns the data that settings of these names ask for; the last one's is kept in memory."""
    from experiments import datasets

    return datasets.load(
        dataset,
        data_dir=places.data_dir,
        eval_split=eval_split,
        validation_examples=held_out,
        features=features,
        features_dir=places.features_dir,
    )


def load_data(settings: Settings, places: Places) -> Any:
    """Returns the data of a run; the last one's is kept in memory."""
    return data_of(
        settings.dataset,
        settings.eval_split,
        settings.validation_examples or 0,
        settings.features,
        places,
    )


def forget_models() -> None:
    """Frees the memory of models that are not used any more."""
    import tensorflow as tf

    tf.keras.backend.clear_session()
    gc.collect()  # The last run's data is in graphs, which hold each other.


def line(job: grid.Job, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the line for the record of a run whose training left `result`."""
    return {
        **{"dataset": job.dataset, "row": job.row, "target_epsilon": job.target_epsilon},
        **{"seed": job.settings.seed, "settings": dataclasses.asdict(job.settings)},
        **{name: result[name] for name in _KEPT if name in result},
    }


def _run(job: grid.Job, places: Places) -> dict[str, Any]:
    """In a process of its own: trains, and returns the line for the record."""
    from experiments.methods import make_training
    from experiments.report import RunFolder

    forget_models()
    folder = RunFolder(places.runs / job.key)
    result = folder.result()
    if result is None:
        data = load_data(job.settings, places)
        # A table needs the last model only.
        training = make_training(job.settings, data, folder, progress=False, every_epoch=False)
        result = training.run()
    return line(job, result)


def tell(failures: Sequence[str]) -> None:
    """Prints what was not run; ends the program with an error if it was not for lack of time."""
    for failure in failures:
        print(failure, file=sys.stderr)
    if any(OUT_OF_TIME not in failure for failure in failures):
        sys.exit(1)
