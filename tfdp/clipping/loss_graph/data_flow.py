"""Data flow through a traced function, and through all functions that it calls."""

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

from tfdp.base.tf import op_types
from tfdp.base.tf.plain_variables import holds_data
from tfdp.clipping.loss_graph import batch_state, own_operations

# What a tensor follows from: values of examples; only their number; a metric, which holds
# statistics of them. The shape of a RAGGED tensor follows from values, too. A release, with noise
# that is counted, follows from none of these.
DATA, SIZE, METRIC, RAGGED = 1, 2, 4, 8
PRIVATE = DATA | SIZE | METRIC

# Operations on resources: those that read them, write them, and hand them on.
READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)
ITERATOR_TYPES = frozenset(
    {
        "DatasetToSingleElement",
        "IteratorGetNext",
        "IteratorGetNextAsOptional",
        "IteratorGetNextSync",
        "OptionalGetValue",
    }
)
WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStrided")
# Random generators, whose state is a variable, step by the number of values that are drawn.
GENERATORS = frozenset(
    {"NonDeterministicInts", "RngReadAndSkip", "RngSkip"}
    | {"StatefulRandomBinomial", "StatefulStandardNormal", "StatefulStandardNormalV2"}
    | {"StatefulTruncatedNormal", "StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt"}
)
_HANDED_ON = frozenset({"Identity", "IdentityN"})
# Sums over the workers of a distribution strategy, and the like.
COLLECTIVES = ("Collective",)
_FROM_DATA = (
    *("Iterator", "OptionalGetValue", "MultiDeviceIterator", "DatasetTo", "ReduceDataset"),
    *COLLECTIVES,  # Data of other workers.
)
SHAPES = frozenset({"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"})
# Operations whose output has a shape that follows from the values of all inputs, and of those
# from an index on.
_RAGGED = (
    *("DynamicPartition", "ListDiff", "NonMax", "Ragged", "Sparse", "StringSplit", "Unicode"),
    *("Multinomial", "ParameterizedTruncatedNormal", "Random", "TruncatedNormal"),
    *("StatefulRandom", "StatefulStandard", "StatefulTruncated", "StatefulUniform"),
    *("StatelessMultinomial", "StatelessParameterized", "StatelessRandom", "StatelessTruncated"),
)
_SHAPED_FROM = {
    **{"Bincount": 0, "Fill": 0, "Range": 0, "Unique": 0, "UniqueV2": 0, "UniqueWithCounts": 0},
    **{"UniqueWithCountsV2": 0, "Where": 0, "BroadcastTo": 1, "MirrorPad": 1, "OneHot": 1},
    **{"Pad": 1, "PadV2": 1, "Reshape": 1, "Slice": 1, "StridedSlice": 1, "Tile": 1},
    **{"BatchToSpaceND": 1, "CropAndResize": 3, "DenseBincount": 1, "Empty": 0, "LinSpace": 2},
    **{"MatrixDiagV2": 1, "MatrixDiagV3": 1, "ScatterNd": 2, "SpaceToBatchND": 1, "TopKV2": 1},
    **dict.fromkeys(("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"), 1),
    **dict.fromkeys([f"Segment{kind}" for kind in ("Max", "Mean", "Min", "Prod", "Sum")], 1),
    **dict.fromkeys([f"UnsortedSegment{kind}" for kind in ("Max", "Min", "Prod", "Sum")], 2),
}


class Value(NamedTuple):
    """Facts that are known of a tensor.

    Attributes:
      colors: Sources that it follows from, as bits.
      handles: If it is a resource: references to the tensors outside that it may be.
    """

    colors: int = 0
    handles: frozenset = frozenset()


Visit = Callable[[tf.Operation, Sequence[Value], int], bool]


