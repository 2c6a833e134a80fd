"""Keras callbacks that keep a training run within its privacy budget."""

import math
import warnings
from typing import Any

import tensorflow as tf

from tfdp._exponential_average import ExponentialMovingAverage  # noqa: F401  # Public here.
from tfdp._validation import error
from tfdp.accounting.calibration import most_releases
from tfdp.accounting.ledger import (
    Ledgers,
    PrivacyLedger,
    as_ledgers,
    as_seen,
    check_unit,
    compose_ledgers,
)
from tfdp.accounting.sampling import EXAMPLE
from tfdp.optimizers import record_ledger
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.selective import SelectiveUpdateMixin


class PrivacyBudget(tf.keras.callbacks.Callback):
    """Callback that logs epsilon after every epoch, and stops before the budget is overspent.

    The epsilon is read from the ledger of the model. It covers all steps that private optimizers
    took on its variables, also those before it was compiled again, saved or restored.

    Args:
      target_epsilon: Largest epsilon that the released model may have, under add-or-remove-one.
      delta: The delta of the guarantee, in (0, 1); a warning is issued if it is not below 1 / N.
      prior: Other releases about the same examples: a `PrivacyLedger`, or several. Examples are
        statistics of the data, other models, or the past of weights that were loaded without their
        optimizer.

    Raises:
      ValueError: An argument is out of its range. When training starts: the optimizer is not one of
        tfdp's or was not given `sampling`, or the budget does not allow one more step.

    Example:
      >>> import tfdp
      >>> budget = tfdp.callbacks.PrivacyBudget(target_epsilon=2.0, delta=1e-5)
      >>> # model.fit(tfdp.data.poisson_batches(...), epochs=100, callbacks=[budget])
    """

    def __init__(self, target_epsilon: float, delta: float, prior: Ledgers | None = None):
        super().__init__()
        if not target_epsilon > 0:
            raise error("target_epsilon", "positive", target_epsilon)
        if not 0 < delta < 1:
            raise error("delta", "in (0, 1)", delta)
        self.target_epsilon = target_epsilon
        self.delta = delta
        self._prior = as_ledgers(prior)
        self._last_step = 0
        self._reason: str | None = None  # Why training is stopped.
        self._epoch, self._batch = 0, 0
        self._before = PrivacyLedger()
        self._others = 0
        self._most_batches = 1
        self._is_first = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Computes how many more steps the budget allows."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizerMixin):
            raise ValueError(
                "PrivacyBudget needs one of tfdp's optimizers in `model.compile`. Received: "
                f"{type(optimizer).__name__}."
            )
        if self.model.built:  # So that it knows what the variables have cost.
            optimizer.build(self.model.trainable_variables)
        self._plan()
        self._is_first = True
        sampling = optimizer.sampling
        padded = sampling is not None and sampling.has_padding
        if isinstance(optimizer, SelectiveUpdateMixin):  # It shows no metrics.
            padded = False
        if padded and getattr(self.model.compiled_metrics, "_user_metrics", None):
            warnings.warn(
                "Keras computes `metrics` over the padding of the batches too. Pass "
                "`weighted_metrics` to `model.compile` instead.",
                stacklevel=2,
            )

    def _plan(self) -> None:
        """Works out how many more steps the budget allows, after what has been released."""
        optimizer = self.model.optimizer
        ledger, taken = self._ledger(), optimizer.own_steps()
        check_unit(ledger, EXAMPLE if optimizer.sampling is None else optimizer.sampling.unit)
        release = optimizer.release
        event = as_seen(release.event, optimizer.ledger.selective_release, ledger)
        allowed = most_releases(
            event, release.truncation_probability, ledger, self.target_epsilon, self.delta
        )
        # Keras lowers the number for the last call of an epoch, and the next is a whole one again.
        self._most_batches = self._batches_per_call()
        if allowed < -(-self._most_batches // optimizer.gradient_accumulation_steps):
            raise ValueError(
                f"The privacy budget of target_epsilon={self.target_epsilon} at "
                f"delta={self.delta} allows no further step: {ledger.steps} steps have been "
                f"taken, at epsilon={ledger.epsilon(self.delta).epsilon:.4g}."
            )
        self._last_step, self._before = taken + allowed, ledger
        self._reason = None
        self._others = self._released_elsewhere()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch that begins."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Accounts for a state that another callback restored when training began."""
        if self._is_first and self._released_elsewhere() != self._others:
            self._plan()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops before a step that would overspend."""
        self._batch = batch
        optimizer = self.model.optimizer
        if optimizer.released_steps()[1]:
            optimizer.ledger.epsilon(self.delta)  # Raises: nothing can be stated.
        self._stop_before_overspending(optimizer.missing_batches())
        if self._released_elsewhere() != self._others:
            if self._is_first:  # A model that had no variables was restored.
                self._plan()
            else:
                self._expect_as_much_again()
        self._is_first = False

    def _expect_as_much_again(self) -> None:
        """Stops if what was released since the beginning, once more, would overspend.

        Another optimizer trains the same variables: the allowed steps of this one are not all.
        """
        now = self._ledger()
        before = {(r.event, r.truncation_probability): r.count for r in self._before.releases}
        for release in now.releases:
            new = release.count - before.get((release.event, release.truncation_probability), 0)
            if new > 0:
                now.record(release.event, new, release.truncation_probability)
        if now.epsilon(self.delta).epsilon > self.target_epsilon:
            self._stop()
        self._before = self._ledger()
        self._others = self._released_elsewhere()

    def _released_elsewhere(self) -> int:
        optimizer = self.model.optimizer
        return sum(optimizer.released_steps()) - optimizer.own_steps()

    def _stop_before_overspending(self, missing_batches: int) -> None:
        """Stops if the next call may begin a step that is not allowed.

        Args:
          missing_batches: Batches that come first, of a step that was begun and so counted.
        """
        optimizer = self.model.optimizer
        batches = max(0, self._most_batches - missing_batches)
        begun = -(-batches // optimizer.gradient_accumulation_steps)
        if optimizer.own_steps() + begun > self._last_step:
            self._stop()

    def _stop(self) -> None:
        self.model.stop_training = True
        if self._reason is not None:
            return
        ledger = self._ledger()
        self._reason = (
            f"PrivacyBudget stops training after {ledger.steps} steps, at epsilon "
            f"{ledger.epsilon(self.delta).epsilon:.4g} and delta {self.delta:g}: the next "
            f"{'step' if self._most_batches == 1 else 'call'} would exceed "
            f"target_epsilon={self.target_epsilon:g}."
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `epsilon` to the logs of the epoch."""
        self._stop_before_overspending(0)  # The next one may break a step off, and begin another.
        if logs is not None:
            logs["epsilon"] = self._ledger().epsilon(self.delta).epsilon

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Says, in one line, that the budget ended the training, and why."""
        steps = self.params.get("steps")
        is_last_epoch = self._epoch + 1 >= self.params.get("epochs", math.inf)
        is_complete = is_last_epoch and steps is not None and self._batch + 1 >= steps
        if self._reason is not None and not is_complete:
            print(f"\n{self._reason}")

    def _ledger(self) -> PrivacyLedger:
        """Returns everything that was released of the model's variables, and `prior`."""
        own = record_ledger.ledger_of_model(self.model) or self.model.optimizer.ledger
        mode = self.model.optimizer.ledger.selective_release
        return compose_ledgers([own, *self._prior], mode)

    def _batches_per_call(self) -> int:
        """Returns the number of batches that Keras may use until it asks again."""
        calls = self.model._steps_per_execution
        return 1 if calls is None else int(calls.numpy())
