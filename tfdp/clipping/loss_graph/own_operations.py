"""Operations of a training step that the library has added itself, and what they release.

Three marks tell apart the parts of a private step:

- *own*: the clipped sum, its noise and the record. These may write what depends on data.
- *released*: the noisy sums. Their cost is counted, so that they no longer count as data.
- *update*: what is made of the released sums, which users extend: schedules, constraints, their own
  optimizers. It is checked as the rest of the step is; the mark tells whose code it was.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_released: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# For each graph: names of operations of updates, and weak references to their optimizers.
_updates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_sections = threading.local()  # Graphs of this thread, and where `own_operations` began.


def is_own(op: tf.Operation) -> bool:
    """Returns whether an operation was marked by `own_operations`."""
    return op.name in _names.get(op.graph, ())


@contextlib.contextmanager
def own_operations() -> Iterator[None]:
    """Marks what is added to the graph being built meanwhile as the library's own.

    It may write what depends on data: a sum that waits for noise.
    """
    graph = tf.compat.v1.get_default_graph()
    sections = _sections.__dict__.setdefault("open", [])
    sections.append((graph, len(graph.get_operations())))
    try:
        yield
    finally:
        _mark_own(*sections.pop())


@contextlib.contextmanager
def pause_own_operations() -> Iterator[None]:
    """Ends `own_operations` for a while, in which others add to the same graph.

    Others are other replicas, and the code of users that makes the update.
    """
    sections = _sections.__dict__.setdefault("open", [])
    for section in sections:
        _mark_own(*section)
    try:
        yield
    finally:
        sections[:] = [(graph, len(graph.get_operations())) for graph, _ in sections]


@contextlib.contextmanager
def update_operations(optimizer: Any) -> Iterator[None]:
    """Marks what is added to the graph being built meanwhile as an optimizer's update.

    It is not the library's own, and may only write what follows from `mark_released` tensors,
    public numbers, and state made of these.
    """
    graph = tf.compat.v1.get_default_graph()
    with pause_own_operations():
        first = len(graph.get_operations())
        try:
            yield
        finally:
            made = [op.name for op in graph.get_operations()[first:]]
            _updates.setdefault(graph, {}).update(dict.fromkeys(made, weakref.ref(optimizer)))


def optimizer_of(op: tf.Operation) -> Any:
    """Returns the optimizer whose update an operation was marked as; None if it was not."""
    reference = _updates.get(op.graph, {}).get(op.name)
    return None if reference is None else reference()


def mark_released(tensors: Iterable[tf.Tensor | None]) -> None:
    """Marks tensors as released: what they reveal of the data is counted."""
    for tensor in tensors:
        if tensor is not None:
            _released.setdefault(tensor.graph, set()).add(tensor.name)


def released_in(graph: tf.Graph) -> set[str]:
    """Returns the names of a graph's tensors that are marked as released."""
    return _released.get(graph, set())


def _mark_own(graph: tf.Graph, first: int) -> None:
    names = _names.setdefault(graph, set())
    names.update(op.name for op in graph.get_operations()[first:])
