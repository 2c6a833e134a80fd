"""State that belongs to one object in one process."""

import os
import weakref
from typing import Any


class ProcessLocal:
    """Base class of state that copies, pickles and forked processes begin anew.

    It is in no checkpoint. Nobody else then continues what it counts, or uses its secrets again.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Makes the state, and remembers it for forks."""
        new = super().__new__(cls)
        _live.add(new)
        return new

    def _arguments(self) -> tuple:
        """Returns the arguments of `__init__` that make such a state anew."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """Forgets what was before, with no operation on large tensors."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return type(self)(*self._arguments())

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(*self._arguments())

    def __reduce__(self) -> tuple:
        return type(self), self._arguments()


_live: "weakref.WeakSet[ProcessLocal]" = weakref.WeakSet()


def _begin_all_anew() -> None:
    for state in list(_live):
        state.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all_anew)
