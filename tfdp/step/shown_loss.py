"""The loss that `fit` shows of padded batches: that of their examples.

Keras weighs the loss of a batch by its number of rows, and divides by it, and rows of padding are
rows. Their losses are multiplied by zero, so that only the divisor is wrong. What Keras writes into
the metrics of the loss is therefore replaced in the graph of the step, before it runs: by the sum
of the losses of the examples, and by the number of examples.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.clipping.loss_graph import batch_state, loss_reader, reductions

_corrected: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Names of writes, by graph.


def metrics_of_caller(of: Callable[[Any], list[Any] | None]) -> list[Any]:
    """Returns the metrics of the loss of the model whose training step calls the optimizer.

    Args:
      of: Returns the metrics of the loss of a model; None if it gets something else.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = of(frame.f_locals.get("self"))
        if found is not None:
            return found
        frame = frame.f_back
    return []


def show_examples(metrics: Iterable[Any], mask: tf.Tensor) -> None:
    """Has the metrics of the loss count examples, in the graph being built.

    Losses that are sums over the examples stay as they are; of means the sum is taken. Metrics that
    were not written in this graph, and those of losses that cannot be read, are left alone.

    Args:
      metrics: Means of losses, weighted by rows: those of Keras 2 or 3, with `total` and `count`.
      mask: Weights of the rows of the batch, `[rows, ...]`, zero for padding; or bool.
    """
    graph = tf.compat.v1.get_default_graph()
    writes = list(_writes(graph, metrics))
    if not writes:
        return
    number = _number_of_examples(mask)
    for total, count in writes:
        value = _value(total.added, count.added)
        loss = None if value is None else _loss_of_examples(value, number)
        if loss is not None:
            total.add(loss)
            count.add(number)


class _Write(NamedTuple):
    """Operation by which something is added to a variable, and the place of what is added."""

    op: tf.Operation
    place: int

    @property
    def added(self) -> tf.Tensor:
        """What is added."""
        return self.op.inputs[self.place]

    def add(self, tensor: tf.Tensor) -> None:
        """Has another tensor be added."""
        self.op._update_input(self.place, tf.cast(tensor, self.added.dtype))


def _writes(graph: tf.Graph, metrics: Iterable[Any]) -> Iterator[tuple[_Write, _Write]]:
    """Yields, for each metric, the operations by which it was last written in a graph."""
    last = {}
    for op in graph.get_operations():
        if op.type in ("AssignAddVariableOp", "AssignVariableOp"):
            last[id(_outermost(op.inputs[0]))] = op
    done = _corrected.setdefault(graph, set())
    for metric in metrics:
        found = [
            next((_write(last[id(h)]) for h in _handles(v) if id(h) in last), None)
            for v in (metric.total, metric.count)
        ]
        total, count = found
        if total is not None and count is not None and total.op.name not in done:
            done.add(total.op.name)
            yield total, count


def _write(op: tf.Operation) -> _Write | None:
    """Returns how something is added to a variable: Keras 3 assigns a sum with its value."""
    if op.type == "AssignAddVariableOp":
        return _Write(op, 1)
    total = _before_casts(op.inputs[1]).op
    if total.type == "AddV2" and _before_casts(total.inputs[0]).op.type == "ReadVariableOp":
        return _Write(total, 1)
    return None


def _handles(variable: Any) -> list[Any]:
    """Returns the handles of a variable of a Keras, or of its parts for replicas."""
    inner = getattr(variable, "value", None)  # Set in a variable of Keras 3.
    variable = inner if isinstance(inner, tf.Variable) else variable
    if isinstance(variable, tf.distribute.DistributedValues):
        return [part.handle for part in variable.values]
    return [variable.handle]


def _outermost(handle: Any) -> Any:
    """Returns the handle outside of all functions that a captured one stands for."""
    while tf.is_symbolic_tensor(handle):
        outer = batch_state.captured(handle.graph).get(handle.ref())
        if outer is None:
            break
        handle = outer
    return handle


def _number_of_examples(mask: tf.Tensor) -> tf.Tensor:
    kept = mask if mask.dtype == tf.bool else mask != 0
    kept = tf.reduce_any(kept, axis=list(range(1, kept.shape.rank)))
    return tf.reduce_sum(tf.cast(kept, tf.float32))


def _value(total: tf.Tensor, count: tf.Tensor) -> tf.Tensor | None:
    """Returns the loss that was given to a metric, from what it adds up; None if it is not seen."""
    total, count = _summed(total), _summed(count)
    if total.op.type == "Mul":
        for value, weight in (total.op.inputs, reversed(total.op.inputs)):
            if _before_casts(weight).ref() == count.ref():
                return value
    return total if tf.get_static_value(count) is not None else None


def _summed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what a metric has summed, before changes of type."""
    tensor = _before_casts(tensor)
    return _before_casts(tensor.op.inputs[0]) if tensor.op.type == "Sum" else tensor


def _before_casts(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _loss_of_examples(value: tf.Tensor, number: tf.Tensor) -> tf.Tensor | None:
    """Returns the loss of a batch times the number of its examples; None if it cannot be read."""
    data = loss_reader.data_of(value)[1]

    def depends(tensor: tf.Tensor) -> bool:
        return loss_reader.depends_on(tensor, data)

    parts = []
    for addend in reductions.addends(value, depends):
        if not depends(addend):
            parts.append(tf.reduce_sum(addend) * tf.cast(number, addend.dtype))  # Regularizers.
            continue
        found = reductions.of_term(addend, depends)
        if found is None:
            return None
        if found.kind == reductions.SUM:
            parts.append(addend * tf.cast(number, addend.dtype))
        else:
            parts.append(tf.reduce_sum(found.losses))
    return tf.add_n([tf.cast(part, tf.float32) for part in parts])
