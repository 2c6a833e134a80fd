"""Check for everything in a model of Keras 3 that private training refuses or does slowly."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.base.keras_3 import tf_variable
from tfdp.keras3.front_end import KERAS_3
from tfdp.keras3.keras_3 import check_is_model
from tfdp.keras3.named import DPSGD
from tfdp.training import model_check
from tfdp.training.findings import Finding, ModelCheck


def validate(model: keras.Model, loss: Any = None, *, data: Any = None) -> ModelCheck:
    """Finds everything in a model that private training refuses or does slowly, before training.

    It does for models of Keras 3 what `tfdp.keras2.validate` does for those of Keras 2. The
    training step is traced on symbolic inputs, with the engine that clips in training; no batch is
    computed. If the step is refused, the layers and the loss are traced one by one, so that all
    problems are reported together.

    Of a model with a `train_step` or `compute_loss` of its own, that step is traced, with a private
    optimizer in place of the model's, if `data` is given.

    Args:
      model: A model of Keras 3 that is built, or was called.
      loss: The loss, as in `model.compile`; None: that of the compiled model. Without either, only
        the layers are examined.
      data: `(x, y)`, or `tfdp.data.poisson_batches`, from which the shapes and types of inputs and
        targets are taken; for a task of KerasHub also its texts or images, as `make_private` takes
        them. None: inputs are those that the model was made with (of a subclassed one, real numbers
        of the shape that it was called with), and targets are guessed from the model's outputs and
        the loss.

    Returns:
      The findings; `print` shows them. `ok` tells whether training would start; `check()` raises an
      error if it would not.

    Raises:
      ValueError: `model` is not a model of Keras 3, its inputs are not known, or `data` are
        no examples of real numbers.

    Example:
      >>> import keras, tfdp.keras3
      >>> model = keras.Sequential([
      ...     keras.Input([3]),
      ...     keras.layers.Dense(4),
      ...     keras.layers.BatchNormalization(name="bn"),
      ... ])
      >>> found = tfdp.keras3.validate(model, "mse")
      >>> found.ok, found.findings[0].where
      (False, "layer 'bn' (BatchNormalization)")
    """
    check_is_model(model)
    return model_check.check(_FRONT_END, model, loss, data)


def validate_without_loss(model: keras.Model, loss: None, *, data: Any) -> ModelCheck:
    """Finds what is refused of a model that is to be trained without a loss of `compile`."""
    return model_check.check(_FRONT_END, model, loss, data, has_no_loss=True)


def _inputs(model: Any, data: Any) -> Any:
    """Returns the specs of what `fit` calls the model with: one argument."""
    if not model.built:
        return None
    if data is not None:
        return (data,), {}
    functional = getattr(model, "_functional", None) or model  # Set in a Sequential model.
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is not None:
        return (tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs),), {}
    shapes = list((model._build_shapes_dict or {}).values())
    if len(shapes) != 1:
        return None
    spec = keras.tree.map_shape_structure(
        lambda shape: tf.TensorSpec([None, *shape[1:]], model.input_dtype), shapes[0]
    )
    return (spec,), {}


def _compiled_loss(model: Any) -> tuple[Any, Any]:
    loss = model._compile_loss
    return (None, None) if loss is None else (loss._user_loss, loss._user_loss_weights)


class _Loss(keras.Model):
    """Model that has the loss of another, and one regularizer.

    Args:
      output_names: Names of the outputs of the other model; None: they have none.
    """

    def __init__(self, output_names: Any):
        super().__init__()
        if output_names is not None:
            self.output_names = output_names
        self.regularizer: Any = None

    @property
    def losses(self) -> list[Any]:
        return [] if self.regularizer is None else [self.regularizer]


def _loss(model: Any, losses: Any, weights: Any) -> Callable[[Any, Any, Any], tf.Tensor]:
    compiled = _Loss(getattr(model, "output_names", None))
    compiled.compile(loss=losses, loss_weights=weights)

    def compute(y: Any, predictions: Any, regularizer: Any) -> tf.Tensor:
        compiled.regularizer = regularizer
        return compiled.compute_loss(y=y, y_pred=predictions)

    return compute


def _own_variables(layer: Any) -> list[tf.Variable]:
    states = keras.tree.flatten(getattr(layer, "states", None))  # For stateful recurrent layers.
    states = [state for state in states if isinstance(state, keras.Variable)]
    own = [*layer._trainable_variables, *layer._non_trainable_variables, *states]
    return list(map(tf_variable, own))


@contextlib.contextmanager
def _watching(model: Any) -> Iterator[Callable[[Any], Any]]:
    """Notes what layers are called with, of which Keras 3 keeps the shapes alone."""
    seen: dict[int, Any] = {}
    before = [
        (vars(layer), vars(layer).get("call"), _noting(layer, seen))
        for layer in model._flatten_layers(include_self=False)
    ]
    for attributes, _, noting in before:
        attributes["call"] = noting
    try:
        yield lambda layer: seen.get(id(layer))
    finally:
        for attributes, call, _ in before:
            del attributes["call"]
            if call is not None:
                attributes["call"] = call


def _noting(layer: Any, seen: dict[int, Any]) -> Callable[..., Any]:
    """Returns a layer's `call` that notes the specs of its first arguments."""
    call = layer.call

    def noting_call(*args: Any, **kwargs: Any) -> Any:
        spec = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype) if tf.is_tensor(t) else t, (args, kwargs)
        )
        seen.setdefault(id(layer), spec)
        return call(*args, **kwargs)

    return noting_call


def _settings(model: Any) -> list[Finding]:
    findings = model_check.replicas(model)
    if any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables):
        findings.append(
            Finding(
                "the policy float8",
                "layers replace variables by a statistic of the batch.",
                "Build the model with another policy.",
            )
        )
    return findings


def _swap_optimizer(model: Any, optimizer: Any) -> None:
    attributes = vars(model)  # Keras tracks no optimizer, and would track it here.
    if optimizer is None:
        attributes.pop("optimizer", None)
    else:
        attributes["optimizer"] = optimizer


_FRONT_END = KERAS_3.with_parts(
    model_check.FrontEnd,
    inputs=_inputs,
    compiled_loss=_compiled_loss,
    loss=_loss,
    own_variables=_own_variables,
    trainable_variables=lambda layer: list(map(tf_variable, layer.trainable_variables)),
    watching=_watching,
    settings=_settings,
    swap_optimizer=_swap_optimizer,
    sgd=DPSGD,
    autograph=False,
)
