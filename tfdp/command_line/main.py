"""Entry point of the command `tfdp`: its commands, and how errors are shown.

The exit status is 0, 1 for a failure, or 2 for arguments that are wrong.
"""

import importlib.util
import sys
import types
import warnings
from typing import Any, NoReturn

import click


class _Lazy(types.ModuleType):
    """A module that is loaded when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)


def _load_lazily(*names: str) -> None:
    """Has modules loaded when they are first used.

    dp_accounting imports them for what tfdp does not use, which takes half of a short command.
    (`importlib.util.LazyLoader` would load them at the next `import` of the same module.)
    """
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _Lazy
            package, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], last, module)


def main() -> NoReturn:
    """Runs the command with the arguments of the process, and ends the process."""
    _load_lazily("scipy.stats", "scipy.signal")
    from tfdp.command_line.commands import tfdp

    sys.exit(run(tfdp))


def run(command: click.Command, arguments: list[str] | None = None) -> int:
    """Runs a command; shows errors and warnings in one line each, on standard error.

    Args:
      command: The command.
      arguments: Its arguments; None: those of the process.

    Returns:
      The exit status.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("once", UserWarning)
        warnings.showwarning = lambda message, *_: click.echo(f"tfdp: warning: {message}", err=True)
        try:
            return int(command.main(arguments, prog_name="tfdp", standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            return 2
        except click.UsageError as error:
            name = "tfdp" if error.ctx is None else error.ctx.command_path
            click.echo(f"{name}: error: {_one_line(error.format_message())}", err=True)
            return 2
        except click.ClickException as error:
            click.echo(f"tfdp: error: {_one_line(error.format_message())}", err=True)
            return 1
        except click.Abort:
            click.echo("tfdp: interrupted", err=True)
            return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())
