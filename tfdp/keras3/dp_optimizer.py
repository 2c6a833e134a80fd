"""Private optimizers of Keras 3: any optimizer of Keras, on noisy sums of clipped gradients."""

import copy
import importlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdp import schedules
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import private_apis
from tfdp.base.keras_3 import tf_variable
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.validation import error
from tfdp.clipping import step_check
from tfdp.clipping.batch_loss import BatchLoss
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.update_error import Code, described
from tfdp.keras3 import keras_3, several_optimizers
from tfdp.schedules import NoiseMultiplier
from tfdp.step import replicas
from tfdp.step.arguments import (
    PRIVATE_ARGUMENTS,
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

# The attribute of a graph for the losses that were scaled in it. They are tensors of that graph:
# a table of this module would keep it alive.
_SCALED = "_tfdp_scaled_losses"

# The key of configs for what a MultiOptimizer has chosen.
_ASSIGNMENT = "assignment"

_HOW = (
    "A private step clips the gradient of each example of a loss, which it must be given: Keras's "
    "own `train_step` does it. In a training step of your own, write `loss = "
    "optimizer.scale_loss(loss)` inside the tape, with a loss that is a mean or sum over the "
    "examples, and then `optimizer.apply(tape.gradient(loss, variables), variables)`; or "
    "`optimizer.minimize(loss, variables)`, without a tape. Gradients from elsewhere are not "
    "private. "
)


@keras.saving.register_keras_serializable(package="tfdp")
class DPOptimizer(PrivateStep, keras.optimizers.Optimizer):
    """Optimizer that makes another optimizer of Keras 3 differentially private.

    Each example's gradient is clipped to norm C, the clipped gradients are summed, noise is added,
    and the inner optimizer takes its step with the result:

        g = (sum_i clip_C(grad L_i) + N(0, (noise_multiplier * C)^2)) / expected_batch_size

    All that the inner optimizer does with g is post-processing, which costs no privacy: momentum,
    weight decay, `clipnorm`, averages of weights (`use_ema`), learning rate schedules.

    Keras's `fit` calls it as it calls `keras.optimizers.LossScaleOptimizer`: `scale_loss` gets the
    loss, of which the gradients of single examples are computed, and `apply` makes the step. The
    loss that `scale_loss` returns has no gradients: so `tape.gradient` costs nothing, and `apply`
    refuses gradients that come from elsewhere.

    Formal guarantee: on batches of `tfdp.data.poisson_batches`, T steps are T adaptively composed
    Poisson-sampled Gaussian mechanisms with sampling probability `expected_batch_size /
    dataset_size` and noise multiplier `noise_multiplier`, under zero-out; `ledger`
    counts them.

    Args:
      inner_optimizer: An optimizer of Keras 3, such as `keras.optimizers.AdamW(0.001)`.
      {{private_arguments}}
      name: Name of the optimizer.

    Raises:
      ValueError: An argument is out of its range; while training, the loss is not one value per
        example, or the model mixes examples (BatchNormalization).

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = keras.Sequential([keras.layers.Dense(2)])
      >>> model.compile(
      ...     optimizer=tfdp.keras3.DPOptimizer(
      ...         keras.optimizers.AdamW(0.001),
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=1.1,
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True

    References:
      - Abadi et al., 2016, Deep Learning with Differential Privacy, Algorithm 1
        (https://arxiv.org/abs/1607.00133).
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: Any,
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
        name: str | None = None,
    ):
        _check_inner(inner_optimizer)
        check_name(name)
        config = PrivacyConfig.checked(self._public_name(), locals())
        if config.sparse_embeddings is not None:
            row_updates().check_inner(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name or type(self).__name__)
        self.inner_optimizer = inner_optimizer
        self._self_setattr_tracking = False  # What follows is in no checkpoint by itself.
        self._name = self.name
        self._assignment: several_optimizers.Assignment | None = None
        self._set_privacy(config)
        self._self_setattr_tracking = True

    def __repr__(self) -> str:
        # Keras 2 shows it in the error for optimizers that it does not know.
        noise = schedules.describe(self.noise_multiplier)
        return (
            f"<tfdp.keras3.{type(self).__name__}, for models of Keras 3 (`import keras`), with "
            f"l2_norm_clip={self.l2_norm_clip:g}, noise_multiplier={noise}>"
        )

    def _public_name(self) -> str:
        return f"tfdp.keras3.{type(self).__name__}"

    # The step.

    def scale_loss(self, loss: Any) -> tf.Tensor:
        """Takes the loss of the step, of which `apply` clips the gradients.

        Args:
          loss: One loss per example, `[rows]`, or a scalar that is provably their sum or mean.

        Returns:
          The value of the loss, without gradients.

        Raises:
          ValueError: It is called outside of a `tf.function`, or twice before `apply`.
        """
        self._check_traced()
        if isinstance(loss, BatchLoss):
            raise ValueError(
                f"Argument `loss` of {type(self).__name__}.scale_loss must be a tensor. Received a "
                "TwoTermLoss: give it to `minimize`."
            )
        loss = tf.convert_to_tensor(loss)
        self._keep(loss)
        return tf.stop_gradient(loss)

    def _keep(self, loss: tf.Tensor | BatchLoss) -> None:
        """Keeps the loss of the graph being built for `apply`."""
        scaled = self._scaled_losses()
        if replicas.index() in scaled:
            raise ValueError(
                f"{type(self).__name__}.scale_loss must be called once before each `apply`: one "
                "loss is one step. Received a second loss. Add the losses of an example up before."
            )
        scaled[replicas.index()] = loss
        # Also a step that never gives it to `apply` must write nothing that depends on data.
        step_check.watch(tf.compat.v1.get_default_graph())

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Takes a private step of the loss that `scale_loss` got: clips, sums, adds noise, updates.

        Args:
          grads: The gradients of what `scale_loss` returned: None for each variable.
          trainable_variables: The variables to update; None: those it was built with.

        Raises:
          ValueError: There is no such loss, the gradients are others, the step would not be
            private, it is not taken in a `tf.function`, or there are no variables.
        """
        self._check_traced()
        if trainable_variables is None and not self.built:
            raise error(
                "trainable_variables", "given, or those of `optimizer.build(variables)`", None
            )
        loss = self._scaled_losses().pop(replicas.index(), None)
        if loss is None:
            raise ValueError(
                f"{_HOW}Received a call of {type(self).__name__}.apply without a loss from "
                f"`scale_loss` in the same function.{scaling_hint('keras')}"
            )
        if any(gradient is not None for gradient in grads):
            raise ValueError(
                f"{_HOW}Received gradients in {type(self).__name__}.apply that are not those of "
                "the loss that `scale_loss` returned, which has none (`tape.gradient` gives None "
                "for each variable)."
            )
        if trainable_variables is None:
            trainable_variables = self.inner_optimizer._trainable_variables
        self._take_step(loss, list(trainable_variables))

    def minimize(self, loss: Any, trainable_variables: Any) -> None:
        """Takes a private step of a loss, without a tape.

        Args:
          loss: See `scale_loss`; or a `tfdp.clipping.TwoTermLoss`.
          trainable_variables: The variables to update.

        Raises:
          ValueError: The step would not be private, or is not taken in a `tf.function`.
        """
        self._check_traced()
        self._keep(loss if isinstance(loss, BatchLoss) else tf.convert_to_tensor(loss))
        variables = list(trainable_variables)
        self.apply([None] * len(variables), variables)

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: a private step changes variables.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `stateless_apply`.")

    def _tf_variable(self, variable: Any) -> tf.Variable:
        return tf_variable(variable)

    def _scaled_losses(self) -> dict[int, tf.Tensor | BatchLoss]:
        """Returns the losses of the graph being built that wait for `apply`, by replica."""
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, _SCALED):
            setattr(graph, _SCALED, weakref.WeakKeyDictionary())
        return getattr(graph, _SCALED).setdefault(self, {})

    def _update(self, gradients: list[tuple[tf.Tensor | None, tf.Variable]], name: Any) -> Any:
        known = {
            id(tf_variable(variable)): variable
            for variable in self.inner_optimizer._trainable_variables
        }
        rows = [(g, known[id(v)]) for g, v in gradients if isinstance(g, tf.IndexedSlices)]
        if rows:
            row_updates().apply(self.inner_optimizer, rows)
            gradients = [(g, v) for g, v in gradients if not isinstance(g, tf.IndexedSlices)]
            if not gradients:  # Keras takes no step without gradients.
                self.inner_optimizer.iterations.assign_add(1)
                return
        before = _calls.kept
        self.inner_optimizer.apply(
            [gradient for gradient, _ in gradients],
            [known[id(variable)] for _, variable in gradients],
        )
        if replicas.count() > 1 and _calls.kept == before:
            raise private_apis.PrivateApiMissingError(
                f"The inner optimizer {type(self.inner_optimizer).__name__}, as this version of "
                "Keras calls it, adds up the gradients of all replicas once more. Train without a "
                "distribution strategy, or with an optimizer of Keras as it is."
            )

    def _loss_metrics(self, model: Any) -> list[Any] | None:
        if not isinstance(model, keras.Model):
            return None
        total, parts = model._loss_tracker, getattr(model._compile_loss, "metrics", [])
        return [*([] if total is None else [total]), *parts]

    def update_code(self, variables: Sequence[tf.Variable]) -> Code:
        """Yields, for messages, the functions of users that an update may call."""
        yield from keras_3.update_code(self.inner_optimizer)
        yield from described("optimizer", type(self))

    # The state.

    def build(self, variables: Iterable[Any]) -> None:
        """Creates the state now, not at the first step, so that a checkpoint can be restored.

        The ledger takes over what these variables have cost under other private optimizers.

        Args:
          variables: The variables that will be trained: `model.trainable_variables`.

        Raises:
          ValueError: It was built with other variables, they hold no real numbers that are
            updated by gradients, or they have no values yet and the inner optimizer needs them.
        """
        variables = list(variables)
        values = [tf_variable(variable) for variable in variables]
        if self.built:
            self.inner_optimizer._check_variables_are_known(variables)
        else:
            _check_updated(variables)
            self._check_workers(values)
            # A tf.function that sees variables being created is traced twice, and after an error
            # in its first trace it does nothing: it does not see these.
            with tf.init_scope() if tf.distribute.has_strategy() else plain_variables():
                if not self.inner_optimizer.built:
                    self._build_inner(variables)
                self._create_record(self._add_weight)
                self._create_memory(self._add_weight, values)
            self.built = True
        with tf.init_scope():  # Once, and not in each step.
            self._assign_loaded()
            self._released.trains(values)

    def _build_inner(self, variables: list[Any]) -> None:
        known = several_optimizers.parts(self.inner_optimizer)
        assigned = several_optimizers.choosing(self.inner_optimizer, self._assignment, variables)
        try:
            with assigned:
                self.inner_optimizer.build(variables)
        except Exception as cause:
            if all(tf_variable(variable).is_initialized() for variable in variables):
                raise
            # A new one: this one is half built, and would be taken for one that is.
            self.inner_optimizer = several_optimizers.fresh(self.inner_optimizer, [])
            raise ValueError(
                f"The model must have weights before it is trained with "
                f"{type(self.inner_optimizer).__name__}, which reads them to make its own state. "
                "Received a model that makes them in its first step. Give it a `keras.Input`, or "
                "call `model.build(input_shape)` or the model itself on a batch before `fit`."
            ) from cause
        for part in several_optimizers.parts(self.inner_optimizer):
            if all(part is not one for one in known):  # A function has chosen it just now.
                _check_part(part)
        for updating in (self.inner_optimizer, *several_optimizers.parts(self.inner_optimizer)):
            # Gradients are the sums of all replicas already.
            updating._all_reduce_sum_gradients = _keep_sums

    def _add_weight(self, name: str, shape: Any, dtype: Any, initializer: Any, **_: Any) -> Any:
        dtype = tf.as_dtype(dtype).name
        return self.add_variable(tuple(shape), initializer, dtype, name=name).value

    @property
    def variables(self) -> list[Any]:
        """The variables of the state: the record, and those of the inner optimizer."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def iterations(self) -> Any:
        """Number of steps of the inner optimizer."""
        return self.inner_optimizer.iterations

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches that make one logical batch."""
        return self._gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: None) -> None:
        """Takes Keras's default, None: its own accumulation is not used."""
        if steps is not None:
            raise AttributeError(
                "`gradient_accumulation_steps` is an argument of the private optimizer, and cannot "
                f"be changed. Received: {steps!r}."
            )

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        try:
            self.inner_optimizer.learning_rate = learning_rate
        except TypeError as error:
            raise TypeError(
                "A learning rate that follows a schedule cannot be set, as callbacks such as "
                "`LearningRateScheduler` do: give the optimizer, or `make_private`, the argument "
                f"`learning_rate`, a number. Received: {learning_rate!r}."
            ) from error

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the weight decay of the inner optimizer."""
        for part in several_optimizers.parts(self.inner_optimizer):
            part.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Does what the inner optimizer does at the end of `fit`."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def _state_variables(self) -> list[tf.Variable]:
        return [tf_variable(variable) for variable in self.variables]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Takes over, before a checkpoint, what other optimizers have done to the variables."""
        if tf.executing_eagerly():
            self._released.refresh()
        return super()._trackable_children(save_type, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again, without the secret noise key."""
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **self._privacy_config(),
        }
        assignment = several_optimizers.assignment_of(self.inner_optimizer) or self._assignment
        if assignment is not None:
            config[_ASSIGNMENT] = assignment.get_config()
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "DPOptimizer":
        """Makes an optimizer from its config."""
        config = dict(config)
        saved = config.pop(_ASSIGNMENT, None)
        inner = config.get("inner_optimizer")
        if isinstance(inner, dict):
            config["inner_optimizer"] = keras.saving.deserialize_keras_object(
                inner, custom_objects=custom_objects
            )
        if saved is None:
            return super().from_config(config, custom_objects)
        assignment = several_optimizers.Assignment.from_config(saved)
        config["inner_optimizer"] = several_optimizers.joined(config["inner_optimizer"], assignment)
        optimizer = super().from_config(config, custom_objects)
        optimizer._assignment = assignment
        return optimizer

    def __copy__(self) -> "DPOptimizer":
        """Returns a copy that shares nothing: it draws other noise and counts for itself."""
        return copy.deepcopy(self)


def row_updates() -> Any:
    """Returns the module of updates of rows, which is loaded where it is used."""
    return importlib.import_module("tfdp.keras3.row_updates")


keep_evaluations_private(keras)
guard_fit(keras)


def _check_inner(inner: Any) -> None:
    """Raises a ValueError if an optimizer cannot be made private."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise error(
            "inner_optimizer",
            "an optimizer of Keras 3, such as `keras.optimizers.AdamW(0.001)`",
            inner,
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            "Argument `loss_scale_factor` of the inner optimizer must be None: gradients are "
            f"clipped as they are. Received: {inner.loss_scale_factor}."
        )
    for part in (inner, *several_optimizers.parts(inner)):
        _check_part(part)
        rate = getattr(part, "_learning_rate", 0.0)
        if isinstance(rate, keras.Variable):
            rate = float(rate.numpy())
        check_hyperparameters({**vars(part), "learning_rate": rate})


