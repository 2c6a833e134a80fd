"""Times training on several workers of one thread each, beside plain Keras on as many.

    python -m benchmarks.distributed --workers 1 2 --rows 2048

Weak scaling: each worker has so many rows, whatever the number of workers; its efficiency is the
time of a step on one worker over that on several. Strong scaling: the rows are shared among them.
Workers are processes of this machine, which add their sums up over the loopback interface: with
more workers than cores, they wait for each other.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import tensorflow as tf

import tfdp
from benchmarks import networks
from benchmarks.keras_steps import make_loss, make_optimizer
from benchmarks.problems import PROBLEMS
from experiments import workers

CONTESTANTS = {"plain Keras": "keras_sgd", "tfdp.DPSGD": "tfdp_one_pass"}
_EXAMPLES = 16_384


def work(model_name: str, contestant: str, rows: int, seconds: float, repeats: int) -> list[float]:
    """Is one worker: trains on `rows` rows of its own a step.

    Returns:
      Seconds a step, of each turn.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    count, problem = strategy.num_replicas_in_sync, PROBLEMS[model_name]
    x, y = problem.rows(_EXAMPLES)
    batches = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, _: (x, y),
        dataset_size=count * _EXAMPLES,
        expected_batch_size=count * rows,
    )
    optimizer = make_optimizer(contestant, count * rows, batches.sampling)
    if contestant.startswith("keras"):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows, drop_remainder=True).repeat()
        batches = strategy.distribute_datasets_from_function(lambda _: data.prefetch(2))
    with strategy.scope():
        model = networks.build(problem)
        model.compile(optimizer, make_loss("keras"))

    def turn(steps: int) -> float:
        begin = time.perf_counter()
        model.fit(batches, steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - begin) / steps

    turn(2)
    # All workers must take as many steps as the others: so many for what a worker has to do.
    steps = max(2, round(seconds / (rows * 2e-5)))
    return [turn(steps) for _ in range(repeats)]


def measure(arguments: argparse.Namespace, contestant: str, count: int, rows: int) -> float:
    """Returns the median seconds of a step on `count` workers of `rows` rows each."""
    command = [sys.executable, "-m", "benchmarks.distributed", f"--model={arguments.model}"]
    command += [f"--turn_seconds={arguments.turn_seconds}", f"--repeats={arguments.repeats}"]
    command += [f"--contestant={contestant}", f"--rows={rows}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    pipes = {"stdout": subprocess.PIPE, "text": True}
    running = workers.start([command] * count, [pipes, *[quiet] * (count - 1)])
    try:
        output, _ = running[0].communicate()
    finally:
        for worker in running:
            worker.kill()
    return statistics.median(json.loads(output.splitlines()[-1]))


def table(arguments: argparse.Namespace) -> str:
    """Measures, and returns a Markdown table."""
    lines = ["| scaling | workers | rows of each |"]
    lines[0] += "".join(f" {name} ms | efficiency |" for name in CONTESTANTS) + " ratio |"
    lines.append("|---|---|---|" + "---|" * (2 * len(CONTESTANTS) + 1))
    (rows,) = arguments.rows
    alone: dict[str, float] = {}
    for scaling in ("weak", "strong"):
        for count in arguments.workers:
            if scaling == "strong" and count == 1:
                continue
            each = rows if scaling == "weak" else rows // count
            cells, times = [], []
            for contestant in CONTESTANTS.values():
                seconds = measure(arguments, contestant, count, each)
                first = alone.setdefault(contestant, seconds)
                efficiency = first / seconds / (1 if scaling == "weak" else count)
                times.append(seconds)
                cells += [f"{1e3 * seconds:.1f}", f"{efficiency:.2f}"]
            ratio = f"{times[1] / times[0]:.2f}"
            lines.append(f"| {scaling} | {count} | {each:,} | {' | '.join([*cells, ratio])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints, or is a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*PROBLEMS], default="mnist_cnn")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs=1, default=[2048], help="Of one worker.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn_seconds", type=float, default=1.0, help="About.")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if workers.index() is None:
        print(table(arguments))
        return
    turns = work(
        arguments.model,
        arguments.contestant,
        arguments.rows[0],
        arguments.turn_seconds,
        arguments.repeats,
    )
    print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main()
