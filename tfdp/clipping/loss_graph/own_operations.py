"""Operations of a training step that the library has added itself."""

import contextlib
import threading
import weakref
from collections.abc import Iterator

import tensorflow as tf

_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_sections = threading.local()  # Of this thread: graphs and where in them `own_operations` began.


def is_own(op: tf.Operation) -> bool:
    """Returns whether an operation was marked by `own_operations`."""
    return op.name in _names.get(op.graph, ())


@contextlib.contextmanager
def own_operations() -> Iterator[None]:
    """Marks what is added to the graph being built meanwhile as the library's own.

    It may write what depends on data: a noisy update, a sum that waits for noise.
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
    """Ends `own_operations` for a while, in which other replicas add to the same graph."""
    sections = _sections.__dict__.setdefault("open", [])
    for section in sections:
        _mark_own(*section)
    try:
        yield
    finally:
        sections[:] = [(graph, len(graph.get_operations())) for graph, _ in sections]


def _mark_own(graph: tf.Graph, first: int) -> None:
    names = _names.setdefault(graph, set())
    names.update(op.name for op in graph.get_operations()[first:])
