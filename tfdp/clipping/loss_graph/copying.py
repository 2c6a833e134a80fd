"""Copies of a part of a graph, gradients included: the same computation of other data."""

from collections.abc import Callable, Iterable, Sequence, Set

import tensorflow as tf

from tfdp.clipping.loss_graph import custom_gradients
from tfdp.clipping.loss_graph.batch_state import captured


def copy(
    operations: Sequence[tf.Operation],
    wanted: Sequence[tf.Tensor],
    known: dict[str, tf.Tensor],
    gradient_of: Callable[[tf.Operation], Callable | None] = lambda op: None,
    same_shapes: bool = False,
) -> tuple[list[tf.Tensor], dict[str, tf.Operation]]:
    """Copies operations into the default graph.

    Args:
      operations: Operations of one graph: all that `wanted` depends on, up to `known`.
      wanted: Their outputs whose copies to return, or tensors of `known`.
      known: Replacements of the tensors that they begin with, by name.
      gradient_of: Gets an operation without a gradient function of its own; may give it one.
      same_shapes: Whether the copies have the static shapes of the operations. Not all follow from
        those of `known`: layers state shapes that operations compute.

    Returns:
      The copies of `wanted`; and of calls of functions the originals, by the names of the copies.

    Raises:
      ValueError: The operations do not go with what was put in.
    """
    if not operations:
        return [known[tensor.name] for tensor in wanted], {}
    # Calls of functions keep their gradient outside the graph definition.
    gradients = {op.name: getattr(op, "_gradient_function", None) for op in operations}
    calls = [name for name, gradient in gradients.items() if gradient]
    for op in operations:
        gradients[op.name] = gradients[op.name] or gradient_of(op)
    custom = {op.name: op for op in operations if custom_gradients.is_custom(op)}
    named = [name for name, gradient in gradients.items() if gradient or name in custom]
    made = [tensor for tensor in wanted if tensor.name not in known]
    imported = tf.graph_util.import_graph_def(
        _definition(operations, same_shapes),
        input_map=known,
        return_elements=[*[tensor.name for tensor in made], *named],
        name="part_of_batch",
    )
    copies = dict(zip([tensor.name for tensor in made], imported, strict=False))
    copied = dict(zip(named, imported[len(made) :], strict=True))
    for name, op in copied.items():
        gradient = gradients[name]
        if name in custom:
            scope = op.name.removesuffix(name)
            gradient = _copied_gradient(custom[name], operations, scope, known)
        op._gradient_function = gradient
    source = operations[0].graph
    return (
        [known[t.name] if t.name in known else copies[t.name] for t in wanted],
        {copied[name].name: source.get_operation_by_name(name) for name in calls},
    )


def evaluate(
    wanted: Sequence[tf.Tensor], arguments: Sequence[tf.Tensor], values: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Computes tensors of a function's graph in the default graph.

    Args:
      wanted: The tensors.
      arguments: Tensors of the function that are given: its inputs, say.
      values: Their values, by name, of the default graph or of those around it.
    """
    target = tf.compat.v1.get_default_graph()
    given = {t.ref() for t in arguments}
    made = [t for t in wanted if t.ref() not in given]
    operations, boundary = cone(made, given)
    known = {t.name: bring(values[t.name], target) for t in boundary}
    copies = iter(copy(operations, made, known)[0])
    return [values[t.name] if t.ref() in given else next(copies) for t in wanted]


def _copied_gradient(
    op: tf.Operation, operations: Sequence[tf.Operation], scope: str, known: dict[str, tf.Tensor]
) -> Callable[..., list[tf.Tensor | None]]:
    """Returns the custom gradient of an operation, for its copy: of the copied data."""
    inside = {t.ref() for other in operations for t in other.outputs}
    outside = {
        t.ref()
        for other in op.graph.get_operations()
        for t in other.outputs
        if other.type == "Placeholder" or t.name in known
    }

    def gradient(copied: tf.Operation, *arriving: tf.Tensor) -> list[tf.Tensor | None]:
        here = tf.compat.v1.get_default_graph()
        traced = custom_gradients.trace(op)
        wanted = [g for g in traced.gradients if g is not None]
        stand_ins = {t.name: g for t, g in zip(traced.arriving, arriving, strict=True)}
        stop = inside | outside | {t.ref() for t in traced.arriving}
        added, boundary = cone(wanted, stop)
        values = {}
        for tensor in boundary:
            if tensor.name in stand_ins:
                values[tensor.name] = stand_ins[tensor.name]
            elif tensor.name in known:
                values[tensor.name] = bring(known[tensor.name], here)
            elif tensor.ref() in inside:
                own = copied.graph.get_tensor_by_name(scope + tensor.name)
                values[tensor.name] = bring(own, here)
            else:
                values[tensor.name] = bring(tensor, here)
        found = iter(copy(added, wanted, values)[0])
        return [None if g is None else next(found) for g in traced.gradients]

    return gradient


def _definition(operations: Sequence[tf.Operation], shapes: bool) -> tf.compat.v1.GraphDef:
    """Returns the definition of a part of a graph, without the order of side effects."""
    complete = operations[0].graph.as_graph_def()
    graph_def = tf.compat.v1.GraphDef(versions=complete.versions, library=complete.library)
    names = {op.name: op for op in operations}
    for node in complete.node:
        if node.name in names:
            copy = graph_def.node.add()
            copy.CopyFrom(node)
            # Control inputs order side effects, such as updates of metrics: not wanted twice.
            del copy.input[:]
            copy.input.extend(name for name in node.input if not name.startswith("^"))
            copy.attr.pop("_class", None)
            if shapes:
                known = [t.shape.as_proto() for t in names[node.name].outputs]
                copy.attr["_output_shapes"].list.shape.extend(known)
    return graph_def


def cone(
    tensors: Iterable[tf.Tensor], stop: Set = frozenset()
) -> tuple[list[tf.Operation], list[tf.Tensor]]:
    """Returns the operations that `tensors` depend on down to `stop`, and the tensors met there."""
    operations: dict[str, tf.Operation] = {}
    boundary: dict = {}
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if tensor.ref() in stop:
            boundary[tensor.ref()] = tensor
        elif tensor.op.name not in operations:
            operations[tensor.op.name] = tensor.op
            pending.extend(tensor.op.inputs)
    return list(operations.values()), list(boundary.values())


def bring(tensor: tf.Tensor, target: tf.Graph) -> tf.Tensor:
    """Makes a tensor of an enclosing graph, or a captured tensor, available in `target`."""
    if not tf.is_symbolic_tensor(tensor):
        return target.capture(tensor)
    if tensor.graph is target:
        return tensor
    enclosing = target
    while enclosing is not None and enclosing is not tensor.graph:
        enclosing = getattr(enclosing, "outer_graph", None)
    outer = captured(tensor.graph).get(tensor.ref()) if enclosing is None else None
    return target.capture(tensor) if outer is None else bring(outer, target)
