"""Embeddings: rows of a table that examples look up."""

import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Lookups
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.shared_tensors import product, reshaped, sizes_of


@register_op_gradients("ResourceGather", weight=0)
def resource_gather(use: Use) -> Contribution | None:
    """Keras's Embedding: reads rows of the variable."""
    return _lookup(use, use.op.get_attr("batch_dims"))


@register_op_gradients("GatherV2", weight=0)
def gather(use: Use) -> Contribution | None:
    """Handles `tf.gather` on the value of a variable, along its first axis."""
    axis = tf.get_static_value(use.op.inputs[2])
    return _lookup(use, use.op.get_attr("batch_dims")) if axis == 0 else None


def _lookup(use: Use, batch_dims: int) -> Contribution | None:
    indices, width = use.data[1], tf.TensorShape(use.shape[1:]).num_elements()
    if indices is None or batch_dims:
        return None
    n, *positions = sizes_of(indices)
    count = product(positions)
    return Lookups(
        reshaped(indices, [n, count]), reshaped(use.gradient, [n, count, width]), use.shape
    )
