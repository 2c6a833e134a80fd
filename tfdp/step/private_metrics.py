"""Metrics of evaluations, which hold exact statistics of the data that a model was evaluated on.

No private step is traced then, whose graph would show what is written. So the metrics of a model
that has a private optimizer are kept private after each evaluation, whatever the data.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.base.tf.private_variables import keep_private
from tfdp.step.private_step import PrivateStep

_EVALUATIONS = ("evaluate", "test_on_batch")


def keep_evaluations_private(keras: Any) -> None:
    """Has files hold zeros in place of what evaluations leave in metrics.

    Args:
      keras: The Keras whose models with private optimizers are meant. Others stay as they are.
    """
    for name in _EVALUATIONS:
        own = getattr(keras.Model, name)
        setattr(keras.Model, name, _then(own, functools.partial(_keep_metrics_private, keras)))


def _then(evaluate: Callable, follow: Callable[[Any], None]) -> Callable:
    @functools.wraps(evaluate)
    def evaluate_and_follow(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, *args, **kwargs)
        finally:
            follow(self)

    return evaluate_and_follow


def _keep_metrics_private(keras: Any, model: Any) -> None:
    if not isinstance(getattr(model, "optimizer", None), PrivateStep):
        return
    # Includes metrics in attributes, which Keras 2 does not list.
    tracked = [m for m in getattr(model, "submodules", ()) if isinstance(m, keras.metrics.Metric)]
    for metric in [*model.metrics, *tracked]:
        for variable in metric.variables:
            inner = getattr(variable, "value", None)  # Set in a variable of Keras 3.
            keep_private(inner if isinstance(inner, tf.Variable) else variable)
