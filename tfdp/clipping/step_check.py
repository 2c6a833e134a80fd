"""Checks of the whole training step: where it is traced, and what else it does.

Clipping bounds what an example adds to the update. It bounds nothing that takes another way: a
variable, a table or Python code that keeps a statistic of the batch, a branch that a statistic
chooses. The graph of the step is therefore read once it is finished, functions that it calls
included. Every operation with a state must be of a kind that is known, and what follows from data
may be written only into metrics and by the optimizer itself.
"""

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from tfdp.base.tf import op_types
from tfdp.base.tf.private_variables import keep_private
from tfdp.clipping import function_checks, update_error
from tfdp.clipping.batch_loss import BatchLoss
from tfdp.clipping.loss_graph import batch_state, copying, data_flow, loss_reader
from tfdp.clipping.loss_graph.batch_state import captured
from tfdp.clipping.loss_graph.data_flow import DATA, METRIC, PRIVATE, SIZE, Flow, Value
from tfdp.clipping.loss_graph.own_operations import is_own
from tfdp.clipping.loss_graph.own_operations import mark_released as mark_released
from tfdp.clipping.loss_graph.own_operations import own_operations as own_operations
from tfdp.clipping.loss_graph.own_operations import pause_own_operations as pause_own_operations
from tfdp.clipping.loss_graph.own_operations import update_operations as update_operations

# Random streams inside of the runtime, with a seed of their own that nothing can set back.
RANDOM_STREAMS = frozenset(
    {
        "FixedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
_HARMLESS = (
    data_flow.READS
    | data_flow.GENERATORS
    | RANDOM_STREAMS
    | {"Assert", "DisableCopyOnRead", "LookupTableFindV2", "LookupTableSizeV2", "VarHandleOp"}
    | op_types.STATEFUL
    | {"CudnnRNN", "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"}
    | {"CudnnRNNV2", "CudnnRNNV3"}
)
_ITERATORS = frozenset(
    {"AnonymousIterator", "AnonymousIteratorV2", "AnonymousIteratorV3", "DatasetToSingleElement"}
    | {"IteratorGetNext", "IteratorGetNextAsOptional", "IteratorGetNextSync", "IteratorV2"}
    | {"MakeIterator", "MultiDeviceIteratorGetNextFromShard", "RandomDataset", "RangeDataset"}
    | {"ReduceDataset", "ShuffleDatasetV3", "TensorSliceDataset"}
)
# Python code may keep any state, even if it is declared stateless.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_ADVICE = (
    (tuple(_PYTHON), "Compute it with TensorFlow operations, or before `poisson_batches`."),
    (("Print",), "It shows private data: remove `tf.print`, or print in a callback."),
    (("Lookup", "Mutable"), "Fill lookup tables before training: a step may only look up."),
    (("Write",), "Summaries and files show private data: write them in a callback, of metrics."),
)
_OTHER_ADVICE = "Keep states in tf.Variables, which must not depend on the data, or remove it."

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *[os.path.join("site-packages", name, "") for name in ("keras", "tensorflow", "tf_keras")],
)

# The name says what to do, in TensorFlow's error.
_TIE = "functions_that_call_minimize_may_be_called_from_one_outer_function_only"

_NO_BATCH = "that read no batch of their own"

# A local variable of the function in TensorFlow that runs callbacks when a graph is left. If the
# graph was entered again, it holds the callbacks of the enclosing entry. Otherwise it is None.
_ENCLOSING_CALLBACKS = "old_scope_exit_callbacks"

_anchors: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_losses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Names, for messages.
_data_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_own_loops: weakref.WeakSet = weakref.WeakSet()
_watched: weakref.WeakSet = weakref.WeakSet()
_minimizing: weakref.WeakSet = weakref.WeakSet()  # Functions in which `minimize` is called.
_with_private_rows: weakref.WeakSet = weakref.WeakSet()
_unfinished_loops: weakref.WeakSet = weakref.WeakSet()  # Bodies that read no batch so far.


def mark_own_loop() -> None:
    """Marks the branch or loop body being built as the library's own control flow."""
    _own_loops.add(tf.compat.v1.get_default_graph())


def mark_data(tensors: Iterable[tf.Tensor]) -> None:
    """Marks tensors of the graph being built as data, which the graph does not show."""
    for tensor in tensors:
        _data_names.setdefault(tensor.graph, set()).add(tensor.name)


