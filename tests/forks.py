"""Programs in processes of their own that fork from one: it takes the seconds of all imports."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]

# TensorFlow is imported, and has not begun to compute: it would not survive a fork.
_PARENT = """
import json, os, sys, traceback

prelude, program, runs, together, rewritten = json.loads(sys.argv[1])
exec(prelude, {})

def run(arguments, environment, output, errors):
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    if "tensorflow" in sys.modules and not rewritten:
        options = {"disable_meta_optimizer": True}
        sys.modules["tensorflow"].config.optimizer.set_experimental_options(options)
    status = 1
    try:
        exec(program, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

def wait(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

processes, ended = [], []
for arguments in runs:
    processes.append(os.fork())
    if processes[-1] == 0:
        run(*arguments)
    if not together:
        ended.append(wait(processes[-1]))
print(json.dumps(ended or [wait(process) for process in processes]))
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended: by a signal, if its status is negative."""

    status: int
    output: str
    errors: str


def run_each(
    program: str,
    arguments: Sequence[Sequence[object]],
    prelude: str = "import tensorflow, tfdp.data",
    environments: Sequence[dict[str, str]] | None = None,
    without: Collection[str] = (),
    together: bool = False,
    rewritten: bool = False,
) -> list[Ended]:
    """Runs a program once for each list of arguments, its `sys.argv[1:]`.

    Args:
      program: Its source.
      arguments: Arguments of each process.
      prelude: What is run once, before the processes begin.
      environments: Further variables of the environment of each process.
      without: Variables of the environment that none of them has.
      together: Whether all run at the same time, and not one after the other.
      rewritten: Whether TensorFlow rewrites their graphs, as for users (`tests/conftest.py`). It
        does so in any case where the prelude does not import TensorFlow.
    """
    environments = environments or [{}] * len(arguments)
    with tempfile.TemporaryDirectory() as folder:
        places = [[f"{folder}/{i}.out", f"{folder}/{i}.err"] for i in range(len(arguments))]
        runs = [
            [[str(one) for one in given], environment, *place]
            for given, environment, place in zip(arguments, environments, places, strict=True)
        ]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        inherited = {k: v for k, v in os.environ.items() if k not in without}
        parent = subprocess.run(
            [
                sys.executable,
                "-c",
                _PARENT,
                json.dumps([prelude, program, runs, together, rewritten]),
            ],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert parent.returncode == 0, parent.stderr[-3000:]
        statuses = json.loads(parent.stdout)
        texts = [[Path(path).read_text() for path in place] for place in places]
    return [Ended(status, *text) for status, text in zip(statuses, texts, strict=True)]
