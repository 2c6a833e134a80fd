"""Results of many runs beside published numbers, as Markdown.

Runs are those of experiments/tables/runs.py. Whatever renders raises a ValueError for runs that
would not count: see `check` there.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from experiments.output import markdown
from experiments.tables.runs import (
    MIN_SEEDS,
    TITLES,
    Cell,
    Published,
    Run,
    baseline_rows,
    cells,
    class_accuracies,
    private_rows,
)

# What holds of every `subgroup_table`.
HOW_SUBGROUPS = (
    "Test accuracy of a class in percent, averaged over the seeds before the worst and the best "
    "class are taken."
)

_FEW_SEEDS = {1: "¹ 1 seed", 2: "² 2 seeds"}  # by `Cell.mark`


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of one cell minus that of another.

    Attributes:
      row: Name of the first: with sign.
      other: Name of the second: without.
      difference: Difference of the means, in percent.
      error: Its standard error, by Welch; None where a cell has one seed.
      verdict: "ahead" or "behind" where Welch's t test at 5% tells the means apart, else "within
        noise"; "too few seeds" where a cell has less than `MIN_SEEDS`.
    """

    dataset: str
    epsilon: float
    row: str
    other: str
    difference: float
    error: float | None
    verdict: str


# Accuracy beside the published.


def accuracy_table(
    published: Published,
    runs: Sequence[Run],
    dataset: str,
    notes: Mapping[str, str] | None = None,
    baselines: Mapping[str, str] | None = None,
) -> str:
    """Ours and the published accuracy of one data set: rows by epsilons.

    A cell is "mean ± standard deviation (published)" in percent, bold where our mean is at or above
    the published number; "– (published)" where nothing was run.

    Args:
      published: The table of the paper; its rows and epsilons are shown, no others.
      runs: See the module's docstring.
      dataset: Its name.
      notes: For each row, the reason that there are no runs; shown under the table where there are
        none.
      baselines: For each private row, the row of the same network without privacy.

    Raises:
      ValueError: See `check`.
    """
    ours, lines, remarks, few = cells(runs), [], [], set()
    rows = published.accuracy[dataset]
    for row in rows:
        found = [ours.get((dataset, row, epsilon)) for epsilon in published.epsilons]
        numbers = [published.number(dataset, row, epsilon) for epsilon in published.epsilons]
        lines.append([row, *map(_text, found, numbers)])
        few |= {cell.seeds for cell in found if cell}
        if row in (notes or {}) and not any(found):
            remarks.append(f"{row}: {notes[row]}")
    shown, number = [], published.non_private.get(dataset)
    for row in baseline_rows(runs, dataset, rows, baselines or {}):
        cell = ours[dataset, row, None]
        shown.append(f"{row} {_text(cell, number)}")
        few.add(cell.seeds)
    if shown or number is not None:
        remarks.append(f"Non-private: {', '.join(shown) or _text(None, number)}")
    remarks += _few_seeds(few)
    titles = [TITLES.get(dataset, dataset), *(f"ε = {e:g}" for e in published.epsilons)]
    return "\n\n".join([markdown(titles, lines), *(f"{remark.rstrip('.')}." for remark in remarks)])


def accuracy_section(
    published: Published,
    runs: Sequence[Run],
    notes: Mapping[str, str] | None = None,
    baselines: Mapping[str, str] | None = None,
) -> str:
    """Writes a published table's title, how to read it, and a table per data set."""
    deltas = sorted({run["delta"] for run in runs if run["target_epsilon"] is not None})
    at = f" at δ = {', '.join(f'{delta:g}' for delta in deltas)}" if deltas else ""
    how = (
        f"Test accuracy in percent{at}: mean ± sample standard deviation over the seeds (published "
        "number); **bold**: the mean is at or above the published number; –: not run."
    )
    tables = [
        accuracy_table(published, runs, data, notes, baselines) for data in published.accuracy
    ]
    return "\n\n".join([f"### {published.title}", how, *tables])


