"""Kills programs, and looks at what they leave."""

import contextlib
import dataclasses
import json
import random
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from experiments import records
from tests import forks
from tests.faults import programs

_DELTA = 1e-5
# Keras writes a file in place: a kill leaves a part of it, which must not be taken for a whole one.
_FITS = ("fit", "fit_executions", "fit_keras_2")
_WRITTEN_IN_PLACE = {*_FITS, "save", "save_keras_2", "tune"}
_KERAS_3 = "import tensorflow, keras, tfdp, tfdp.data, tfdp.keras3.named"
_KERAS_2 = (
    "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'; "
    "import tensorflow, tfdp, tfdp.data, tfdp.keras2; tensorflow.keras.Model, tfdp.keras2.DPSGD"
)
_PRELUDES = {
    **{"fit": _KERAS_3, "fit_executions": _KERAS_3, "fit_keras_2": _KERAS_2},
    **{"save": _KERAS_3, "save_keras_2": _KERAS_2},
    "classify": "import tensorflow, keras, tfdp, experiments.classify",
    "tune": f"{_KERAS_3}, tfdp.training.tuning",
    "features": "import tensorflow, tfdp, tfdp.data, kymatio.scattering2d.frontend.numpy_frontend",
    "write_examples": "import tensorflow, tfdp, tfdp.data",
    "records": "import experiments.records",
    "attacks": "import tensorflow, tfdp, experiments.attacks.command, sklearn.ensemble",
}
KINDS = tuple(_PRELUDES)
# Programs of which two may be begun in one folder: the folders of others are those of Keras.
SHARED = ("classify", "tune", "features", "write_examples")
_REFUSED = "must be a folder that no other"
# The model at the end. Programs that make none check their results themselves.
_FINAL = {
    **dict.fromkeys([*_FITS, "save", "save_keras_2", "tune"], "final.keras"),
    "classify": "model.keras",
}


def source(kind: str) -> str:
    """Returns the program of a kind."""
    made: dict[str, Callable[[], str]] = {
        "fit": lambda: programs.fit(durable()),
        "fit_executions": lambda: programs.fit(
            durable().replace("save_freq=2", "save_freq=4"), steps_per_execution=2
        ),
        "fit_keras_2": lambda: programs.fit(durable("keras_2"), keras_2=True),
        "save": programs.save,
        "save_keras_2": lambda: programs.save(keras_2=True),
        "classify": lambda: programs.CLASSIFY,
        "tune": lambda: programs.TUNE,
        "features": lambda: programs.FEATURES,
        "write_examples": lambda: programs.WRITE_EXAMPLES,
        "records": lambda: programs.RECORDS,
        "attacks": lambda: programs.ATTACKS,
    }
    return made[kind]()


def durable(which: str = "keras") -> str:
    """Returns the function with the callbacks of docs/sharp_edges.md."""
    text = (forks.ROOT / "docs/sharp_edges.md").read_text()
    name = "durable" if which == "keras" else f"durable_{which}"
    (block,) = re.findall(rf"```python\n(def {name}\(.*?)```", text, re.DOTALL)
    return block.replace(f"def {name}(", "def durable(")


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


