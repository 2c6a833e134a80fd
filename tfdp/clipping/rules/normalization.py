"""Batch normalization with public statistics: the scale and the shift of its channels."""

import tensorflow as tf

from tfdp.clipping.contributions import Contribution
from tfdp.clipping.rules.elementwise import reduced
from tfdp.clipping.rules.registry import register_rule
from tfdp.clipping.uses import Use

_TYPES = ("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")


def _axes(use: Use) -> tuple[int, list[int]] | None:
    """The axis of the channels in `[n, each, ...]`, and the others but that of the examples."""
    if use.op.get_attr("is_training") or use.rows[0] is None or use.rows[0].axis != 0:
        return None
    rank = use.gradient.shape.rank
    channel = 2 if use.op.get_attr("data_format").startswith(b"NC") else rank - 1
    return channel, [axis for axis in range(1, rank) if axis != channel]


@register_rule(*_TYPES, weight=1)
def scale(use: Use) -> Contribution | None:
    """Gamma, which multiplies `(x - mean) / sqrt(variance + epsilon)`."""
    found, x = _axes(use), use.data[0]
    if found is None or x is None or use.inside:
        return None
    channel, axes = found
    shape = [-1 if axis == channel else 1 for axis in range(use.gradient.shape.rank)]
    mean, variance = (tf.reshape(tensor, shape) for tensor in use.op.inputs[3:5])
    inverse = tf.math.rsqrt(variance + use.op.get_attr("epsilon"))
    return reduced(
        use, [use.gradient, x], lambda g, x: g * (x - mean) * inverse, axes, "normalization's scale"
    )


@register_rule(*_TYPES, weight=2)
def shift(use: Use) -> Contribution | None:
    """Beta."""
    found = _axes(use)
    if found is None:
        return None
    return reduced(use, [use.gradient], lambda g: g, found[1], "normalization's shift")
