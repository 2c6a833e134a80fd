"""Files that a classification run leaves in its folder."""

import csv
import dataclasses
import fcntl
import io
import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.settings import RefusedError, Settings
from tfdp.base.whole_files import whole_file

_ARTEFACTS = ("metrics.csv", "curve.png", "flags.txt", "privacy.txt", "result.json", "model.keras")
_CHECKPOINT = "checkpoint"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of `metrics.csv`: the model after an epoch.

    Attributes:
      epoch: Epochs done.
      step: Logical steps done.
      epsilon: Privacy spent so far; infinite for a method that is not private.
      accuracy: On the evaluation split, in [0, 1]; None when the model was not evaluated.
      loss: Mean loss on the evaluation split; None when the model was not evaluated.
      seconds: Time spent training and evaluating so far; None where it would tell of attempts that
        were not released.
    """

    epoch: int
    step: int
    epsilon: float
    accuracy: float | None
    loss: float | None
    seconds: float | None


class _Lock:
    """The lock of a folder, which this process holds as long as one of its objects has it.

    The operating system gives it back when the process ends, however it ends.
    """

    def __init__(self, path: Path):
        folder = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        except OSError:  # The file system has no locks.
            pass


_locks: "weakref.WeakValueDictionary[tuple[Path, int], _Lock]" = weakref.WeakValueDictionary()


class RunFolder:
    """The folder of one run; every file appears whole or not at all.

    From `lock` on, no other process can begin a run in it.

    Args:
      path: The folder; made when the first file is written.
      places: Further flags that `flags.txt` holds, which say where things lie; a run can be resumed
        with others.
    """

    def __init__(self, path: str | Path, places: dict[str, str | None] | None = None):
        self.path = Path(path)
        self._places = places or {}
        self._lock: _Lock | None = None

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoints of an unfinished run lie."""
        return self.path / _CHECKPOINT

    @property
    def model(self) -> Path:
        """Where the trained model lies."""
        return self.path / "model.keras"

    def result(self) -> dict[str, Any] | None:
        """Returns what `write_result` wrote, or None when the run is not finished."""
        path = self.path / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def lock(self) -> None:
        """Keeps other processes from beginning a run here, until this one ends.

        Raises:
          RefusedError: Another process has locked the folder, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            key = self.path.resolve(), os.getpid()
            self._lock = _locks.get(key) or _Lock(self.path)
            _locks[key] = self._lock
        except BlockingIOError as error:
            raise RefusedError(
                "--output_dir must be a folder that no other process writes to. Received: "
                f"--output_dir={self.path}, where a run is under way. Wait until it has ended, or "
                "name another folder."
            ) from error
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> RefusedError:
        return RefusedError(
            f"--output_dir must be a folder that can be written. Received: "
            f"--output_dir={self.path} ({error.strerror})."
        )

    def check(self, settings: Settings) -> None:
        """Checks that the run found here, if any, is one of `settings`.

        Raises:
          RefusedError: It is not; the message names the first flag that differs.
        """
        path = self.path / "flags.txt"
        if path.exists():
            _check_same(_parse(path.read_text().splitlines()), _parse(_lines(settings)), self.path)

    def begin(self, settings: Settings) -> None:
        """Writes `flags.txt` for a new run, or checks that the one found here is the same.

        Raises:
          RefusedError: The folder holds a run of other settings, or cannot be written.
        """
        self.lock()
        self.check(settings)
        places = [f"--{name}={value}" for name, value in self._places.items() if value is not None]
        header = "# Does this run again: python -m experiments.classify --flagfile=flags.txt"
        try:
            self._write("flags.txt", "\n".join([header, *_lines(settings), *places, ""]))
        except OSError as error:
            raise self._not_writable(error) from error

    def clear(self) -> None:
        """Removes what a run wrote here, and nothing else.

        Raises:
          RefusedError: Another process writes to the folder.
        """
        if not self.path.exists():
            return
        self.lock()
        for name in _ARTEFACTS:
            (self.path / name).unlink(missing_ok=True)
        self.clear_checkpoint()

    def clear_checkpoint(self) -> None:
        """Removes the checkpoints."""
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def write_model(self, model: Any) -> None:
        """Writes `model.keras`."""
        self.path.mkdir(parents=True, exist_ok=True)
        with whole_file(self.model) as unfinished:
            model.save(unfinished)

    def write_rows(self, rows: list[Row]) -> None:
        """Writes `metrics.csv`."""
        text = io.StringIO()
        columns = [field.name for field in dataclasses.fields(Row)]
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
        self._write("metrics.csv", text.getvalue())

    def write_privacy(self, text: str) -> None:
        """Writes `privacy.txt`."""
        self._write("privacy.txt", text.rstrip() + "\n")

    def write_curve(self, rows: list[Row], settings: Settings) -> None:
        """Writes `curve.png`."""
        image = io.BytesIO()
        draw_curve(rows, settings).savefig(image, format="png", dpi=120)
        self._write("curve.png", image.getvalue())

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes `result.json`: last, as its presence says that the run is finished."""
        self._write("result.json", json.dumps(result, indent=2, allow_nan=False) + "\n")

    def _write(self, name: str, content: str | bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with whole_file(self.path / name) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def draw_curve(rows: list[Row], settings: Settings) -> Figure:
    """Accuracy and, for a private method, epsilon, against steps."""
    evaluated = [(row.step, 100 * row.accuracy) for row in rows if row.accuracy is not None]
    last, accuracy = rows[-1], evaluated[-1][1]
    steps = [row.step for row in rows]
    figure = Figure(figsize=(7, 5.6 if settings.private else 4), layout="constrained")
    panels = figure.subplots(2 if settings.private else 1, 1, sharex=True, squeeze=False)[:, 0]
    title = f"{settings.dataset}, {settings.method}: {accuracy:.1f}%"
    if settings.private:
        title += f" at ε = {last.epsilon:.2f}, δ = {settings.delta:g}"
    figure.suptitle(title)

    panels[0].plot(*zip(*evaluated, strict=True), marker=".", color="tab:blue")
    panels[0].annotate(
        f"{accuracy:.1f}%",
        evaluated[-1],
        xytext=(0, -14),
        textcoords="offset points",
        ha="right",
        color="tab:blue",
    )
    panels[0].set_ylabel(f"{settings.eval_split} accuracy (%)")
    if settings.private:
        panels[1].plot(steps, [row.epsilon for row in rows], marker=".", color="tab:orange")
        panels[1].axhline(settings.target_epsilon, linestyle="--", linewidth=1, color="0.4")
        panels[1].annotate(
            f"target ε = {settings.target_epsilon:g}",
            (0, settings.target_epsilon),
            xytext=(4, -12),
            textcoords="offset points",
            color="0.4",
        )
        panels[1].set_ylabel("privacy spent: ε")
        panels[1].set_ylim(0, 1.1 * max(settings.target_epsilon, last.epsilon))
    panels[-1].set_xlabel("steps")
    panels[-1].set_xlim(0, None)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _lines(settings: Settings) -> list[str]:
    """Returns the flags that stand for `settings`."""
    return [
        f"--{name}={value}"
        for name, value in dataclasses.asdict(settings).items()
        if value is not None
    ]


def _parse(lines: list[str]) -> dict[str, str]:
    flags = [line[2:].partition("=") for line in lines if line.startswith("--")]
    return {name: value for name, _, value in flags}


def _check_same(old: dict[str, str], new: dict[str, str], path: Path) -> None:
    old = {name: value for name, value in old.items() if name in Settings.__dataclass_fields__}
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            began = f"--{name}={old[name]}" if name in old else f"no --{name}"
            now = f"--{name}={new[name]}" if name in new else f"no --{name}"
            raise RefusedError(
                f"The run in {path} began with {began} and cannot resume with another. Received: "
                f"{now}. Give another --output_dir, or --overwrite to start again."
            )
