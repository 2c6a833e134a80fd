"""Base of the private optimizers of Keras 2: the private step as TF-Privacy's classes take it."""

import copy
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp import schedules
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import compat
from tfdp.base.tf import first_trace
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.validation import error
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.update_error import Code, described
from tfdp.keras2.weight_decay import WeightDecay
from tfdp.schedules import NoiseMultiplier
from tfdp.step.arguments import (
    check_first_argument,
    check_hyperparameters,
    check_name,
    scaling_hint,
)
from tfdp.step.privacy_config import PrivacyConfig
from tfdp.step.private_fit import guard_fit
from tfdp.step.private_metrics import keep_evaluations_private
from tfdp.step.private_step import PrivateStep

if TYPE_CHECKING:
    from tfdp.correlated_noise import CorrelatedNoise
    from tfdp.step.compression import Compression
    from tfdp.step.sparse_embeddings import SparseEmbeddings

compat.check_keras_2()

if TYPE_CHECKING:
    from tensorflow.keras.optimizers.legacy import Optimizer as _Optimizer
else:
    _Optimizer = object

_ONLY_MINIMIZE = (
    "{0}.minimize must be called, as Keras's `fit` does: `optimizer.minimize(loss, variables, "
    "tape=tape)` with one loss per example. It adds noise to clipped sums that it computes itself; "
    "gradients from elsewhere, such as `tape.gradient`, are not private. Received a call of `{1}`."
)
_EXCLUDED = "excluded_from_weight_decay"
_DISCARDED = (
    "This graph has no private step: it is the first trace of a function that creates variables, "
    "which TensorFlow traces a second time. Create variables before, with initial values that do "
    "not depend on the function's arguments."
)


