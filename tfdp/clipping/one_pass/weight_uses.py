"""Uses of a variable in the graph of a loss, and what per-example gradients follow from."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import copying, custom_gradients, data_flow
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import Public, Rows
from tfdp.clipping.shared_tensors import constant, reshaped, shared, sizes_of

_VIEW_TYPES = frozenset(
    {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Transpose"}
)


class CannotUse(Exception):
    """Reason why the gradients of a variable cannot be computed in one pass."""


@dataclasses.dataclass(frozen=True)
class View:
    """View of a variable's value as the weights of a site.

    The same numbers in another shape, or negated: norms of gradients are the same. Or, if there is
    an `end`, what is computed from the variable and from public values.

    Attributes:
      operations: The operations that make it from the value of the variable, without an `end`.
      end: The tensor that is computed.
      handle: The variable's handle, with an `end`.
      caller: The operation that calls the function that `end` is in; None if it is in no function.
    """

    operations: tuple[tf.Operation, ...] = ()
    end: tf.Tensor | None = None
    handle: Any = None
    caller: Any = None

    @property
    def key(self) -> tuple:
        """Equal for views that arrange the numbers, or compute them, in the same way."""
        if self.end is not None:
            return (_signature(self.end, self), str(self.caller and self.caller.name))
        return tuple(
            (op.type, tuple(op.outputs[0].shape), str(tf.get_static_value(op.inputs[-1])))
            for op in self.operations
            if op.type not in ("Cast", "Identity")
        )

    @property
    def negates(self) -> bool:
        """Returns whether the weights are the negated values of the variable."""
        return sum(op.type == "Neg" for op in self.operations) % 2 == 1

    def axes_of(self, axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the axes of the variable that axes of the weights are made of.

        Args:
          axes: Axes of the weights.
          shape: Shape of the variable.

        Returns:
          The axes in their order, without those of one entry; None if a reshape splits an axis.
        """
        found = list(axes)
        for op in reversed(self.operations):
            if op.type == "Transpose":
                order = tf.get_static_value(op.inputs[1])
                found = [int(order[axis]) for axis in found]
            elif op.type not in ("Cast", "Identity", "Neg"):
                groups = merged_axes(op.inputs[0].shape, op.outputs[0].shape.as_list())
                if groups is None:
                    return None
                found = [before for axis in found for before in groups[axis]]
        return tuple(axis for axis in found if shape[axis] != 1)

    def pull_back(self, gradient: tf.Tensor) -> tf.Tensor:
        """Maps gradients of the view, `[..., *view]`, to those of the variable."""
        for op in reversed(self.operations):
            lead = gradient.shape.rank - op.outputs[0].shape.rank
            if op.type == "Neg":
                gradient = -gradient
            elif op.type == "Transpose":
                order = list(tf.get_static_value(op.inputs[1]))
                inverse = [order.index(axis) + lead for axis in range(len(order))]
                gradient = tf.transpose(gradient, [*range(lead), *inverse])
            elif op.type not in ("Cast", "Identity"):
                shape = op.inputs[0].shape.as_list()
                sizes = shape if not lead else tf.concat([tf.shape(gradient)[:lead], shape], 0)
                gradient = tf.reshape(gradient, sizes)
        return gradient


def merged_axes(before: tf.TensorShape, after: Sequence[int]) -> list[list[int]] | None:
    """Returns, for each axis that a reshape makes, the axes that it merges to it.

    Returns:
      None if it is unknown or another reshape, such as one that splits an axis.
    """
    if not before.is_fully_defined() or 0 in after:
        return None
    groups: list[list[int]] = []
    axis = 0
    for size in after:
        group: list[int] = []
        while axis < before.rank and math.prod(before[i] for i in group) < size:
            group.append(axis)
            axis += 1
        if math.prod(before[i] for i in group) != size:
            return None
        groups.append(group)
    while axis < before.rank and before[axis] == 1 and groups:
        groups[-1].append(axis)
        axis += 1
    return groups if axis == before.rank else None


