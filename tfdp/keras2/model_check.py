"""Check for everything in a Keras model that private training refuses or does slowly."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.keras2.dp_sgd import DPSGD
from tfdp.keras2.front_end import KERAS_2, is_called_for_inference
from tfdp.keras2.keras_2 import check_is_model
from tfdp.training import model_check
from tfdp.training.findings import ModelCheck


def validate(model: tf.keras.Model, loss: Any = None, *, data: Any = None) -> ModelCheck:
    """Finds everything in a model that private training refuses or does slowly, before training.

    The training step is traced on symbolic inputs, with the engine that clips in training; no batch
    is computed. If the step is refused, the layers and the loss are traced one by one, so that all
    problems are reported together.

    Of a model with a `train_step` or `compute_loss` of its own, that step is traced, with a private
    optimizer in place of the model's, if `data` is given.

    Args:
      model: A model of Keras 2 that is built, or was called.
      loss: The loss, as in `model.compile`; None: that of the compiled model. Without either, only
        the layers are examined.
      data: `(x, y)`, or `tfdp.data.poisson_batches`, from which the shapes and types of targets
        are taken; None: they are guessed from the model's outputs and the loss.

    Returns:
      The findings; `print` shows them. `ok` tells whether training would start; `check()` raises an
      error if it would not.

    Raises:
      ValueError: `model` is not a model of Keras 2, its inputs are not known, or `data` are
        no examples of real numbers.

    Example:
      >>> import tensorflow as tf, tfdp
      >>> model = tf.keras.Sequential([
      ...     tf.keras.layers.Dense(4, input_shape=[3]),
      ...     tf.keras.layers.BatchNormalization(name="bn"),
      ... ])
      >>> found = tfdp.validate(model, "mse")
      >>> found.ok, found.findings[0].where
      (False, "layer 'bn' (BatchNormalization)")
    """
    check_is_model(model)
    return model_check.check(_FRONT_END, model, loss, data)


def validate_without_loss(model: tf.keras.Model, loss: None, *, data: Any) -> ModelCheck:
    """Finds what is refused of a model that is to be trained without a loss of `compile`."""
    return model_check.check(_FRONT_END, model, loss, data, has_no_loss=True)


def _inputs(model: Any, data: Any) -> Any:
    return model.save_spec()


def _compiled_loss(model: Any) -> tuple[Any, Any]:
    compiled = model.compiled_loss
    return (
        (None, None) if compiled is None else (compiled._user_losses, compiled._user_loss_weights)
    )


def _loss(model: Any, losses: Any, weights: Any) -> Callable[[Any, Any, Any], tf.Tensor]:
    compile_utils = importlib.import_module("tf_keras.src.engine.compile_utils")
    names = getattr(model, "output_names", None)
    container = compile_utils.LossesContainer(losses, weights, output_names=names)

    def compute(y: Any, predictions: Any, regularizer: Any) -> tf.Tensor:
        regularizers = None if regularizer is None else [regularizer]
        return container(y, predictions, regularization_losses=regularizers)

    return compute


def _own_variables(layer: Any) -> list[tf.Variable]:
    states = tf.nest.flatten(getattr(layer, "states", None))  # For stateful recurrent layers.
    own = [*layer._trainable_weights, *layer._non_trainable_weights, *states]
    return [v for v in own if isinstance(v, tf.Variable)]  # Vocabularies, too, are among weights.


def _inputs_of(model: Any) -> Callable[[Any], Any]:
    """Returns a function of layers: what Keras has noted of their calls."""
    models = [layer for layer in model._flatten_layers() if is_called_for_inference(layer)]
    asleep = {id(layer) for model in models for layer in model._flatten_layers()}

    def inputs_of(layer: Any) -> Any:
        if not layer._saved_model_inputs_spec:
            return None
        args, kwargs = layer._get_save_spec(inputs_only=False)
        if layer._expects_training_arg:
            kwargs = {**kwargs, "training": id(layer) not in asleep}
        return args, kwargs

    return inputs_of


def _swap_optimizer(model: Any, optimizer: Any) -> None:
    if optimizer is not None:
        model.optimizer = optimizer
    elif hasattr(model, "optimizer"):
        del model.optimizer


_FRONT_END = KERAS_2.with_parts(
    model_check.FrontEnd,
    inputs=_inputs,
    compiled_loss=_compiled_loss,
    loss=_loss,
    own_variables=_own_variables,
    trainable_variables=lambda layer: layer.trainable_variables,
    watching=lambda model: contextlib.nullcontext(_inputs_of(model)),
    settings=model_check.replicas,
    swap_optimizer=_swap_optimizer,
    sgd=DPSGD,
    autograph=True,
)
