"""Checks that a function sees no data but its arguments.

Clipping can only take apart what a loss computes from the rows that it is given. A user's function
is therefore traced into a graph of its own. The graph's captured inputs must be variables, or
follow from variables and constants, and it must have no side effects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping.loss_graph import batch_state, data_flow, loss_reader
from tfdp.clipping.loss_graph.batch_state import captured
from tfdp.clipping.loss_graph.copying import cone
from tfdp.clipping.row_analysis.analysis import PUBLIC_STATEFUL_TYPES, RowAnalysis
from tfdp.clipping.row_analysis.states import Rows, Unproven

_ALLOWED_TYPES = PUBLIC_STATEFUL_TYPES | {"Assert", "Placeholder"}


def trace(name: str, function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Traces a function by itself.

    Args:
      name: The argument of the user that the function came by.
      function: Gets tensors like `specs`.
      specs: Nested `tf.TensorSpec`s, one nest for each argument.

    Returns:
      The concrete function.

    Raises:
      ValueError: It uses data that are not its arguments, or has side effects.
    """
    concrete = trace_alone(name, function, specs)
    batch_state.check(concrete.graph, lambda t: bool(loss_reader.data_of(t)[1]))
    for op_type, op_name in loss_reader.stateful_operations(concrete.graph):
        if op_type not in _ALLOWED_TYPES:
            raise ValueError(
                f"Argument `{name}` must have no side effects, by which examples could get into "
                f"each other's losses. Received a function with the operation '{op_name}' "
                f"({op_type})."
            )
    return concrete


def trace_alone(name: str, function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Traces a function as `trace` does, without looking at its side effects.

    Args:
      name: See `trace`.
      function: See `trace`.
      specs: See `trace`.

    Raises:
      ValueError: It uses data that are not its arguments.
    """
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = concrete.graph
    for tensor in captured(graph).values():
        if not _is_public(tensor):
            raise ValueError(
                f"Argument `{name}` must compute its result from its arguments, variables and "
                "constants: only its arguments can be taken apart by clipping. Received a function "
                f"that uses another tensor, {tensor.name}, which depends on data or on a state: "
                "pass its rows in `batch`."
            )
    # Includes variables that are read by their handles, or by functions that are called.
    read = [
        batch_state.variable_with(t) for t in captured(graph).values() if t.dtype == tf.resource
    ]
    for variable in [*getattr(graph, "_watched_variables", ()), *read]:
        if variable is not None and batch_state.is_metric(variable):
            raise ValueError(
                f"Argument `{name}` must use no metric, which holds statistics of the data. "
                f"Received a function that uses '{variable.name}'."
            )
    return concrete


def _is_public(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor follows from variables and constants alone."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    outside = captured(tensor.graph)
    for op in cone([tensor])[0]:
        if op.type == "Placeholder":
            outer = outside.get(op.outputs[0].ref())
            if outer is None or not _is_public(outer):
                return False
        elif op.type == "ReadVariableOp":
            variable = batch_state.variable_of(op.inputs[0])
            if variable is None or batch_state.is_metric(variable):
                return False
        elif op.op_def.is_stateful:
            return False
    return True


def check_is_by_row(name: str, tensor: Any) -> None:
    """Refuses tensors that are not data, nor provably computed row by row from them."""
    if not tf.is_symbolic_tensor(tensor) or tensor.shape.rank in (None, 0):
        raise ValueError(
            f"Argument `{name}` must hold tensors of the batch, first dimension the example. "
            f"Received: {tensor!r}."
        )
    batch, data = loss_reader.data_of(tensor)
    outside = captured(tensor.graph)
    for source in data:
        if source in outside:  # The enclosing function may have mixed it.
            check_is_by_row(name, outside[source])
    if tensor.ref() in data:
        return
    needed = {op.name for op in cone([tensor], {t.ref() for t in batch})[0]}
    operations = [op for op in tensor.graph.get_operations() if op.name in needed]
    operations = data_flow.in_order(operations)
    if any(op.op_def.is_stateful or op.type.startswith("Stateless") for op in operations):
        raise ValueError(
            f"Argument `{name}` must hold data, or what is computed from them without random "
            "numbers, which could follow from a row's place in the batch; these come by `draws`. "
            f"Received: {tensor}."
        )
    state = RowAnalysis(operations, batch).state(tensor)
    if state != Rows() or len(data) > len(batch):
        why = state.reason if isinstance(state, Unproven) else f"found: {state}"
        raise ValueError(
            f"Argument `{name}` must hold data, or what is provably computed row by row from them. "
            f"Received: {tensor} ({why}). Compute it in `sample_wise` and `batch_wise`; random "
            "numbers come by `draws`."
        )
