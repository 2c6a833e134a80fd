"""Keras 3 callbacks that keep a training run within its privacy budget."""

import keras

from tfdp.keras3.dp_optimizer import DPOptimizer
from tfdp.training.privacy_budget import BudgetCallback


class PrivacyBudget(BudgetCallback, keras.callbacks.Callback):
    """Callback that logs epsilon after every epoch, and stops before the budget is overspent.

    What has been spent is read from the ledger of the model: all steps of private optimizers that
    went into its variables, also before it was compiled again, saved or restored.

    Args:
      target_epsilon: Epsilon that the released model may cost at most, under zero-out.
      delta: The delta of the guarantee, in (0, 1); a warning is issued if it is not below 1 / N.
      prior: Other releases about the same examples: a `PrivacyLedger`, or several. For
        example statistics of the data, other models, or the past of weights that were loaded
        without their optimizer.

    Raises:
      ValueError: An argument is out of its range; when training starts: the optimizer is not one
        of tfdp.keras3, was not given `sampling`, or the budget does not allow one more step.

    Example:
      >>> import tfdp.keras3
      >>> budget = tfdp.keras3.PrivacyBudget(target_epsilon=2.0, delta=1e-5)
      >>> # model.fit(tfdp.data.poisson_batches(...), epochs=100, callbacks=[budget])
    """

    _optimizer_class = DPOptimizer
    _package = "tfdp.keras3"

    def _has_metrics(self) -> bool:
        metrics = self.model._compile_metrics
        return metrics is not None and bool(metrics._user_metrics)

    def _batches_per_call(self) -> int:
        return int(self.model.steps_per_execution)
