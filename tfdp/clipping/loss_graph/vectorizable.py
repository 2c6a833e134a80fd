"""Gradients that `tf.vectorized_map` can vectorize, for operations whose own ones it cannot."""

from collections.abc import Callable

import tensorflow as tf

# Above this many values in a patch, finding patches by a convolution costs more than it saves.
_LARGEST_PATCH = 300


def gradient_of(op: tf.Operation) -> Callable | None:
    """Returns a vectorizable gradient function for `op`, or None where TensorFlow's is as good."""
    if op.type != "Conv2D" or op.get_attr("data_format") != b"NHWC":
        return None
    x, kernel = op.inputs
    if not kernel.shape.is_fully_defined() or x.shape[-1] != kernel.shape[2]:
        return None
    return _conv2d_gradient if kernel.shape[:3].num_elements() <= _LARGEST_PATCH else None


def _conv2d_gradient(op: tf.Operation, output_gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns the gradients of a convolution, the kernel's as one product with patches."""
    x, kernel = op.inputs
    names = ("strides", "padding", "explicit_paddings", "dilations")
    attributes = {name: op.get_attr(name) for name in names}
    x_gradient = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=tf.shape(x), filter=kernel, out_backprop=output_gradient, **attributes
    )
    patch = kernel.shape[:3].num_elements()
    identity = tf.reshape(tf.eye(patch, dtype=x.dtype), [*kernel.shape[:3], patch])
    patches = tf.raw_ops.Conv2D(input=x, filter=identity, **attributes)
    kernel_gradient = tf.matmul(
        tf.reshape(patches, [-1, patch]),
        tf.reshape(output_gradient, [-1, kernel.shape[3]]),
        transpose_a=True,
    )
    return [x_gradient, tf.reshape(kernel_gradient, kernel.shape)]
