"""Figures of accuracy beside published numbers, and of accuracy by class.

Runs are those of experiments/tables/runs.py. Both functions raise a ValueError for runs that would
not count: see `check` there.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from experiments.tables.runs import (
    TITLES,
    Cell,
    Published,
    Run,
    baseline_rows,
    cells,
    check,
    class_accuracies,
    private_rows,
)

_COLORS = ("C0", "C3", "C2", "C1", "C4", "C5", "C8", "C9", "C6", "0.3")
_MARKERS = "os^vDPX*<>"
# How far apart neighboring points of one epsilon lie, at most: a difference of logarithms.
_DODGE = 0.035


@dataclasses.dataclass(frozen=True)
class Panel:
    """Accuracies in percent that `draw_overview` shows of a data set.

    Attributes:
      title: Above the panel.
      ours: The accuracy for each epsilon.
      published: The best published accuracy for each epsilon.
      pretrained: Published accuracy of a network that was pretrained on other data, by epsilon.
      not_private: The accuracy without privacy.
    """

    title: str
    ours: Mapping[float, float]
    published: Mapping[float, float]
    pretrained: Mapping[float, float]
    not_private: float


def draw_overview(panels: Sequence[Panel]) -> Figure:
    """Accuracy against epsilon for readers who know neither the methods nor the papers."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        end = len(panel.ours) - 1
        axis.axhline(panel.not_private, color="0.35", linestyle=(0, (4, 3)), linewidth=1.2)
        axis.text(end, panel.not_private + 0.4, "no privacy", color="0.35", ha="right", fontsize=10)
        for numbers, color, width, name, below in (
            (panel.published, "0.55", 2.0, "published", True),
            (panel.ours, "#0b62a4", 2.8, "tfdp", False),
        ):
            values = [numbers[epsilon] for epsilon in panel.ours]
            axis.plot(values, color=color, linewidth=width, marker="o", markersize=6, label=name)
            place = {"xytext": (0, -24 if below else 9), "textcoords": "offset points"}
            axis.annotate(name, (end, values[-1]), **place, color=color, ha="right", fontsize=11)
        for place, epsilon in enumerate(panel.ours):
            if epsilon in panel.pretrained:
                number = panel.pretrained[epsilon]
                axis.plot(place, number, "D", color="0.55", markersize=7, markerfacecolor="white")
                text = "published,\npretrained on\nrandom images"
                where = {"xytext": (6, 6), "textcoords": "offset points", "va": "bottom"}
                axis.annotate(text, (place, number), **where, color="0.45", fontsize=9)
        axis.set_xticks(range(end + 1), [f"{epsilon:g}" for epsilon in panel.ours])
        axis.set_xlim(-0.2, end + 0.2)
        lowest = min(*panel.published.values(), *panel.ours.values())
        axis.set_ylim(lowest - 3, panel.not_private + 3)
        axis.yaxis.set_major_locator(MultipleLocator(5))
        axis.set_title(panel.title, fontsize=12)
        axis.set_xlabel("epsilon (smaller protects more)", fontsize=10)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy, %", fontsize=10)
    return figure


