"""Times training on several workers, each on one core, beside plain Keras on as many.

    python -m benchmarks.distributed --workers 1 2 --rows 2048

Weak scaling: each worker has so many rows, whatever the number of workers; its efficiency is the
time of a step on one worker over that on several. Strong scaling: the rows are shared among them.
Workers are processes of this machine, which add their sums up over the loopback interface. They
share its memory and caches, so the weak efficiency is also given against as many trainings of one
worker each, at the same time ("apart"): what is lost to working together alone.

    python -m benchmarks.distributed --predict --parameters 26010 --step_ms 100

Predicts steps of many replicas by a ring all-reduce, from what was measured on one.

    python -m benchmarks.distributed --draws

Times draws of a replica's batch from parts of many sizes.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import functools
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
from benchmarks.together import timed_fit
from experiments import workers
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base.random.key_streams import KeyStream
from tfdp.data.source import draw_indices

CONTESTANTS = {"plain Keras": "keras_sgd", "tfdp.DPSGD": "tfdp_one_pass"}
_EXAMPLES = 16_384


def work(
    model_name: str, contestant: str, rows: int, seconds: float, repeats: int, core: int
) -> list[float]:
    """Is one worker, of one thread on a core of its own: trains on `rows` rows of its own a step.

    Returns:
      Seconds a step, of each turn.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
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
        options = {"steps_per_epoch": steps, "verbose": 0}
        return timed_fit(
            lambda clock: model.fit(batches, callbacks=[clock], **options), tf.keras
        ).wall

    turn(2)
    # All workers must take as many steps as the others: so many for what a worker has to do.
    steps = max(2, round(seconds / (rows * 2e-5)))
    return [turn(steps) for _ in range(repeats)]


