"""Lets the steps of Keras, plain and private, take turns in one process.

Processes that train the same network alone differ by up to a factor of two on some machines, and
stay so; a ratio of times within one process does not depend on that.
"""

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.settings import StepSettings

_MOST_STEPS = 200


def take_turns(
    names: Sequence[str],
    problem_name: str,
    settings: StepSettings,
    repeats: int,
    turn_seconds: float,
    timeout: float,
) -> dict[str, list[float]]:
    """Measures contestants in a new process.

    Args:
      names: Contestants whose framework is Keras.
      problem_name: Name of the network.
      settings: Settings of the steps.
      repeats: Turns of each.
      turn_seconds: About how long a turn takes.
      timeout: Longest wait for all of them, in seconds.

    Returns:
      Seconds a step, of each turn, by contestant.

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
        seconds = min(_seconds(contestant, 1) for _ in range(3))
        steps[name] = max(1, min(_MOST_STEPS, round(turn_seconds / seconds)))
    turns: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            contestant.run(1)  # It brings the caches back.
            turns[name].append(_seconds(contestant, steps[name]))
    sender.send(turns)


def _seconds(contestant: Any, steps: int) -> float:
    start = time.perf_counter()
    contestant.run(steps)
    return (time.perf_counter() - start) / steps
