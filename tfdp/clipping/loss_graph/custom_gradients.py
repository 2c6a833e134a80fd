"""Gradients that `tf.custom_gradient` put in place of TensorFlow's own.

Such a gradient is a Python function that closes over tensors of the graph in which it was made. To
use it in a copy of that graph, or to prove what it does to examples, its operations are traced in
the first graph, as functions of stand-ins for the gradients that arrive.
"""

import dataclasses

import tensorflow as tf
from tensorflow.python.framework import ops


@dataclasses.dataclass(frozen=True)
class TracedGradient:
    """The gradient of an operation, traced in its own graph.

    Attributes:
      arriving: Stand-ins for the gradients of the operation's outputs.
      gradients: Those of its inputs, or None.
    """

    arriving: list[tf.Tensor]
    gradients: list[tf.Tensor | None]


def is_custom(op: tf.Operation) -> bool:
    """Returns whether an operation's gradient was replaced by `tf.custom_gradient`."""
    return op.type == "IdentityN" and is_replaced(op)


def is_replaced(op: tf.Operation) -> bool:
    """Returns whether an operation's gradient is not that of its type."""
    try:
        return bool(op.get_attr("_gradient_op_type"))
    except ValueError:
        return False


def trace(op: tf.Operation) -> TracedGradient:
    """Traces the gradient of an operation for which `is_custom` holds."""
    with op.graph.as_default(), tf.control_dependencies(None):
        arriving = [tf.zeros_like(tensor) for tensor in op.outputs]
        gradients = ops.get_gradient_function(op)(op, *arriving)
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
    return TracedGradient(arriving, gradients)
