"""The exponential moving average of a model's weights."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.validation import elements, error, is_number
from tfdp.keras2.keras_2 import Callback

_NAME = "_tfdp_exponential_average"
# Models that hold an average instead of the weights of their training. Another callback that put
# its average there meanwhile would take the first one's for the weights.
_SWAPPED: "weakref.WeakSet[tf.keras.Model]" = weakref.WeakSet()


class ExponentialMovingAverage(Callback):
    """Callback that averages the weights over the steps, and evaluates the average.

    Privacy noise moves the weights about, and the average takes out a part of that. After each
    step, average = d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)) at the
    t-th step of training, so that the first weights are soon forgotten.

    Guarantees: the average costs no privacy. It is a function of the weights after each step, which
    the guarantee lets anyone see (post-processing); training does not depend on it. Rejected
    updates of DPSUR do not enter it, nor do the chunks of a step that is not complete.

    `validation_data` of `fit` is evaluated with the average. `model.evaluate` after training sees
    what is in the model: the average, unless `set_at_end` is False. Of several callbacks of this
    class the first is evaluated, and the last is set at the end.

    Args:
      decay: Largest d, in [0, 1): the average is over about 1 / (1 - decay) steps.
      set_at_end: Whether the average replaces the model's trainable variables when `fit` ends.
        Training that continues begins from it.
      on_average: Callbacks that see the average in the model at the end of each epoch, such as
        `tf.keras.callbacks.ModelCheckpoint`. Do not give them to `fit`, too.

    `tf.keras.callbacks.BackupAndRestore`, and checkpoints of the model, keep the average. With
    `steps_per_execution` = k the weights after every k-th step count for k steps.

    Raises:
      ValueError: An argument is out of its range.

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification
    through Scale" (parameter averaging). The warm-up of d is that of
    `tf.train.ExponentialMovingAverage`.

    Example:
      >>> import tfdp
      >>> average = tfdp.ExponentialMovingAverage(decay=0.99)
      >>> # model.fit(batches, validation_data=(x_test, y_test), callbacks=[budget, average])
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        set_at_end: bool = True,
        on_average: Sequence[tf.keras.callbacks.Callback] = (),
    ):
        super().__init__()
        if not (is_number(decay) and 0 <= decay < 1):
            raise error("decay", "in [0, 1)", decay)
        if not isinstance(set_at_end, bool):
            raise error("set_at_end", "a bool", set_at_end)
        self.decay = float(decay)
        self.set_at_end = set_at_end
        self._others = tuple(elements("on_average", on_average, "a sequence of callbacks"))
        for other in self._others:
            if not isinstance(other, tf.keras.callbacks.Callback):
                raise error("on_average", "a sequence of callbacks", on_average)
            if getattr(other, "save_freq", "epoch") != "epoch":
                raise error("on_average", "of callbacks that save after epochs", other.save_freq)
        self._state: _State | None = None
        self._variables: list[tf.Variable] = []
        self._iterations: int | None = None
        self._weights: list[np.ndarray] | None = None  # Set while the average is in the model.

    @property
    def average(self) -> list[np.ndarray]:
        """The average of the model's trainable variables, in their order.

        Raises:
          RuntimeError: Training has not begun.
        """
        if self._state is None:
            raise RuntimeError("ExponentialMovingAverage has no average before `fit` begins.")
        return [variable.numpy() for variable in self._state.average]

    def set_model(self, model: tf.keras.Model) -> None:
        """Begins anew with another model."""
        if model is not self.model:
            self._put_weights_back()
            self._state = None
        super().set_model(model)
        for other in self._others:
            other.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes on what Keras says about the training."""
        super().set_params(params)
        for other in self._others:
            other.set_params(params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins with the weights of the model, or resumes."""
        self._put_weights_back()  # An evaluation may have failed.
        if self.model.built:
            self._begin()
        self._iterations = None  # Another callback may restore it.
        for other in self._others:
            other.on_train_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes how many steps were taken before."""
        if self._iterations is None:
            self._iterations = self._steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the weights to the average if a step was completed."""
        state = self._begin()
        steps = self._steps()
        new = steps - (self._iterations or 0)
        self._iterations = steps
        if new > 0:
            state.add(self.model.trainable_variables, self.decay, new)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes on the beginning of an epoch."""
        for other in self._others:
            other.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows the average to the callbacks of `on_average`."""
        if self._others:
            with self._average_in_model():
                for other in self._others:
                    other.on_epoch_end(epoch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the average into the model, to be evaluated."""
        self._put_average()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the weights of the training back."""
        self._put_weights_back()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the average into the model, if that was asked for."""
        self._put_weights_back()
        with self._average_in_model():
            for other in self._others:
                other.on_train_end(logs)
        if self.set_at_end and self._state is not None:
            self._put_average()
            self._weights = None
            _SWAPPED.discard(self.model)

    def _begin(self) -> "_State":
        """Makes the variables of the average, and lets checkpoints of the model keep them.

        They begin anew where other variables are trained than before.
        """
        variables = self.model.trainable_variables
        if self._state is None or list(map(id, variables)) != list(map(id, self._variables)):
            self._variables = list(variables)
            with self.model.distribute_strategy.scope():
                self._state = _State(variables)
            # Not as an attribute: Keras would take its variables for weights of the model.
            self.model._track_trackable(self._state, _NAME, overwrite=True)
        return self._state

    def _steps(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    @contextlib.contextmanager
    def _average_in_model(self) -> Iterator[None]:
        self._put_average()
        try:
            yield
        finally:
            self._put_weights_back()

    def _put_average(self) -> None:
        if self._state is None or self.model in _SWAPPED:
            return
        _SWAPPED.add(self.model)
        self._weights = [variable.numpy() for variable in self.model.trainable_variables]
        for variable, average in zip(
            self.model.trainable_variables, self._state.average, strict=True
        ):
            variable.assign(tf.cast(average, variable.dtype))

    def _put_weights_back(self) -> None:
        if self._weights is None:
            return
        for variable, value in zip(self.model.trainable_variables, self._weights, strict=True):
            variable.assign(value)
        self._weights = None
        _SWAPPED.discard(self.model)


class _State(tf.train.Checkpoint):
    """The average and the number of steps that are in it, for checkpoints.

    Attributes:
      average: One variable for each variable that is averaged, float32 or more precise.
      steps: Number of steps, int64.
    """

    def __init__(self, variables: Sequence[tf.Variable]):
        super().__init__()
        self.average = [
            tf.Variable(tf.cast(v, _at_least_float32(v.dtype)), trainable=False) for v in variables
        ]
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self, variables: Sequence[tf.Variable], decay: float, steps: int) -> None:
        """Adds the weights after `steps` more steps."""
        kept = 1.0
        for t in range(int(self.steps.numpy()), int(self.steps.numpy()) + steps):
            kept *= min(decay, (1 + t) / (10 + t))
        for average, variable in zip(self.average, variables, strict=True):
            average.assign_add((1 - kept) * (tf.cast(variable, average.dtype) - average))
        self.steps.assign_add(steps)


def _at_least_float32(dtype: tf.DType) -> tf.DType:
    return dtype if dtype == tf.float64 else tf.float32
