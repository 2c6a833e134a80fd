"""Trains variational autoencoders with differential privacy, and compares ways of doing it.

    python -m experiments.vae
    python -m experiments.vae --task=sparsity --data_dir=... --target_epsilon=0.5,1,2,5 --seeds=3
    python -m experiments.vae --task=pinwheel --target_epsilon=0.5,1,2,5 --seeds=3

`digits` (embedded): a conditional autoencoder generates images, and a classifier that has seen
nothing else is tested on real ones. `sparsity` (Fashion-MNIST) and `pinwheel`: sections 5.1 and 5.2
of Takahashi et al., Differentially Private Variational Autoencoders with Term-wise Gradient
Aggregation (https://arxiv.org/abs/2006.11204), and their figures 1 and 2.

Everything is measured and drawn on held-out examples. Writes to --output_dir: runs.csv, a row for
each run; runs/, what figures show and the privacy statement of each; a figure of the measures
against epsilon, and pinwheel.png or generated.png. Runs that are found there are not repeated.

Flags that are not given take the defaults of the task, in experiments/vae/settings.py. Choose
others on --eval_split=validation, never on the test set; what that choice costs in privacy is not
part of epsilon.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import csv
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

from experiments import cli, datasets
from experiments.settings import RefusedError, positive_numbers
from experiments.vae import data as vae_data
from experiments.vae import figures as vae_figures
from experiments.vae import settings as vae_settings
from experiments.vae import training
from experiments.vae.settings import DEFAULTS, METHODS, VaeSettings, resolve
from experiments.vae.training import Outcome
from tfdp.base.whole_files import whole_file, write_text

_COLUMNS = [*VaeSettings.__dataclass_fields__, *Outcome.__dataclass_fields__]
_INTEGERS = {
    "steps": "Updates of each run. Default: by --epochs.",
    "epochs": "Passes over the training set, instead of --steps.",
    "expected_batch_size": "Expected number of examples in a batch, at most all.",
    "num_samples": "Codes that are drawn for an example.",
    "num_groups": "Groups of a batch in which the divergence is clipped.",
    "evaluation_examples": "Held-out examples that are measured.",
    "importance_samples": "Codes that the log-likelihood of an example is estimated from.",
}
_NUMBERS = {
    "delta": "Delta of the guarantee, below 1/N.",
    "alpha": "Weight of the divergence.",
    "beta": "Weight of KL(q(z|x) || p(z)).",
    "normal_scale": "Standard deviation of a normal likelihood, instead of the task's likelihood.",
    "l2_norm_clip": "Largest l2 norm of an example's gradient.",
    "batch_clip": "Largest l2 norm of the gradient of a group's divergence.",
    "learning_rate": "Learning rate of all methods. Default: by task and method.",
}


class Runs:
    """The runs in a folder: `runs.csv`, and two files of each in `runs/`.

    Args:
      folder: The folder; made when the first run is added.

    Raises:
      RefusedError: What is there has other columns.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._rows: list[dict[str, str]] = []
        path = folder / "runs.csv"
        if path.exists():
            reader = csv.DictReader(io.StringIO(path.read_text()))
            self._rows = list(reader)
            if reader.fieldnames != _COLUMNS:
                raise RefusedError(
                    f"--output_dir must be a folder of this experiment, or a new one: {path} has "
                    f"other columns. Received: --output_dir={folder}."
                )

    def find(self, settings: VaeSettings) -> dict[str, Any] | None:
        """Returns the row of a finished run, numbers as such; None when there is none."""
        key = settings.key()
        complete = all(self._path(settings, kind).exists() for kind in ("npz", "txt"))
        for row in self._rows:
            if complete and all(row[name] == value for name, value in key.items()):
                outcome = {
                    name: float(row[name]) if row[name] else None
                    for name in Outcome.__dataclass_fields__
                }
                return {**dataclasses.asdict(settings), **outcome}
        return None

    def add(
        self, settings: VaeSettings, outcome: Outcome, arrays: dict[str, np.ndarray], statement: str
    ) -> None:
        """Writes a run: its row last, as its presence says that the run is finished."""
        key = settings.key()
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        with whole_file(self._path(settings, "npz")) as unfinished:
            np.savez_compressed(unfinished, **arrays)
        write_text(self._path(settings, "txt"), statement.rstrip() + "\n")
        outcome_texts = {
            name: "" if value is None else str(value)
            for name, value in dataclasses.asdict(outcome).items()
        }
        others = [row for row in self._rows if any(row[n] != v for n, v in key.items())]
        self._rows = [*others, {**key, **outcome_texts}]
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self.folder / "runs.csv", text.getvalue())

    def arrays(self, settings: VaeSettings) -> dict[str, np.ndarray]:
        """Returns what the figures show of a finished run."""
        with np.load(self._path(settings, "npz")) as found:
            return dict(found)

    def statement(self, settings: VaeSettings) -> str:
        """Returns the privacy statement of a finished run."""
        return self._path(settings, "txt").read_text()

    def _path(self, settings: VaeSettings, kind: str) -> Path:
        return self.folder / "runs" / f"{settings.name}.{kind}"


