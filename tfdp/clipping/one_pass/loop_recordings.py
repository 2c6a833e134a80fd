"""Loops that remember the random numbers that they draw.

The one-pass engine takes the steps of a loop again (`loops`), and needs the numbers of the first
time: those of a recurrent layer's dropout masks, say. A loop that draws some is replaced by one
that also writes them into lists.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import copying, data_flow
from tfdp.clipping.one_pass.weight_uses import unchanged
from tfdp.clipping.row_analysis.analysis import PUBLIC_STATEFUL_TYPES

# Operations with a state that return the same when a step is taken again.
REPEATABLE = data_flow.READS | op_types.CALLS | {"While", "If"}


def record_draws(operations: Sequence[tf.Operation], fixed: Sequence[tf.Tensor]) -> bool:
    """Replaces the loops that draw random numbers, in the graph that is being built.

    Args:
      operations: Operations of the graph.
      fixed: Tensors whose operations must stay.

    Returns:
      Whether a loop was replaced: then other operations compute what these did.
    """
    kept = {t.op.name for t in fixed}
    replaced = False
    for op in operations:
        if op.type not in op_types.LOOPS or op.name in kept:
            continue
        body = data_flow.function_graph(op.graph, op.get_attr("body").name)
        draws = draws_of(body)
        if not draws or all(recorder(body, t) is not None for t in draws):
            continue
        steps = number_of_steps(op, body)
        if steps is not None:
            with op.graph.as_default():
                _replace(op, body, draws, steps)
            replaced = True
    return replaced


def draws_of(body: tf.Graph) -> list[tf.Tensor]:
    """Returns what the operations of a loop's body return that draw random numbers."""
    operations, _ = copying.cone(body.outputs, {t.ref() for t in body.inputs})
    drawing = PUBLIC_STATEFUL_TYPES - REPEATABLE - {"VarHandleOp"}
    return [t for op in operations if op.type in drawing for t in op.outputs]


def recorder(body: tf.Graph, draw: tf.Tensor) -> int | None:
    """Returns the index of the loop's list that a tensor is written into; None if there is none."""
    for op in draw.consumers():
        if op.type != "TensorListSetItem" or op.inputs[2] is not draw:
            continue
        for index, (before, after) in enumerate(zip(body.inputs, body.outputs, strict=False)):
            place = [i for i, t in enumerate(body.inputs) if t is op.inputs[1]]
            if before is op.inputs[0] and unchanged(after).op is op and place:
                return index if counts(body, place[0]) else None
    return None


def counts(body: tf.Graph, index: int) -> bool:
    """Returns whether a variable of a loop is one more after each step."""
    add = unchanged(body.outputs[index]).op
    return (
        add.type == "AddV2" and add.inputs[0] is body.inputs[index] and integer(add.inputs[1]) == 1
    )


def number_of_steps(op: tf.Operation, body: tf.Graph) -> int | tf.Tensor | None:
    """Returns how many steps a loop takes; None if it does not count up to a limit."""
    condition = data_flow.function_graph(op.graph, op.get_attr("cond").name)
    place = {t.ref(): i for i, t in enumerate(condition.inputs)}
    pending, limits = [condition.outputs[0]], []
    while pending:
        test = unchanged(pending.pop()).op
        if test.type == "LogicalAnd":
            pending += test.inputs
            continue
        index = place.get(test.inputs[0].ref()) if test.type == "Less" else None
        if index is None or not counts(body, index):
            return None
        other = place.get(test.inputs[1].ref())
        if other is not None and unchanged(body.outputs[other]) is not body.inputs[other]:
            return None
        first = integer(op.inputs[index])
        limit = integer(test.inputs[1] if other is None else op.inputs[other])
        if first is not None and limit is not None:
            limits.append(max(0, limit - first))
        elif other is None:
            return None
        else:
            left = tf.cast(op.inputs[other] - op.inputs[index], tf.int32)
            limits.append(tf.maximum(left, 0))
    if all(isinstance(limit, int) for limit in limits):
        return min(limits)
    return tf.reduce_min(tf.stack(limits))


def integer(tensor: tf.Tensor) -> int | None:
    """Returns the value of a scalar, if it follows from constants and static shapes."""
    tensor = unchanged(tensor)
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "Max":
        value = tf.get_static_value(tensor.op.inputs[0])
        value = None if value is None else value.max()
    if value is None and tensor.op.type == "StridedSlice":
        value = _size(tensor.op)
    return None if value is None else int(value)


def _size(op: tf.Operation) -> int | None:
    """Returns one static size of a shape of which an operation takes a slice."""
    first, shrinks = tf.get_static_value(op.inputs[1]), op.get_attr("shrink_axis_mask")
    if op.inputs[0].op.type != "Shape" or first is None or len(first) != 1 or shrinks != 1:
        return None
    shape = op.inputs[0].op.inputs[0].shape
    return shape[int(first[0])] if shape.rank else None


def _replace(
    op: tf.Operation, body: tf.Graph, draws: list[tf.Tensor], steps: int | tf.Tensor
) -> None:
    """Makes a loop that also writes what is drawn into lists, and uses it in place of another."""
    condition = data_flow.function_graph(op.graph, op.get_attr("cond").name)
    kept = [unchanged(b) is a for a, b in zip(body.inputs, body.outputs, strict=True)]
    changing = [i for i, same in enumerate(kept) if not same]

    def values(graph: tf.Graph, variables: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        found = dict(zip(changing, variables, strict=True))
        return {t.name: found.get(i, op.inputs[i]) for i, t in enumerate(graph.inputs)}

    def again(position: tf.Tensor, variables: list, arrays: list) -> tf.Tensor:
        (more,) = copying.evaluate(
            [condition.outputs[0]], condition.inputs, values(condition, variables)
        )
        return more

    def step(position: tf.Tensor, variables: list, arrays: list) -> tuple:
        wanted = [*[body.outputs[i] for i in changing], *draws]
        found = copying.evaluate(wanted, body.inputs, values(body, variables))
        for tensor, before in zip(found, variables, strict=False):
            tensor.set_shape(before.shape)
        drawn = found[len(changing) :]
        arrays = [array.write(position, t) for array, t in zip(arrays, drawn, strict=True)]
        return position + 1, found[: len(changing)], arrays

    first = [op.inputs[i] for i in changing]
    shapes = [body.inputs[i].shape for i in changing]
    arrays = [tf.TensorArray(t.dtype, steps, element_shape=t.shape) for t in draws]
    first = [tf.ensure_shape(t, s) if s.rank else t for t, s in zip(first, shapes, strict=True)]
    _, last, _ = tf.while_loop(again, step, [0, first, arrays], maximum_iterations=steps)
    results = dict(zip(changing, last, strict=True))
    for index, output in enumerate(op.outputs[: len(kept)]):
        for consumer in output.consumers():
            for place, tensor in enumerate(consumer.inputs):
                if tensor is output:
                    consumer._update_input(place, results.get(index, op.inputs[index]))
