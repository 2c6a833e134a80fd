"""Times everyday Keras programs: private `fit` beside plain `fit`, as users call them.

    python -m benchmarks.ports
    python -m benchmarks.ports --keras 3 --program gmlp ratings --repeats 9

The programs are those of `benchmarks.programs` and, of Keras 3, `benchmarks.programs_keras_3`,
which `tests/ports` trains, with Adam. Each has a process of its own. In it plain `fit` at batch
size B and private `fit` on Poisson batches of expected size B take turns; sampling and gathering
are part of the time. A first step is that of a fresh model, from the call of `fit`, tracing
included; private and plain ones take turns, too, and the first of all of them is not counted.
CPU time is that of all threads; on a machine that others use, it is the steadier measure.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tfdp
from benchmarks.keras_steps import make_optimizer, versions
from benchmarks.report import cpu_model
from benchmarks.timed import Timed
from benchmarks.together import Turn
from benchmarks.user import PLAIN, PRIVATE, first_rows, fits, milliseconds, ratio, take_turns
from experiments.front_ends import VERSIONS, front_end

STEPS_PER_EPOCH = 64
FIRST_STEPS = 3
_MODULES = {2: "benchmarks.programs", 3: "benchmarks.programs_keras_3"}
HEADER = (
    "| program | changed lines | engine | B | Keras `fit`, ms a step | tfdp `fit` on Poisson "
    "batches | ratio | ratio of CPU time | first step, s: Keras | tfdp | "
    "ratio | ratio of CPU time |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def programs(keras: int) -> dict[str, Timed]:
    """Returns the programs of a version of Keras, by name."""
    return importlib.import_module(_MODULES[keras]).PROGRAMS


def row(keras: int, name: str, repeats: int, turn_seconds: float) -> str:
    """Times a program.

    Args:
      keras: Version of Keras, 2 or 3.
      name: A key of `programs(keras)`.
      repeats: Turns of each training.
      turn_seconds: About how long a turn takes.

    Returns:
      A row of a Markdown table, under `HEADER`.
    """
    package = front_end(keras).keras
    program = programs(keras)[name]
    batch = program.batch
    _, _, data = program.build(batch * STEPS_PER_EPOCH, **program.sizes)
    batches = tfdp.data.poisson_batches(data, expected_batch_size=batch)
    repeated = batches.repeat()

    def fresh() -> tuple[Any, Any]:
        """Returns a plain and a private model."""
        plain, loss, _ = program.build(batch, **program.sizes)
        plain.compile(make_optimizer("keras_adam", batch, keras=keras), loss)
        private, loss, _ = program.build(batch, **program.sizes)
        private.compile(make_optimizer("tfdp_adam", batch, batches.sampling, keras), loss)
        return plain, private

    first: dict[str, list[Turn]] = {PLAIN: [], PRIVATE: []}
    for _ in range(FIRST_STEPS + 1):
        plain, private = fresh()
        some = first_rows(data, batch)
        first[PLAIN].append(_first_step(plain, package, **some, batch_size=batch))
        first[PRIVATE].append(_first_step(private, package, x=repeated, steps_per_epoch=1))
    trainings = fits(plain, private, data, repeated, batch, package)
    result = take_turns(trainings, repeats, turn_seconds, STEPS_PER_EPOCH)
    cells = [
        name,
        str(program.changed),
        engine(private.optimizer.clipping.report()),
        str(batch),
        milliseconds(result, PLAIN),
        milliseconds(result, PRIVATE),
        f"**{ratio(result, PRIVATE, 'wall').replace(' ', '** ', 1)}",
        ratio(result, PRIVATE, "cpu"),
        *_of_first_steps(first[PLAIN][1:], first[PRIVATE][1:]),
    ]
    return f"| {' | '.join(cells)} |"


def _first_step(model: Any, keras: Any, **options: Any) -> Turn:
    """Returns the time from the call of `fit` to the end of the first step, without its end."""
    ends: list[tuple[float, float]] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(_now())
    )
    wall, cpu = _now()
    model.fit(callbacks=[clock], verbose=0, **options)
    return Turn(ends[0][0] - wall, ends[0][1] - cpu)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _of_first_steps(plain: list[Turn], private: list[Turn]) -> list[str]:
    """Returns the medians of both on the clock, and of their ratios, turn by turn."""
    pairs = list(zip(plain, private, strict=True))
    medians = (
        [turn.wall for turn in plain],
        [turn.wall for turn in private],
        [b.wall / a.wall for a, b in pairs],
        [b.cpu / a.cpu for a, b in pairs],
    )
    return [f"{statistics.median(values):.2f}" for values in medians]


def engine(report: Any) -> str:
    """Says which engine clips, of a step's report."""
    slow = sum(not entry.fast for entry in report.entries)
    if report.fallback is not None:
        return "vectorized"
    return f"{slow} of {len(report.entries)} variables vectorized" if slow else "one pass"


def machine(keras: int) -> str:
    """Returns the machine and the versions, as a Markdown list."""
    of_packages = ", ".join(f"{name} {number}" for name, number in versions(keras).items())
    return f"- Machine: {cpu_model()}, {os.cpu_count()} cores\n- {of_packages}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keras", type=int, choices=VERSIONS, default=2, help="version of Keras")
    parser.add_argument("--program", nargs="+", help="names; all by default")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each training")
    parser.add_argument(
        "--turn_seconds", type=float, default=1.0, help="about how long a turn takes"
    )
    options = parser.parse_args(arguments)
    known = programs(options.keras)
    names = options.program or [*known]
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--program must be of {', '.join(known)}. Received: {unknown}.")
    print(f"{machine(options.keras)}\n\n{HEADER}", flush=True)
    for name in names:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            values = (options.keras, name, options.repeats, options.turn_seconds)
            print(pool.apply(row, values), flush=True)


if __name__ == "__main__":
    main()
