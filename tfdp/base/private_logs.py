"""Callbacks of `fit` that act on logs of the training data, which epsilon does not cover.

Keras tells nobody which callbacks `fit` was given. They are found in the call of `fit` itself, when
it traces the training step, and when it begins to read Poisson batches.
"""

import string
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Logs of tfdp and Keras that follow from no data, or that epsilon covers.
_PUBLIC = frozenset({"accepted", "accepted_updates", "batch", "epoch", "epsilon"})
_RATES = frozenset({"learning_rate", "lr"})
_FILES = frozenset({"CSVLogger", "RemoteMonitor", "TensorBoard"})
_REMEDY = (
    "Callbacks must not act on the losses and metrics of the training data, which epsilon does not "
    "cover: when training stops, which weights are kept, or the learning rate would tell of single "
    "examples. Received: {}. Monitor public validation data: `model.fit(..., "
    'validation_data=(x_public, y_public))` and `monitor="val_loss"`; leave out `TerminateOnNaN` '
    "(a gradient that is not finite contributes nothing). `privacy_statement` says from now on "
    "that a callback acted on private logs."
)
_STORES = (
    "Callbacks write the losses and metrics of the training data, which epsilon does not cover. "
    "Received: {}. Publish nothing that they write but what begins with `val_`, if the validation "
    "data are public."
)


def check_fit() -> None:
    """Warns of callbacks that act on private logs, if the caller is called by Keras's `fit`.

    The ledger of the private optimizer notes it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit":
            given = getattr(frame.f_locals.get("callbacks"), "callbacks", None)
            optimizer: Any = getattr(frame.f_locals.get("self"), "optimizer", None)
            if isinstance(given, list) and hasattr(optimizer, "note_callbacks"):
                optimizer.note_callbacks(given)
                return
        frame = frame.f_back


def warn_of(callbacks: list, warn: Callable[[str], None]) -> bool:
    """Warns of callbacks that act on private logs, or write them into files.

    Returns:
      Whether there are some that act on them.
    """
    every = list(_all(callbacks))
    acting = [text for text in map(_action, every) if text is not None]
    writing = [f"`{type(c).__name__}`" for c in every if _class_names(c) & _FILES]
    if acting:
        warn(_REMEDY.format("; ".join(dict.fromkeys(acting))))
    elif writing:
        warn(_STORES.format(", ".join(dict.fromkeys(writing))))
    return bool(acting)


def _all(callbacks: list) -> Iterator[Any]:
    for callback in callbacks:
        yield callback
        for name in ("callbacks", "_others"):  # Callbacks of a list and of an average.
            nested = getattr(callback, name, None)
            if isinstance(nested, (list, tuple)):
                yield from _all(list(nested))


def _action(callback: Any) -> str | None:
    """Returns in words on which private log a callback acts; None if on none that can be seen."""
    name = type(callback).__name__
    if "TerminateOnNaN" in _class_names(callback):
        return f"`{name}`, which acts on 'loss'"
    monitor = getattr(callback, "monitor", None)
    acts = getattr(callback, "save_best_only", True)
    if acts and isinstance(monitor, str) and _is_private(monitor):
        return f"`{name}` with monitor={monitor!r}"
    path = getattr(callback, "filepath", None)
    if isinstance(path, str):
        private = [field for field in _fields(path) if _is_private(field)]
        if private:
            return f"`{name}`, whose filepath={path!r} shows '{private[0]}'"
    return None


def _fields(path: str) -> list[str]:
    try:
        return [field for _, field, *_ in string.Formatter().parse(path) if field]
    except ValueError:  # Keras says so when it saves.
        return []


def _is_private(log: str) -> bool:
    return not log.startswith("val_") and log not in _PUBLIC | _RATES


def _class_names(callback: Any) -> set[str]:
    return {cls.__name__ for cls in type(callback).__mro__}
