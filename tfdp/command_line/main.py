"""Entry point of the command `tfdp`: its commands, and how errors are shown.

The exit status is 0, 1 for a failure, or 2 for arguments that are wrong.
"""

import importlib.util
import sys
import warnings
from typing import NoReturn

import click


def _load_lazily(*names: str) -> None:
    """Has modules imported when they are first used.

    dp_accounting imports them for what tfdp does not use, which takes half of a short command.
    """
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            # `from scipy import signal` takes the attribute, and would load a module without one.
            package, _, last = name.rpartition(".")
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
