"""Facts of models of Keras 3, where one is given; what imports this has Keras 3."""

from typing import Any

import keras
import tensorflow as tf


def tf_variable(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable of a variable of Keras 3."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def takes(network: keras.Model) -> Any:
    """Returns the specs of what a model takes, for any number of rows."""
    if hasattr(network, "inputs"):  # Functional or sequential.
        sequential = isinstance(network, keras.Sequential)
        inputs = network.inputs[0] if sequential else network.input
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), inputs)
    shapes = (network.get_build_config() or {}).get("input_shape")
    return keras.tree.map_shape_structure(
        lambda shape: tf.TensorSpec([None, *shape[1:]], network.input_dtype), shapes
    )