def count_section(tables: Sequence[Published], runs: Sequence[Run]) -> str:
    """Counts the cells at or above the published numbers, by table and in total; lists those below.

    Raises:
      ValueError: See `check`.
    """
    ours, lines, below, total = cells(runs), [], [], np.zeros(4, int)
    for table in tables:
        counts = np.zeros(4, int)  # at or above, judged, with few seeds, not run
        for dataset, row, epsilon in _published_cells(table):
            cell, number = ours.get((dataset, row, epsilon)), table.number(dataset, row, epsilon)
            judged = cell is not None and cell.seeds >= MIN_SEEDS
            above = judged and cell.mean >= number
            counts += [above, judged, cell is not None and not judged, cell is None]
            if judged and not above:
                name = [table.title, TITLES.get(dataset, dataset), row, f"{epsilon:g}"]
                below.append([*name, str(cell), f"{number}", _signed(cell.mean - number)])
        lines.append(f"{table.title}: {_count(counts)}")
        total += counts
    lines.append(f"In total: {_count(total)}")
    text = "\n".join(f"- {line}" for line in lines)
    if below:
        titles = ["table", "data set", "row", "ε", "ours", "published", "gap"]
        text += f"\n\nBelow the published number:\n\n{markdown(titles, below)}"
    return text


def other_section(tables: Sequence[Published], runs: Sequence[Run]) -> str:
    """Private cells that no published table has, such as those of other epsilons; may be empty.

    Raises:
      ValueError: See `check`.
    """
    printed = {
        (dataset, row, epsilon)
        for table in tables
        for dataset, rows in table.accuracy.items()
        for row in rows
        for epsilon in table.epsilons
    }
    others = {
        key: cell for key, cell in cells(runs).items() if key not in printed and key[2] is not None
    }
    lines = [
        [TITLES.get(dataset, dataset), row, f"{epsilon:g}", f"{others[dataset, row, epsilon]}"]
        for dataset, row, epsilon in sorted(others)
    ]
    return markdown(["data set", "row", "ε", "test accuracy (%)"], lines) if lines else ""


# Sign against no sign.


