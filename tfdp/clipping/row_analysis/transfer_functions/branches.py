"""Branches (`tf.cond`) that no example chooses: the proof goes through the branches' own graphs."""

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import copying, data_flow
from tfdp.clipping.row_analysis.analysis import RowAnalysis, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State


@transfers(*op_types.BRANCHES)
def branch(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Handles outputs for which both branches agree on where they hold the examples."""
    if not isinstance(inputs[0], Public):
        return unproven(op, "its condition depends on examples, or on how many there are")
    try:
        graphs = [
            data_flow.function_graph(op.graph, op.get_attr(name).name)
            for name in ("then_branch", "else_branch")
        ]
    except ValueError:
        return unproven(op, "its branches cannot be read")
    if any(len(graph.inputs) != len(inputs) - 1 for graph in graphs):
        return unproven(op, "its branches get other tensors than it does")
    then, otherwise = (_outputs(op, graph, inputs[1:]) for graph in graphs)
    return [
        state if state == other and isinstance(state, Rows) else _differs(op, state, other)
        for state, other in zip(then, otherwise, strict=True)
    ]


def _outputs(op: tf.Operation, graph: tf.Graph, arguments: list[State]) -> list[State]:
    given = {t.ref(): state for t, state in zip(graph.inputs, arguments, strict=True)}
    needed = {other.name for other in copying.cone(graph.outputs, set(given))[0]}
    operations = [other for other in graph.get_operations() if other.name in needed]
    analysis = RowAnalysis(data_flow.in_order(operations), [], given=given)
    states = [analysis.state(tensor) for tensor in graph.outputs[: len(op.outputs)]]
    # TensorFlow gives an operation that was differentiated outputs that the graph lacks.
    return states + [unproven(op, "another output")] * (len(op.outputs) - len(states))


def _differs(op: tf.Operation, state: State, other: State) -> State:
    if isinstance(state, Public) and isinstance(other, Public):
        return Public()
    return unproven(op, f"one of its branches holds the examples as {state}, the other as {other}")
