"""Trainings that must not share variables with one another."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_lock = threading.Lock()
_thread_of: dict[int, int] = {}


@contextlib.contextmanager
def exclusive_training(shared: Sequence[Any]) -> Iterator[None]:
    """Keeps other threads from training with any of some objects meanwhile.

    Two attempts at once on the same variables would test each other's updates, and count one
    release where there were two.

    Args:
      shared: Variables, optimizers and models.

    Raises:
      RuntimeError: Another thread trains with one of them.
    """
    own = threading.get_ident()
    with _lock:
        taken = [part for part in shared if _thread_of.get(id(part), own) != own]
        if taken:
            name = getattr(taken[0], "name", None) or getattr(taken[0], "_name", "")
            raise RuntimeError(
                "One thread at a time must train the same variables, or with the same optimizer. "
                f"Received a model that shares '{name}' with one that another thread is training. "
                "Wait until that `fit` has returned, or train a copy."
            )
        added = {id(part) for part in shared} - _thread_of.keys()
        _thread_of.update(dict.fromkeys(added, own))
    try:
        yield
    finally:
        with _lock:
            for key in added:
                del _thread_of[key]
