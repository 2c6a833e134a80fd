"""Refuses models that keep a statistic of the batch."""

from collections.abc import Callable

import tensorflow as tf

_WRITING = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStrided")


def captured(graph: tf.Graph) -> dict:
    """The tensor outside that each captured tensor of a function's graph stands for."""
    return {inner.ref(): outer for outer, inner in getattr(graph, "captures", ())}


def check(graph: tf.Graph, depends_on_data: Callable[[tf.Tensor], bool]) -> None:
    """Refuses layers that write what they see of the batch into a variable."""
    for op in graph.get_operations():
        if not op.type.startswith(_WRITING) or not any(map(depends_on_data, op.inputs[1:])):
            continue
        variable = _variable_of(op.inputs[0])
        if variable is None or _is_metric(variable):
            continue
        raise ValueError(
            f"The model writes a statistic of the batch into its variable '{variable.name}': it "
            "would leave the training without noise, and it mixes examples. Replace "
            "BatchNormalization by GroupNormalization or LayerNormalization, and do not use "
            "stateful layers."
        )


def _variable_of(handle: tf.Tensor) -> tf.Variable | None:
    """The variable that a graph's resource tensor is the handle of, if the graph reads it too."""
    watched = list(getattr(handle.graph, "_watched_variables", ()))
    outer = handle
    while tf.is_symbolic_tensor(outer):
        outer = captured(outer.graph).get(outer.ref())
    return next((v for v in watched if v.handle is outer), None)


def _is_metric(variable: tf.Variable) -> bool:
    """Whether a variable is one of a Keras metric, by how Keras makes those."""
    return (
        variable.synchronization == tf.VariableSynchronization.ON_READ
        and variable.aggregation == tf.VariableAggregation.SUM
    )
