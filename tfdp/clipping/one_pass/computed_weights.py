"""Gradients of variables from which weights are computed before examples meet them.

A scale that is divided by a standard deviation, a slice of a kernel, rows of a table of positions:
an example's gradient of the variable follows from that of the weights, by the gradient of what
computes them, which no example is in.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.loss_graph import copying
from tfdp.clipping.one_pass import low_rank_weights
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct
from tfdp.clipping.one_pass.weight_uses import View, follows_from
from tfdp.clipping.vectorized.mapping import vectorized_map


def of_variable(part: Contribution, view: View, shape: Sequence[int]) -> Contribution:
    """Returns the gradients of a variable, from those of weights that were computed from it.

    Args:
      part: Gradients of the weights.
      view: Steps from the variable to the weights: it has an `end`.
      shape: Shape of the variable.
    """

    def function(*tensors: tf.Tensor) -> tf.Tensor:
        gradients = part.unflatten(part.flat(tensors))
        found = vectorized_map(lambda gradient: _pulled_back(gradient, view, shape), gradients)
        return tf.reshape(found, [-1, tf.TensorShape(shape).num_elements()])

    name = f"{part.name.split(',')[0]}, of computed weights"
    floats = part.floats_per_row + tf.TensorShape(shape).num_elements()
    found = Direct(part.tensors, shape, name, function, floats)
    found.slow = part.slow
    if low_rank_weights.has_product(view):
        found.slow = f"each example's gradient of a product of shape {part.shape} is instantiated"
    return found


def _pulled_back(gradient: tf.Tensor, view: View, shape: Sequence[int]) -> tf.Tensor:
    """Returns the gradient of the variable, from that of what is computed from it."""
    handle = copying.bring(view.handle, tf.compat.v1.get_default_graph())
    end = _evaluate(view.end, view, handle)
    (found,) = tf.gradients(end, handle, tf.cast(gradient, end.dtype))
    if found is None:  # It was rounded, say.
        return tf.zeros(shape, gradient.dtype)
    return tf.cast(tf.convert_to_tensor(found), gradient.dtype)


def _evaluate(tensor: tf.Tensor, view: View, handle: tf.Tensor) -> tf.Tensor:
    """Computes a public tensor again in the default graph, from the variable's handle there."""
    target = tf.compat.v1.get_default_graph()
    if tensor is view.handle:
        return handle
    if tensor.graph is view.handle.graph:
        # Only what follows from the variable: the rest may be the shape of a batch, say.
        operations, boundary = copying.cone([tensor], {view.handle.ref()})
        path = [op for op in operations if follows_from(op.outputs[0], view)]
        made = {t.ref() for op in path for t in op.outputs}
        known = {t.name: t for op in path for t in op.inputs if t.ref() not in made}
        known = {name: copying.bring(t, target) for name, t in known.items()}
        known[view.handle.name] = handle
        return copying.copy(path, [tensor], known)[0][0]
    inputs = {t.ref(): i for i, t in enumerate(tensor.graph.inputs)}
    operations, boundary = copying.cone([tensor], set(inputs))
    known = {}
    for t in boundary:
        outer = view.caller.inputs[inputs[t.ref()]]
        follows = follows_from(outer, view)
        known[t.name] = _evaluate(outer, view, handle) if follows else copying.bring(outer, target)
    return copying.copy(operations, [tensor], known)[0][0] if operations else known[tensor.name]