def look(folder: Path, private: bool = True) -> Seen:
    """Returns what a folder holds: files of weights, and those of experiments.

    Args:
      folder: The folder.
      private: Whether all weights must hold what they have cost.
    """
    from tfdp.step.record.file_ledger import ledger_of_file

    seen = Seen({}, [])
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        name = path.name
        if name.startswith(".") or (path.is_dir() and not name.isdigit()):
            continue
        try:
            if path.is_dir():  # A part of examples.
                assert [len(np.load(array, mmap_mode="r")) for array in path.iterdir()] == [10, 10]
            elif name.endswith(".keras") and not private:
                assert zipfile.is_zipfile(path)
            elif name.endswith((".keras", ".h5")):
                seen.epsilons[name] = ledger_of_file(path).ledger.epsilon(_DELTA).epsilon
            elif name == "result.json":
                found = json.loads(path.read_text())
                seen.epsilons[name] = found["epsilon"]
            elif name.endswith(".npy"):
                np.load(path, mmap_mode="r")
            elif name.endswith(".jsonl"):
                records.read(path)  # All but a last line that was cut.
            elif name.endswith((".partial", ".unfinished")):
                continue
            elif name == "examples.json":
                json.loads(path.read_text())
            elif name == "metrics.csv":
                assert path.read_text().endswith("\n")
            elif name.endswith(".png"):
                assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
            else:
                assert path.read_text().endswith("\n")
        except Exception:
            seen.unreadable.append(name)
    for run in folder.glob("unfinished/*/*"):
        unreadable = look(run, private=False).unreadable  # Half of them are without privacy.
        seen.broken += [f"{run.name}: not whole: {name}" for name in unreadable]
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
    runs: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A run without a fault: how often it touches its folder, and how long it takes.

    Attributes:
      events: Number of times that Python opens, renames or removes something there.
      changes: Number of changes there, by any library.
      seconds: How long it works.
    """

    events: int
    changes: int
    seconds: float


def whole(kind: str, folder: Path) -> Whole:
    """Runs a program without a fault."""
    folder.mkdir(parents=True, exist_ok=True)
    (ended,) = forks.run_each(source(kind), [[folder, "none"]], prelude=_PRELUDES[kind])
    assert ended.status == 0, ended.errors[-2000:]
    events, changes, seconds = ended.output.rpartition("WHOLE ")[2].split()
    return Whole(int(events), int(changes), float(seconds))


def trial(kind: str, folder: Path, faults: list[str], program: str | None = None) -> Outcome:
    """Runs a program once with each fault, and to its end; looks at the folder after each.

    Args:
      kind: One of `KINDS`.
      folder: Folder of the trial, without files.
      faults: See `tests.faults.programs`.
      program: The program, if not that of the kind.
    """
    copies = [folder.with_name(f"{folder.name}_after_{n}") for n in range(len(faults) + 1)]
    if not any(fault.startswith("disk") for fault in faults):
        return _trial(kind, folder, copies, faults, program)
    with small_disk(folder):
        return _trial(kind, folder / "run", copies, faults, program)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A disk of 16 MiB at a place, for a while. To mount one needs the rights of root."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def _trial(
    kind: str, folder: Path, copies: list[Path], faults: list[str], program: str | None
) -> Outcome:
    problems, most, kills, unreadable = [], 0.0, 0, 0
    last, told = Seen({}, []), []
    runs = [[folder, fault] for fault in [*faults, "none"]]
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
        # A write that fails ends the program, of which HDF5 may make a crash.
        failed = not killed and one.status != 0 and run[1].startswith(("disk", "size"))
        kills += killed or failed
        if one.status != 0 and not killed and not failed:
            problems.append(f"{where}: it does not resume: {one.errors[-1500:]}")
            break
        beginnings = re.findall(r"^RESUMED (\S+)$", one.output, re.MULTILINE)
        for resumed in beginnings:
            if float(resumed) < most:
                problems.append(
                    f"in {run[1]}: it resumes with epsilon {resumed}, below {most} of a file that "
                    "was published"
                )
        unreadable += len(last.unreadable)
        if last.unreadable and kind not in _WRITTEN_IN_PLACE:
            problems.append(f"{where}: not whole: {last.unreadable}")
        problems += [f"{where}: {problem}" for problem in last.broken]
        most = max([most, *last.epsilons.values()])
        files = ", ".join(f"{name} {epsilon:.3f}" for name, epsilon in last.epsilons.items())
        begun = " ".join(f"begins at {float(resumed):.3f}," for resumed in beginnings)
        ending = "killed" if killed else "fails" if failed else "ends"
        told.append(f"{run[1]}: {begun} {ending}; published: {files}")
        shutil.rmtree(copy, ignore_errors=True)
    if not problems and kind in _FINAL:
        final = last.epsilons.get(_FINAL[kind])
        if final is None:
            problems.append(f"no model at the end: {last}")
        elif final < most:
            problems.append(f"the last epsilon is {final}, below {most} of a published file")
    return Outcome(problems, kills, unreadable, told)


def pair(kind: str, folder: Path) -> list[str]:
    """Runs a program twice at the same time, in one folder; returns what is wrong after it.

    One of them may be refused the folder. What they leave must be whole.
    """
    folder.mkdir(parents=True)
    runs = [[folder, "none"]] * 2
    ended = forks.run_each(source(kind), runs, prelude=_PRELUDES[kind], together=True)
    refused = [one for one in ended if one.status != 0]
    problems = [one.errors[-1500:] for one in refused if _REFUSED not in one.errors]
    if len(refused) == 2:
        problems.append("both end with an error")
    last = look(folder)
    if kind in _FINAL and _FINAL[kind] not in last.epsilons:
        problems.append(f"no model at the end: {last}")
    return [*problems, *last.unreadable, *last.broken]


_COPYING = """
import os, shutil, sys
if os.path.exists(sys.argv[1]):
    shutil.copytree(sys.argv[1], sys.argv[3])
else:
    os.makedirs(sys.argv[3])
    os.makedirs(sys.argv[1])
"""


def random_faults(random_: random.Random, whole: Whole, disks: bool) -> list[str]:
    """Draws one to three faults, of a program that works so without any.

    Args:
      random_: Decides.
      whole: How it works without a fault.
      disks: Whether disks can be mounted.
    """

    def fault() -> str:
        kinds = ["event", "change", "seconds", "disk" if disks else "size"]
        kind = random_.choices(kinds, [0.25, 0.4, 0.15, 0.2])[0]
        if kind in ("disk", "size"):
            return f"{kind}:{int(10 ** random_.uniform(0, 5.5))}"
        if kind == "seconds":
            return f"seconds:{random_.uniform(0.0, whole.seconds):.3f}"
        most = whole.events if kind == "event" else whole.changes
        return f"{kind}:{random_.randint(1, max(1, most))}"

    return [fault() for _ in range(random_.randint(1, 3))]
