"""Times single steps on Poisson batches of few sizes and of many, one after the other.

    python -m benchmarks.padding --model cifar_cnn --batch 2048 --steps 24

Prints milliseconds. Where a number of rows is new, TensorFlow may choose kernels for it first, as
it does for convolutions on a GPU.
"""

import argparse
import time
from typing import Any

import tensorflow as tf

import tfdp
from benchmarks import networks, report
from benchmarks.keras_steps import make_loss, make_optimizer
from benchmarks.problems import PROBLEMS, problem
from tfdp.accounting.sampling import BUCKETS, FULL, NONE

_EXAMPLES = 20  # Times the batch.


class _Clock(tf.keras.callbacks.Callback):
    """Keeps how long each step took, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops it."""
        self.seconds.append(time.perf_counter() - self._start)


def measure(name: str, batch: int, steps: int, padding: str) -> list[float]:
    """Returns the seconds of each step of a training, the first one with its tracing."""
    rows = problem(name).rows(_EXAMPLES * batch)
    batches = tfdp.data.poisson_batches(rows, expected_batch_size=batch, padding=padding)
    model = networks.build(problem(name))
    model.compile(make_optimizer("tfdp_one_pass", batch, batches.sampling), make_loss("tfdp"))
    clock = _Clock()
    model.fit(batches.repeat(), steps_per_epoch=steps, verbose=0, callbacks=[clock])
    return clock.seconds


def main(arguments: list[str] | None = None) -> None:
    """Measures every padding, and prints the milliseconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(PROBLEMS), default="cifar_cnn")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args(arguments)
    for padding in (BUCKETS, FULL, NONE):
        seconds = measure(options.model, options.batch, options.steps, padding)
        print(f"{padding:8}{' '.join(f'{1e3 * s:.0f}' for s in seconds)}", flush=True)
    print(report.machine())


if __name__ == "__main__":
    main()
