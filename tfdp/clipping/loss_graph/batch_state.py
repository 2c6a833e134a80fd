"""Check that a model keeps no statistic of the batch."""

from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph.own_operations import is_own

_WRITING = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStrided")


def captured(graph: tf.Graph) -> dict:
    """Returns the tensor outside that each captured tensor of a function's graph stands for."""
    return {inner.ref(): outer for outer, inner in getattr(graph, "captures", ())}


def check(
    graph: tf.Graph, depends_on_data: Callable[[tf.Tensor], bool], unknown: bool = False
) -> None:
    """Refuses layers that write what they see of the batch into a variable.

    Args:
      graph: The graph that computes the loss.
      depends_on_data: Whether a tensor of it does.
      unknown: Whether to refuse writes into variables that the graph does not read as well; nothing
        shows whether these belong to a metric.

    Raises:
      ValueError: There is such a layer.
    """
    for variable in kept(graph, depends_on_data, unknown):
        raise keeps_statistic(variable)


def kept(
    graph: tf.Graph, depends_on_data: Callable[[tf.Tensor], bool], unknown: bool = False
) -> Iterator[tf.Variable | None]:
    """Finds the variables that data are written into; for the arguments see `check`.

    Yields:
      The variables; None for those that the graph does not read.
    """
    for op in graph.get_operations():
        if is_own(op):  # The record of draws holds fingerprints of data.
            continue
        if op.type.startswith(_WRITING):
            handles, inputs = op.inputs[:1], op.inputs[1:]
        elif op.type in op_types.CONTROL_FLOW and _writes(op):
            handles = [tensor for tensor in op.inputs if tensor.dtype == tf.resource]
            inputs = [tensor for tensor in op.inputs if tensor.dtype != tf.resource]
        else:
            continue
        written = [variable_of(handle) for handle in handles]
        written = [v for v in written if (unknown if v is None else not is_metric(v))]
        if written and any(map(depends_on_data, inputs)):
            yield written[0]


def keeps_statistic(variable: tf.Variable | None, where: str = "") -> ValueError:
    """Returns the error for a variable, if it is known, that data are written into."""
    name = "(not read here)" if variable is None else variable.name
    return ValueError(
        f"The model writes a statistic of the batch into its variable '{name}'{where}: it "
        "would leave the training without noise, and it mixes examples. Replace "
        "BatchNormalization by GroupNormalization or LayerNormalization, and do not use "
        "stateful layers."
    )


def depends_on_metric(what: str, names: Iterable[str]) -> ValueError:
    """Returns the error for a loss, or a gradient, that depends on a metric."""
    listed = ", ".join(f"'{name}'" for name in names)
    return ValueError(
        "The loss must depend on no metric, which holds statistics of the batch. Received "
        f"{what} that depends on {listed}."
    )


def _writes(call: tf.Operation) -> bool:
    """Returns whether a function that is called writes into a variable."""
    return any(node.op.startswith(_WRITING) for node in with_called(call.graph, [call.node_def]))


def with_called(graph: tf.Graph, nodes: Iterable) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the nodes of a graph and of the functions that they call."""
    library = {f.signature.name: f.node_def for f in graph.as_graph_def().library.function}
    pending = list(nodes)
    seen: set[str] = set()
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attr.values():
            name = attribute.func.name
            if name in library and name not in seen:
                seen.add(name)
                pending.extend(library[name])


def variable_of(handle: tf.Tensor) -> tf.Variable | None:
    """Returns the variable that a resource tensor of a graph refers to, if the graph reads it."""
    watched = list(getattr(handle.graph, "_watched_variables", ()))
    outer = handle
    while tf.is_symbolic_tensor(outer):
        outer = captured(outer.graph).get(outer.ref())
    return next((v for v in watched if v.handle is outer), None)


def variable_with(handle: tf.Tensor) -> tf.Variable | None:
    """Returns the variable that has a handle, if there is one.

    Args:
      handle: A resource tensor, outside of all functions.
    """
    # Noted by TensorFlow when it makes the variable, which a graph that only writes it does not.
    variable = getattr(handle, "_parent_trackable", lambda: None)()
    return variable if isinstance(variable, tf.Variable) else None


def is_metric(variable: tf.Variable) -> bool:
    """Returns whether a variable is one of a Keras metric, by how Keras makes those."""
    return (
        variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