class Flow:
    """Data flow through a traced function: what its tensors follow from.

    Args:
      visit: Gets each operation, also of functions that are called, the values of its inputs, and
        what decides whether it runs, as bits. Returns whether to look into what it calls.
      own_loops: Graphs of branches and loop bodies; what decides whether they run does not count.
      marked: For a graph, the names of tensors that hold data, whatever the graph says.
    """

    def __init__(
        self,
        visit: Visit = lambda *_: True,
        own_loops: Collection[tf.Graph] = (),
        marked: Callable[[tf.Graph], set[str]] = lambda graph: set(),
    ):
        self._visit, self._own_loops, self._marked = visit, own_loops, marked
        self._called: dict = {}
        self._roots: dict = {}
        self._variables: dict = {}

    def values(self, graph: tf.Graph) -> dict:
        """Returns the values of the tensors of a graph by reference: its arguments hold data."""
        if graph not in self._roots:
            arguments = {}
            for outer, inner in getattr(graph, "captures", ()):
                if tf.is_symbolic_tensor(outer):
                    arguments[inner.ref()] = self.values(outer.graph)[outer.ref()]
                elif outer.dtype in (tf.resource, tf.variant):
                    arguments[inner.ref()] = Value(0, frozenset([outer.ref()]))
                else:
                    arguments[inner.ref()] = Value()  # A constant.
            self._roots[graph] = self._run(graph, arguments, 0)
        return self._roots[graph]

    def is_metric(self, handle: Any) -> bool:
        """Returns whether a reference is to the handle of a metric's variable."""
        variable = self._variable(handle)
        return variable is not None and batch_state.is_metric(variable)

    def _held_by(self, handle: Any) -> int:
        """Returns what the variable holds that a reference is to the handle of."""
        variable = self._variable(handle)
        if variable is None:
            return 0
        if holds_data(variable):
            return DATA
        return METRIC if batch_state.is_metric(variable) else 0

    def _variable(self, handle: Any) -> tf.Variable | None:
        if handle not in self._variables:
            self._variables[handle] = batch_state.variable_with(handle.deref())
        return self._variables[handle]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics' variables that were found."""
        found = [v for v in self._variables.values() if v is not None]
        return [v.name for v in found if batch_state.is_metric(v)]

    def _run(self, graph: tf.Graph, arguments: dict, control: int) -> dict:
        values = dict(arguments)
        marked, released = self._marked(graph), own_operations.released_in(graph)
        for op in in_order(graph.get_operations()):
            if op.type == "Placeholder":
                handle = op.outputs[0].dtype in (tf.resource, tf.variant)
                made = Value(0, frozenset([op.outputs[0].ref()])) if handle else Value(DATA)
                values.setdefault(op.outputs[0].ref(), made)
                continue
            inputs = [values[t.ref()] for t in op.inputs]
            outputs = self._outputs(op, inputs, control)
            for tensor, value in zip(op.outputs, outputs, strict=True):
                if tensor.name in marked:
                    value = Value(value.colors | DATA, value.handles)
                elif tensor.name in released:
                    value = Value()
                values[tensor.ref()] = value
        return values

    def _outputs(self, op: tf.Operation, inputs: Sequence[Value], control: int) -> list[Value]:
        enter = self._visit(op, inputs, control)
        everything = Value(_colors(inputs))
        count = len(op.outputs)
        functions = called_functions(op)
        if functions and enter:
            if op.type in op_types.CALLS:
                return _padded(self._call(op, functions[0], inputs, control), count, everything)
            if op.type in op_types.BRANCHES | op_types.CASES:
                return self._branches(op, functions, inputs, control, everything)
            if op.type in op_types.LOOPS:
                return self._loop(op, inputs, control)
            for name in functions:  # For example, of a dataset, which passes elements and states.
                graph = function_graph(op.graph, name)
                self._call(op, name, self._passed_by(op, graph, inputs), control)
            return [Value(everything.colors | DATA)] * count
        if op.type in READS and op.type != "VariableShape":
            held = [self._held_by(handle) for handle in inputs[0].handles]
            return [Value(functools.reduce(operator.or_, held, _colors(inputs[1:])))] * count
        if op.type.startswith(_FROM_DATA):
            return [Value(everything.colors | DATA)] * count
        if op.type == "OptionalHasValue" or op.type == "VariableShape":
            return [Value()]
        if op.type in SHAPES:
            return [Value(_of_shape(v.colors)) for v in inputs]
        if op.type in _HANDED_ON:
            return list(inputs)
        if op.type.startswith(_RAGGED) or op.type in _SHAPED_FROM:
            shaping = _colors(inputs[_SHAPED_FROM.get(op.type, 0) :])
            return [Value(everything.colors | (RAGGED if shaping & DATA else 0))] * count
        made = [frozenset([t.ref()] if t.dtype == tf.resource else []) for t in op.outputs]
        return [Value(everything.colors, handles) for handles in made]

    def _passed_by(
        self, op: tf.Operation, function: tf.Graph, inputs: Sequence[Value]
    ) -> list[Value]:
        """Returns what an operation of data sets passes: data, and what its function captures."""
        anything = Value(_colors(inputs) | DATA, frozenset().union(*(v.handles for v in inputs)))
        passed = [anything] * len(function.inputs)
        first, captures = _captured_inputs(op)
        if len(called_functions(op)) > 1 or not 0 < captures <= len(passed):
            return passed
        return passed[: len(passed) - captures] + list(inputs[first : first + captures])

    def _branches(
        self,
        op: tf.Operation,
        functions: Sequence[str],
        inputs: Sequence[Value],
        control: int,
        everything: Value,
    ) -> list[Value]:
        chosen = inputs[0].colors & PRIVATE
        found = [Value(chosen)] * len(op.outputs)
        for name in functions:
            own = function_graph(op.graph, name) in self._own_loops
            inside = control if own else control | chosen
            branch = self._call(op, name, inputs[1:], inside)
            found = _joined(found, _padded(branch, len(found), everything))
        return found

    def _loop(self, op: tf.Operation, inputs: Sequence[Value], control: int) -> list[Value]:
        condition, body = op.get_attr("cond").name, op.get_attr("body").name
        own = function_graph(op.graph, body) in self._own_loops
        values = list(inputs)
        while True:
            decided = self._call(op, condition, values, control)[0].colors & PRIVATE
            again = self._call(op, body, values, control if own else control | decided)
            joined = _joined(values, _padded(again, len(values), Value(_colors(values))))
            if joined == values:
                return [Value(v.colors | decided, v.handles) for v in values]
            values = joined

    def _call(
        self, op: tf.Operation, name: str, inputs: Sequence[Value], control: int
    ) -> list[Value]:
        graph = function_graph(op.graph, name)
        key = (graph, tuple(inputs), control)
        if key not in self._called:
            arguments = {t.ref(): v for t, v in zip(graph.inputs, inputs, strict=False)}
            values = self._run(graph, arguments, control)
            self._called[key] = [values[t.ref()] for t in graph.outputs]
        return self._called[key]


