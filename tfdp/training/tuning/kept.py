"""Runs of a private selection that are done, in a folder: how many, and the best model so far."""

import fcntl
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdp.base import validation

_STATE = "selection.json"
_FILES = (".index", ".data-00000-of-00001")  # Of a checkpoint.
FAILED = -math.inf  # The score of a run that failed.


class KeptRuns:
    """The runs of a selection, in a folder, so that another process can go on.

    A run is done once the state says so, which is written last and whole: a run that was
    interrupted is made anew, and nothing of it is used. Until the selection is finished, everything
    in the folder is secret.

    Args:
      folder: The folder.
      plan: What the selection is, as plain values. Another selection is refused.
      candidates: Number of candidates.
      runs: Draws the number of runs.

    Attributes:
      done: How many runs are done.
      best: Candidate of the best run; None if none is done.
      score: Its score.

    Raises:
      ValueError: The folder is of another selection, or another process uses it.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], candidates: int, runs: Any):
        self._folder, self._plan = folder, plan
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(candidates, runs)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise validation.error(
                    "folder", "a folder that no other selection writes to", str(folder)
                ) from error
            raise

    def _read(self, candidates: int, runs: Any) -> None:
        path = self._folder / _STATE
        if not path.exists():
            choice = random.SystemRandom().randrange
            self.drawn: list[int] = [choice(candidates) for _ in range(runs.draw())]
            self.done, self.score = 0, FAILED
            self.best: int | None = None
            self._weights: str | None = None
            self._write()
            return
        state = json.loads(path.read_text())
        if state["plan"] != self._plan:
            other = {k for k, v in self._plan.items() if state["plan"].get(k) != v}
            raise validation.error(
                "folder",
                f"of a selection with the same arguments; its {', '.join(sorted(other))} differ",
                str(self._folder),
            )
        self.drawn, self.done = state["drawn"], state["done"]
        self.best, self.score, self._weights = state["best"], state["score"], state["weights"]

    def load_best(self, model: Any) -> None:
        """Gives a model the weights of the best run, and with them what they cost."""
        checkpoint = _checkpoint(model)
        checkpoint.read(str(self._folder / str(self._weights))).assert_consumed()

    def next_candidate(self) -> int | None:
        """Returns the candidate that the next run trains; None if all runs are done."""
        return self.drawn[self.done] if self.done < len(self.drawn) else None

    def finish(self, model: Any, score: float) -> None:
        """Notes that a run is done; of equal scores, the first run is the best.

        Args:
          model: The trained model.
          score: Its score; `FAILED` if the run failed, as NaN says, too.
        """
        score = FAILED if math.isnan(score) else score
        before = self._weights
        if self.best is None or score > self.score:
            self.best, self.score = self.drawn[self.done], score
            # Of a name of its own: the state must never name weights that a later run wrote.
            self._weights = f"run-{self.done}" if score > FAILED else None
            if self._weights is not None:
                _checkpoint(model).write(str(self._folder / self._weights))
                for path in self._paths(self._weights):
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
        self.done += 1
        self._write()
        if before != self._weights:
            self._remove(before)

    def close(self, finished: bool) -> None:
        """Lets other processes use the folder.

        Args:
          finished: Whether the selection is finished: the folder then keeps nothing but what it
            releases.
        """
        if finished and self.drawn:
            before, self._weights = self._weights, "best"
            for old, new in zip(self._paths(before), self._paths("best"), strict=True):
                new.write_bytes(old.read_bytes())
            self.drawn, self.done = [], 0
            self._write()
            self._remove(before)
        os.close(self._lock)

    def _paths(self, weights: str | None) -> list[Path]:
        return [self._folder / f"{weights}{suffix}" for suffix in _FILES]

    def _remove(self, weights: str | None) -> None:
        for path in self._paths(weights):
            path.unlink(missing_ok=True)

    def _write(self) -> None:
        state = {
            **{"plan": self._plan, "drawn": self.drawn, "done": self.done, "best": self.best},
            **{"score": self.score, "weights": self._weights},
        }
        partial = self._folder / f"{_STATE}.partial"
        with open(partial, "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._folder / _STATE)


def _checkpoint(model: Any) -> tf.train.Checkpoint:
    """Returns a checkpoint of a model's weights, without its optimizer."""
    values = [(weight, getattr(weight, "value", None)) for weight in model.weights]
    # Keras 3's hold TensorFlow's.
    weights = [value if isinstance(value, tf.Variable) else weight for weight, value in values]
    return tf.train.Checkpoint(weights=weights)
