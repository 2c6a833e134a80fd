"""Records: files of JSON lines, one for each run that ended."""

import fcntl
import json
from pathlib import Path
from typing import Any


def read(path: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of a record; none without a file. A last line cut by a kill is dropped.

    Raises:
      ValueError: Another line is damaged.
    """
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text()
    lines = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as problem:
            raise ValueError(f"{path}, line {number}: not a line of JSON ({problem}).") from problem
    return lines


def append(path: str | Path, line: dict[str, Any]) -> None:
    """Adds a line to a record, after whatever a kill has left unfinished there.

    Several processes may add to a record at once.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Closing the file ends it, after the last byte.
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read() != b"\n":
                text = path.read_bytes()
                file.truncate(text.rfind(b"\n") + 1)
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
