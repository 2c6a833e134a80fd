"""Finished runs of many settings, and the published numbers that stand beside them.

A run is a dictionary, one line of a JSON Lines file: `dataset`, `row` (of a table: "DPSGD-TS"),
`target_epsilon` (None without privacy), `seed`, `accuracy` and `accuracy_by_class` in [0, 1],
`epsilon`, `epsilon_by_accountant`, `delta`, `evaluated_on`, `settings`; others are not read.

A cell is all runs of one data set, row and target epsilon. experiments/tables/report.py makes
Markdown of cells, experiments/tables/figures.py figures. Both refuse runs that would not count.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Run = Mapping[str, Any]

# A mean of fewer seeds is marked, and neither counted nor judged.
MIN_SEEDS = 3

TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "imdb": "IMDB",
    "imdb_reviews": "IMDB",
}

_MARKS = {1: "¹", 2: "²"}


@dataclasses.dataclass(frozen=True)
class Published:
    """One table of a paper; all numbers in percent.

    Attributes:
      name: Short: "bottlenecked_3".
      title: "Table 3 of ...".
      epsilons: The columns.
      accuracy: For each data set and row, a number per epsilon, None where the paper has none.
      non_private: Accuracy without privacy, by data set.
    """

    name: str
    title: str
    epsilons: tuple[float, ...]
    accuracy: Mapping[str, Mapping[str, tuple[float | None, ...]]]
    non_private: Mapping[str, float | None]

    def number(self, dataset: str, row: str, epsilon: float) -> float | None:
        """Returns what the paper has for a cell, or None."""
        row_numbers = self.accuracy.get(dataset, {}).get(row)
        numbers = dict(zip(self.epsilons, row_numbers, strict=True)) if row_numbers else {}
        return numbers.get(epsilon)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The accuracies of a cell, in percent: one per seed.

    Attributes:
      values: The accuracies.
    """

    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        """How many runs."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Over the seeds; rounded so far only that 0.57 is 57 percent, not 56.99999999999999."""
        return round(float(np.mean(self.values)), 9)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None with one seed."""
        return float(np.std(self.values, ddof=1)) if self.seeds > 1 else None

    @property
    def mark(self) -> str:
        """Says that the seeds are few."""
        return f" {_MARKS[self.seeds]}" if self.seeds < MIN_SEEDS else ""

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.mean:.2f}{spread}"


def epsilon_violations(runs: Sequence[Run]) -> list[str]:
    """Cells whose epsilon is not true, in words; normally none.

    The largest epsilon over the runs of a cell must be at most the target, and every run's must be
    one that an accountant gave: no less than the smallest of `epsilon_by_accountant`.
    """
    found = []
    for (dataset, row, target), same in _grouped(runs).items():
        if target is None:
            continue
        name = _name(dataset, row, target)
        spent = [math.inf if run["epsilon"] is None else run["epsilon"] for run in same]
        if not all(epsilon <= target for epsilon in spent):  # "not": NaN is a violation.
            found.append(f"{name}: spent ε = {np.max(spent):.6g}")
        for run, epsilon in zip(same, spent, strict=True):
            bounds = [b for b in run["epsilon_by_accountant"].values() if b is not None]
            if not any(bound <= epsilon for bound in bounds):
                found.append(f"{name}, seed {run['seed']}: no accountant gave ε = {epsilon:.6g}")
    return found


def check(runs: Sequence[Run]) -> None:
    """Checks that runs may be rendered.

    A run that is there twice, alike in settings and accuracy, counts once.

    Raises:
      ValueError: An epsilon is not true; a run was not evaluated on "test"; a data set, row, target
        epsilon and seed is there twice, with other settings or another accuracy.
    """
    problems = epsilon_violations(runs)
    problems += [
        f"{_run_name(run)}: evaluated on {run.get('evaluated_on')!r}"
        for run in runs
        if run.get("evaluated_on") != "test"
    ]
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = (run["dataset"], run["row"], run["target_epsilon"], run["seed"])
        first = seen.setdefault(key, run)
        for name in ("settings", "accuracy"):
            if run[name] != first[name]:
                problems.append(f"{_run_name(run)}: there twice, with different {name}")
    if problems:
        raise ValueError("These runs cannot be reported:\n" + "\n".join(problems))


def cells(runs: Sequence[Run]) -> dict[tuple[str, str, float | None], Cell]:
    """Returns all cells, by data set, row and target epsilon (None: without privacy).

    Raises:
      ValueError: See `check`.
    """
    check(runs)
    return {
        key: Cell(tuple(100 * run["accuracy"] for run in _once(same)))
        for key, same in _grouped(runs).items()
    }


def baseline_rows(
    runs: Sequence[Run], dataset: str, rows: Iterable[str], baselines: Mapping[str, str]
) -> list[str]:
    """Returns the rows without privacy that belong to private rows; else all of the data set.

    Args:
      runs: See the module's docstring.
      dataset: Its name.
      rows: Private rows.
      baselines: For each private row, the row of the same network without privacy.
    """
    found = sorted(
        {r["row"] for r in runs if (r["dataset"], r["target_epsilon"]) == (dataset, None)}
    )
    named = {baselines[row] for row in rows if row in baselines}
    return [row for row in found if row in named or not named]


def class_accuracies(
    runs: Sequence[Run], dataset: str, row: str, epsilon: float | None
) -> dict[str, float]:
    """Returns the mean accuracy by class over the seeds, in percent; empty if not known.

    Raises:
      ValueError: The runs do not have the same classes.
    """
    same = _once(_grouped(runs).get((dataset, row, epsilon), []))
    found = [run.get("accuracy_by_class") or {} for run in same]
    if len({frozenset(by_class) for by_class in found}) > 1:
        raise ValueError(f"Runs have different classes: {_name(dataset, row, epsilon)}.")
    classes = found[0] if found else ()
    return {k: 100 * float(np.mean([by_class[k] for by_class in found])) for k in classes}


def private_rows(runs: Sequence[Run], dataset: str, epsilon: float) -> list[str]:
    """Rows that were run on a data set for a target epsilon, by name."""
    return sorted(
        {row for data, row, target in _grouped(runs) if (data, target) == (dataset, epsilon)}
    )


def _grouped(runs: Sequence[Run]) -> dict[tuple[str, str, float | None], list[Run]]:
    found: dict[tuple[str, str, float | None], list[Run]] = {}
    for run in runs:
        found.setdefault((run["dataset"], run["row"], run["target_epsilon"]), []).append(run)
    return found


def _once(same: Sequence[Run]) -> list[Run]:
    """Returns the runs of a cell, one per seed: `check` has seen that others are the same."""
    found: dict[Any, Run] = {}
    for run in same:
        found.setdefault(run["seed"], run)
    return list(found.values())


def _name(dataset: str, row: str, epsilon: float | None) -> str:
    return f"{dataset}, {row}, " + ("no privacy" if epsilon is None else f"target ε = {epsilon:g}")


def _run_name(run: Run) -> str:
    return f"{_name(run['dataset'], run['row'], run['target_epsilon'])}, seed {run['seed']}"
