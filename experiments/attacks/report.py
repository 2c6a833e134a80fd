"""Tables of attacks, beside the published numbers and what the guarantee allows."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.attacks.declarations import BLACK_BOX, WHITE_BOX, Table
from experiments.attacks.runs import LIRA
from experiments.output import markdown
from experiments.tables.runs import TITLES, check

HOW = """\
Accuracy of guesses whether an example was trained on, as many members as others: 0.5 is guessing.
Attackers are a network / a random forest. "Accuracy on members / others" is the target's own, as a
classifier. Rows without ε are controls: the same network without privacy, trained until it fits its
training set. ε is the ledger's, for adding or removing one example. "Allowed" is the largest
accuracy, of any attack, that (ε, δ) leaves possible: where nothing else depends on whether an
example is in / where another takes its place if it is out, as in a split into parts of fixed sizes.
The accuracy of LiRA is that of the best threshold for its own scores.\
"""

_NAMES = {BLACK_BOX: "black box", WHITE_BOX: "white box"}
_TITLES = (
    *("model", "ε", "accuracy on members / others", "attack"),
    *("network / forest", "published", "allowed", "AUC", "TPR at 0.1% FPR", "runs"),
)


def largest_accuracy(epsilon: float, delta: float, changed: int = 1) -> float:
    """Computes the largest accuracy of a balanced guess that differential privacy allows.

    An example is in the training set by a fair coin, and nothing else depends on the coin. With
    rates of errors a (of "in") and b (of "out"), (epsilon, delta) says that
    1 - b <= e^epsilon a + delta and 1 - a <= e^epsilon b + delta. The accuracy 1 - (a + b) / 2 is
    then at most (e^epsilon + delta) / (e^epsilon + 1).

    Args:
      epsilon: Epsilon of adding or removing one example, not negative.
      delta: Its delta, in [0, 1].
      changed: Number of examples that the coin adds or removes. Two, where the place of an example
        that is out is taken by another: the guarantee is then
        (2 epsilon, (1 + e^epsilon) delta), by that of groups.

    Returns:
      The accuracy, in [1/2, 1].

    References:
      - Kairouz, Oh, Viswanath, 2015, The Composition Theorem for Differential Privacy, Theorem 2.1.
      - Dwork and Roth, 2014, Theorem 2.2 (groups).
    """
    # Numerator and denominator are divided by e^(changed epsilon), which may be too large a number.
    excess = delta * sum(math.exp((i - changed) * epsilon) for i in range(changed))
    return min(1.0, (1 + excess) / (1 + math.exp(-changed * epsilon)))


def section(table: Table, counterparts: dict[str, str], lines: Sequence[dict[str, Any]]) -> str:
    """Writes a published table, as far as it was run: a control, then its private rows.

    Args:
      table: The table.
      counterparts: The row without privacy of each private row.
      lines: The record; others than those of the table may be among them.

    Raises:
      ValueError: Runs that would not count; see `experiments.tables.runs.check`.
    """
    lines = [line for line in lines if line["dataset"] == table.dataset]
    papers = [line for line in lines if line["lira_models"] is None]
    ratios = [line for line in lines if line["lira_models"] is not None]
    body, missing = {}, {}
    for row in table.rows:
        control = counterparts[row]
        for name, epsilon in [(control, None), *((row, epsilon) for epsilon in table.epsilons)]:
            cell = _cell(papers, name, epsilon)
            if cell:
                # Rows may share a control: its lines are there once.
                body.update(dict.fromkeys(_line(cell, attack, table) for attack in table.accuracy))
            else:
                missing.setdefault(name, {})[epsilon] = None
            cell = _cell(ratios, name, epsilon)
            if cell:
                body[_line(cell, LIRA, table)] = None
    text = [f"### {table.title}: {TITLES.get(table.dataset, table.dataset)}"]
    if body:
        text.append(markdown(_TITLES, list(body)))
    if missing:
        text.append(f"Not run: {'; '.join(map(_name, missing, missing.values()))}.")
    return "\n\n".join(text)


def checked(lines: Sequence[dict[str, Any]]) -> None:
    """Checks that runs may be rendered.

    Raises:
      ValueError: See `experiments.tables.runs.check`; or runs used parts of other sizes.
    """
    for models in {line["lira_models"] for line in lines}:
        check([line for line in lines if line["lira_models"] == models])
    sizes = {line["examples"] for line in lines}
    if len(sizes) > 1:
        raise ValueError(
            f"These runs have different --examples: {', '.join(sorted(map(str, sizes)))}. Runs of "
            "one folder must have the same."
        )


def versions(lines: Sequence[dict[str, Any]]) -> str:
    """Returns what the runs were made with."""
    pairs = sorted({pair for line in lines for pair in line["versions"].items()})
    return ", ".join(f"{name} {version}" for name, version in pairs)


def _cell(lines: Iterable[dict[str, Any]], row: str, epsilon: float | None) -> list[dict[str, Any]]:
    return [line for line in lines if (line["row"], line["target_epsilon"]) == (row, epsilon)]


def _line(cell: Sequence[dict[str, Any]], attack: str, table: Table) -> tuple[str, ...]:
    """Writes the means over the runs of a cell."""
    first = cell[0]
    row, target = first["row"], first["target_epsilon"]
    epsilon = allowed = "–"
    if target is not None:
        # The largest epsilon of the runs, as the ledgers have it.
        spent, delta = max(line["epsilon"] for line in cell), first["delta"]
        epsilon = f"{spent:.3f}"
        allowed = " / ".join(f"{largest_accuracy(spent, delta, n):.3f}" for n in (1, 2))
    number = None if attack == LIRA else table.number(attack, row, target)
    accuracies = [
        f"{np.mean([line[name] for line in cell]):.3f}"
        for name in ("accuracy_on_members", "accuracy")
    ]

    def means(name: str) -> str:
        attackers = first["attacks"][attack]
        return " / ".join(
            f"{np.mean([line['attacks'][attack][each][name] for line in cell]):.3f}"
            for each in attackers
        )

    return (
        *(row, epsilon, " / ".join(accuracies)),
        _NAMES.get(attack, f"LiRA, {first['lira_models']} models"),
        means("accuracy"),
        *("–" if number is None else f"{number:.3f}", allowed),
        *(means("auc"), means("tpr"), f"{len(cell)}"),
    )


def _name(row: str, epsilons: Iterable[float | None]) -> str:
    numbers = [f"{epsilon:g}" for epsilon in epsilons if epsilon is not None]
    return f"{row} at ε = {', '.join(numbers)}" if numbers else row
