"""Runs cases in a child process, which is started again when it dies."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time

TIME_LIMIT = 900.0  # Seconds for a case, on a machine that may be busy.
CASES_OF_A_CHILD = 150  # TensorFlow does not give back all memory.


class Runner:
    """A child process that runs one case after the other.

    Use as a context manager. Attributes: `deaths`, how often the child died.
    """

    def __init__(self, time_limit=TIME_LIMIT):
        self._limit, self._child, self._ran = time_limit, None, 0
        self._errors = None
        self.deaths = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop()

    def run(self, recipe, mutant=None):
        """The outcome of a case; `mutant` names what is taken out of the library meanwhile.

        A case in which the child dies is run again: TensorFlow's own memory was seen to be damaged
        in one of some thousand cases, and not again in 250 runs of the same case. What dies twice
        is a finding.
        """
        outcome = self._run(recipe, mutant)
        return self._run(recipe, mutant) if outcome.get("kind") == "crash" else outcome

    def _run(self, recipe, mutant):
        if self._child is None or self._ran >= CASES_OF_A_CHILD:
            self._stop()
            self._start()
        self._ran += 1
        request = json.dumps({"recipe": recipe, "mutant": mutant})
        self._child.stdin.write(request + "\n")
        self._child.stdin.flush()
        answer = self._answer()
        if answer is not None:
            return answer
        code = self._child.poll()
        self._errors.seek(0)
        tail = self._errors.read()[-600:]
        self._stop()
        self.deaths += 1
        kind = "hang" if code is None else "crash"
        return {"outcome": "finding", "kind": kind, "detail": f"exit code {code}: {tail}"}

    def _answer(self):
        """What the child wrote, or None if it died or ran out of time."""
        end, data = time.monotonic() + self._limit, b""
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._child.stdout], [], [], left)[0]:
                break
            part = os.read(self._child.stdout.fileno(), 65536)
            if not part:
                self._child.wait(timeout=10)
                return None
            data += part
            if data.endswith(b"\n"):
                return json.loads(data)
        return None

    def _start(self):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        self._ran = 0

    def _stop(self):
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child.stdin.close()
            self._child.stdout.close()
            self._errors.close()
            self._child = None
