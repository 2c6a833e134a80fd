"""Keras 2, as training sees it."""

from typing import Any

import tensorflow as tf

from tfdp.keras2 import keras_2
from tfdp.training.front_end import FrontEnd


def is_called_for_inference(layer: Any) -> bool:
    """Returns whether all calls of a layer in functional models are with `training=False`."""
    nodes = getattr(layer, "inbound_nodes", [])
    called = [node.call_kwargs.get("training") for node in nodes if node.call_args]
    return bool(called) and all(training is False for training in called)


def takes(network: tf.keras.Model) -> Any:
    """Returns the specs of what a model takes, for any number of rows; None if it is not known."""
    spec = network.save_spec(dynamic_batch=True)
    return None if spec is None else spec[0][0]


KERAS_2 = FrontEnd(
    package=tf.keras,
    name="tf.keras",
    title="Keras 2",
    part="tfdp",
    optimizers="tfdp.DPSGD, DPAdam, DPSignSGD or DPSignAdam",
    ordinary="an ordinary optimizer of Keras (`tf.keras.optimizers`, not `legacy`)",
    normalizations=keras_2.BATCH_NORMALIZATION,
    takes=takes,
    tf_variable=lambda variable: variable,
    is_called_for_inference=is_called_for_inference,
)
