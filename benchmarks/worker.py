"""A process that measures one contestant, on the orders of `benchmarks.turns`.

It reads one JSON object per line and answers each with one: see `benchmarks.turns.Worker`.
"""

import json
import os
import sys
import time
import traceback
from typing import Any

from benchmarks.contestants import CONTESTANTS
from benchmarks.problems import problem
from benchmarks.settings import StepSettings, Unsupported

MIB = 2**20


def make_steps(name: str, problem_name: str, settings: StepSettings) -> Any:
    """Returns the steps of a contestant; imports its framework and no other."""
    framework = CONTESTANTS[name].framework
    if framework == "keras":
        from benchmarks.keras_steps import KerasSteps as Steps
    elif framework == "torch":
        from benchmarks.torch_steps import TorchSteps as Steps
    else:
        from benchmarks.jax_steps import JaxSteps as Steps
    steps = Steps(name, problem(problem_name), settings)
    expected = problem(problem_name).parameters
    if steps.parameters != expected:
        raise AssertionError(f"{steps.parameters=:,} instead of {expected:,}: another network")
    return steps


def memory() -> tuple[float, float]:
    """Resident memory of this process now and at most so far, in MiB."""
    # Not `ru_maxrss`: it begins with that of the process that started this one.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    now, peak = (int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def forget_peak() -> None:
    """Makes the peak of `memory` begin anew, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # then the peak of the imports counts, which is mostly the lower one
        pass


def serve(arguments: dict[str, Any], orders: Any, answer: Any) -> None:
    """Sets up, says so, and takes steps until the orders end."""
    settings = StepSettings(**arguments["settings"])
    steps = make_steps(arguments["contestant"], arguments["problem"], settings)
    _, peak = memory()
    forget_peak()
    before, _ = memory()
    answer({"versions": steps.versions(), "parameters": steps.parameters})
    for line in orders:
        order = json.loads(line)
        if "warm_up" in order:
            steps.run(order["warm_up"])
        start = time.perf_counter()
        steps.run(order["steps"])
        seconds = time.perf_counter() - start
        highest = memory()[1]
        answer({"seconds": seconds, "peak": max(peak, highest), "growth": highest - before})


def describe(error: Exception) -> str:
    """Returns an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # Keras puts a traceback in front of the message.
    line = lines[-1] if lines[0].startswith("in user code") else lines[0]
    name = type(error).__name__
    return (line if line.startswith(name) else f"{name}: {line}")[:200]


def main() -> None:
    """Serves on standard input and output; what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    try:
        serve(json.loads(sys.argv[1]), sys.stdin, answer)
    except Unsupported as error:
        answer({"reason": f"not supported: {error}"})
    except ImportError as error:
        answer({"reason": f"not installed: {error}"})
    except Exception as error:
        traceback.print_exc()
        answer({"reason": f"failed: {describe(error)}"})


if __name__ == "__main__":
    main()
