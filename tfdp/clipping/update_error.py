"""Error for updates that are made of more than noisy gradients and public numbers.

It says whose code reads what: a schedule, a constraint or an optimizer into which a metric or a
loss has got. All of that is worked out once there is an error, so that other steps lose no time.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import batch_state, data_flow
from tfdp.clipping.loss_graph.batch_state import captured
from tfdp.clipping.loss_graph.data_flow import DATA, METRIC, PRIVATE, Flow
from tfdp.clipping.loss_graph.own_operations import optimizer_of

_REMEDY = (
    "Compute it from public numbers: `optimizer.iterations`, constants, or a tf.Variable that you "
    "set between epochs from a metric of public validation data."
)
_UNCHANGED = frozenset({"Cast", "Identity", "Reshape", "StopGradient"})


Code = Iterator[tuple[str, Any]]


def described(kind: str, function: Any) -> Code:
    """Yields the name of something that an update may call, in words, and what is called.

    Args:
      kind: Its kind or argument, such as "schedule".
      function: A function, an object that is called, or a class, which stands for its methods;
        nothing is yielded for anything else.
    """
    kind = kind.replace("_", " ")
    if isinstance(function, type):
        for cls in function.__mro__[:-1]:
            yield f"the {kind} `{function.__name__}`", cls
    elif callable(function):
        name = getattr(function, "__name__", type(function).__name__)
        yield f"the {kind} `{name}`", function


def update_of(op: tf.Operation) -> Any:
    """Returns the optimizer in whose update an operation is, also in functions that it calls."""
    while op is not None:
        optimizer = optimizer_of(op)
        if optimizer is not None:
            return optimizer
        op = _caller(op.graph)
    return None


def update_error(
    op: tf.Operation,
    flow: Flow,
    losses: Mapping[tf.Graph, set[str]],
    made_at: Callable[[tf.Operation], str],
) -> ValueError:
    """Returns the error for an operation of an update that writes what depends on data.

    Args:
      op: The operation.
      flow: Data flow of the step.
      losses: Names of the losses that `minimize` was given in each graph.
      made_at: Returns the user's line that made an operation, for messages.
    """
    source, path = _source(op, flow, losses)
    names = [f"'{v.name}'" for v in [_written(op)] if v is not None]
    lines = [line for line in map(made_at, path) if line]
    return ValueError(
        "The update must be made of the noisy gradient, public numbers, and variables that no data "
        "are written into: anything else gets into the weights without noise. Received "
        f"{_whose(path)}{lines[0] if lines else ''}, which reads {source} and decides what is "
        f"written into {''.join(names) or 'a variable'}. {_REMEDY}"
    )


def _source(
    op: tf.Operation, flow: Flow, losses: Mapping[tf.Graph, set[str]]
) -> tuple[str, list[tf.Operation]]:
    """Returns what gets into an operation of an update, and the operations on the way from it."""
    pending = [(tensor, [op]) for tensor in _behind(op)]
    seen = set()
    while pending:
        tensor, path = pending.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        value = flow.values(tensor.graph)[tensor.ref()]
        maker = tensor.op
        if maker.type == "Placeholder":
            outer = captured(tensor.graph).get(tensor.ref())
            if outer is None and _caller(tensor.graph) is None:
                return _described(tensor, value.colors, losses, path), path
            if outer is None or tf.is_symbolic_tensor(outer):
                behind = _arguments(tensor) if outer is None else [outer]
                pending += [(t, path) for t in behind]
            continue
        if not value.colors & PRIVATE:
            continue
        if maker.type in data_flow.READS and maker.inputs:
            for handle in flow.values(tensor.graph)[maker.inputs[0].ref()].handles:
                variable = batch_state.variable_with(handle.deref())
                if variable is not None:
                    kind = "metric" if batch_state.is_metric(variable) else "variable of tfdp"
                    return f"the {kind} '{variable.name}'", [maker, *path]
        if update_of(maker) is None:
            return _described(tensor, value.colors, losses, path), path
        pending += [(t, [maker, *path]) for t in _behind(maker)]
    return "data", [op]


def _behind(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the tensors that decide what an operation computes, writes, or whether it runs."""
    found = [t for t in op.inputs if t.dtype not in (tf.resource, tf.variant)]
    for name in data_flow.called_functions(op):
        found += data_flow.function_graph(op.graph, name).outputs
    caller = None if optimizer_of(op) is not None else _caller(op.graph)
    if caller is not None and caller.type not in op_types.CALLS:
        found += [t for t in caller.inputs if t.dtype not in (tf.resource, tf.variant)]
    return found


def _arguments(placeholder: tf.Tensor) -> list[tf.Tensor]:
    caller = _caller(placeholder.graph)
    return [] if caller is None else [t for t in caller.inputs if t.dtype != tf.resource]


def _caller(graph: tf.Graph) -> tf.Operation | None:
    """Returns the operation of the enclosing graph that calls a graph."""
    outer = getattr(graph, "outer_graph", None)
    if not isinstance(outer, tf.__internal__.FuncGraph):
        return None
    for op in outer.get_operations():
        for name in data_flow.called_functions(op):
            if data_flow.function_graph(outer, name) is graph:
                return op
    return None


def _described(
    tensor: tf.Tensor, colors: int, losses: Mapping[tf.Graph, set[str]], path: list
) -> str:
    named = losses.get(tensor.graph, set())
    while tensor.op.type in _UNCHANGED and tensor.name not in named:
        tensor = tensor.op.inputs[0]
    if tensor.name in named:
        return "the loss"
    if colors & METRIC:
        return "a metric"
    if path[0].type in data_flow.SHAPES or not colors & DATA:
        return "the number of rows of the batch"
    return "what depends on the batch"


def _written(op: tf.Operation) -> tf.Variable | None:
    handle = op.inputs[0]
    while tf.is_symbolic_tensor(handle):
        handle = captured(handle.graph).get(handle.ref())
    return None if handle is None else batch_state.variable_with(handle)


def _variables(graph: tf.Graph) -> list[tf.Variable]:
    """Returns the variables that a function captures, also for functions in it."""
    outermost = list(data_flow.graphs_around(graph))[-1]
    handles = [h for h in captured(outermost).values() if h.dtype == tf.resource]
    found = [batch_state.variable_with(h) for h in handles if not tf.is_symbolic_tensor(h)]
    return [variable for variable in found if variable is not None]


def _whose(path: Sequence[tf.Operation]) -> str:
    """Returns in words whose code made the first of some operations that shows it."""
    optimizer = update_of(path[-1])
    parts = list(optimizer.update_code(_variables(path[-1].graph)))
    for op in path:
        for frame in reversed(op.traceback or ()):
            for words, function in parts:
                if any(_has(code, frame) for code in _codes(function)):
                    return words
    return " or ".join(dict.fromkeys(words for words, _ in parts)) or "code of the update"


def _codes(function: Any) -> Iterator[CodeType]:
    """Yields the code of a function, an object that is called, or the methods of a class."""
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(function, FunctionType):
        yield function.__code__
    elif isinstance(function, type):
        for method in vars(function).values():
            if isinstance(method, FunctionType):
                yield inspect.unwrap(method).__code__
    elif callable(function):
        yield from _codes(type(function).__call__)


def _has(code: CodeType, frame: Any) -> bool:
    """Returns whether a frame of a traceback is in a function, or in one that is defined in it."""
    if frame.filename != code.co_filename or frame.lineno < code.co_firstlineno:
        return False
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    lines = [line for *_, line in code.co_lines() if line]
    return frame.lineno <= max(lines, default=0) or any(_has(c, frame) for c in inner)
