"""Pictures and tables of attacks."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.auditing import statistics
from tfdp.base import validation

_RATES = (0.001, 0.01)


def attack_table(in_scores: np.ndarray, out_scores: np.ndarray) -> list[str]:
    """Returns a Markdown table of an attack's success; empty where there are too few scores."""
    if not (np.size(in_scores) and np.size(out_scores)):
        return []
    rows = [
        (f"TPR at {100 * rate:g}% FPR", statistics.tpr_at_fpr(in_scores, out_scores, rate))
        for rate in _RATES
    ]
    rows.append(("AUC", statistics.auc(in_scores, out_scores)))
    rows.append(("advantage", statistics.advantage(in_scores, out_scores)))
    return [
        "| success of the attack | value |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in rows),
    ]


def draw(
    path: str | os.PathLike,
    attacks: Mapping[str, tuple[np.ndarray, np.ndarray]],
    lower: Sequence[tuple[int, float]] = (),
    upper: Sequence[tuple[int, float]] = (),
    confidence: float = 0.95,
) -> None:
    """Draws ROC curves on logarithmic axes, and bounds on epsilon against steps if there are any.

    Args:
      path: The picture's file.
      attacks: By name, the scores of what was trained on, and of what was not.
      lower: Steps, and the lower bound on epsilon after them.
      upper: Steps, and the upper bound.
      confidence: Confidence of the lower bound.

    Raises:
      ImportError: matplotlib is missing.
    """
    validation.path("path", path)
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("Pictures need matplotlib: `pip install matplotlib`.") from missing

    figure = Figure(figsize=(9, 4) if lower else (4.5, 4), layout="constrained")
    panels: Any = figure.subplots(1, 2 if lower else 1, squeeze=False)[0]
    _roc(panels[0], attacks)
    if lower:
        axes = panels[1]
        for points, label in ((upper, "ledger (upper bound)"), (lower, "audit (lower bound)")):
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel="steps", ylabel="epsilon", title=f"lower bound at {100 * confidence:.6g}%")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=120)


def _roc(axes: Any, attacks: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    least = 1.0
    for name, (seen, unseen) in attacks.items():
        if np.size(seen) and np.size(unseen):
            false, true = statistics.roc_curve(seen, unseen)
            axes.plot(false, true, label=name, drawstyle="steps-post")
            least = min(least, 1 / np.size(unseen), 1 / np.size(seen))
    axes.plot([least, 1], [least, 1], color="gray", linestyle="--", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend()