def _captured_inputs(op: tf.Operation) -> tuple[int, int]:
    """Returns the index and the number of the inputs that the function of a data set captures."""
    first = 0
    for arg in op.op_def.input_arg:
        size = 1
        if arg.type_list_attr:
            size = len(op.get_attr(arg.type_list_attr))
        elif arg.number_attr:
            size = op.get_attr(arg.number_attr)
        if arg.name == "other_arguments":
            return first, size
        first += size
    return first, 0


def _colors(values: Sequence[Value]) -> int:
    colors = 0
    for value in values:
        colors |= value.colors
    return colors


def _of_shape(colors: int) -> int:
    """Returns what the shape of a tensor follows from: also from a metric that it follows from."""
    metric = colors & METRIC
    if colors & RAGGED:
        return DATA | RAGGED | metric
    return (SIZE if colors & (DATA | SIZE) else 0) | metric


def _joined(some: Sequence[Value], others: Sequence[Value]) -> list[Value]:
    return [
        Value(a.colors | b.colors, a.handles | b.handles) for a, b in zip(some, others, strict=True)
    ]


def _padded(values: Sequence[Value], count: int, rest: Value) -> list[Value]:
    """Returns `count` values: cuts the surplus, and fills up with `rest`.

    A graph may have got outputs since the function was made of it, or lack some.
    """
    return [*values[:count], *[rest] * (count - len(values))]


def called_functions(op: tf.Operation) -> list[str]:
    """Returns names of the functions that an operation may call."""
    kinds = _FUNCTION_ATTRIBUTES.get(op.type)
    if kinds is None:
        found = [a for a in op.op_def.attr if a.type in ("func", "list(func)")]
        kinds = _FUNCTION_ATTRIBUTES[op.type] = [(a.name, a.type == "func") for a in found]
    names = []
    for name, single in kinds:
        value = op.get_attr(name)
        names += [f.name for f in ([value] if single else value)]
    return [name for name in names if name]


_FUNCTION_ATTRIBUTES: dict[str, list[tuple[str, bool]]] = {}
# The attribute of a graph that holds the graphs of functions that were imported into it, by name,
# each with its function. Kept elsewhere, one could be taken for that of another function of the
# same name, or outlive the graph, in which what it calls is looked up.
_IMPORTED = "_tfdp_imported_functions"


def function_graph(graph: tf.Graph, name: str) -> tf.Graph:
    """Returns the graph of a function that another graph calls.

    Raises:
      ValueError: It cannot be read.
    """
    enclosing, imported = graph, None
    while enclosing is not None:
        found = enclosing._get_function(name)
        if found is not None and getattr(found, "graph", None) is not None:
            return found.graph
        if found is not None and imported is None:
            imported = enclosing, found
        enclosing = getattr(enclosing, "outer_graph", None)
    if imported is not None:
        return _graph_of_imported(*imported)
    raise ValueError(
        f"The training step calls the function '{name}', which cannot be read, so that nothing "
        "shows what it does with the data. Define it as a `tf.function` in Python."
    )


def _graph_of_imported(graph: tf.Graph, function: Any) -> tf.Graph:
    """Returns the graph of a function that a graph has as a definition."""
    if not hasattr(graph, _IMPORTED):
        setattr(graph, _IMPORTED, {})
    known = getattr(graph, _IMPORTED)
    if function.name not in known or known[function.name][0] is not function:
        with graph.as_default():  # What it calls is looked up there.
            read = function_def_to_graph.function_def_to_graph(function.definition)
        known[function.name] = function, read
    return known[function.name][1]


def in_order(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations of one graph, inputs before outputs, otherwise in given order."""
    given = {op.name: op for op in operations}
    begun: set[str] = set()
    done: dict[str, tf.Operation] = {}
    for first in operations:
        pending = [first]
        while pending:
            op = pending[-1]
            before = [t.op for t in op.inputs if t.op.name in given and t.op.name not in done]
            if op.name in done or not before:
                done[op.name] = pending.pop()
            elif op.name in begun:
                raise ValueError(
                    "The training step must have no loops but those of `tf.while_loop`, whose "
                    f"bodies are functions. Received a cycle of operations at '{op.name}'."
                )
            else:
                begun.add(op.name)
                pending.extend(before)
    return list(done.values())


def graphs_around(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Returns a graph and those that enclose it, as far as they are functions'."""
    while isinstance(graph, tf.__internal__.FuncGraph):
        yield graph
        graph = graph.outer_graph
