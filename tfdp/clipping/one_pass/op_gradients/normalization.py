"""Batch normalization with public statistics: the scale and the shift of its channels."""

import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients.elementwise import direct, reduced
from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.one_pass.per_example_gradients import Contribution
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.shared_tensors import constant

_TYPES = ("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")


def _axes(use: Use) -> list[int] | None:
    """Returns the axes of `[n, each, ...]` but those of the examples and the channels."""
    if use.op.get_attr("is_training") or use.rows[0] is None or use.rows[0].axis != 0:
        return None
    rank = use.gradient.shape.rank
    channel = 2 if use.op.get_attr("data_format").startswith(b"NC") else rank - 1
    return [axis for axis in range(1, rank) if axis != channel]


@register_op_gradients(*_TYPES, weight=1)
def scale(use: Use) -> Contribution | None:
    """Handles gamma, which multiplies `(x - mean) / sqrt(variance + epsilon)`."""
    axes, x = _axes(use), use.data[0]
    if axes is None or x is None or use.inside:
        return None
    mean, variance = use.op.inputs[3:5]
    inverse = tf.math.rsqrt(variance + constant(use.op.get_attr("epsilon"), variance.dtype))

    def function(g: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        # Linear in x: one pass over memory less than to normalize x first.
        products = tf.reduce_sum(g * x, axis=constant(axes))
        return (products - mean * tf.reduce_sum(g, axis=constant(axes))) * inverse

    return direct(use, [use.gradient, x], function, axes, "normalization's scale")


@register_op_gradients(*_TYPES, weight=2)
def shift(use: Use) -> Contribution | None:
    """Handles beta."""
    axes = _axes(use)
    if axes is None:
        return None
    return reduced(use, [use.gradient], lambda g: g, axes, "normalization's shift")
