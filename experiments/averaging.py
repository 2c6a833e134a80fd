"""Compares the averages of a private run's weights with its last weights, on held-out examples.

    python -m experiments.averaging
    python -m experiments.averaging --dataset=mnist --data_dir=... --epochs=8 \
        --expected_batch_size=1024 --seeds=3

Each run is one of `experiments.classify`, with `tfdp.ExponentialMovingAverage` of each
decay beside it, so that all rows of a schedule are of the same runs. The test set is not touched.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import statistics
import sys
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging

from experiments import cli, datasets
from experiments.output import markdown
from experiments.report import RunFolder
from experiments.schedules import SCHEDULES
from experiments.settings import RefusedError, Settings, resolve
from experiments.training import Training
from tfdp.keras2 import ExponentialMovingAverage


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_enum("dataset", "digits", datasets.DATASETS, "Data set.", flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    for name, what in (("epochs", "Epochs"), ("expected_batch_size", "Batch size")):
        text = f"{what}; that of the data set unless given."
        flags.DEFINE_integer(name, None, text, lower_bound=1, flag_values=values)
    for name, what in (("target_epsilon", "Epsilon"), ("learning_rate", "Learning rate")):
        text = f"{what}; that of the data set unless given."
        flags.DEFINE_float(name, None, text, lower_bound=1e-6, flag_values=values)
    text = "Learning rates over the steps."
    flags.DEFINE_multi_enum("schedules", ["constant"], SCHEDULES, text, flag_values=values)
    flags.DEFINE_list("decays", ["0.9", "0.97", "0.99"], "Of the average.", flag_values=values)
    flags.DEFINE_integer("seeds", 3, "Runs.", lower_bound=1, flag_values=values)


class _AveragedTraining(Training):
    """A run with averages of its weights beside it."""

    def __init__(self, *args: Any, decays: list[float], **kwargs: Any):
        self.averages = [ExponentialMovingAverage(decay, set_at_end=False) for decay in decays]
        super().__init__(*args, **kwargs)

    def _budget(self) -> list[tf.keras.callbacks.Callback]:
        return [*super()._budget(), *self.averages]


def accuracies(settings: Settings, data: datasets.Data, decays: list[float]) -> list[float]:
    """Trains once, and returns the accuracy of the last weights and of each average."""
    with tempfile.TemporaryDirectory() as folder:
        training = _AveragedTraining(
            settings, data, RunFolder(folder), decays=decays, progress=False, every_epoch=False
        )
        training.run()
    model = training.model
    last = [variable.numpy() for variable in model.trainable_variables]
    found = []
    for weights in [last, *(callback.average for callback in training.averages)]:
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.assign(value)
        logits = model.predict(data.eval_x, batch_size=1000, verbose=0)
        found.append(float(np.mean(logits.argmax(axis=-1) == data.eval_y)))
    return found


def table(values: flags.FlagValues) -> str:
    """Trains what the flags ask for, and returns a Markdown table.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    names = ("dataset", "epochs", "expected_batch_size", "target_epsilon", "learning_rate")
    given = {name: values[name].value for name in names}
    try:
        decays = [float(decay) for decay in values.decays]
        for decay in decays:
            ExponentialMovingAverage(decay)
    except ValueError as error:
        raise RefusedError(f"--decays: {error}") from error
    settings = resolve({**given, "eval_split": "validation"})
    data = datasets.load(
        settings.dataset,
        data_dir=values.data_dir,
        eval_split="validation",
        validation_examples=settings.validation_examples or 0,
    )
    rows = []
    for schedule in values.schedules:
        runs = [
            accuracies(
                resolve(
                    {**given, "eval_split": "validation", "seed": seed}
                    | {"learning_rate_schedule": schedule}
                ),
                data,
                decays,
            )
            for seed in range(values.seeds)
        ]
        for name, of_runs in zip(["last weights", *decays], zip(*runs, strict=True), strict=True):
            gains = [100 * (a - run[0]) for a, run in zip(of_runs, runs, strict=True)]
            rows.append(
                [
                    schedule,
                    f"{name}",
                    f"{100 * statistics.fmean(of_runs):.2f}",
                    ", ".join(f"{gain:+.2f}" for gain in gains),
                ]
            )
    return markdown(["learning rate", "decay", "held-out accuracy %", "gain of each run"], rows)


def main(argv: list[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    try:
        print(table(flags.FLAGS))
    except (RefusedError, datasets.DataError) as refusal:
        sys.exit(f"averaging: {refusal}")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
