"""Times everyday Keras programs: private `fit` beside plain `fit`, as users call them.

    python -m benchmarks.ports
    python -m benchmarks.ports --program convnet u_net --repeats 9

The programs are those of `benchmarks.programs`, which `tests/ports` trains, with Adam. Each has a
process of its own, in which plain `fit` at batch size B and private `fit` on Poisson batches of
expected size B take turns; sampling and gathering are part of the time.
CPU time is that of all threads; on a machine that others use, it is the steadier measure.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import multiprocessing
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfdp
from benchmarks.fine_tuning import machine
from benchmarks.keras_steps import make_optimizer
from benchmarks.programs import PROGRAMS
from benchmarks.user import PLAIN, PRIVATE, fits, milliseconds, ratio, take_turns

STEPS_PER_EPOCH = 64
HEADER = (
    "| program | engine | B | Keras `fit`, ms a step | tfdp `fit` on Poisson batches | ratio | "
    "ratio of CPU time |\n|---|---|---|---|---|---|---|"
)


def row(name: str, repeats: int, turn_seconds: float) -> str:
    """Times a program.

    Args:
      name: A key of `PROGRAMS`.
      repeats: Turns of each training.
      turn_seconds: About how long a turn takes.

    Returns:
      A row of a Markdown table, under `HEADER`.
    """
    program = PROGRAMS[name]
    batch, examples = program.batch, program.batch * STEPS_PER_EPOCH
    plain, loss, (x, y) = program.build(examples, **program.sizes)
    plain.compile(make_optimizer("keras_adam", batch), loss)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=batch)
    optimizer = make_optimizer("tfdp_adam", batch, batches.sampling)
    private, loss, _ = program.build(batch, **program.sizes)
    private.compile(optimizer, loss)
    trainings = fits(plain, private, (x, y), batches.repeat(), batch, tf.keras)
    result = take_turns(trainings, repeats, turn_seconds, STEPS_PER_EPOCH)
    cells = [
        name,
        engine(optimizer.clipping.report()),
        str(batch),
        milliseconds(result, PLAIN),
        milliseconds(result, PRIVATE),
        ratio(result, PRIVATE, "wall"),
        f"**{ratio(result, PRIVATE, 'cpu').replace(' ', '** ', 1)}",
    ]
    return f"| {' | '.join(cells)} |"


def engine(report: Any) -> str:
    """Says which engine clips, of a step's report."""
    slow = sum(not entry.fast for entry in report.entries)
    if report.fallback is not None:
        return "vectorised"
    return f"{slow} of {len(report.entries)} variables vectorised" if slow else "one pass"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--repeats", type=int, default=7, help="turns of each training")
    parser.add_argument(
        "--turn_seconds", type=float, default=1.0, help="about how long a turn takes"
    )
    options = parser.parse_args(arguments)
    print(f"{machine()}\n\n{HEADER}", flush=True)
    for name in options.program:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(row, (name, options.repeats, options.turn_seconds)), flush=True)


if __name__ == "__main__":
    main()
