"""What the tests of `experiments.classify` share."""

import os
import subprocess
import sys
from pathlib import Path

from absl import flags

from experiments import classify

ROOT = Path(__file__).absolute().parents[2]


def parse(*arguments):
    """Flags parsed as on the command line, without touching absl's global ones."""
    values = flags.FlagValues()
    classify.define_flags(values)
    rest = values(["classify", *arguments])
    if rest[1:]:
        raise ValueError(rest)
    return values


def classify_here(*arguments):
    """Runs it in this process and returns what `result.json` holds."""
    return classify.run(parse(*arguments))


def start(*arguments, program=("-m", "experiments.classify")):
    """Starts it as a user does, or another program instead."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