def follows_from(tensor: tf.Tensor, view: View) -> bool:
    """Returns whether a tensor is computed from the variable of a view with an `end`."""
    own = tensor.graph is view.handle.graph
    inputs = {} if own else {t.ref(): i for i, t in enumerate(tensor.graph.inputs)}
    boundary = copying.cone([tensor], {view.handle.ref(), *inputs})[1]
    return any(
        t is view.handle if own else follows_from(view.caller.inputs[inputs[t.ref()]], view)
        for t in boundary
    )


def _signature(tensor: tf.Tensor, view: View) -> tuple:
    """Returns what is equal for tensors that are computed from a variable in the same way."""
    if tensor is view.handle:
        return ("variable",)
    if not follows_from(tensor, view):
        return (tensor.dtype.name, _constant(tensor))
    op = tensor.op
    if tensor.graph is not view.handle.graph and op.type == "Placeholder":
        places = [i for i, t in enumerate(tensor.graph.inputs) if t is tensor]
        return _signature(view.caller.inputs[places[0]], view)
    attributes = {a.name: str(op.get_attr(a.name)) for a in op.op_def.attr}
    inputs = tuple(_signature(t, view) for t in op.inputs)
    return (op.type, tuple(sorted(attributes.items())), tensor.value_index, inputs)


def _constant(tensor: tf.Tensor) -> tuple:
    """Returns the value of a constant, or else the name of a tensor."""
    value = tf.get_static_value(tensor)
    if value is None or value.size > 64:
        return (id(tensor.graph), tensor.name)
    return (str(value.tolist()),)


@dataclasses.dataclass(frozen=True)
class Site:
    """An operation that combines a variable with examples.

    Attributes:
      op: The operation.
      weight: Index of the input that is the variable, or a view of it.
      view: Steps from the variable to that input.
      caller: The operation that calls the function that `op` is in; None if it is in no function.
    """

    op: tf.Operation
    weight: int
    view: View
    caller: Any = None

    @property
    def key(self) -> tuple:
        """Tells sites apart."""
        return (None if self.caller is None else self.caller.name, self.op.name, self.weight)


def find_sites(handle: tf.Tensor, analysis: RowAnalysis) -> list[Site]:
    """Finds where the computation of a loss uses a variable.

    Args:
      handle: The variable's handle in the graph of the loss.
      analysis: Analysis of where the tensors that the loss is computed from hold the examples.

    Returns:
      The operations that combine the variable with examples, each once per input.

    Raises:
      CannotUse: The variable is used in a way that cannot be followed.
    """
    search = _Search(handle)
    search.follow(handle, View(), analysis)
    return search.sites


class _Search:
    """Search that follows a variable to the operations where examples meet it."""

    def __init__(self, handle: tf.Tensor):
        self.sites: list[Site] = []
        self._handle = handle
        self._seen: set = set()

    def follow(
        self,
        start: tf.Tensor,
        view: View,
        analysis: RowAnalysis,
        caller: tf.Operation | None = None,
    ) -> None:
        pending = [(start, view)]
        while pending:
            tensor, view = pending.pop()
            if caller is not None:
                _check_stays_inside(tensor, start, caller)
            for op in tensor.consumers():
                if op.name not in analysis.operations or op.type == "StopGradient":
                    continue
                for index in (i for i, t in enumerate(op.inputs) if t is tensor):
                    key = (None if caller is None else caller.name, op.name, index)
                    if key not in self._seen:
                        self._seen.add(key)
                        pending += self._at(op, index, view, analysis, caller)

    def _at(
        self,
        op: tf.Operation,
        index: int,
        view: View,
        analysis: RowAnalysis,
        caller: tf.Operation | None,
    ) -> list[tuple[tf.Tensor, View]]:
        """Notes a site, or returns what else to follow."""
        if op.name in analysis.inner:
            if caller is not None:
                raise CannotUse(f"'{op.name}' ({op.type}) calls a function within a function")
            inner = analysis.inner[op.name]
            self.follow(inner.graph.inputs[index], view, inner, op)
            return []
        if op.type == "ReadVariableOp":
            return [(op.outputs[0], view)]
        if any(not isinstance(analysis.state(t), Public) for t in op.outputs):
            if _is_complex(op):
                raise CannotUse(f"'{op.name}' ({op.type}) combines it with complex numbers")
            self.sites.append(Site(op, index, view, caller))
            return []
        if view.end is None and index == 0 and _is_view(op):
            return [(op.outputs[0], View((*view.operations, op)))]
        made = [t for t in op.outputs if not _has_no_gradient(t)]
        if made and not (_is_pure(op) and all(t.dtype.is_floating for t in made)):
            raise CannotUse(
                f"'{op.name}' ({op.type}) computes something from the variable before examples "
                "meet it"
            )
        return [(t, computed_view(t, self._handle, caller)) for t in made]


