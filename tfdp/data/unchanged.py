"""Checks that stored examples do not change during training, of what shows without reading them."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

_REASON = (
    "Argument `data` must not change during training: the privacy guarantee is about the examples "
    "that it had at the start."
)


def check_size(now: int, before: int) -> None:
    """Raises a RuntimeError if the number of examples is another than before."""
    if now != before:
        raise RuntimeError(f"{_REASON} Received {now} examples, where there were {before}.")


def files(arrays: Sequence[Any]) -> dict[str, tuple[int, int] | None]:
    """Returns the files of memory maps, with what shows that they are written to."""
    paths = {str(a.filename) for a in arrays if isinstance(a, np.memmap) and a.filename}
    return {path: _stamp(path) for path in sorted(paths)}


def check_files(before: dict[str, tuple[int, int] | None]) -> None:
    """Raises a RuntimeError if files were written to since `files` returned this.

    A file that has no name any more is not looked at: its pages stay as they are.
    """
    for path, stamp in before.items():
        if _stamp(path) not in (stamp, None):
            raise RuntimeError(
                f"{_REASON} The file '{path}' was written to since. Train on a copy of it."
            )


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns the size and time of a file, if it is there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
