"""Runs `python -m experiments.attacks`; its help is that of experiments/attacks/command.py."""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
from absl import flags, logging

from experiments import cli, reproduce, tune
from experiments.attacks import command

__doc__ = command.__doc__  # What `--help` prints.

if __name__ == "__main__":
    command.define_flags(flags.FLAGS)
    for module in (command, reproduce, tune):
        flags.adopt_module_key_flags(module)  # `--help` lists them.
    logging.set_verbosity(logging.WARNING)  # unless --verbosity
    cli.run(command.main)