def computed_view(end: tf.Tensor, handle: tf.Tensor, caller: tf.Operation | None) -> View:
    """Returns a view of what is computed from a variable.

    Raises:
      CannotUse: It is another in each step of a loop, or its shape is not known well enough.
    """
    inputs = {} if caller is None else {t.ref(): i for i, t in enumerate(end.graph.inputs)}
    if caller is not None and caller.type in op_types.LOOPS:
        for tensor in copying.cone([end], set(inputs))[1]:
            if unchanged(end.graph.outputs[inputs[tensor.ref()]]) is not tensor:
                raise CannotUse(f"'{end.name}' changes from step to step")
    # Outside of a function nothing says how large its tensors are.
    if end.shape.rank is None or (caller is not None and not end.shape.is_fully_defined()):
        raise CannotUse(f"'{end.name}' has no static shape")
    return View((), end, handle, caller)


def _check_stays_inside(tensor: tf.Tensor, start: tf.Tensor, caller: tf.Operation) -> None:
    """Refuses values of a variable that a function returns; a loop passes on its arguments."""
    # TensorFlow gives functions that it differentiates more outputs, at the end.
    inputs, outputs = start.graph.inputs, start.graph.outputs[: len(caller.outputs)]
    for index, output in enumerate(outputs):
        if output is not tensor:
            continue
        passed_on = index < len(inputs) and inputs[index] is start
        if not (passed_on and unchanged(output) is start) or caller.outputs[index].consumers():
            raise CannotUse(f"'{caller.name}' ({caller.type}) returns the variable")


