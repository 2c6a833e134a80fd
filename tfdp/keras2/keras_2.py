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
    "registered",
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
