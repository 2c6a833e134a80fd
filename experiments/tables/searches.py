"""The record of the searches, as Markdown: how large each was, and what it chose."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.output import markdown
from experiments.tables.runs import TITLES

HOW = (
    "Every trial on record, on held-out training examples: their number is the price of a choice "
    "that no ε covers. The best has the highest mean, of those with the most runs. A value in "
    "**bold** is the smallest or the largest that was tried: a better one may lie beyond it. "
    "Rows are run with the best of the trials that tables.toml declares, which may be fewer."
)

_NOT_SEARCHED = {"target_epsilon", "delta", "dataset", "seed", "eval_split", "validation_examples"}


def section(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a row for each search of a data set, a row and an epsilon.

    Args:
      lines: Trials: lines of `experiments.tune`'s record.
    """
    found: dict[tuple, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["dataset"], line["row"], line["target_epsilon"]), []).append(line)
    order = sorted(found, key=lambda place: (place[0], place[1], place[2] or 0.0))
    rows = [[*_names(*place), *_outcome(found[place])] for place in order]
    edges = sum("**" in cells[-1] for cells in rows)
    made = sum(int(cells[3].split()[0]) for cells in rows)
    titles = ["data set", "row", "ε", "trials", "best, validation %", "best, of what was tried"]
    return (
        f"{HOW}\n\n{markdown(titles, rows)}\n\n{made} trials in {len(rows)} searches; "
        f"{edges} chose a smallest or largest value."
    )


def _names(dataset: str, row: str, epsilon: float | None) -> list[str]:
    return [TITLES.get(dataset, dataset), row, "–" if epsilon is None else f"{epsilon:g}"]


def _outcome(trials: list[dict[str, Any]]) -> list[str]:
    """Returns the number of trials, the best mean accuracy, and its settings among all.

    Settings that an older line lacks were None.
    """
    accuracies: dict[str, list[float]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for trial in trials:
        found = trial["settings"].items()
        given = {k: v for k, v in found if k not in _NOT_SEARCHED and v is not None}
        key = repr(sorted(given.items()))
        accuracies.setdefault(key, []).append(trial["accuracy"])
        settings[key] = given
    best = max(
        accuracies, key=lambda key: (len(accuracies[key]), statistics.fmean(accuracies[key]))
    )
    chosen = []
    for name in dict.fromkeys(name for given in settings.values() for name in given):
        values = list(dict.fromkeys(given.get(name) for given in settings.values()))
        if len(values) > 1:
            chosen.append(f"{name} {_of(settings[best].get(name), values)}")
    accuracy = f"{100 * statistics.fmean(accuracies[best]):.2f}"
    runs = "" if len(trials) == len(settings) else f" ({len(trials)} runs)"
    return [f"{len(settings)}{runs}", accuracy, "; ".join(chosen) or "–"]


def _of(chosen: Any, values: list[Any]) -> str:
    """Returns a value and all that were tried, in bold where it is at an end of numbers."""
    if not all(isinstance(value, (int, float)) for value in values):
        return f"{chosen} of {', '.join(sorted(map(str, values)))}"
    at_end = chosen in (min(values), max(values))
    text = f"**{chosen:g}**" if at_end else f"{chosen:g}"
    return f"{text} of {', '.join(f'{value:g}' for value in sorted(values))}"
