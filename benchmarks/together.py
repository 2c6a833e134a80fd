"""Lets the steps of Keras, plain and private, take turns in one process.

Processes that train the same network alone differ by up to a factor of two on some machines, and
stay so; a ratio of times within one process does not depend on that.
"""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.settings import StepSettings

_MOST_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Turn:
    """Seconds for each step: on the clock, and of all processors."""

    wall: float
    cpu: float


def timed(run: Callable[[int], Any], steps: int) -> Turn:
    """Runs so many steps, and returns the time of each."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(steps)
    return Turn((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def take_turns(
    names: Sequence[str],
    problem_name: str,
    settings: StepSettings,
    repeats: int,
    turn_seconds: float,
    timeout: float,
) -> dict[str, list[Turn]]:
    """Measures contestants in a new process.

    Args:
      names: Contestants whose framework is Keras.
      problem_name: Name of the network.
      settings: Settings of the steps.
      repeats: Turns of each.
      turn_seconds: About how long a turn takes.
      timeout: Longest wait for all of them, in seconds.

    Returns:
      The turns, by contestant.

    Raises:
      TimeoutError: It took too long.
      RuntimeError: The process died.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (list(names), problem_name, settings, repeats, turn_seconds, sender)
    process = context.Process(target=_measure, args=arguments)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the process died") from None
    finally:
        process.kill()
        process.join()


def _measure(
    names: Sequence[str],
    problem_name: str,
    settings: StepSettings,
    repeats: int,
    turn_seconds: float,
    sender: Any,
) -> None:
    from benchmarks.worker import make_steps

    contestants = {name: make_steps(name, problem_name, settings) for name in names}
    steps = {}
    for name, contestant in contestants.items():
        contestant.run(1)
        seconds = min(timed(contestant.run, 1).wall for _ in range(3))
        steps[name] = max(1, min(_MOST_STEPS, round(turn_seconds / seconds)))
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            contestant.run(1)  # It brings the caches back.
            turns[name].append(timed(contestant.run, steps[name]))
    sender.send(turns)
