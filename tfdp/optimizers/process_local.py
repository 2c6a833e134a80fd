"""State of an optimizer that belongs to one object in one process."""

import os
import weakref
from typing import Any


class ProcessLocal:
    """Base class of state that copies, pickles and forked processes begin anew.

    It is in no checkpoint. What continues without it has a cost that is counted, and no noise that
    another has used.
    """

    _arguments: tuple = ()

    def __new__(cls, *args: Any) -> Any:
        """Makes the state, and remembers it for forks."""
        new = super().__new__(cls)
        new._arguments = args
        _live.add(new)
        return new

    def begin_anew(self) -> None:
        """Forgets what was before, with no operation on large tensors."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return type(self)(*self._arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)(*self._arguments)

    def __reduce__(self) -> tuple:
        return type(self), self._arguments


_live: "weakref.WeakSet[ProcessLocal]" = weakref.WeakSet()


def _begin_all_anew() -> None:
    for state in list(_live):
        state.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all_anew)
