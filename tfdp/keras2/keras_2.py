"""Facts of Keras 2, and TensorFlow Privacy's classes: what the modules for Keras 2 import.

Where these are missing, or `tf.keras` is Keras 3, the import raises the error that says what to use
for models of Keras 3.

Raises:
  ImportError: See `tfdp.base.compat.check_keras_2`.
"""

from typing import Any, TypeAlias

import tensorflow as tf

from tfdp.base import compat, private_apis

compat.check_keras_2()
private_apis.check("tf_keras", "tensorflow_privacy")

from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (  # noqa: E402
    VectorizedDPKerasAdamOptimizer,
    VectorizedDPKerasSGDOptimizer,
)

__all__ = [
    "BATCH_NORMALIZATION",
    "Callback",
    "VectorizedDPKerasAdamOptimizer",
    "VectorizedDPKerasSGDOptimizer",
    "check_is_model",
    "is_called_for_inference",
    "registered",
    "takes",
]

Callback: TypeAlias = tf.keras.callbacks.Callback
# Decorates the classes that Keras saves by name.
registered = tf.keras.utils.register_keras_serializable(package="tfdp")

BATCH_NORMALIZATION = (
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
)


def check_is_model(model: Any) -> None:
    """Raises a ValueError if `model` is not a model of Keras 2."""
    if not isinstance(model, tf.keras.Model):
        module = type(model).__module__
        keras_3 = module.startswith("keras.") or any(
            base.__module__.startswith("keras.src") for base in type(model).__mro__
        )
        raise ValueError(
            "Argument `model` must be a model of Keras 2, which `tf.keras` is with the environment "
            f"variable TF_USE_LEGACY_KERAS=1. Received: {type(model).__name__} of {module}."
            + (" Models of Keras 3 (`import keras`) have `tfdp.keras3`." if keras_3 else "")
        )


def is_called_for_inference(layer: Any) -> bool:
    """Returns whether all calls of a layer in functional models are with `training=False`."""
    nodes = getattr(layer, "inbound_nodes", [])
    called = [node.call_kwargs.get("training") for node in nodes if node.call_args]
    return bool(called) and all(training is False for training in called)


def takes(network: tf.keras.Model) -> Any:
    """Returns the specs of what a model takes, for any number of rows; None if it is not known."""
    spec = network.save_spec(dynamic_batch=True)
    return None if spec is None else spec[0][0]
