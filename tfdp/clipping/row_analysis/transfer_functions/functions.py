"""Calls of functions, and loops: the proof goes through the functions' own graphs."""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import copying, custom_gradients, data_flow
from tfdp.clipping.row_analysis.analysis import RowAnalysis, function_transfers, unproven
from tfdp.clipping.row_analysis.states import BatchSize, Public, RowList, Rows, State, Unproven
from tfdp.clipping.row_analysis.transfer_functions.common import constant_along

# A loop's states are found in so many passes, or not: each passes on what a step makes of them.
_PASSES = 8


@function_transfers(*op_types.CALLS)
def call(op: tf.Operation, inputs: list[State]) -> tuple[State | list[State], RowAnalysis | None]:
    """Returns the states of the results, from those of the arguments."""
    graph = _graph(op, "f")
    if graph is None:
        return unproven(op, "its function cannot be read"), None
    analysis = _analyse(graph, inputs)
    # TensorFlow gives a call that was differentiated outputs that its function's graph lacks.
    states = [analysis.state(tensor) for tensor in graph.outputs[: len(op.outputs)]]
    other = unproven(op, "one of its other outputs")
    return states + [other] * (len(op.outputs) - len(states)), analysis


@function_transfers(*op_types.LOOPS)
def loop(op: tf.Operation, inputs: list[State]) -> tuple[State | list[State], RowAnalysis | None]:
    """States that a step keeps, where examples do not decide how many steps there are."""
    body, condition = _graph(op, "body"), _graph(op, "cond")
    if body is None or condition is None or len(body.inputs) != len(inputs):
        return unproven(op, "its functions cannot be read"), None
    states = [_any(state) for state in inputs]
    for _ in range(_PASSES):
        analysis = _analyse(body, states)
        after = [analysis.state(tensor) for tensor in body.outputs]
        joined = [
            _joined(op, *pair) for pair in zip(body.inputs, states, op.inputs, after, strict=True)
        ]
        if joined == states:
            break
        states = joined
    else:
        return unproven(op, "its steps change where tensors hold the examples"), None
    (again,) = (_analyse(condition, states).state(t) for t in condition.outputs[:1])
    if not isinstance(again, Public):
        return unproven(op, "examples may decide how many steps it takes"), None
    return states, analysis


def _graph(op: tf.Operation, attribute: str) -> tf.Graph | None:
    """Returns the graph of a called function; None if its gradient cannot be read.

    Nor can it where there are complex numbers: loops and calls pass on gradients of real ones.
    """
    try:
        graph = data_flow.function_graph(op.graph, op.get_attr(attribute).name)
    except ValueError:
        return None
    # Tracing such a gradient may give the function's graph more arguments.
    own = any(custom_gradients.is_custom(inner) for inner in graph.get_operations())
    return None if own or _has_complex_numbers(graph) else graph


def _has_complex_numbers(graph: tf.Graph) -> bool:
    return any(t.dtype.is_complex for op in graph.get_operations() for t in op.outputs)


def _analyse(graph: tf.Graph, states: Sequence[State]) -> RowAnalysis:
    given = {t.ref(): state for t, state in zip(graph.inputs, states, strict=False)}
    needed = {op.name for op in copying.cone(graph.outputs, set(given))[0]}
    operations = [op for op in graph.get_operations() if op.name in needed]
    return RowAnalysis(data_flow.in_order(operations), [], given=given)


def _any(state: State) -> State:
    """Returns a state without the values that may be others in the next step."""
    if isinstance(state, Public):
        return Public()
    return BatchSize() if isinstance(state, BatchSize) else state


def _joined(
    op: tf.Operation, inside: tf.Tensor, before: State, first: tf.Tensor, after: State
) -> State:
    """Returns the state that a loop's variable has before and after a step."""
    before, after = _any(before), _any(after)
    if before == after or isinstance(before, Unproven):
        return before
    if isinstance(before, RowList) and before.element is None and isinstance(after, RowList):
        return after
    if isinstance(before, RowList) and isinstance(after, RowList) and after.element is None:
        return before
    if isinstance(before, Public | BatchSize) and isinstance(after, Public | BatchSize):
        return BatchSize()
    if isinstance(before, Public) and isinstance(after, Rows):
        length = inside.shape[after.axis] if inside.shape.rank else None
        if constant_along(first, after.axis, length):
            return after
    return unproven(op, f"'{inside.name}' is {before} before a step and {after} after it")
