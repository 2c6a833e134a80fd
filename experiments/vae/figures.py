"""The figures and the table of the experiments on variational autoencoders."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.vae.settings import METHODS

LABELS = {
    "sparsity": "Hoyer sparsity",
    "purity": "cluster purity",
    "accuracy": "accuracy of a classifier of generated images",
    "log_likelihood": "log-likelihood (nats)",
    "mmd": "MMD² of q(z) and p(z)",
}

_COLORS = dict(zip(METHODS, ("C0", "C1", "C2", "C3", "0.25", "0.6"), strict=True))


def statistics(rows: list[dict[str, Any]], measure: str) -> dict[tuple[str, float], np.ndarray]:
    """Returns, by method and target epsilon, runs, mean and standard deviation of a measure.

    The mean is NaN where a run diverged: leaving that run out would flatter the method.
    """
    found = {}
    for method, epsilon in dict.fromkeys((row["method"], row["target_epsilon"]) for row in rows):
        same = [r for r in rows if (r["method"], r["target_epsilon"]) == (method, epsilon)]
        values = np.array([row[measure] for row in same], float)
        deviation = values.std(ddof=1) if len(values) > 1 else 0.0
        found[method, epsilon] = np.array([len(values), values.mean(), deviation])
    return found


def draw_measures(rows: list[dict[str, Any]], measures: list[str], title: str) -> Figure:
    """One panel for each measure against epsilon, a band of a standard deviation over the seeds.

    Methods without privacy are horizontal lines.
    """
    figure = Figure(figsize=(4.6 * len(measures), 4.3), layout="constrained")
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for panel, measure in zip(panels, measures, strict=True):
        found = statistics(rows, measure)
        for method in dict.fromkeys(method for method, _ in found):
            points = sorted((e, *found[m, e][1:]) for m, e in found if m == method)
            _draw_line(panel, method, np.array(points).T)
        epsilons = sorted({epsilon for _, epsilon in found if math.isfinite(epsilon)})
        if epsilons:
            panel.set_xscale("log")
            panel.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        else:
            panel.set_xticks([])
        panel.minorticks_off()
        panel.set_xlabel("ε")
        panel.set_title(LABELS[measure], fontsize=10)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure


def _draw_line(panel: Any, method: str, points: np.ndarray) -> None:
    epsilons, means, deviations = points
    style = {"color": _COLORS[method], "label": METHODS[method].title}
    if not METHODS[method].private:
        panel.axhline(means[0], linestyle="--", **style)
        panel.axhspan(
            means[0] - deviations[0], means[0] + deviations[0], color=style["color"], alpha=0.12
        )
        return
    panel.plot(epsilons, means, marker="o", markersize=4, **style)
    if len(epsilons) == 1:  # A band would have no width.
        panel.errorbar(epsilons, means, deviations, color=style["color"], capsize=3)
    panel.fill_between(
        epsilons, means - deviations, means + deviations, color=style["color"], alpha=0.2, lw=0
    )


def draw_pinwheel(
    runs: dict[str, dict[str, np.ndarray]],
    centres: np.ndarray,
    variance: float,
    titles: dict[str, str],
) -> Figure:
    """Points with their reconstructions, and their codes: a column for each method.

    Args:
      runs: For each method `inputs`, `reconstructions`, `latents` `[N, 2]` and `labels` `[N]`.
      centers: Centers of the prior's components, `[K, 2]`.
      variance: Variance of these.
      titles: Titles of the columns.
    """
    figure = Figure(figsize=(3.1 * len(runs), 6.4), layout="constrained")
    panels = figure.subplots(2, len(runs), sharex="row", sharey="row", squeeze=False)
    for (method, run), (above, below) in zip(runs.items(), panels.T, strict=True):
        above.scatter(*run["inputs"].T, s=5, color="tab:red", label="held-out inputs")
        above.scatter(*run["reconstructions"].T, s=5, color="gold", label="reconstructions")
        above.set_title(titles[method], fontsize=10)
        below.scatter(*run["latents"].T, s=5, c=run["labels"], cmap="tab10", vmax=9, vmin=0)
        angles = np.linspace(0, 2 * np.pi, 60)
        circle = 2 * math.sqrt(variance) * np.stack([np.cos(angles), np.sin(angles)])
        for centre in np.asarray(centres):
            below.plot(*(circle + centre[:, np.newaxis]), color="0.3", linewidth=0.8)
        for panel in (above, below):
            panel.set_aspect("equal")
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize=8, loc="upper right")
    panels[0, 0].set_ylabel("points")
    panels[1, 0].set_ylabel("codes, by spiral; prior at 2 sd")
    return figure


def draw_generated(runs: dict[str, np.ndarray], titles: dict[str, str], by_class: bool) -> Figure:
    """Returns a sheet of generated images for each method.

    Args:
      runs: For each method images `[rows, columns, height, width]` in [0, 1].
      titles: Titles of the sheets.
      by_class: Whether a row is a class.
    """
    figure = Figure(figsize=(3.2 * len(runs), 4.4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for panel, (method, images) in zip(panels, runs.items(), strict=True):
        gaps = [(0, 0), (0, 0), (0, 1), (0, 1)]
        images = np.pad(images, gaps, constant_values=0.5)
        rows, columns, height, width = images.shape
        sheet = images.transpose(0, 2, 1, 3).reshape(rows * height, columns * width)
        panel.imshow(np.nan_to_num(sheet, nan=0.5), cmap="gray", vmin=0, vmax=1)
        panel.set_title(titles[method], fontsize=10)
        panel.set_xticks([])
        panel.set_yticks((np.arange(rows) + 0.5) * height - 0.5 if by_class else [])
        panel.set_yticklabels(range(rows) if by_class else [])
        panel.tick_params(length=0)
    return figure


def table(rows: list[dict[str, Any]], measures: list[str]) -> str:
    """Means and standard deviations over the seeds, as a Markdown table."""
    names = " | ".join(measures)
    lines = [f"| method | target epsilon | runs | {names} |", "|---" * (3 + len(measures)) + "|"]
    columns = [statistics(rows, measure) for measure in measures]
    for method, epsilon in sorted(columns[0], key=_order):
        runs = int(columns[0][method, epsilon][0])
        cells = []
        for column in columns:
            _, mean, deviation = column[method, epsilon]
            cells.append(f"{mean:.4g} ± {deviation:.2g}" if runs > 1 else f"{mean:.4g}")
        shown = f"{epsilon:g}" if math.isfinite(epsilon) else "none"
        lines.append(f"| {method} | {shown} | {runs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _order(key: tuple[str, float]) -> tuple[float, int]:
    method, epsilon = key
    return epsilon, list(METHODS).index(method)