class PrivateOptimizerMixin(PrivateStep, _Optimizer):
    """Mixin that turns a TF-Privacy `DPOptimizerClass` into an optimizer of tfdp.

    `PrivateStep` says what a step is. The private optimizers' docstrings describe the arguments.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an optimizer that `__init__` sets up; checks what is given by position."""
        check_first_argument(cls, args, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        l2_norm_clip: float | None = None,
        noise_multiplier: NoiseMultiplier | None = None,
        expected_batch_size: int | None = None,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int | None = None,
        sampling: PoissonSampling | dict[str, int] | None = None,
        noise_seed: int | None = None,
        secure_noise: bool = False,
        engine: str = "one_pass",
        clipping_rule: ClippingRule | str | dict[str, Any] = "flat",
        noise_correlation: "CorrelatedNoise | dict[str, Any] | None" = None,
        compression: "Compression | dict[str, Any] | None" = None,
        sparse_embeddings: "SparseEmbeddings | dict[str, Any] | None" = None,
        weight_decay: float | None = None,
        **kwargs: Any,
    ):
        config = PrivacyConfig.checked(self._public_name(), locals())
        if config.sparse_embeddings is not None:
            raise error(
                "sparse_embeddings",
                "None in Keras 2, whose optimizers change all rows of a table: use `tfdp.keras3`",
                config.sparse_embeddings,
            )
        self._base_arguments = kwargs
        check_hyperparameters(kwargs)
        self._weight_decay = WeightDecay(weight_decay)
        self._set_privacy(config)
        del self._base_arguments
        check_name(kwargs.get("name"))
        kwargs["name"] = kwargs.get("name") or type(self).__name__
        # TF-Privacy's own noise, which is never used, has no schedules.
        super().__init__(l2_norm_clip, self._stages.values[0], num_microbatches, **kwargs)

    def __repr__(self) -> str:
        # Keras 3 shows it in the error for optimizers that it does not know.
        noise = schedules.describe(self.noise_multiplier)
        return (
            f"<tfdp.{type(self).__name__}, for models of Keras 2 (`tf.keras`), with "
            f"l2_norm_clip={self.l2_norm_clip:g}, noise_multiplier={noise}>"
        )

    def minimize(
        self,
        loss: Any,
        var_list: Any,
        grad_loss: tf.Tensor | None = None,
        name: str | None = None,
        tape: tf.GradientTape | None = None,
    ) -> tf.Operation:
        """Takes a private step: clips, sums, adds noise, and updates the variables.

        Args:
          loss: One loss per example, `[rows]`, or a scalar that is provably their sum or mean; or a
            function of no arguments that returns it.
          var_list: The variables to update, or a function that returns them.
          grad_loss: Must be None.
          name: Name of the operation.
          tape: Not used: gradients are those of the graph. Keras gives it.

        Returns:
          The operation that updates the variables.

        Raises:
          ValueError: The step would not be private, or is not taken in a `tf.function`.
        """
        if grad_loss is not None:
            raise ValueError("Argument `grad_loss` must be None: weights would undo the clipping.")
        self._was_dp_gradients_called = True
        if self._is_traced_again():
            return tf.debugging.Assert(False, [_DISCARDED])
        return self._take_step(loss, var_list, name)

    def _is_traced_again(self) -> bool:
        """Returns whether TensorFlow discards the trace that is being made: see `first_trace`."""
        if tf.distribute.has_strategy():
            return False
        if first_trace.is_discarded():
            return True
        return _metrics_will_be_built() and first_trace.discard()

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Raises an error: TensorFlow 1 style training is not supported."""
        raise NotImplementedError(f"{type(self).__name__} trains in TensorFlow 2 style only.")

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: the sums that it would return are not private."""
        raise self._only_minimize("_compute_gradients")

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: gradients from elsewhere, such as `tape.gradient`, are not private.

        Raises:
          RuntimeError: Always; `minimize` takes a private step.
        """
        raise self._only_minimize("apply_gradients")

    def _only_minimize(self, called: str) -> RuntimeError:
        text = _ONLY_MINIMIZE.format(type(self).__name__, called)
        return RuntimeError(text + scaling_hint("tf.keras"))

    def _update(self, gradients: list, name: Any) -> tf.Operation:
        return super().apply_gradients(gradients, name=name, experimental_aggregate_gradients=False)

    def _loss_metrics(self, model: Any) -> list[Any] | None:
        if not isinstance(model, tf.keras.Model):
            return None
        return [] if model.compiled_loss is None else model.compiled_loss.metrics

    def update_code(self, variables: Sequence[tf.Variable]) -> Code:
        """Yields, for messages, the functions of users that an update may call."""
        for name, value in self._hyper.items():
            yield from described(name, value)
        for variable in variables:
            yield from described("constraint", variable.constraint)
        yield from described("optimizer", type(self))

    def _distributed_apply(
        self, distribution: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
    ) -> tf.Operation:
        self._weight_decay.apply(distribution, grads_and_vars, self._decayed_lr)
        return super()._distributed_apply(distribution, grads_and_vars, *args, **kwargs)

    @property
    def weight_decay(self) -> float | None:
        """Share, times the learning rate, by which a step shrinks the weights; None: nothing."""
        return self._weight_decay.rate

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[tf.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Excludes variables from `weight_decay`, as `tf.keras.optimizers.AdamW` does.

        Files remember it, by the names of the variables.

        Args:
          var_list: Variables.
          var_names: Regular expressions: variables in whose names one is found.

        Raises:
          ValueError: `var_names` is a string; or the optimizer has been built, by `build` or the
            first step.
        """
        if isinstance(var_names, str):  # Each of its letters would be one.
            raise error("var_names", "a list of regular expressions", var_names)
        if self._hypers_created:
            raise ValueError(
                "Method `exclude_from_weight_decay` must be called before the optimizer is built, "
                f"by `build` or the first step. Received: var_list={var_list}, {var_names=}."
            )
        self._weight_decay.exclude(var_list or (), var_names or ())

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again, without the secret noise key."""
        config = {**super().get_config(), **self._privacy_config()}
        config["weight_decay"] = self.weight_decay
        if excluded := self._weight_decay.excluded_names():  # Keras forgets them.
            config[_EXCLUDED] = excluded
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns an optimizer with the arguments that `get_config` returned."""
        config = dict(config)
        excluded = config.pop(_EXCLUDED, ())
        optimizer = super().from_config(config, custom_objects)
        optimizer._weight_decay.exclude((), excluded)
        return optimizer

    # The state, and how Keras 2 saves it.

    def _state_variables(self) -> list[tf.Variable]:
        return self.weights

    def _worker_facts(self) -> Any:
        return self.get_config()

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_all_weights(var_list)
        self._weights.extend(self._create_record(self.add_weight))
        self._weights.extend(self._create_memory(self.add_weight, var_list))
        self._assign_loaded()

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the state now, not at the first step, so that a checkpoint can be restored.

        The ledger takes over what these variables have cost under other private optimizers.

        Args:
          var_list: The variables that will be trained: `model.trainable_variables`.
        """
        self._check_workers(var_list)
        # A tf.function that sees variables being created is traced twice: it does not see these.
        with tf.init_scope() if tf.distribute.has_strategy() else plain_variables():
            self._create_all_weights(list(var_list))
            self._released.trains(var_list)

    def get_weights(self) -> list[np.ndarray]:
        """Returns the state as arrays, with what other optimizers have done to the variables."""
        self._released.refresh()
        return super().get_weights()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Takes over, before a checkpoint, what other optimizers have done to the variables."""
        if tf.executing_eagerly():
            self._released.refresh()
        return super()._trackable_children(save_type, **kwargs)

    def restore_from_saved_model(self, model: Any, path: str) -> None:
        """Restores the state that Keras saved with `model` but does not restore itself."""
        self.build(model.trainable_variables)  # So that the ledger knows at once.
        prefix = os.path.join(path, "variables", "variables")
        tf.train.Checkpoint(root=model).restore(prefix).expect_partial()

    def __copy__(self) -> "PrivateOptimizerMixin":
        """Returns a copy that shares nothing: it draws other noise and counts for itself."""
        return copy.deepcopy(self)


compat.let_keras_save(PrivateOptimizerMixin)
keep_evaluations_private(tf.keras)
guard_fit(tf.keras)


def _metrics_will_be_built() -> bool:
    """Returns whether Keras creates metrics later in the function that is being traced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, tf.keras.Model):
            metrics = model.compiled_metrics
            given = metrics and (metrics._user_metrics or metrics._user_weighted_metrics)
            return bool(given) and not metrics.built
        frame = frame.f_back
    return False
