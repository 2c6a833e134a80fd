"""The rule for operations that have none: the operation's own gradient, example by example."""

import tensorflow as tf

from tfdp.clipping.loss_graph import copying
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.vectorized.mapping import vectorized_map


def generic(use: Use) -> Contribution | None:
    """Evaluates the operation on each example and differentiates it, vectorized over examples."""
    op, output = use.op, use.rows[-1]
    if use.is_open:
        return None
    if use.has_sizes or use.inside:  # Sizes of the whole batch are wrong for one example.
        return None
    inputs = [(i, t) for i, t in enumerate(use.data) if t is not None]
    if any(rows is not None and rows.interleaved for rows in use.rows) or len(op.outputs) != 1:
        return None
    if any(tensor.dtype == tf.resource for tensor in op.inputs) or output is None:
        return None
    public = {
        i: tensor for i, tensor in enumerate(op.inputs) if use.data[i] is None and i != use.weight
    }
    weights = op.inputs[use.weight]
    if sum(tensor is weights for tensor in op.inputs) > 1:
        return None
    axes = [0 if rows is None else rows.axis for rows in use.rows]

    def gradient_of_one(row: list[tf.Tensor]) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        values = {i: copying.bring(t, graph) for i, t in {**public, use.weight: weights}.items()}
        for (i, _), tensor in zip(inputs, row[1:], strict=True):
            values[i] = _restore(tensor, axes[i])
        values[use.weight] = weight = tf.identity(values[use.weight])
        known = {tensor.name: values[i] for i, tensor in enumerate(op.inputs)}
        ((result,), _) = copying.copy([op], [op.outputs[0]], known)
        (gradient,) = tf.gradients(result, weight, _restore(row[0], output.axis))
        return tf.reshape(tf.convert_to_tensor(gradient), [-1])

    def function(*tensors: tf.Tensor) -> tf.Tensor:
        narrow = [use.gradient.dtype, *[t.dtype for _, t in inputs]]
        narrowed = [tf.cast(t, dtype) for t, dtype in zip(tensors, narrow, strict=True)]
        return vectorized_map(gradient_of_one, narrowed)

    floats = sum(t.shape[1:].num_elements() or 0 for _, t in inputs)
    name = f"the gradient of {op.type}, vectorized"
    return Direct(
        [use.gradient, *[t for _, t in inputs]], weights.shape.as_list(), name, function, floats
    )


def _restore(tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Reshapes `[each, ...]` of one example to the axes that the operation works with."""
    order = list(range(1, tensor.shape.rank))
    return tf.transpose(tensor, [*order[:axis], 0, *order[axis:]]) if axis else tensor
