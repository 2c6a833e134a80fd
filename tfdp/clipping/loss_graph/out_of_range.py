"""Protection of operations against labels and ids that are out of range.

A failure is visible, and a single example can cause it. The losses of such a label or id are NaN
instead, as on a GPU, and add no gradient.
"""

import weakref
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from tfdp.clipping.loss_graph.copying import cone

# For each graph: names of the tensors that replace outputs of guarded operations, by the names of
# the outputs. (A tensor would keep its graph alive.)
_guarded: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_SAME_VALUES = frozenset({"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"})


def guard(loss: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]) -> tf.Tensor:
    """Changes the operations that compute a loss so that no label or id makes them fail.

    Labels of `sparse_softmax_cross_entropy_with_logits` and indices of `tf.gather`, which Keras's
    Embedding uses, are meant, where the number of classes, or the size of the table, is known.

    Args:
      loss: A tensor of the graph being built.
      depends_on_data: Whether a tensor of it does.

    Returns:
      The loss, of the changed operations.
    """
    stand_ins = _guarded.setdefault(loss.graph, {})
    for op in cone([loss])[0]:
        limit = _number_of_values(op)
        if limit is None or op.outputs[0].name in stand_ins:
            continue
        if not _may_be_out_of_range(op.inputs[1], limit) or not depends_on_data(op.inputs[1]):
            continue
        with loss.graph.as_default(), tf.name_scope("within_range"):
            stand_ins[op.outputs[0].name] = _guard(op, limit).name
    return loss.graph.get_tensor_by_name(stand_ins.get(loss.name, loss.name))


def _guard(op: tf.Operation, limit: int) -> tf.Tensor:
    """Makes an operation use other values for those out of range; returns its output's stand-in."""
    values, output = op.inputs[1], op.outputs[0]
    uses = [(c, i) for c in output.consumers() for i, t in enumerate(c.inputs) if t is output]
    valid = tf.logical_and(values >= 0, values < tf.constant(limit, values.dtype))
    op._update_input(1, tf.where(valid, values, tf.zeros([], values.dtype)))
    if not output.dtype.is_floating:
        return output
    if op.type == "GatherV2":  # Dimensions of the table before those that are looked up.
        batch_dims = op.get_attr("batch_dims")
        for _ in range(_axis(op) - batch_dims):
            valid = tf.expand_dims(valid, batch_dims)
    for _ in range(output.shape.rank - valid.shape.rank):
        valid = tf.expand_dims(valid, -1)
    not_a_number = tf.constant(float("nan"), output.dtype)
    if op.type == "SparseSoftmaxCrossEntropyWithLogits":  # Without a gradient for such labels.
        found = tf.where(valid, output, not_a_number)
    else:  # Added: a choice would take a pass over memory in the gradient, too.
        found = output + tf.where(valid, tf.zeros([], output.dtype), not_a_number)
    for consumer, index in uses:
        consumer._update_input(index, found)
    return found


def _axis(op: tf.Operation) -> int:
    axis = int(tf.get_static_value(op.inputs[2]))
    return axis if axis >= 0 else axis + op.inputs[0].shape.rank


def _number_of_values(op: tf.Operation) -> int | None:
    """Returns the number of valid labels or ids of an operation.

    The result is None if any value is valid, or if the number is not known.
    """
    if op.type == "SparseSoftmaxCrossEntropyWithLogits":
        return op.inputs[0].shape[-1] if op.inputs[0].shape.rank else None
    if op.type not in ("GatherV2", "ResourceGather"):
        return None
    if op.outputs[0].shape.rank is None or op.inputs[1].shape.rank is None:
        return None
    if op.type == "GatherV2":
        known = op.inputs[0].shape.rank and tf.get_static_value(op.inputs[2]) is not None
        return op.inputs[0].shape[_axis(op)] if known else None
    return _rows(op.inputs[0])


def _rows(handle: tf.Tensor) -> int | None:
    """Returns the first dimension of the variable that a tensor is the handle of."""
    data = handle_data_util.get_resource_handle_data(handle)
    if not data.is_set or not data.shape_and_type[0].shape.dim:
        return None
    rows = data.shape_and_type[0].shape.dim[0].size
    return rows if rows >= 0 else None


def _may_be_out_of_range(values: tf.Tensor, limit: int) -> bool:
    """Returns whether values may be out of [0, limit), for all that the graph shows."""
    op = values.op
    while op.type in _SAME_VALUES and op.inputs[0].dtype.is_integer:
        op = op.inputs[0].op
    most = None  # The number of values that the operation makes.
    if op.outputs[0].dtype == tf.uint8:
        most = 256
    elif op.type == "ArgMax" and tf.get_static_value(op.inputs[1]) is not None:
        rank = op.inputs[0].shape.rank
        most = op.inputs[0].shape[int(tf.get_static_value(op.inputs[1]))] if rank else None
    elif op.type == "Bucketize":
        most = len(op.get_attr("boundaries")) + 1
    elif op.type in ("StringToHashBucketFast", "StringToHashBucketStrong"):
        most = op.get_attr("num_buckets")
    return most is None or most > limit