def runs_to_make(values: flags.FlagValues, dataset_size: int) -> list[VaeSettings]:
    """Returns the runs that the flags ask for; of methods without privacy, one for each seed.

    Raises:
      RefusedError: Values that do not go together.
    """
    task = values["task"].value
    given = {name: values[name].value for name in (*_INTEGERS, *_NUMBERS, "optimizer")}
    given |= {"task": task, "eval_split": values["eval_split"].value}
    methods = values["methods"].value or DEFAULTS[task].methods
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise RefusedError(
            f"--methods must be among {', '.join(METHODS)}. Received: --methods={unknown[0]}."
        )
    asked = values["target_epsilon"].value or []
    epsilons = sorted(positive_numbers("target_epsilon", asked, may_be_empty=True))
    epsilons = epsilons or DEFAULTS[task].target_epsilon
    seeds = values["seeds"].value or DEFAULTS[task].seeds
    todo = [
        resolve(given, method, epsilon, seed, dataset_size)
        for seed in range(1, seeds + 1)
        for epsilon in epsilons
        for method in methods
    ]
    return list(dict.fromkeys(todo))


def run(values: flags.FlagValues) -> list[dict[str, Any]]:
    """Does what the parsed flags ask for; returns the rows of the runs, found or made.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    task = values["task"].value
    folder = Path(values["output_dir"].value or Path("results", "vae", task))
    runs = Runs(folder)
    data = vae_data.load(
        task, data_dir=values["data_dir"].value, eval_split=values["eval_split"].value
    )
    todo = runs_to_make(values, data.size)
    rows = []
    for settings in todo:
        row = runs.find(settings)
        if row is None:
            runs.add(settings, *training.run(settings, data))
            row = runs.find(settings)
            tf.keras.backend.clear_session()  # The next run's model is another one.
        print(_line(row), flush=True)
        rows.append(row)
    written = write_figures(runs, todo, rows)
    measures = [DEFAULTS[task].measure, "log_likelihood", "mmd"]
    if task in training.CONDITIONAL:
        measures += ["kl", "explained", "diversity"]
    print(f"\n{vae_figures.table(rows, measures)}\n")
    print(_privacy(runs, todo))
    if task in training.CONDITIONAL:
        accuracy = training.accuracy_of_real(data)
        print(f"A classifier of the real training images: {accuracy:.4f}; not private.")
    print(f"{', '.join(written)}: {folder}")
    return rows


def write_figures(runs: Runs, todo: list[VaeSettings], rows: list[dict[str, Any]]) -> list[str]:
    """Draws; returns the names of the files."""
    task = todo[0].task
    measure = DEFAULTS[task].measure
    title = f"{task}, {todo[0].eval_split} examples, seeds: {len({s.seed for s in todo})}"
    measures = [measure, "log_likelihood", "mmd"]
    figures = {f"{measure}.png": vae_figures.draw_measures(rows, measures, title)}
    # The first seed of each method, at the largest epsilon there is.
    largest = max((s.target_epsilon for s in todo if s.private), default=math.inf)
    shown = {
        settings.method: settings
        for settings in reversed(todo)
        if settings.seed == 1 and settings.target_epsilon in (largest, math.inf)
    }
    shown = {method: shown[method] for method in METHODS if method in shown}
    titles = {
        method: METHODS[method].title
        + (f", ε = {settings.target_epsilon:g}" if settings.private else "")
        for method, settings in shown.items()
    }
    arrays = {method: runs.arrays(settings) for method, settings in shown.items()}
    if task == "pinwheel":
        figures["pinwheel.png"] = vae_figures.draw_pinwheel(
            arrays, training.PINWHEEL_CENTRES, training.PINWHEEL_VARIANCE, titles
        )
    else:
        images = {method: found["generated"] for method, found in arrays.items()}
        figures["generated.png"] = vae_figures.draw_generated(
            images, titles, task in training.CONDITIONAL
        )
    for name, figure in figures.items():
        with whole_file(runs.folder / name) as unfinished:
            figure.savefig(unfinished, dpi=120)
    return ["runs.csv", *figures]


def _line(row: dict[str, Any]) -> str:
    """Describes the result of a run."""
    measures = [DEFAULTS[row["task"]].measure, "log_likelihood", "mmd"]
    shown = ", ".join(f"{name} {row[name]:.4g}" for name in measures)
    epsilon = "not private"
    if math.isfinite(row["epsilon"]):
        epsilon = f"epsilon {row['epsilon']:.4f} of {row['target_epsilon']:g}"
    return f"{row['method']}, seed {row['seed']}: {epsilon}; {shown}; {row['seconds']:.1f} s"


def _privacy(runs: Runs, todo: list[VaeSettings]) -> str:
    private = [settings for settings in todo if settings.private]
    if not private:
        return "No differential privacy."
    several = (
        f"\nThat is the first of {len(private)} private runs, whose statements lie in runs/. Each "
        "counts itself alone: who sees several of them sees the sum of what they spent."
        if len(private) > 1
        else ""
    )
    return runs.statement(private[0]) + several


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    where = {"flag_values": values}
    flags.DEFINE_enum("task", vae_data.TASKS[0], vae_data.TASKS, "What to learn.", **where)
    text = f"Among {', '.join(METHODS)}. Default: by task."
    flags.DEFINE_list("methods", None, text, **where)
    text = "Epsilons that a run may cost, separated by commas; the noise is calibrated to each."
    flags.DEFINE_list("target_epsilon", None, f"{text} Default: by task.", **where)
    text = "Runs of each method at each epsilon, of seeds 1, 2, ... Default: by task."
    flags.DEFINE_integer("seeds", None, text, lower_bound=1, **where)
    for name, text in _INTEGERS.items():
        text = text if "Default" in text else f"{text} Default: by task."
        low = 2 if name == "evaluation_examples" else 1
        flags.DEFINE_integer(name, None, text, lower_bound=low, **where)
    for name, text in _NUMBERS.items():
        text = text if "Default" in text else f"{text} Default: by task."
        flags.DEFINE_float(name, None, text, **where)
    text = "Optimizer of the private methods. Default: by task."
    flags.DEFINE_enum("optimizer", None, vae_settings.OPTIMIZERS, text, **where)
    text = "What is measured on: the test set, or other held-out examples."
    flags.DEFINE_enum("eval_split", "test", ["test", "validation"], text, **where)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, **where)
    flags.DEFINE_string("output_dir", None, "Folder. Default: results/vae/TASK.", **where)


def main(argv: list[str]) -> None:
    """Runs what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("vae", argv, RefusedError, datasets.DataError):
        run(flags.FLAGS)