def measure(
    arguments: argparse.Namespace, contestant: str, count: int, rows: int, apart: bool = False
) -> float:
    """Returns the median seconds of a step on `count` workers of `rows` rows each.

    Args:
      arguments: The command line.
      contestant: One of `CONTESTANTS`.
      count: Number of workers.
      rows: Rows of each.
      apart: Whether each is a cluster of its own.
    """
    command = [sys.executable, "-m", "benchmarks.distributed", f"--model={arguments.model}"]
    command += [f"--turn_seconds={arguments.turn_seconds}", f"--repeats={arguments.repeats}"]
    command += [f"--contestant={contestant}", f"--rows={rows}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    pipes = {"stdout": subprocess.PIPE, "text": True}
    commands = [[*command, f"--core={core}"] for core in range(count)]
    options = [pipes, *[quiet] * (count - 1)]
    clusters = [slice(i, i + 1) for i in range(count)] if apart else [slice(count)]
    running = [worker for one in clusters for worker in workers.start(commands[one], options[one])]
    try:
        output, _ = running[0].communicate()
    finally:
        for worker in running:
            worker.kill()
    return statistics.median(json.loads(output.splitlines()[-1]))


def table(arguments: argparse.Namespace) -> str:
    """Measures, and returns a Markdown table."""
    lines = ["| scaling | workers | rows of each |"]
    lines[0] += "".join(f" {name} ms | efficiency | apart |" for name in CONTESTANTS) + " ratio |"
    lines.append("|---|---|---|" + "---|" * (3 * len(CONTESTANTS) + 1))
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
                against = "" if scaling == "strong" else "1.00"
                if scaling == "weak" and count > 1:
                    apart = measure(arguments, contestant, count, each, apart=True)
                    against = f"{apart / seconds:.2f}"
                cells += [f"{1e3 * seconds:.1f}", f"{efficiency:.2f}", against]
            ratio = f"{times[1] / times[0]:.2f}"
            lines.append(f"| {scaling} | {count} | {each:,} | {' | '.join([*cells, ratio])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Time of a step of R replicas, each with as many rows as one that was measured.

    Attributes:
      step_ms: A step of one replica, noise included.
      parameters: Number of parameters.
      noise_ns: Noise of one parameter, on a replica's processors.
      gigabits: Bandwidth between two replicas, each way, in Gbit/s.
      latency_us: Latency of one message.
    """

    step_ms: float
    parameters: int
    noise_ns: float
    gigabits: float
    latency_us: float

    def parts(self, replicas: int) -> dict[str, float]:
        """Returns the milliseconds of a step's parts."""
        noise = 1e-6 * self.noise_ns * self.parameters
        # A ring: each replica sends all slices but one, twice.
        sent = 2 * (replicas - 1) / replicas * 4 * self.parameters
        return {
            "clipped sum": self.step_ms - noise,
            "noise": noise / replicas,
            "bytes": 1e3 * sent * 8 / (self.gigabits * 1e9),
            "latency": 1e-3 * self.latency_us * 2 * (replicas - 1),
        }

    def table(self, counts: Sequence[int]) -> str:
        """Returns a Markdown table, a row for each number of replicas."""
        names = list(self.parts(1))
        lines = [f"| replicas | {' ms | '.join(names)} ms | step ms | efficiency |"]
        lines.append("|---|" + "---|" * (len(names) + 2))
        for count in counts:
            parts = self.parts(count)
            total = sum(parts.values())
            cells = [f"{parts[name]:.2f}" for name in names]
            efficiency = self.step_ms / total
            lines.append(f"| {count:,} | {' | '.join(cells)} | {total:.1f} | {efficiency:.2f} |")
        return "\n".join(lines)


def draws(rows: int, repeats: int) -> str:
    """Times what a replica does to choose its examples, and returns a Markdown table.

    Args:
      rows: Expected rows of a replica.
      repeats: Turns of 100 draws each.
    """
    lines = ["| examples | replicas | rows of each, expected | at most | CPU ms a draw |"]
    lines.append("|---|---|---|---|---|")
    keys = KeyStream()
    for size, parts in ((60_000, 1), (10**6, 1), (10**9, 1), (10**9, 1000)):
        sampling = PoissonSampling(size, parts * rows, parts=parts, largest_part=size // parts)
        draw = tf.function(functools.partial(_draw, keys, sampling, size // parts))
        draw()
        times = []
        for _ in range(repeats):
            begin = time.process_time()
            for _ in range(100):
                draw()
            times.append(10 * (time.process_time() - begin))
        cells = f"{size:,}", f"{parts:,}", f"{rows:,}", f"{sampling.padded_batch_size:,}"
        lines.append(f"| {' | '.join(cells)} | {statistics.median(times):.2f} |")
    return "\n".join(lines)


def _draw(keys: KeyStream, sampling: PoissonSampling, size: int) -> tf.Tensor:
    return draw_indices(keys.next_key(), sampling, size)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints, or is a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*PROBLEMS], default="mnist_cnn")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs=1, default=[2048], help="Of one worker.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn_seconds", type=float, default=1.0, help="About.")
    parser.add_argument("--predict", action="store_true", help="Predicts instead of measuring.")
    parser.add_argument("--draws", action="store_true", help="Times draws, in this process.")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8, 64, 1000])
    parser.add_argument("--step_ms", type=float, default=100.0, help="Measured, of one replica.")
    parser.add_argument("--parameters", type=int, default=26_010)
    parser.add_argument("--noise_ns", type=float, default=20.0, help="Of one parameter.")
    parser.add_argument("--gigabits", type=float, default=10.0, help="Between two replicas.")
    parser.add_argument("--latency_us", type=float, default=50.0, help="Of a message.")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.predict:
        fields = [field.name for field in dataclasses.fields(CostModel)]
        cost = CostModel(**{name: getattr(arguments, name) for name in fields})
        if cost.parts(1)["clipped sum"] < 0:
            parser.error("--step_ms must be at least the noise, --noise_ns times --parameters")
        print(cost.table(arguments.replicas))
        return
    if arguments.draws:
        print(draws(arguments.rows[0], arguments.repeats))
        return
    if workers.index() is None:
        print(table(arguments))
        return
    turns = work(
        arguments.model,
        arguments.contestant,
        arguments.rows[0],
        arguments.turn_seconds,
        arguments.repeats,
        arguments.core,
    )
    print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main()