def check_step(loss: tf.Tensor | BatchLoss, rows_are_private: bool = False) -> None:
    """Checks where a step is traced; and, once that is finished, all of its graph.

    Args:
      loss: The loss of the step.
      rows_are_private: Whether the number of rows is that of the examples that were drawn.

    Raises:
      ValueError: The step is traced where data may have been mixed, or a statistic of the batch
        may decide about it.
    """
    here = tf.compat.v1.get_default_graph()
    check_types(here)
    tensors: list[Any] = [loss]
    if isinstance(loss, BatchLoss):
        tensors = tf.nest.flatten((loss.batch, loss.mask))
    for tensor in tensors:
        if not tf.is_symbolic_tensor(tensor):
            continue
        if tensor.graph is not here:
            raise ValueError(
                "The loss must be computed in the function, branch or loop body that calls "
                f"`minimize`. Received {tensor}, of another one. Move both to the same place, best "
                "to the outermost tf.function."
            )
        found = loss_reader.data_of(tensor)[1]
        for op in copying.cone([tensor])[0]:
            for source in op.outputs:
                if source.ref() in found:
                    _check_source(source)
    _check_place(here)
    _anchors.setdefault(here, set()).add(tf.no_op(name="minimize").name)
    _losses.setdefault(here, set()).update(t.name for t in tensors if tf.is_symbolic_tensor(t))
    _minimizing.update(data_flow.graphs_around(here))
    if rows_are_private:
        _with_private_rows.update(data_flow.graphs_around(here))
    _tie_to_outermost(here)
    watch(here)


def check_update(tensors: Iterable[tf.Tensor | None]) -> None:
    """Refuses updates that depend on a metric, which holds statistics of the data.

    Raises:
      ValueError: There is such a tensor.
    """
    present = [t for t in tensors if t is not None]
    if not present:
        return
    flow = Flow(own_loops=_own_loops)
    values = flow.values(present[0].graph)
    if any(values[t.ref()].colors & METRIC for t in present):
        raise batch_state.depends_on_metric("a gradient", flow.metrics)


def watch(graph: tf.Graph) -> None:
    """Arranges for the step that is being traced to be checked when it is finished."""
    around = list(data_flow.graphs_around(graph))
    if not around or around[-1] in _watched:
        return
    outermost = around[-1]
    handled = _being_handled()

    def leave() -> None:
        # Distribution strategies enter a graph again, in threads: then it is not finished yet.
        enclosing = sys._getframe(1).f_locals.get(_ENCLOSING_CALLBACKS)
        if enclosing is not None:
            enclosing.append(leave)
            return
        _watched.discard(outermost)
        # Skipped if tracing failed: nothing can run then, and its error says more. An exception
        # that was being handled before tracing began was not raised by it.
        if all(error in handled for error in _being_handled()[:1]):
            check_graph(outermost)

    outermost._add_scope_exit_callback(leave)
    _watched.add(outermost)


def _tie_to_outermost(graph: tf.Graph) -> None:
    """Makes a nested function one that no other outermost function can call.

    Such a call would not trace it again, so that nothing would check where it is, and what else the
    other function does. TensorFlow refuses it, since what is captured here is out of scope there.
    """
    around = list(data_flow.graphs_around(graph))
    if len(around) < 2 or any(enclosing in _own_loops for enclosing in around):
        return
    with around[-1].as_default():
        scope = tf.constant(True, name=_TIE)
    graph.capture(scope)


def _being_handled() -> list[BaseException]:
    """Returns the exception being handled or raised, and those in whose handlers it was raised."""
    found: list[BaseException] = []
    error = sys.exc_info()[1]
    while error is not None and error not in found:
        found.append(error)
        error = error.__context__
    return found


def check_graph(graph: tf.Graph) -> None:
    """Checks all that a finished step does, in functions that it calls, too.

    Args:
      graph: Graph of the outermost function.

    Raises:
      ValueError: An operation with a state is not known to be harmless; or something that depends
        on data is written; or decides about the update.
    """

    def visit(op: tf.Operation, inputs: Sequence[Value], control: int) -> bool:
        if op.name in _anchors.get(op.graph, ()) and control & PRIVATE:
            raise ValueError(
                "No statistic of the batch must decide whether the update is made, or how often. "
                f"Received a condition of a branch or loop around '{op.name}' that depends on data "
                "or on an argument of the tf.function. Decide by a tf.Variable that does not "
                "depend on data, or by a Python number."
            )
        if is_own(op):
            return False
        _check_passed(op, inputs)
        check_type(op)
        _check_write(flow, op, inputs, control, graph in _with_private_rows)
        return True

    for body in [g for g in _unfinished_loops if graph in data_flow.graphs_around(g)]:
        if not loss_reader.reads_iterator(body, itself=True):
            raise _not_in_branch(_NO_BATCH)
    flow = _flow(visit)
    flow.values(graph)


def _flow(visit: data_flow.Visit = lambda *_: True) -> Flow:
    return Flow(visit, _own_loops, lambda graph: _data_names.get(graph, set()))


def check_type(op: tf.Operation) -> None:
    """Refuses operations with a state that are not known to keep the guarantee.

    Raises:
      ValueError: It is one.
    """
    kind = op.type
    if not is_allowed(kind):
        advice = next((a for kinds, a in _ADVICE if kind.startswith(kinds)), _OTHER_ADVICE)
        raise ValueError(
            "The training step must have no side effects, by which examples could get into each "
            f"other's gradients or out of the step. Received the operation '{op.name}' ({kind})"
            f"{_made_at(op)}. {advice}"
        )


def check_types(graph: tf.Graph) -> None:
    """Checks a function's operations as `check_type` does, also in functions that it calls."""

    def visit(op: tf.Operation, inputs: Sequence[Value], control: int) -> bool:
        if is_own(op):
            return False
        check_type(op)
        return True

    Flow(visit).values(graph)


