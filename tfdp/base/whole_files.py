"""Files that are there with all that they hold, or not at all."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a path to write to, beside another one, whose name it gets once it is written.

    A kill or a full disk leaves the file that was there before.

    Args:
      path: The file. Its suffix is that of the path to write to.
    """
    place = pathlib.Path(path)
    unfinished = place.with_name(f".unfinished.{place.name}")
    try:
        yield unfinished
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, place)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text to a file, whole."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, "utf-8")
