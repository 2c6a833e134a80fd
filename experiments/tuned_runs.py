"""Runs that are kept in a record, and the best learning rate for each setting."""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging

from experiments import records
from experiments.settings import RefusedError

TUNING, TEST = "validation", "test"
_EVALUATED = 1000  # Examples that are evaluated at a time.


def accuracy_of(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    """Returns the accuracy of a classifier in percent."""
    right = 0
    for start in range(0, len(y), _EVALUATED):
        part = slice(start, start + _EVALUATED)
        logits = model(tf.constant(x[part]), training=False).numpy()
        right += int(np.sum(logits.argmax(axis=-1) == y[part]))
    return 100 * right / len(y)


@dataclasses.dataclass(frozen=True)
class Run:
    """Base of what decides a run."""

    epochs: int
    expected_batch_size: int
    validation_examples: int
    split: str
    learning_rate: float
    seed: int

    def check_size(self, size: int) -> None:
        """Checks that a batch fits a training set of this size.

        Raises:
          RefusedError: It does not.
        """
        if self.expected_batch_size > size:
            raise RefusedError(
                f"--expected_batch_size must be at most {size}. Received: "
                f"{self.expected_batch_size}."
            )


class Runs:
    """Runs that ended, in memory and in the record.

    Args:
      path: File of the record.
      kind: Subclass of `Run`, with all that decides a run.
      train: Trains once; returns the accuracy in percent, and the epsilon that was spent.
    """

    def __init__(self, path: str | Path, kind: Any, train: Callable[[Any], tuple[float, float]]):
        self._path, self._train = Path(path), train
        self._ended = {kind(**line["run"]): line["accuracy"] for line in records.read(self._path)}

    def accuracy(self, run: Any) -> float:
        """Returns the accuracy of a run, which is done now if it is not in the record."""
        if run not in self._ended:
            accuracy, spent = self._train(run)
            tf.keras.backend.clear_session()
            gc.collect()
            line = {"run": dataclasses.asdict(run), "accuracy": accuracy, "epsilon": spent}
            records.append(self._path, line)
            self._ended[run] = accuracy
            logging.info("%s: %.2f", run, accuracy)
        return self._ended[run]

    def tuned(self, begun: Callable[..., Any], rates: Sequence[float], seeds: int) -> "Tuned":
        """Returns the best learning rate on held-out examples, and accuracies on the test set.

        Args:
          begun: Makes a run of a split, a learning rate and a seed.
          rates: Learning rates to try, one run each.
          seeds: Number of runs with the best one.
        """
        found = {
            rate: self.accuracy(begun(split=TUNING, learning_rate=rate, seed=0)) for rate in rates
        }
        best = max(found, key=lambda rate: found[rate])
        accuracies = [
            self.accuracy(begun(split=TEST, learning_rate=best, seed=seed)) for seed in range(seeds)
        ]
        return Tuned(best, accuracies)


def define_flags(values: flags.FlagValues, record: str, seeds: int) -> None:
    """Defines the flags that all such experiments have.

    Args:
      values: Where they are defined.
      record: Default of the file of the runs.
      seeds: Default number of runs on the test set.
    """
    flags.DEFINE_float("delta", 1e-5, "Delta.", 1e-12, 5e-4, flag_values=values)
    for name, default, text in (
        ("epochs", 15, "Epochs."),
        ("expected_batch_size", 256, "Expected number of examples in a batch."),
        ("seeds", seeds, "Runs on the test set of each setting."),
        ("validation_examples", 287, "Training examples that are held out to choose rates."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)
    flags.DEFINE_string("record", record, "File of the runs.", flag_values=values)
    flags.DEFINE_string("plot", None, "Picture to write.", flag_values=values)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A setting with its best learning rate.

    Attributes:
      learning_rate: The best on held-out examples.
      accuracies: Accuracies on the test set in percent, one for each seed.
    """

    learning_rate: float
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def text(self) -> str:
        """Mean and standard deviation, as tables show them."""
        spread = statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0
        return f"{self.mean:.1f} ({spread:.1f})"
