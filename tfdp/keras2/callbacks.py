"""Keras callbacks that keep a training run within its privacy budget."""

from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.keras_2 import Callback
from tfdp.training.privacy_budget import BudgetCallback


class PrivacyBudget(BudgetCallback, Callback):
    """Callback that logs epsilon after every epoch, and stops before the budget is overspent.

    The epsilon is read from the ledger of the model. It covers all steps that private optimizers
    took on its variables, also those before it was compiled again, saved or restored.

    Args:
      target_epsilon: Largest epsilon that the released model may have, under zero-out.
      delta: The delta of the guarantee, in (0, 1); a warning is issued if it is not below 1 / N.
      prior: Other releases about the same examples: a `PrivacyLedger`, or several. Examples are
        statistics of the data, other models, or the past of weights that were loaded without their
        optimizer.

    Raises:
      ValueError: An argument is out of its range. When training starts: the optimizer is not one of
        tfdp's or was not given `sampling`, or the budget does not allow one more step.

    Example:
      >>> import tfdp
      >>> budget = tfdp.PrivacyBudget(target_epsilon=2.0, delta=1e-5)
      >>> # model.fit(tfdp.data.poisson_batches(...), epochs=100, callbacks=[budget])
    """

    _optimizer_class = PrivateOptimizerMixin
    _package = "tfdp"

    def _has_metrics(self) -> bool:
        return bool(getattr(self.model.compiled_metrics, "_user_metrics", None))

    def _batches_per_call(self) -> int:
        calls = self.model._steps_per_execution
        return 1 if calls is None else int(calls.numpy())
