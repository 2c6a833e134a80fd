"""Runs `python -m experiments.vae`; its help is that of experiments/vae/command.py."""

from absl import flags, logging

from experiments import cli
from experiments.vae import command

__doc__ = command.__doc__  # What `--help` prints.

if __name__ == "__main__":
    command.define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)  # unless --verbosity
    cli.run(command.main)
