"""Trains a classifier with differential privacy in several processes, each with a part of the data.

    python -m experiments.distributed --workers=2 --dataset=mnist --data_dir=...

Starts the workers on this machine, each on one thread; every one of them opens its own part of the
training set, and draws its own Poisson samples of it. Prints accuracy and epsilon, which are those
of one process (`--workers=1`) up to the random numbers. A worker that dies stops the others;
`--restarts=1` starts all of them again, and they resume from the last epoch that was saved to
--output_dir. `--kill_at_step=K` kills the last worker there, the first time, to show it.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import tensorflow as tf
from absl import flags, logging

import tfdp
from experiments import cli, datasets, workers
from experiments.settings import Settings, make_network, resolve

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of processes.", lower_bound=1)
_DATASET = flags.DEFINE_enum("dataset", "digits", datasets.DATASETS, "What to learn.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_EPOCHS = flags.DEFINE_integer("epochs", None, "Epochs; by default as `classify`.", lower_bound=1)
_EPSILON = flags.DEFINE_float("target_epsilon", None, "Epsilon; by default as `classify`.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder that keeps what was learned so far.")
_RESTARTS = flags.DEFINE_integer("restarts", 0, "How often to start dead workers again.")
_KILL_AT_STEP = flags.DEFINE_integer("kill_at_step", None, "Kills the last worker there, once.")
_THREADS = flags.DEFINE_integer("threads", 1, "Threads of each worker.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    """Starts workers, or is one."""
    del argv
    task = workers.index()
    if task is not None:
        with contextlib.suppress(KeyboardInterrupt):
            work(task)
        return
    for attempt in range(_RESTARTS.value + 1):
        if supervise(kill=attempt == 0):
            return
        if attempt < _RESTARTS.value:
            print("A worker died. All are started again.", flush=True)
    sys.exit("distributed: a worker died. To resume, run the same command again with --output_dir.")


def supervise(kill: bool) -> bool:
    """Runs all workers to their end; returns whether all ended well."""
    command = [sys.executable, "-m", "experiments.distributed", *sys.argv[1:]]
    if not kill:
        command.append("--kill_at_step=0")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    count = _WORKERS.value
    running = workers.start([command] * count, [{}, *[quiet] * (count - 1)])
    first = None
    try:
        while any(worker.poll() is None for worker in running):
            time.sleep(0.1)
            if first is None and any(worker.poll() for worker in running):
                first = time.monotonic()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for worker in running:
            worker.kill()
    if first is not None:
        seconds = time.monotonic() - first
        print(f"The last worker ended {seconds:.0f} s after the first that died.", flush=True)
    return first is None


def work(task: int) -> None:
    """Is one worker."""
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Before TensorFlow does anything else.
    given = {"dataset": _DATASET.value, "epochs": _EPOCHS.value, "target_epsilon": _EPSILON.value}
    settings = resolve(given)
    data = datasets.load(settings.dataset, data_dir=_DATA_DIR.value)
    batches = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (data.train_x[index::count], data.train_y[index::count]),
        dataset_size=data.size,
        expected_batch_size=settings.expected_batch_size,
    )
    model = compiled(strategy, settings, batches)
    callbacks = [
        tfdp.PrivacyBudget(settings.target_epsilon, settings.delta),
        _Killer(task == _WORKERS.value - 1),
    ]
    if _OUTPUT_DIR.value:
        backup = os.path.join(_OUTPUT_DIR.value, "backup")
        callbacks.append(tf.keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False))
    started = time.monotonic()
    model.fit(
        batches,
        epochs=settings.epochs,
        steps_per_epoch=batches.steps_per_epoch,
        verbose=2 if task == 0 else 0,
        callbacks=callbacks,
    )
    seconds = time.monotonic() - started
    predicted = model.predict(data.eval_x, batch_size=1000, verbose=0).argmax(axis=-1)
    epsilon = model.optimizer.ledger.epsilon(settings.delta).epsilon
    print(
        f"{settings.dataset}, {_WORKERS.value} workers: {(predicted == data.eval_y).mean():.2%} of "
        f"{len(predicted)} test examples are classified correctly; epsilon = {epsilon:.4f} at "
        f"delta = {settings.delta:g}, {model.optimizer.ledger.steps} steps, {seconds:.0f} s.",
        flush=True,
    )


def compiled(strategy: tf.distribute.Strategy, settings: Settings, batches) -> tf.keras.Model:
    """Returns the network of the data set, with noise for its budget."""
    noise_multiplier = tfdp.calibrate_noise_multiplier(
        target_epsilon=settings.target_epsilon,
        delta=settings.delta,
        dataset_size=batches.sampling.dataset_size,
        expected_batch_size=settings.expected_batch_size,
        steps=settings.epochs * batches.steps_per_epoch,
    )
    with strategy.scope():
        model = make_network(settings)
        optimizer = tfdp.DPSGD(
            l2_norm_clip=settings.l2_norm_clip,
            noise_multiplier=noise_multiplier,
            sampling=batches.sampling,
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
        )
        model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class _Killer(tf.keras.callbacks.Callback):
    """Kills this process at a step."""

    def __init__(self, here: bool):
        super().__init__()
        self._at = _KILL_AT_STEP.value if here else None
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Kills it, if this is the step."""
        self._steps += 1
        if self._at == self._steps:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
