"""Budget of a training run, as callbacks of every Keras keep to it."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.calibration import most_steps
from tfdp.accounting.ledger import (
    Ledgers,
    PrivacyLedger,
    as_ledgers,
    as_seen,
    check_unit,
    compose_ledgers,
)
from tfdp.accounting.sampling import EXAMPLE
from tfdp.base.validation import between_zero_and_one, error, is_number
from tfdp.schedules import NoiseSchedule
from tfdp.step.record import record_ledger
from tfdp.step.selective import SelectiveUpdateMixin

_MOST_STEPS = 10**8  # Steps allowed if epsilon has no limit.


class BudgetCallback:
    """Base class of the callbacks `PrivacyBudget`, which are `Callback`s of their Keras, too."""

    model: Any
    params: dict[str, Any]
    _optimizer_class: Any  # Base class of the optimizers of this Keras.
    _package: str  # Name of their package.

    def _has_metrics(self) -> bool:
        """Returns whether metrics of all rows are shown, also of those that are padding."""
        raise NotImplementedError

    def _batches_per_call(self) -> int:
        """Returns the number of batches that Keras may use until it asks again."""
        raise NotImplementedError

    def __init__(self, target_epsilon: float, delta: float, prior: Ledgers | None = None):
        super().__init__()
        if not (is_number(target_epsilon) and target_epsilon > 0):
            raise error("target_epsilon", "a positive number", target_epsilon)
        self.target_epsilon = target_epsilon
        self.delta = between_zero_and_one("delta", delta)
        self._prior = as_ledgers(prior)
        self._last_release = 0
        self._reason: str | None = None  # Why training is stopped.
        self._epoch, self._batch = 0, 0
        self._before = PrivacyLedger()
        self._others = 0
        self._most_batches = 1
        self._is_first = True
        self._first_state: tuple = ()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Computes how many more steps the budget allows."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, self._optimizer_class):
            raise ValueError(
                f"PrivacyBudget needs one of {self._package}'s optimizers in `model.compile`. "
                f"Received: {type(optimizer).__name__} of {type(optimizer).__module__}."
            )
        if self.model.built:  # The optimizer learns what the variables have cost.
            optimizer.build(self.model.trainable_variables)
        self._plan()
        self._is_first = True
        sampling = optimizer.sampling
        padded = sampling is not None and sampling.has_padding
        selective = isinstance(optimizer, SelectiveUpdateMixin)  # It shows no metrics.
        if padded and not selective and self._has_metrics():
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
        allowed = _MOST_STEPS
        if math.isfinite(self.target_epsilon):
            releases = self._next_releases(ledger)
            allowed = most_steps(releases, ledger, self.target_epsilon, self.delta)
        # Keras lowers the number for the last call of an epoch, and the next is a whole one again.
        self._most_batches = self._batches_per_call()
        # Batches of another object may come, and so begin a new cycle.
        begun = -(-self._most_batches // optimizer.gradient_accumulation_steps)
        if allowed < optimizer.releases_begun(begun, anew=True):
            raise ValueError(
                f"The privacy budget of target_epsilon={self.target_epsilon} at "
                f"delta={self.delta} allows no further step: {self._taken(ledger)} have been "
                f"taken, at epsilon={ledger.epsilon(self.delta).epsilon:.4g}."
            )
        self._last_release, self._before = taken + allowed, ledger
        self._reason = None
        self._others = self._released_elsewhere()

    def _next_releases(self, ledger: PrivacyLedger) -> Callable[[int], list[Release]]:
        """Returns the function of the releases of the optimizer's next n steps."""
        optimizer = self.model.optimizer
        first, mode = optimizer.scheduled_steps(), optimizer.ledger.selective_release

        def releases(count: int) -> list[Release]:
            return [
                dataclasses.replace(
                    release, event=event_codec.freeze(as_seen(release.event, mode, ledger))
                )
                for release in optimizer.next_releases(first, count)
            ]

        return releases

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch that begins."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Accounts for a state that another callback restored when training began."""
        if self._is_first:
            if self._released_elsewhere() != self._others:
                self._plan()
            self._first_state = self._state()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops before a step that would overspend."""
        self._batch = batch
        optimizer = self.model.optimizer
        if self._is_first and self._state() == self._first_state:
            raise RuntimeError(
                "The training step of `fit` must take a step of the private optimizer, or else "
                "epsilon says nothing about the weights. Received a step that left "
                f"{type(optimizer).__name__} as it was. In a `train_step` of your own, make every "
                "update of the weights with `self.optimizer`, as the documentation of tfdp says."
            )
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
        Where the noise follows a schedule, the steps to come may cost more than those before.
        """
        now = self._ledger()
        to_come: list[Release] = []
        if isinstance(self.model.optimizer.noise_multiplier, NoiseSchedule):
            to_come = self._next_releases(now)(now.steps - self._before.steps)
        before = {dataclasses.replace(r, count=1): r.count for r in self._before.releases}
        for release in now.releases:
            new = release.count - before.get(dataclasses.replace(release, count=1), 0)
            if new > 0:
                to_come.append(dataclasses.replace(release, count=new))
        for release in to_come:
            now.record(**vars(release))
        if now.epsilon(self.delta).epsilon > self.target_epsilon:
            self._stop()
        self._before = self._ledger()
        self._others = self._released_elsewhere()

    def _state(self) -> tuple:
        """Returns what any batch changes: releases, steps, or the batches that are missing."""
        optimizer = self.model.optimizer
        taken = optimizer.own_steps(), int(optimizer.iterations.numpy())
        return id(optimizer), *taken, optimizer.missing_batches()

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
        if optimizer.own_steps() + optimizer.releases_begun(begun) > self._last_release:
            self._stop()

    def _stop(self) -> None:
        self.model.stop_training = True
        if self._reason is not None:
            return
        ledger = self._ledger()
        self._reason = (
            f"PrivacyBudget stops training after {self._taken(ledger)}, at epsilon "
            f"{ledger.epsilon(self.delta).epsilon:.4g} and delta {self.delta:g}: the next "
            f"{'step' if self._most_batches == 1 else 'call'} would exceed "
            f"target_epsilon={self.target_epsilon:g}."
        )

    def _taken(self, ledger: PrivacyLedger) -> str:
        """Returns in words how many steps a ledger counts, or cycles of them."""
        sampling = self.model.optimizer.sampling
        if sampling is None or sampling.cycle_length == 1:
            return f"{ledger.steps} steps"
        return f"{ledger.steps} cycles of {sampling.cycle_length} steps"

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
