"""Kills programs, and looks at what they leave."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import tensorflow as tf

from tests import forks
from tests.faults import programs

_DELTA = 1e-5
# Keras writes a file in place: a kill leaves a part of it, which must not be taken for a whole one.
_WRITTEN_IN_PLACE = {"fit", "save", "tune"}
_PRELUDES = {
    "fit": "import tensorflow, keras, tfdp, tfdp.data, tfdp.keras3.named",
    "save": "import tensorflow, keras, tfdp, tfdp.data, tfdp.keras3.named",
    "classify": "import tensorflow, keras, tfdp, experiments.classify",
    "tune": "import tensorflow, keras, tfdp, tfdp.data, tfdp.keras3.named, tfdp.training.tuning",
}
KINDS = tuple(_PRELUDES)


def source(kind: str) -> str:
    """Returns the program of a kind."""
    if kind == "fit":
        return programs.FIT.replace("DURABLE", durable())
    return {"save": programs.SAVE, "classify": programs.CLASSIFY, "tune": programs.TUNE}[kind]


def durable() -> str:
    """Returns the function with the callbacks of docs/sharp_edges.md."""
    text = (forks.ROOT / "docs/sharp_edges.md").read_text()
    (block,) = re.findall(r"```python\n(def durable.*?)```", text, re.DOTALL)
    return block


@dataclasses.dataclass
class Seen:
    """Contents of a folder at one time.

    Attributes:
      epsilons: Of each file that says what its weights have cost.
      unreadable: Files that are not whole.
      broken: States that name what is not there.
    """

    epsilons: dict[str, float]
    unreadable: list[str]
    broken: list[str] = dataclasses.field(default_factory=list)


def look(folder: Path) -> Seen:
    """Returns what a folder holds: files of weights, and those of experiments."""
    from tfdp.step.record.file_ledger import ledger_of_file

    seen = Seen({}, [])
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        name = path.name
        if name.startswith(".") or path.is_dir():
            continue
        try:
            if name.endswith((".keras", ".weights.h5")):
                seen.epsilons[name] = ledger_of_file(path).ledger.epsilon(_DELTA).epsilon
            elif name == "result.json":
                found = json.loads(path.read_text())
                seen.epsilons[name] = found["epsilon"]
            elif name == "metrics.csv":
                assert path.read_text().endswith("\n")
            elif name == "curve.png":
                assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
            else:
                assert path.read_text().endswith("\n")
        except Exception:
            seen.unreadable.append(name)
    state = folder / "selection" / "selection.json"
    if state.exists() and (problem := _problem_of_selection(state)):
        seen.broken.append(problem)
    return seen


def _problem_of_selection(path: Path) -> str | None:
    """Returns what is wrong with the state of a selection: its weights must be there, and whole."""
    try:
        state = json.loads(path.read_text())
        assert state["done"] <= len(state["drawn"]), state
        if state["weights"] is not None:
            tf.train.load_checkpoint(str(path.with_name(state["weights"])))
    except Exception as error:
        return f"{path.name}: {type(error).__name__}: {error}"
    return None


@dataclasses.dataclass
class Outcome:
    """The outcome of a trial: what is wrong, and what was seen on the way."""

    problems: list[str]
    kills: int
    unreadable: int


def events(kind: str, folder: Path) -> int:
    """Runs a program without a fault; returns how often it touches files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (ended,) = forks.run_each(source(kind), [[folder, "none"]], prelude=_PRELUDES[kind])
    assert ended.status == 0, ended.errors[-2000:]
    return int(ended.output.rpartition("EVENTS ")[2])


def trial(kind: str, folder: Path, faults: list[str], program: str | None = None) -> Outcome:
    """Runs a program once with each fault, and to its end; looks at the folder after each.

    Args:
      kind: One of `KINDS`.
      folder: Folder of the trial, without files.
      faults: See `tests.faults.programs`.
      program: The program, if not that of the kind.
    """
    problems, most, kills, unreadable = [], 0.0, 0, 0
    last = Seen({}, [])
    runs = [[folder, fault] for fault in [*faults, "none"]]
    copies = [folder.with_name(f"{folder.name}_after_{number}") for number in range(len(runs))]
    # What a run leaves is copied before the next one begins.
    ended = forks.run_each(
        _COPYING + (program or source(kind)),
        [[*run, copy] for run, copy in zip(runs, copies, strict=True)],
        prelude=_PRELUDES[kind],
    )
    for number, (run, copy, one) in enumerate(zip(runs, copies, ended, strict=True)):
        after = copies[number + 1] if number + 1 < len(copies) else folder
        last = look(after)
        where = f"after {run[1]}"
        killed = one.status == -9
        kills += killed
        if not killed and one.status != 0:
            problems.append(f"{where}: it does not resume: {one.errors[-1500:]}")
            break
        unreadable += len(last.unreadable)
        if last.unreadable and kind not in _WRITTEN_IN_PLACE:
            problems.append(f"{where}: not whole: {last.unreadable}")
        problems += [f"{where}: {problem}" for problem in last.broken]
        most = max([most, *last.epsilons.values()])
        shutil.rmtree(copy, ignore_errors=True)
    final = last.epsilons.get("model.keras" if kind == "classify" else "final.keras")
    if not problems and final is None:
        problems.append(f"no model at the end: {last}")
    if not problems and final < most:
        problems.append(f"the last epsilon is {final}, below {most} of a file that was published")
    return Outcome(problems, kills, unreadable)


_COPYING = """
import os, shutil, sys
if os.path.exists(sys.argv[1]):
    shutil.copytree(sys.argv[1], sys.argv[3])
else:
    os.makedirs(sys.argv[3])
    os.makedirs(sys.argv[1])
"""


def random_faults(random_: random.Random, count: int, seconds: float) -> list[str]:
    """Draws one to three faults.

    Args:
      random_: Draws them.
      count: Events of a run without a fault.
      seconds: Seconds of a run without a fault.
    """
    return [
        f"event:{random_.randint(1, count)}"
        if random_.random() < 0.7
        else f"seconds:{random_.uniform(0.0, seconds):.3f}"
        for _ in range(random_.randint(1, 3))
    ]
