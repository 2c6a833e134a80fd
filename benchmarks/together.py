"""Lets the steps of Keras, plain and private, take turns in one process.

A noisy machine disturbs all of them alike.
"""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.settings import StepSettings

_MOST_STEPS, _MORE_STEPS = 200, 9


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


def timed_fit(fit: Callable[[Any], Any], keras: Any) -> Turn:
    """Returns the time of each step of `fit` but the first, without its start and its end.

    The end of `fit` drops an iterator. If `tf.data` tuned that, this can take as long again as the
    whole (`tfdp.base.tf.autotuning`), whatever a step costs.

    Args:
      fit: Function that is given a callback, and calls `fit` with it, for at least two steps.
      keras: The package of the model, `tf.keras` or `keras`.
    """

    class Clock(keras.callbacks.Callback):
        _supports_tf_logs = True  # So that Keras 2 converts nothing after each step.

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[tuple[float, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            self.ends.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    fit(clock)
    (wall, cpu), (last_wall, last_cpu) = clock.ends[0], clock.ends[-1]
    steps = len(clock.ends) - 1
    return Turn((last_wall - wall) / steps, (last_cpu - cpu) / steps)


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
        if seconds < turn_seconds:  # Without the start of `fit`, which may be most of it.
            more = _MORE_STEPS * timed(contestant.run, _MORE_STEPS).wall
            seconds = max((more - seconds) / (_MORE_STEPS - 1), seconds / _MOST_STEPS)
        steps[name] = max(1, min(_MOST_STEPS, round(turn_seconds / seconds)))
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            contestant.run(1)  # It brings the caches back.
            turns[name].append(timed(contestant.run, steps[name]))
    sender.send(turns)
