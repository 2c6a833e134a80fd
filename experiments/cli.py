"""Command lines of the experiments."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def refusing(name: str, arguments: Sequence[str], *refusals: type[Exception]) -> Iterator[None]:
    """Ends the program with a sentence where it cannot do what the command line asks for.

    Args:
      name: Name of the program.
      arguments: Those of `main`: the program's name alone, unless one is no flag.
      refusals: Errors whose message says why it cannot.
    """
    if len(arguments) > 1:
        sys.exit(f"{name}: Every argument must be a flag, --name=value. Received: {arguments[1]}")
    try:
        yield
    except refusals as refusal:
        sys.exit(f"{name}: {refusal}")
