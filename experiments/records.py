"""Records: files of JSON lines, one for each run that ended."""

import json
from pathlib import Path
from typing import Any


def read(path: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of a record; none without a file. A last line cut by a kill is dropped."""
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def append(path: str | Path, line: dict[str, Any]) -> None:
    """Adds a line to a record, after whatever a kill has left unfinished there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, 2)
        if size:
            file.seek(size - 1)
            if file.read() != b"\n":
                text = path.read_bytes()
                file.truncate(text.rfind(b"\n") + 1)
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
