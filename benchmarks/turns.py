"""Starts processes of contestants, and lets them take turns."""

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import together
from benchmarks.contestants import CONTESTANTS, MEMORY_FRACTION, Contestant
from benchmarks.problems import problem
from benchmarks.settings import StepSettings

ROOT = Path(__file__).absolute().parents[1]
SLOW_TURNS = 3


class NoResult(Exception):
    """A contestant cannot be measured; the message says why."""


@dataclasses.dataclass
class Measurement:
    """Measurements of one contestant.

    Attributes:
      contestant: Its name.
      problem: Name of the network.
      settings: Settings of the steps.
      seconds: Seconds per step, one number per turn.
      cpu: Seconds of all processors per step, one number per turn; of contestants of Keras.
      first: Seconds of the first step, with tracing and compilation.
      peak: Most memory of the process, in MiB.
      growth: Its peak from the first step on, less what it held before, in MiB.
      others: Part of the processors' time that processes outside of the benchmark took, during
        the turns.
      versions: Versions of what ran.
      reason: Why nothing was measured, or None.
    """

    contestant: str
    problem: str
    settings: StepSettings
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    first: float | None = None
    peak: float | None = None
    growth: float | None = None
    others: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str | None = None

    @property
    def median(self) -> float | None:
        """Median of the seconds per step."""
        return self.quartiles[1] if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Quartiles of the seconds per step, interpolated."""
        ordered = sorted(self.seconds)

        def at(fraction: float) -> float:
            position = fraction * (len(ordered) - 1)
            low = math.floor(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (position - low) * (ordered[high] - ordered[low])

        return at(0.25), at(0.5), at(0.75)


class Worker:
    """The process of one contestant.

    Args:
      measurement: The measurement to make, which gets the results.
      python: Python that has the framework.
      timeout: Longest wait for an answer, in seconds.
    """

    def __init__(self, measurement: Measurement, python: str, timeout: float):
        self.measurement = measurement
        self.steps = 1
        self._timeout = timeout
        arguments = {
            "contestant": measurement.contestant,
            "problem": measurement.problem,
            "settings": dataclasses.asdict(measurement.settings),
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # Lives as long as the process.
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", json.dumps(arguments)],
            cwd=ROOT,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": _path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def start(self, turn_seconds: float) -> None:
        """Sets up, takes the first step, and finds how many steps make a turn."""
        answer = self._answer()
        self.measurement.versions = answer["versions"]
        self.measurement.first = self._take({"steps": 1})
        if not CONTESTANTS[self.measurement.contestant].slow:
            second = min(self._take({"steps": 1}) for _ in range(2))
            self.steps = max(1, min(200, round(turn_seconds / second)))

    def turn(self) -> None:
        """Takes one turn; a step before it brings the caches back."""
        order = {"steps": self.steps}
        if not CONTESTANTS[self.measurement.contestant].slow:
            order["warm_up"] = 1
        self.measurement.seconds.append(self._take(order) / self.steps)

    def _take(self, order: dict[str, int]) -> float:
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None
        answer = self._answer()
        self.measurement.peak, self.measurement.growth = answer["peak"], answer["growth"]
        return answer["seconds"]

    def _answer(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout):
                raise NoResult(f"stopped: no answer within {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "reason" in answer:
            raise NoResult(answer["reason"])
        return answer

    def _died(self) -> NoResult:
        status = self._process.wait()
        if status < 0:
            return NoResult(f"failed: the process was ended by {signal.Signals(-status).name}")
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        said = lines[-1][:200] if lines else "no message"
        return NoResult(f"failed: {said}")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@dataclasses.dataclass(frozen=True)
class Rounds:
    """StepSettings of how often, and by which workers, contestants are measured.

    Attributes:
      repeats: Turns of each contestant; slow ones take at most three.
      turn_seconds: About how long a turn takes.
      peer_python: Python that has PyTorch, Opacus, JAX and JAX-Privacy.
      timeout: Longest wait for an answer, in seconds.
    """

    repeats: int = 15
    turn_seconds: float = 0.5
    peer_python: str = sys.executable
    timeout: float = 600.0

    def measure(self, measurements: Iterable[Measurement]) -> None:
        """Fills in the measurements.

        Contestants of other frameworks take turns, each in a process of its own; then those of
        Keras, which have one process together, after one turn alone for memory and the first step;
        then the slow ones.
        """
        keras, others, slow = [], [], []
        for measurement in measurements:
            contestant = CONTESTANTS[measurement.contestant]
            group = keras if contestant.framework == "keras" else others
            (slow if contestant.slow else group).append(measurement)
        self._take_turns(others, self.repeats)
        self._take_turns(keras, 1)
        self._take_turns_together([m for m in keras if m.reason is None])
        for measurement in slow:
            self._take_turns([measurement], min(self.repeats, SLOW_TURNS))

    def _take_turns_together(self, measurements: Sequence[Measurement]) -> None:
        """Replaces the times of Keras's contestants by those of turns in one process."""
        groups: dict[tuple, list[Measurement]] = {}
        for measurement in measurements:
            groups.setdefault((measurement.problem, measurement.settings), []).append(measurement)
        for (problem_name, settings), group in groups.items():
            names = [measurement.contestant for measurement in group]
            limits = (self.repeats, self.turn_seconds, self.timeout * len(names))
            try:
                turns = together.take_turns(names, problem_name, settings, *limits)
            except (RuntimeError, TimeoutError) as error:
                for measurement in group:
                    measurement.seconds, measurement.reason = [], f"failed: {error}"
                continue
            for measurement in group:
                own = turns[measurement.contestant]
                measurement.seconds = [turn.wall for turn in own]
                measurement.cpu = [turn.cpu for turn in own]

    def _take_turns(self, measurements: Sequence[Measurement], repeats: int) -> None:
        workers: list[Worker] = []
        try:
            for measurement in measurements:
                self._start(measurement, workers)
            clock = _OthersClock([worker.pid for worker in workers])
            for _ in range(repeats):
                for worker in list(workers):
                    self._try(worker, workers, worker.turn)
            others = clock.fraction([worker.pid for worker in workers])
            for worker in workers:
                worker.measurement.others = others
        finally:
            for worker in workers:
                worker.close()

    def _start(self, measurement: Measurement, workers: list[Worker]) -> None:
        if measurement.reason is not None:
            return
        contestant = CONTESTANTS[measurement.contestant]
        needed = contestant.expected_bytes(problem(measurement.problem), measurement.settings.batch)
        if needed > MEMORY_FRACTION * _available_bytes():
            gib = needed / 2**30
            measurement.reason = f"not run: would need about {gib:.0f} GiB of memory"
            return
        python = sys.executable if contestant.framework == "keras" else self.peer_python
        worker = Worker(measurement, python, self.timeout)
        workers.append(worker)
        self._try(worker, workers, lambda: worker.start(self.turn_seconds))

    @staticmethod
    def _try(worker: Worker, workers: list[Worker], action: Any) -> None:
        try:
            action()
        except NoResult as error:
            worker.measurement.reason = str(error)
            worker.measurement.seconds.clear()
            worker.close()
            workers.remove(worker)


class _OthersClock:
    """Load that processes outside of the benchmark put on the processors.

    Args:
      pids: The benchmark's own processes.
    """

    def __init__(self, pids: Sequence[int]):
        self._start = time.monotonic()
        self._busy = _busy_seconds()
        self._own = {pid: _cpu_seconds(pid) for pid in pids}

    def fraction(self, pids: Sequence[int]) -> float:
        """Part of all processors' time since the start; `pids` are those that still run."""
        own = sum(_cpu_seconds(pid) - self._own[pid] for pid in pids)
        elapsed = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, (_busy_seconds() - self._busy - own) / max(elapsed, 1e-9))


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, stolen = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def plan(names: Iterable[str], problem_name: str, settings: StepSettings) -> list[Measurement]:
    """Returns a measurement, to be filled in, of each contestant."""
    return [Measurement(name, problem_name, settings) for name in names]


def plain_of(contestant: Contestant, done: Iterable[Measurement]) -> Measurement | None:
    """Returns the measurement of the contestant's own framework without privacy."""
    return next((m for m in done if m.contestant == contestant.plain), None)