def draw_accuracy(
    tables: Sequence[Published],
    runs: Sequence[Run],
    baselines: Mapping[str, str] | None = None,
    title: str = "",
) -> Figure:
    """Accuracy against epsilon, ours and the published: a panel for each data set.

    Our means have an error bar of a standard deviation over the seeds. Points of one epsilon lie
    a little apart. Without privacy: dotted lines.

    Args:
      tables: The published tables whose rows are shown, of one paper or of several.
      runs: See the module's docstring.
      baselines: For each private row, the row of the same network without privacy.
      title: Above the panels.
    """
    ours = cells(runs)
    datasets = list(dict.fromkeys(data for table in tables for data in table.accuracy))
    rows = list(dict.fromkeys(r for t in tables for d in t.accuracy.values() for r in d))
    styles = {row: (_COLORS[i % 10], _MARKERS[(i + i // 10) % 10]) for i, row in enumerate(rows)}
    figure, panels = _panels(len(datasets), 3, 3.1, False)
    drawn: set[tuple[str, str]] = set()  # Rows, and whose numbers of them.
    lines: list[tuple[float, str]] = []  # Without privacy, ours and the published.
    for panel, dataset in zip(panels, datasets, strict=True):
        here = [table for table in tables if dataset in table.accuracy]
        shown = list(dict.fromkeys(row for table in here for row in table.accuracy[dataset]))
        epsilons = sorted({epsilon for table in here for epsilon in table.epsilons})
        for row, dodge in zip(shown, _dodges(len(shown), epsilons), strict=True):
            whose = _draw_row(panel, ours, here, (dataset, row), dodge, styles[row])
            drawn |= {(row, one) for one in whose}
        panel.set_xscale("log")
        panel.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        panel.minorticks_off()
        panel.set_xlim(epsilons[0] / 1.25, epsilons[-1] * 1.25)
        panel.set_xlabel("ε")
        panel.set_title(TITLES.get(dataset, dataset), fontsize=10)
        own = [
            (ours[dataset, row, None].mean, row)
            for row in baseline_rows(runs, dataset, shown, baselines or {})
        ]
        numbers = {table.non_private.get(dataset) for table in here} - {None}
        published = [(number, "published") for number in numbers]
        _draw_non_private(panel, own, published)
        lines += [*own, *published]
    panels[0].set_ylabel("test accuracy (%)")
    not_ours = {"linestyle": "--", "markerfacecolor": "white"}
    were_run = {row for row, whose in drawn if whose == "ours"}
    handles = [
        Line2D([], [], color=c, marker=m, label=row, **({} if row in were_run else not_ours))
        for row, (c, m) in styles.items()
        if any(row == one for one, _ in drawn)
    ]
    grey = {"color": "0.4", "marker": "o"}
    if were_run:
        handles.append(Line2D([], [], **grey, label="ours, ± 1 sd"))
    if any(whose == "published" for _, whose in drawn):
        handles.append(Line2D([], [], **grey, label="published", **not_ours))
    if lines:
        handles.append(Line2D([], [], color="0.2", linestyle=":", label="non-private"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False,
        fontsize=8, handlelength=2.6,
    )  # fmt: skip
    figure.suptitle(title)
    return figure


def _dodges(count: int, epsilons: Sequence[float]) -> np.ndarray:
    """Factors of epsilon that keep `count` points of it apart, and from those of others."""
    room = 0.4 * min(np.diff(np.log(epsilons)), default=math.inf)
    step = min(_DODGE, room / max(count - 1, 1))
    return np.exp(step * (np.arange(count) - (count - 1) / 2))


def _draw_row(
    panel: Any,
    ours: Mapping[tuple[str, str, float | None], Cell],
    tables: Sequence[Published],
    key: tuple[str, str],
    dodge: float,
    style: tuple[str, str],
) -> list[str]:
    """Draws a data set's row: ours, and what each table has of it; returns what there is."""
    drawn = []
    line = {"color": style[0], "marker": style[1], "markersize": 4.5, "linewidth": 1.1}
    for table in tables:
        numbers = [(e * dodge, table.number(*key, e)) for e in table.epsilons]
        known = np.array([point for point in numbers if point[1] is not None]).reshape(-1, 2).T
        drawn += ["published"] if known.size else []
        panel.plot(*known, **line, linestyle="--", markerfacecolor="white", alpha=0.75, zorder=2)
    epsilons = sorted({epsilon for table in tables for epsilon in table.epsilons})
    found = [(epsilon, ours.get((*key, epsilon))) for epsilon in epsilons]
    run = [(epsilon * dodge, cell) for epsilon, cell in found if cell]
    if run:
        means = [cell.mean for _, cell in run]
        deviations = [cell.deviation or 0.0 for _, cell in run]
        panel.errorbar([x for x, _ in run], means, deviations, **line, capsize=2, zorder=3)
        drawn.append("ours")
    return drawn


def _draw_non_private(
    panel: Any, ours: Sequence[tuple[float, str]], published: Sequence[tuple[float, str]]
) -> None:
    """Dotted lines, their names stacked above them where no data is."""
    lines = sorted([*((*line, "0.1") for line in ours), *((*line, "0.55") for line in published)])
    for value, _, color in lines:
        panel.axhline(value, linestyle=":", linewidth=1.2, color=color, zorder=1)
    if not lines:
        return
    bottom, top = panel.get_ylim()
    step = 0.055 * (top - bottom)
    top = max(top, lines[-1][0] + (len(lines) + 0.6) * step)
    panel.set_ylim(bottom, top)
    panel.set_yticks([tick for tick in panel.get_yticks() if bottom <= tick <= min(top, 100)])
    for i, (value, name, color) in enumerate(lines):
        panel.annotate(
            f"{name}: {value:.4g}", (0.03, lines[-1][0] + (i + 0.3) * step),
            xycoords=("axes fraction", "data"), fontsize=7, color=color,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )  # fmt: skip


def draw_classes(
    runs: Sequence[Run],
    dataset: str,
    epsilon: float,
    baselines: Mapping[str, str] | None = None,
    rows: Sequence[str] | None = None,
    class_names: Mapping[str, str] | None = None,
) -> Figure:
    """Accuracy by class with privacy and without, a panel for each private row.

    Means over the seeds. The class that is worst with privacy, on average over the rows, is at the
    bottom.

    Args:
      runs: See the module's docstring.
      dataset: Its name.
      epsilon: The target.
      baselines: For each private row, the row of the same network without privacy.
      rows: The private rows to show; all that know the accuracy by class by default.
      class_names: Names of the classes.
    """
    check(runs)
    rows = private_rows(runs, dataset, epsilon) if rows is None else rows
    private = {row: class_accuracies(runs, dataset, row, epsilon) for row in rows}
    private = {row: by_class for row, by_class in private.items() if by_class}
    if not private:
        raise ValueError(
            f"No run has the accuracy by class. Received: dataset={dataset!r}, epsilon={epsilon:g}."
        )
    classes = list(next(iter(private.values())))
    classes.sort(key=lambda c: np.mean([by_class[c] for by_class in private.values()]))
    publics = {row: _without_privacy(runs, dataset, row, baselines) for row in private}
    figure, panels = _panels(len(private), 4, 0.9 + 0.2 * len(classes), True)
    y = range(len(classes))
    for panel, (row, by_class) in zip(panels, private.items(), strict=True):
        values = [by_class[c] for c in classes]
        if publics[row]:
            without = [publics[row][c] for c in classes]
            panel.hlines(y, values, without, color="0.75", linewidth=2, zorder=1)
            panel.scatter(without, y, s=26, facecolor="white", edgecolor="0.2", zorder=2)
        panel.scatter(values, y, s=26, color="C0", zorder=3)
        panel.set_title(row, fontsize=9)
        panel.set_ylim(-0.6, len(classes) - 0.4)
        panel.set_yticks(y, [(class_names or {}).get(c, c) for c in classes])
        panel.set_xlabel("accuracy (%)", fontsize=8)
        panel.tick_params(labelsize=8, labelbottom=True)
    point = {"linestyle": "", "marker": "o", "markersize": 5}
    handles = [Line2D([], [], **point, color="C0", label=f"ε = {epsilon:g}")]
    if any(publics.values()):
        white = {"color": "0.2", "markerfacecolor": "white"}
        handles.append(Line2D([], [], **point, **white, label="non-private"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{TITLES.get(dataset, dataset)}: test accuracy by class", fontsize=11)
    return figure


def _without_privacy(
    runs: Sequence[Run], dataset: str, row: str, baselines: Mapping[str, str] | None
) -> dict[str, float]:
    """Returns the accuracy by class of the same network without privacy, if it was run."""
    other = (baselines or {}).get(row)
    return class_accuracies(runs, dataset, other, None) if other else {}


def _panels(count: int, columns: int, height: float, shared: bool) -> tuple[Figure, list[Any]]:
    """Makes a figure 8 inches wide, with `count` panels, at most `columns` side by side."""
    lines = math.ceil(count / columns)
    columns = math.ceil(count / lines)
    figure = Figure(figsize=(8, height * lines + 0.9), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=shared, sharey=shared).ravel()
    for panel in grid[count:]:
        panel.remove()
    for panel in grid[:count]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, list(grid[:count])