def differences(runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Differences of rows, for every data set and target epsilon where both were run.

    Args:
      runs: See the module's docstring.
      pairs: Rows with sign and without: ("DPSignSGD", "DPSGD").

    Raises:
      ValueError: See `check`.
    """
    ours, found = cells(runs), []
    for row, other in pairs:
        keys = [(d, e) for d, r, e in ours if r == row and e is not None and (d, other, e) in ours]
        for dataset, epsilon in sorted(keys):
            first, second = ours[dataset, row, epsilon], ours[dataset, other, epsilon]
            difference = round(first.mean - second.mean, 9)
            error, critical = _welch(first, second)
            if min(first.seeds, second.seeds) < MIN_SEEDS:
                verdict = "too few seeds"
            elif abs(difference) <= critical * error:
                verdict = "within noise"
            else:
                verdict = "ahead" if difference > 0 else "behind"
            found.append(Difference(dataset, epsilon, row, other, difference, error, verdict))
    return found


def sign_section(runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> str:
    """Reports whether sign beats no sign at equal epsilon: a count and a table."""
    found = differences(runs, pairs)
    verdicts = [one.verdict for one in found]
    few = verdicts.count("too few seeds")
    lines = [
        [
            f"{one.row} - {one.other}",
            TITLES.get(one.dataset, one.dataset),
            f"{one.epsilon:g}",
            _signed(one.difference) + ("" if one.error is None else f" ± {one.error:.2f}"),
            one.verdict if one.verdict not in ("ahead", "behind") else f"sign {one.verdict}",
        ]
        for one in found
    ]
    titles = ["rows", "data set", "ε", "difference ± standard error", "verdict"]
    return (
        f"With at least {MIN_SEEDS} seeds each, sign is ahead in {verdicts.count('ahead')}, behind "
        f"in {verdicts.count('behind')} and within noise in {verdicts.count('within noise')} of "
        f"{len(found) - few} comparisons at equal ε ({few} with fewer seeds are not judged). "
        "Differences of means, in percent, with Welch's standard error; ahead or behind: by "
        "Welch's t test at 5%, each comparison on its own.\n\n"
        f"{markdown(titles, lines)}"
    )


# Subgroups.


def subgroup_table(
    runs: Sequence[Run],
    dataset: str,
    epsilon: float,
    baselines: Mapping[str, str] | None = None,
    rows: Sequence[str] | None = None,
    class_names: Mapping[str, str] | None = None,
) -> str:
    """Worst and best class of each private row, and of the same network without privacy.

    The accuracy of a class is averaged over the seeds before the worst and the best are taken: the
    extremes of single seeds would be those of their noise, and the gap too large.

    Args:
      runs: See the module's docstring.
      dataset: Its name.
      epsilon: The target.
      baselines: For each private row, the row of the same network without privacy.
      rows: The private rows to show; all by default.
      class_names: Names of the classes.

    Raises:
      ValueError: See `check`.
    """
    ours, lines, few = cells(runs), [], set()
    for row in private_rows(runs, dataset, epsilon) if rows is None else rows:
        line, gaps = [], []
        for name, target in ((row, epsilon), ((baselines or {}).get(row), None)):
            by_class = class_accuracies(runs, dataset, name, target)
            cell = ours.get((dataset, name, target))
            line += [f"{name}{cell.mark}" if cell else name or "–"]
            line += _extremes(by_class, class_names or {})
            gaps += [_gap(by_class)] if by_class else []
            few |= {cell.seeds} if cell else set()
        lines.append([*line, f"{gaps[0] - gaps[1]:+.2f}" if len(gaps) == 2 else "–"])
    group = ["worst class", "best class", "gap"]
    titles = [f"{TITLES.get(dataset, dataset)}, ε = {epsilon:g}", *group, "non-private", *group]
    remarks = [f"{remark}." for remark in _few_seeds(few)]
    return "\n\n".join([markdown([*titles, "difference of gaps"], lines), *remarks])


def _published_cells(table: Published) -> list[tuple[str, str, float]]:
    """Those that have a number."""
    return [
        (dataset, row, epsilon)
        for dataset, rows in table.accuracy.items()
        for row in rows
        for epsilon in table.epsilons
        if table.number(dataset, row, epsilon) is not None
    ]


def _few_seeds(counts: set[int]) -> list[str]:
    return [_FEW_SEEDS[seeds] for seeds in sorted(counts) if seeds < MIN_SEEDS]


def _text(cell: Cell | None, number: float | None) -> str:
    beside = "" if number is None else f" ({number})"
    if cell is None:
        return f"–{beside}"
    bold = "**" if number is not None and cell.mean >= number else ""
    return f"{bold}{cell}{bold}{beside}{cell.mark}"


def _count(counts: np.ndarray) -> str:
    above, judged, few, missing = counts
    return (
        f"{above} of {judged} cells that were run (with at least {MIN_SEEDS} seeds) are at or "
        f"above the published mean; not counted: {few} with fewer seeds, {missing} not run."
    )


def _signed(gap: float) -> str:
    """Two digits, or more where these would say that there is no gap."""
    text = f"{gap:+.2f}"
    return f"{gap:+.1g}" if gap and not float(text) else text


def _welch(first: Cell, second: Cell) -> tuple[float | None, float]:
    """Returns the standard error of a difference of means, and Student's quantile at 5%."""
    if first.deviation is None or second.deviation is None:
        return None, math.nan
    parts = [(c.deviation**2 / c.seeds, c.seeds - 1) for c in (first, second)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0, 0.0
    degrees = variance**2 / sum(part**2 / free for part, free in parts)
    return math.sqrt(variance), float(special.stdtrit(degrees, 0.975))


def _gap(by_class: Mapping[str, float]) -> float:
    return max(by_class.values()) - min(by_class.values())


def _extremes(by_class: Mapping[str, float], names: Mapping[str, str]) -> list[str]:
    if not by_class:
        return ["–"] * 3
    chosen = [choose(by_class, key=by_class.__getitem__) for choose in (min, max)]
    return [*(f"{names.get(k, k)}: {by_class[k]:.2f}" for k in chosen), f"{_gap(by_class):.2f}"]
