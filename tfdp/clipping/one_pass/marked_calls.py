"""Calls of functions that Keras marks as a layer, and the modules that know these layers."""

import importlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.tf import op_types

# Beginnings of the marks. A module is loaded when there is such a call.
_MODULES = {"lstm_": "tfdp.clipping.one_pass.recurrent", "gru_": "tfdp.clipping.one_pass.recurrent"}


def function_of(op: tf.Operation) -> Any | None:
    """Returns the function that an operation calls, if there is one with a known mark."""
    if op.type not in op_types.CALLS:
        return None
    with tf.init_scope():
        name = op.get_attr("f").name
        function = op.graph._get_function(name) if tf.executing_eagerly() else None
    return None if function is None or _module_of(function) is None else function


def recognize(op: tf.Operation) -> Any | None:
    """Returns what an operation computes, by the module that knows its layer, or None.

    It has `transfer`, `backward` and `num_outputs`, as `recurrent.RecurrentCall`.
    """
    function = function_of(op)
    module = None if function is None else _module_of(function)
    return None if module is None else importlib.import_module(module).recognize(op)


def _module_of(function: Any) -> str | None:
    mark = function.definition.attr["api_implements"].s.decode()
    return next((name for start, name in _MODULES.items() if mark.startswith(start)), None)


def is_zero(gradient: Any) -> bool:
    """Returns whether a gradient is provably zero, as TensorFlow's are for unused outputs."""
    while tf.is_symbolic_tensor(gradient) and gradient.op.type in ("Identity", "Fill"):
        gradient = gradient.op.inputs[-1]
    if gradient is None or (tf.is_symbolic_tensor(gradient) and gradient.op.type == "ZerosLike"):
        return True
    value = tf.get_static_value(gradient)
    return value is not None and not np.any(value)
