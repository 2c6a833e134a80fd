"""Keras callbacks that keep a training run within its privacy budget."""

import warnings
from typing import Any

import tensorflow as tf

from tfdp.accounting.calibration import most_releases
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.selective import SelectiveUpdateMixin


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Logs epsilon after every epoch, and stops training before the budget is overspent.

    What has been spent is read from the optimizer's ledger, so that a run which is resumed goes
    on counting where it stopped.

    Args:
      target_epsilon: Epsilon that the released model may cost at most, under add-or-remove-one.
      delta: The delta of the guarantee, in (0, 1); below 1 / N.

    Raises:
      ValueError: An argument is out of its range; when training starts: the optimizer is not one
        of tfdp's, was not given `dataset_size`, or the budget does not allow one more step.

    Example:
      >>> import tfdp
      >>> budget = tfdp.callbacks.PrivacyBudget(target_epsilon=2.0, delta=1e-5)
      >>> # model.fit(tfdp.data.poisson_batches(...), epochs=100, callbacks=[budget])
    """

    def __init__(self, target_epsilon: float, delta: float):
        super().__init__()
        if not target_epsilon > 0:
            raise ValueError(
                f"Argument `target_epsilon` must be positive. Received: {target_epsilon=}."
            )
        if not 0 < delta < 1:
            raise ValueError(f"Argument `delta` must be in (0, 1). Received: {delta=}.")
        self.target_epsilon = target_epsilon
        self.delta = delta
        self._last_step = 0
        self._steps_per_call = 1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Works out how many more steps the budget allows."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizerMixin):
            raise ValueError(
                "PrivacyBudget needs one of tfdp's optimizers in `model.compile`. Received: "
                f"{type(optimizer).__name__}."
            )
        ledger = optimizer.ledger
        release = optimizer.release
        allowed = most_releases(
            release.event, release.truncation_probability, ledger, self.target_epsilon, self.delta
        )
        # Keras lowers the number for the last call of an epoch, and the next is a whole one again.
        self._steps_per_call = self._most_steps_per_call()
        if allowed < self._steps_per_call:
            raise ValueError(
                f"The privacy budget of target_epsilon={self.target_epsilon} at "
                f"delta={self.delta} allows no further step: {ledger.steps} steps have been "
                f"taken, at epsilon={ledger.epsilon(self.delta).epsilon:.4g}."
            )
        self._last_step = ledger.steps + allowed
        shows_metrics = not isinstance(optimizer, SelectiveUpdateMixin)
        if shows_metrics and getattr(self.model.compiled_metrics, "_user_metrics", None):
            warnings.warn(
                "Keras computes `metrics` over the padding of Poisson batches too. Pass "
                "`weighted_metrics` to `model.compile` instead.",
                stacklevel=2,
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops before a step that would overspend."""
        steps, not_poisson = self.model.optimizer.released_steps()
        if not_poisson:
            self.model.optimizer.ledger.epsilon(self.delta)  # Raises: nothing can be stated.
        if steps + self._steps_per_call > self._last_step:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `epsilon` to the logs of the epoch."""
        if logs is not None:
            logs["epsilon"] = self.model.optimizer.ledger.epsilon(self.delta).epsilon

    def _most_steps_per_call(self) -> int:
        """Logical steps that Keras may take until it asks again."""
        calls = self.model._steps_per_execution
        calls = 1 if calls is None else int(calls.numpy())
        return -(-calls // self.model.optimizer.gradient_accumulation_steps)
