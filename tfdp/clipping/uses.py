"""Finds where the graph of a loss uses a variable, and what the examples' gradients follow from."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.constants import constant, reshaped, shared
from tfdp.clipping.rows import RowAnalysis
from tfdp.clipping.states import Public, Rows

_VIEW_TYPES = frozenset(
    {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Transpose"}
)


class CannotUse(Exception):
    """Why the gradients of a variable cannot be had in one pass."""


@dataclasses.dataclass(frozen=True)
class View:
    """The values of a variable in another shape, or negated: norms of gradients are the same.

    Attributes:
      operations: The operations that make it from the value of the variable.
    """

    operations: tuple[tf.Operation, ...] = ()

    @property
    def key(self) -> tuple:
        """Equal for views that arrange the numbers in the same way."""
        return tuple(
            (op.type, tuple(op.outputs[0].shape), str(tf.get_static_value(op.inputs[-1])))
            for op in self.operations
            if op.type not in ("Cast", "Identity")
        )

    def pull_back(self, gradient: tf.Tensor) -> tf.Tensor:
        """From gradients of the view, `[..., *view]`, to those of the variable."""
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


@dataclasses.dataclass(frozen=True)
class Site:
    """An operation that combines a variable with examples.

    Attributes:
      op: The operation.
      weight: Which of its inputs is the variable, or a view of it.
      view: How that input follows from the variable.
    """

    op: tf.Operation
    weight: int
    view: View


def find_sites(
    handle: tf.Tensor, in_cone: dict[str, tf.Operation], analysis: RowAnalysis
) -> list[Site]:
    """Where the computation of a loss uses a variable.

    Args:
      handle: The variable's handle in the graph of the loss.
      in_cone: The operations that compute the loss, by name.
      analysis: Where their tensors hold the examples.

    Returns:
      The operations that combine the variable with examples, each once per input.

    Raises:
      CannotUse: Something else than a view is computed from the variable first.
    """
    sites: list[Site] = []
    pending: list[tuple[tf.Tensor, View]] = []
    for op in _consumers(handle, in_cone):
        if op.type == "ReadVariableOp":
            pending.append((op.outputs[0], View()))
        else:
            sites.append(Site(op, 0, View()))
    seen: set[tuple[str, int]] = set()
    while pending:
        tensor, view = pending.pop()
        for op in _consumers(tensor, in_cone):
            for index in (i for i, t in enumerate(op.inputs) if t is tensor):
                if (op.name, index) in seen or op.type == "StopGradient":
                    continue
                seen.add((op.name, index))
                if any(not isinstance(analysis.state(t), Public) for t in op.outputs):
                    sites.append(Site(op, index, view))
                elif op.type in _VIEW_TYPES and index == 0 and _is_static(op):
                    pending.append((op.outputs[0], View((*view.operations, op))))
                elif op.type not in ("Shape", "ZerosLike", "OnesLike", "Size", "Rank"):
                    raise CannotUse(
                        f"'{op.name}' ({op.type}) computes something from the variable before "
                        "examples meet it"
                    )
    return sites


def _consumers(tensor: tf.Tensor, in_cone: dict[str, tf.Operation]) -> list[tf.Operation]:
    return [op for op in tensor.consumers() if op.name in in_cone]


def _is_static(op: tf.Operation) -> bool:
    if op.type == "Transpose" and tf.get_static_value(op.inputs[1]) is None:
        return False
    shapes = [op.inputs[0].shape, op.outputs[0].shape]
    return all(shape.is_fully_defined() for shape in shapes)


def by_example(tensor: tf.Tensor, rows: Rows, count: tf.Tensor) -> tf.Tensor:
    """A tensor with an axis for the examples and one for what belongs to each of them.

    Args:
      tensor: Any tensor that holds examples.
      rows: Where.
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
    """What a rule works with: an operation, its data and the gradient of its output.

    Attributes:
      op: The operation.
      weight: Which of its inputs is the weights.
      data: Its inputs that hold examples, `[rows, each, ...]` (see `by_example`), others None.
      rows: Where the operation's inputs and then its first output hold the examples; None for
        public inputs.
      gradient: Gradient of the sum of the losses with respect to the output, like `data`.
      shape: Shape of the weights.
      has_sizes: Whether an input depends on the size of the batch.
    """

    op: tf.Operation
    weight: int
    data: Sequence[tf.Tensor | None]
    rows: Sequence[Rows | None]
    gradient: tf.Tensor
    shape: list[int]
    has_sizes: bool

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
      analysis: Where the tensors hold the examples.
      count: Number of rows of the batch, a scalar.

    Returns:
      What a rule needs.

    Raises:
      CannotUse: The operation's output is not proven to hold the examples.
    """
    op = site.op
    states = [analysis.state(tensor) for tensor in op.inputs]
    output = analysis.state(op.outputs[0])
    if not isinstance(output, Rows):
        raise CannotUse(f"the output of '{op.name}' ({op.type}) is not proven to hold examples")
    rows = [state if isinstance(state, Rows) else None for state in states]
    data = [
        None if state is None else by_example(tensor, state, count)
        for tensor, state in zip(op.inputs, rows, strict=True)
    ]
    weights = op.inputs[site.weight]
    return Use(
        op=op,
        weight=site.weight,
        data=data,
        rows=[*rows, output],
        gradient=by_example(gradient, output, count),
        shape=list(shape) if weights.dtype == tf.resource else weights.shape.as_list(),
        has_sizes=any(not isinstance(state, Rows | Public) for state in states),
    )
