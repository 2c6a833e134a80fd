"""Runs cases in a child process, which is replaced when it ends or hangs."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.bad_inputs.cases import OTHER, Case

ROOT = Path(__file__).absolute().parents[2]
# After the alarm of the child, which a call of C code may not hear.
_GRACE = 20.0
# A child keeps what its calls leave in TensorFlow.
_CASES_OF_A_CHILD = 10_000
_START = 120.0
_PROGRAM = "from tests.bad_inputs import child; child.main()"


class Runner:
    """Runs cases.

    Args:
      limit: Seconds that a call may take.
      program: Source of the child.
      keras: Version of the Keras that `tf.keras` is in the child.

    Attributes:
      folder: Folder in which the child works, and which goes with it.
      seconds: Seconds of CPU, of the cases alone.
    """

    def __init__(self, limit: float = 20.0, program: str = _PROGRAM, keras: int = 3):
        self._limit, self._program, self._keras = limit, program, keras
        self._child = None
        self._left = 0
        self.seconds, self.folder = 0.0, ""

    def known(
        self, parts: Collection[str] = ("",), without: Collection[str] = ()
    ) -> dict[str, Any]:
        """Returns the arguments of calls, the names of the values, and what has no call.

        Args:
          parts: Parts of the names of calls.
          without: Parts of the names of calls that are left out.
        """
        return self._answer({"parts": list(parts), "without": list(without)})

    def run(self, case: Case) -> tuple[str, str]:
        """Returns the outcome of a case, and the error it is of."""
        kind, detail, seconds = self._answer([case.call, case.argument, case.value])
        self.seconds += seconds
        return kind, detail

    def _answer(self, question: Any) -> Any:
        if self._left == 0:
            self.close()
            self._start()
        self._left -= 1
        patience = self._limit + _GRACE + (_START if self._is_new else 0)
        self._is_new = False
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        ready, _, _ = select.select([self._child.stdout], [], [], patience)
        line = self._child.stdout.readline() if ready else None
        if line:
            return json.loads(line)
        return self._ended() if ready else self._hung()

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.stdin.close()
            try:
                self._child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._child.stdout.close()
            self._child = None
            self._temporary.cleanup()

    def _ended(self) -> tuple[str, str, float]:
        status = self._child.wait()
        self._left = 0
        return OTHER, f"the process ended with status {status}", 0.0

    def _hung(self) -> tuple[str, str, float]:
        self._child.kill()
        self._left = 0
        return OTHER, "hang, that no signal ends", self._limit

    def _start(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(
            prefix="bad_inputs_", ignore_cleanup_errors=True
        )
        self.folder = folder = self._temporary.name
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "TF_USE_LEGACY_KERAS": str(int(self._keras == 2)),
            "TMPDIR": folder,
        }
        self._child = subprocess.Popen(
            [sys.executable, "-c", self._program, str(self._limit)],
            cwd=folder,  # Some values are names of new files.
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._left, self._is_new = _CASES_OF_A_CHILD, True


def run_all(
    runner, cases, results, minutes=None, report=lambda case, kind, detail: None
) -> dict[Case, tuple[str, str]]:
    """Runs cases until the time is over, and writes each outcome to a file.

    Args:
      runner: The runner.
      cases: The cases.
      results: File of JSON lines. Cases that it has are not run again.
      minutes: Time for all, or None.
      report: Is called with each case and its outcome.

    Returns:
      The outcomes, by case: `(kind, detail)`.
    """
    found = read(results)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with open(results, "a") as file:
        for case in cases:
            if case in found:
                continue
            if end is not None and time.monotonic() > end:
                break
            found[case] = runner.run(case)
            file.write(json.dumps([case.call, case.argument, case.value, *found[case]]) + "\n")
            file.flush()
            report(case, *found[case])
    return found


def read(results):
    """Returns the outcomes that a file has, by case."""
    if not os.path.exists(results):
        return {}
    lines = Path(results).read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("]")]
    return {Case(*row[:3]): (row[3], row[4]) for row in rows}