def unchanged(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that identities hand on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _has_no_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_integer or tensor.dtype in (tf.bool, tf.string)


def _is_complex(op: tf.Operation) -> bool:
    """Returns whether an operation works on complex numbers: rules are for real ones."""
    return any(t.dtype.is_complex for t in [*op.inputs, *op.outputs])


def _is_pure(op: tf.Operation) -> bool:
    """Returns whether an operation is a function of its inputs' values, and calls no other."""
    reads = op.type in data_flow.READS
    return (reads or not op.op_def.is_stateful) and not data_flow.called_functions(op)


def _is_view(op: tf.Operation) -> bool:
    """Returns whether an operation arranges the same numbers in another way, or negates them."""
    if op.type not in _VIEW_TYPES or custom_gradients.is_replaced(op):
        return False
    if op.type == "Transpose" and tf.get_static_value(op.inputs[1]) is None:
        return False
    shapes = [op.inputs[0].shape, op.outputs[0].shape]
    return all(shape.is_fully_defined() for shape in shapes)


def by_example(tensor: tf.Tensor, rows: Rows, count: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with an axis for the examples and one for what belongs to each of them.

    Args:
      tensor: Any tensor that holds examples.
      rows: State that says where.
      count: Number of examples, a scalar.

    Returns:
      `[count, each, ...]`, followed by the other axes of the tensor in their order.
    """
    if tf.executing_eagerly():
        return _arranged(tensor, rows, count)
    key = ("by_example", tensor.ref(), rows, count.ref())
    return shared(key, lambda: _arranged(tensor, rows, count))


def _arranged(tensor: tf.Tensor, rows: Rows, count: tf.Tensor) -> tf.Tensor:
    rank = tensor.shape.rank
    if rows.axis != 0:
        tensor = tf.transpose(tensor, [rows.axis, *[a for a in range(rank) if a != rows.axis]])
    rest_shape = tensor.shape[1:]
    static = rest_shape.is_fully_defined()
    rest = rest_shape.as_list() if static else tf.shape(tensor)[1:]
    each = -1 if rows.each is None else rows.each
    if rows.interleaved:
        tensor = tf.reshape(tensor, tf.concat([[each, count], rest], 0))
        tensor = tf.transpose(tensor, [1, 0, *range(2, rank + 1)])
    elif rows.each == 1:
        tensor = tf.expand_dims(tensor, constant(1))
    elif static:
        tensor = reshaped(tensor, [count, each, *rest])
    else:
        tensor = tf.reshape(tensor, tf.concat([[count, each], rest], 0))
    tensor.set_shape([None, rows.each, *rest_shape])
    return tensor


@dataclasses.dataclass(frozen=True)
class Use:
    """Input of a rule: an operation, its data and the gradient of its output.

    Attributes:
      op: The operation.
      weight: Index of the input that is the weights.
      data: Its inputs that hold examples, `[rows, each, ...]` (see `by_example`), others None.
      rows: States that say where the operation's inputs and then its first output hold the
        examples; None for public inputs.
      gradient: Gradient of the sum of the losses with respect to the output, like `data`.
      shape: Shape of the weights. A scalar tensor stands for a size that is not static.
      has_sizes: Whether an input depends on the size of the batch.
      inside: Whether the operation is in a function, so that its inputs cannot be used outside.
    """

    op: tf.Operation
    weight: int
    data: Sequence[tf.Tensor | None]
    rows: Sequence[Rows | None]
    gradient: tf.Tensor
    shape: list[int | tf.Tensor]
    has_sizes: bool
    inside: bool = False

    @property
    def is_open(self) -> bool:
        """Returns whether a size of the weights is not static, as that of positions of a text."""
        return any(tf.is_tensor(size) for size in self.shape)

    @property
    def each(self) -> int | None:
        """Entries of the first axis of the output that belong to one example."""
        return self.gradient.shape[1]


def make_use(
    site: Site,
    gradient: tf.Tensor,
    shape: Sequence[int],
    analysis: RowAnalysis,
    count: tf.Tensor,
) -> Use:
    """Reads what the graph proves about an operation.

    Args:
      site: The operation.
      gradient: Gradient with respect to its first output.
      shape: Shape of the variable.
      analysis: Analysis of where the tensors hold the examples.
      count: Number of rows of the batch, a scalar.

    Returns:
      What a rule needs.

    Raises:
      CannotUse: The operation's output is not proven to hold the examples.
    """
    inputs, output = rows_of(site, analysis)
    data = [
        None if state is None else by_example(tensor, state, count)
        for tensor, state in zip(site.op.inputs, inputs, strict=True)
    ]
    return recorded_use(site, data, by_example(gradient, output, count), shape, analysis)


def rows_of(site: Site, analysis: RowAnalysis) -> tuple[list[Rows | None], Rows]:
    """Returns where a site's inputs hold the examples, None for public ones, and its output.

    Raises:
      CannotUse: The operation's output is not proven to hold the examples.
    """
    op = site.op
    output = analysis.state(op.outputs[0])
    if not isinstance(output, Rows):
        raise CannotUse(f"the output of '{op.name}' ({op.type}) is not proven to hold examples")
    states = [analysis.state(tensor) for tensor in op.inputs]
    return [state if isinstance(state, Rows) else None for state in states], output


def recorded_use(
    site: Site,
    data: Sequence[tf.Tensor | None],
    gradient: tf.Tensor,
    shape: Sequence[int],
    analysis: RowAnalysis,
) -> Use:
    """Makes a use, as `make_use` does, of a gradient and data already arranged by example."""
    weights = site.op.inputs[site.weight]
    sizes = list(shape)
    if weights.dtype != tf.resource:
        sizes = weights.shape.as_list() if site.view.end is None else sizes_of(weights)
    if None in sizes:
        raise CannotUse(f"'{weights.name}' has no static shape")
    states = [analysis.state(tensor) for tensor in site.op.inputs]
    inputs, output = rows_of(site, analysis)
    return Use(
        op=site.op,
        weight=site.weight,
        data=data,
        rows=[*inputs, output],
        gradient=gradient,
        shape=sizes,
        has_sizes=any(not isinstance(state, Rows | Public) for state in states),
        inside=site.caller is not None,
    )
