"""Lines of each room of tfdp, and of what a private step imports: `python tools/rooms.py`."""

import collections
import pathlib

import grimp

ROOT = pathlib.Path(__file__).parents[1]
STEP = "tfdp.keras3.dp_optimizer"


def lines_of(module: str) -> int:
    """Counts the lines of a module's file."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return len(file.read_text().splitlines())


def room_of(module: str) -> str:
    """Returns the first name below `tfdp`."""
    return ".".join(module.split(".")[:2])


def main() -> None:
    """Prints two columns for each room: lines, and those of them that the step imports."""
    graph = grimp.build_graph("tfdp", exclude_type_checking_imports=True, cache_dir=None)
    imported = {STEP, *graph.find_upstream_modules(STEP)}
    lines: collections.Counter[str] = collections.Counter()
    of_step: collections.Counter[str] = collections.Counter()
    for module in graph.modules:
        lines[room_of(module)] += lines_of(module)
        of_step[room_of(module)] += lines_of(module) * (module in imported)
    print(f"{'room':<24}{'lines':>8}{'of the step':>14}")
    for room in sorted(lines):
        print(f"{room:<24}{lines[room]:>8}{of_step[room]:>14}")
    print(f"{'all':<24}{lines.total():>8}{of_step.total():>14}")
    print(f"\n`{STEP}` imports {len(imported) - 1} modules.")


if __name__ == "__main__":
    main()
