"""The score of a run: a sum over validation examples, with noise if they are private."""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base import validation

_ROWS = 256  # Examples that are predicted at a time.
_SPARSE, _ONE_HOT, _BINARY = "sparse", "one-hot", "binary"
_CLASSIFIED = {
    "sparsecategoricalcrossentropy": _SPARSE,
    "categoricalcrossentropy": _ONE_HOT,
    "categoricalfocalcrossentropy": _ONE_HOT,
    "binarycrossentropy": _BINARY,
    "binaryfocalcrossentropy": _BINARY,
}


class Measure:
    """The score of models on validation data.

    Sensitivity: one example changes the sum of the scores by at most 1.

    Args:
      score: "accuracy", or a function of a model and the validation data.
      data: The validation data.
      is_public: Whether they are public.
      noise: Standard deviation of the noise on the sum; None: what follows from the number of
        examples.

    Attributes:
      noise: Standard deviation of the noise; 0 on public data.

    Raises:
      ValueError: An argument is out of its range, or does not fit the data.
    """

    def __init__(
        self,
        score: str | Callable[[Any, Any], Any],
        data: Any,
        is_public: bool,
        noise: float | None,
    ):
        self._score, self._data = score, data
        self._is_public = is_public
        if score == "accuracy" and not (
            isinstance(data, tf.data.Dataset) or (isinstance(data, tuple) and len(data) == 2)
        ):
            raise validation.error(
                "validation_data", "`(x, y)`, or a tf.data.Dataset of single `(x, y)`", type(data)
            )
        in_memory = tf.nest.flatten(data) if isinstance(data, tuple) else []
        if score == "accuracy" and any(map(np.iscomplexobj, in_memory)):
            raise validation.error("validation_data", "of real numbers", type(data))
        if is_public:
            self.noise = 0.0
        elif noise is None:
            # About what chance alone moves the number of right answers by, at an accuracy of 85%.
            self.noise = max(10.0, math.sqrt(_size(data)) / 3)
        else:
            self.noise = validation.positive("score_noise_multiplier", noise)

    def values(self, model: Any) -> np.ndarray:
        """Returns the score of each example, in [0, 1] if they are private, `[examples]`."""
        if not isinstance(self._score, str):
            values = np.asarray(self._score(model, self._data), np.float64)
            if self._is_public:
                return np.atleast_1d(values)
            return np.clip(np.nan_to_num(values, nan=0.0), 0.0, 1.0)
        if isinstance(self._data, tf.data.Dataset):
            x = self._data.map(lambda x, y: x).batch(_ROWS)
            y = np.concatenate([y.numpy() for _, y in self._data.batch(_ROWS)])
            return correct(model, model.predict(x, verbose=0), y)
        x, y = self._data
        return correct(model, model.predict(x, batch_size=_ROWS, verbose=0), np.asarray(y))

    def check(self, model: Any) -> None:
        """Scores a model, to find out whether its runs can be scored.

        Raises:
          ValueError: They cannot.
        """
        if callable(self._score):  # Its errors reach its author as they are.
            self.noisy(self.values(model))
            return
        with validation.using("validation_data", type(self._data), "examples of the model"):
            self.noisy(self.values(model))

    def noisy(self, values: np.ndarray) -> float:
        """Returns the mean score, with noise from the operating system if the data are private.

        Raises:
          ValueError: There is not a score for each example.
        """
        if self._is_public:
            return float(np.mean(values))
        if values.ndim != 1 or not len(values):
            raise validation.error(
                "score",
                "a function that returns a number for each validation example, [examples]",
                f"numbers of the shape {values.shape}",
            )
        rng = np.random.default_rng(int.from_bytes(os.urandom(32), "little"))
        return float((values.sum() + rng.normal(0.0, self.noise)) / len(values))

    def __str__(self) -> str:
        name = "accuracy" if self._score == "accuracy" else "a function"
        if self._is_public:
            return f"{name}, on public validation data."
        return f"{name}; noise of standard deviation {self.noise:.4g} on the sum over the examples."


def check_is_known(model: Any) -> None:
    """Raises a ValueError if it is not known what a right answer of a model is."""
    _kind(model)


def correct(model: Any, predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns for each example whether a model is right; of several answers the share that is.

    Args:
      model: The model, compiled with a loss of crossentropy.
      predicted: What it predicts, `[examples, ...]`.
      labels: What is right.
    """
    kind = _kind(model)
    if labels.dtype.kind not in "biuf":
        raise validation.error("validation_data", "with labels that are numbers", labels.dtype)
    if kind == _SPARSE:
        right = predicted.argmax(axis=-1) == labels.reshape(predicted.shape[:-1])
    elif kind == _ONE_HOT:
        right = predicted.argmax(axis=-1) == labels.argmax(axis=-1)
    else:
        least = 0.0 if getattr(model.loss, "from_logits", False) else 0.5
        right = (predicted > least) == (labels.reshape(predicted.shape) > 0.5)
    return right.reshape(len(right), -1).mean(axis=1, dtype=np.float64)


def _kind(model: Any) -> str:
    loss = model.loss
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    kind = _CLASSIFIED.get(name.replace("_", "").lower())
    if kind is None:
        raise ValueError(
            "Argument `score` must be a function for a model whose loss is not one crossentropy: "
            "which answers are right is not known. Received: score='accuracy', with the loss "
            f"{validation.shown(loss)}."
        )
    return kind


def _size(data: Any) -> int:
    """Returns the number of validation examples."""
    if isinstance(data, tf.data.Dataset):
        size = int(data.cardinality())
        if size == tf.data.INFINITE_CARDINALITY:
            raise validation.error("validation_data", "finite", data)
        return size if size >= 0 else int(data.reduce(0, lambda count, *_: count + 1))
    parts = tf.nest.flatten(data)
    if not parts or not all(hasattr(part, "__len__") for part in parts):
        raise ValueError(
            "Argument `score_noise_multiplier` must be given where `validation_data` do not tell "
            f"the number of examples. Received: score_noise_multiplier=None, with {type(data)}."
        )
    return len(parts[0])