class _Calls(threading.local):
    kept = 0


_calls = _Calls()


def _keep_sums(gradients: Iterable[Any]) -> list[Any]:
    """Stands for the sum over replicas, which gradients are already; counts its calls."""
    _calls.kept += 1
    return list(gradients)


def _check_part(inner: Any) -> None:
    """Raises a ValueError if an optimizer, or one of several, cannot get noisy gradients."""
    if isinstance(inner, (PrivateStep, keras.optimizers.LossScaleOptimizer)):
        raise error(
            "inner_optimizer",
            "an optimizer that updates variables itself, and changes no losses",
            inner,
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "Argument `gradient_accumulation_steps` of the inner optimizer must be None: noise "
            "would be added to each part of a logical batch. Received: "
            f"{inner.gradient_accumulation_steps}. Give it to the private optimizer."
        )
    if inner.built and int(inner.iterations) > 0:
        raise ValueError(
            "Argument `inner_optimizer` must be one that has taken no steps: gradients without "
            "noise, of which no ledger knows, may be in its state. Received: "
            f"{type(inner).__name__} after {int(inner.iterations)} steps. Make a new one: "
            "`type(optimizer).from_config(optimizer.get_config())`."
        )


def _of_inner(name: str) -> property:
    """Returns an attribute that is the inner optimizer's."""

    def get(self: DPOptimizer) -> Any:
        return getattr(self.inner_optimizer, name)

    def put(self: DPOptimizer, value: Any) -> None:
        if hasattr(self, "inner_optimizer"):  # Not Keras's default, when this one is made.
            setattr(self.inner_optimizer, name, value)

    return property(get, put, doc=f"`{name}` of the inner optimizer.")


for _name in (
    *("clipnorm", "clipvalue", "global_clipnorm", "weight_decay"),
    *("ema_momentum", "ema_overwrite_frequency", "use_ema"),
):
    setattr(DPOptimizer, _name, _of_inner(_name))


def _check_updated(variables: Iterable[Any]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                "Variables must be updated by gradients. Received the variable "
                f"'{variable.path}', of a layer that was quantized to float8, which is replaced "
                "by a statistic of the batch."
            )


# Python 3.13 takes the indentation from docstrings.
_DOC, _PLACE = str(DPOptimizer.__doc__), "{{private_arguments}}"
_INDENTATION = _DOC[: _DOC.index(_PLACE)].rpartition("\n")[2]
DPOptimizer.__doc__ = _DOC.replace(
    _PLACE, PRIVATE_ARGUMENTS.replace("\n      ", f"\n{_INDENTATION}")
)
