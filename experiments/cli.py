"""Command lines of the experiments."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app

_HELP = ("help", "helpfull", "helpshort", "helpxml", "?")


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """Parses the flags of the command line, and calls `main`; `--help` is no failure.

    Args:
      main: Gets the arguments that are no flags, beginning with the program's name.
    """
    try:
        app.run(main)
    except SystemExit as end:
        asked = any(a.startswith("-") and a.lstrip("-") in _HELP for a in sys.argv[1:])
        sys.exit(0 if asked and end.code == 1 else end.code)
