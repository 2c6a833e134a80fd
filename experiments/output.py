"""Printing and drawing that several experiments share."""

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tfdp.base.whole_files import whole_file


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions() -> str:
    """Returns what the numbers were computed with."""
    names = ("dp-accounting", "numpy", "scipy")
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {found}"


def save(figure: Figure, path: str) -> None:
    """Writes a picture, and says so."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150)
    print(f"\n{path}")