def is_allowed(kind: str) -> bool:
    """Returns whether operations of a type may be in a training step."""
    if kind in _HARMLESS or kind in _ITERATORS:
        return True
    if kind.startswith((*data_flow.WRITES, *data_flow.COLLECTIVES)):
        return True
    definition = op_def_registry.get(kind)
    return kind not in _PYTHON and definition is not None and not definition.is_stateful


def _check_write(
    flow: Flow, op: tf.Operation, inputs: Sequence[Value], control: int, rows_are_private: bool
) -> None:
    forbidden = PRIVATE
    if op.type in data_flow.GENERATORS and inputs:
        # How many numbers are drawn may follow from the number of rows, if that is public.
        forbidden = PRIVATE if rows_are_private else PRIVATE & ~SIZE
    elif not op.type.startswith(data_flow.WRITES):
        return
    colors = control
    for value in inputs[1:]:
        colors |= value.colors
    if not colors & forbidden:
        return
    for handle in inputs[0].handles or {None}:
        variable = None if handle is None else batch_state.variable_with(handle.deref())
        if variable is not None and batch_state.is_metric(variable):
            keep_private(variable)
        elif update_error.update_of(op) is not None:
            raise update_error.update_error(op, _flow(), _losses, _made_at)
        else:
            raise batch_state.keeps_statistic(variable, f", by '{op.name}'{_made_at(op)}")


def _check_passed(op: tf.Operation, inputs: Sequence[Value]) -> None:
    """Checks that a function that calls `minimize` is passed data as they are."""
    if op.type not in op_types.CALLS:
        return
    called = data_flow.called_functions(op)
    if not any(data_flow.function_graph(op.graph, name) in _minimizing for name in called):
        return
    for tensor, value in zip(op.inputs, inputs, strict=True):
        if not value.colors & DATA or is_own(tensor.op):
            continue
        if tensor.ref() not in loss_reader.data_of(tensor)[1]:
            _check_by_row(tensor)


def _check_source(tensor: tf.Tensor) -> None:
    """Checks that data come into a function as they are, and have rows."""
    if tensor.shape.rank == 0:
        raise ValueError(
            "Data must have a first dimension, the example. Received a loss that depends on the "
            f"scalar {tensor}, an argument or a result of another function, which may depend on "
            "all examples. For a schedule or a constant, use a tf.Variable or a Python number."
        )
    graph = tensor.graph
    if _is_branch_or_loop(graph) and tensor.op.type == "Placeholder":
        raise _not_in_branch(f"which get {tensor} from outside")
    outer = captured(graph).get(tensor.ref())
    if outer is None:
        return
    if outer.ref() in loss_reader.data_of(outer)[1]:
        _check_source(outer)
        return
    _check_by_row(outer)


def _check_by_row(tensor: tf.Tensor) -> None:
    """Checks that what a function gets was computed from data row by row."""
    try:
        function_checks.check_is_by_row("loss", tensor)
    except ValueError as error:
        raise ValueError(
            "`minimize` must be called in the function that gets the batch, best the outermost "
            f"tf.function. Received a loss that depends on {tensor}, computed from data in an "
            "enclosing function, where examples may have been mixed. Pass the batch itself, and "
            f"compute that in the inner function. ({error})"
        ) from error


def _check_place(graph: tf.Graph) -> None:
    """Checks the branches and loops around `minimize`.

    The body of a loop may read its next batch last, as `fit` of Keras 3 does: that is checked when
    the step is finished.
    """
    read_inside = False
    for enclosing in data_flow.graphs_around(graph):
        if not _is_branch_or_loop(enclosing):
            continue
        if loss_reader.reads_iterator(enclosing):
            read_inside = True
        elif read_inside and isinstance(enclosing, control_flow.WhileBodyFuncGraph):
            _unfinished_loops.add(enclosing)
        else:
            raise _not_in_branch(_NO_BATCH)
        if isinstance(enclosing, control_flow.WhileCondFuncGraph):
            raise _not_in_branch(_NO_BATCH)


def _is_branch_or_loop(graph: tf.Graph) -> bool:
    kinds = (
        control_flow.CondBranchFuncGraph,
        control_flow.WhileBodyFuncGraph,
        control_flow.WhileCondFuncGraph,
    )
    return isinstance(graph, kinds) and graph not in _own_loops


def _not_in_branch(why: str) -> ValueError:
    return ValueError(
        "`minimize` must not be called in a branch (`tf.cond`, `if`) or a loop (`tf.while_loop`, "
        "`for`) of a tf.function, where a statistic of the batch could decide about the update, or "
        f"one batch be used twice. Received a step in branches or loops {why}. Call it outside; "
        "a loop is allowed if its body gets each batch: "
        "`for _ in tf.range(n): step(next(iterator))`."
    )


def _made_at(op: tf.Operation) -> str:
    """Returns the user's line that made an operation, for messages."""
    for frame in reversed(op.traceback or ()):
        if not any(part in frame.filename for part in _LIBRARIES):
            return f", made at {frame.filename}:{frame.lineno}"
    return ""
