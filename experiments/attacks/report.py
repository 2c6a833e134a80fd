"""Tables of attacks, beside the published numbers and what the guarantee allows."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.attacks import inversion
from experiments.attacks.declarations import BLACK_BOX, INVERSION, LAYERS, WHITE_BOX, Table
from experiments.attacks.runs import LIRA
from experiments.output import markdown
from experiments.tables.runs import TITLES, check

HOW = """\
Accuracy of guesses whether an example was trained on, as many members as others: 0.5 is guessing.
Attackers are a network / a random forest. "Accuracy on members / others" is the target's own, as a
classifier. Rows without ε are controls: the same network without privacy, trained until it fits its
training set. ε is the ledger's, for zero-out of one example. "Allowed" is the largest
accuracy, of any attack, that (ε, δ) leaves possible: where nothing else depends on whether an
example is in / where another takes its place if it is out, as in a split into parts of fixed sizes.
The accuracy of LiRA is that of the best threshold for its own scores.\
"""

LAYERS_HOW = """\
Leino and Fredrikson's attack. The network is cut before each layer that has weights, and the layers
above the cut are trained again on the shadow's examples, as the target's own layers below see them:
a proxy. The evidence is the difference between the logits of the class, of the target and of the
proxy. "AUC of layers" is that of the evidence of each cut alone, from inputs to logits, without
learning from members; the attackers learn from half of the examples to combine the cuts, and guess
the others.\
"""
INVERSION_HOW = f"""\
Model inversion: {inversion.STARTS} images of each class, by descent from starts at random, with a
Gaussian of the shadow's examples for a prior. "Recognised" is the share that a random forest, grown
on the shadow's examples, takes for their class; 1 / classes is guessing. Distances are to the mean
of the members, and of the others, of the class: the root of the mean square over pixels in [0, 1].
"Of the prior" is the distance of the prior's mean to the mean of the others. "AUC" is that of a
guess of membership by the distance to the nearest of these images.\
"""

SUMMARY_HOW = """\
The smallest and the largest accuracy of attackers, over both attackers and all ε of a row.\
"""

_NAMES = {BLACK_BOX: "black box", WHITE_BOX: "white box"}
_RUN = ("dataset", "row", "target_epsilon", "seed", "examples", "lira_models")
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
      epsilon: Epsilon of zero-out of one example, not negative.
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


def summary(tables: Iterable[Table], lines: Sequence[dict[str, Any]]) -> str:
    """Writes a line for each row of each data set: what its attackers reached; "" without runs."""
    attacks = {**_NAMES, LAYERS: "each layer", LIRA: "LiRA"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for dataset in dict.fromkeys(table.dataset for table in tables):
        same = [line for line in lines if line["dataset"] == dataset]
        # Controls first.
        for line in sorted(
            same, key=lambda line: (line["target_epsilon"] is not None, line["row"])
        ):
            found.setdefault((TITLES.get(dataset, dataset), line["row"]), []).append(line)
    body = []
    for place, cells in found.items():
        epsilons = sorted({line["target_epsilon"] or 0.0 for line in cells})
        reached = []
        for attack in attacks:
            accuracies = [
                each["accuracy"]
                for line in cells
                for each in line["attacks"].get(attack, {}).values()
            ]
            ends = sorted({f"{end(accuracies):.3f}" for end in (min, max)} if accuracies else "–")
            reached.append(" to ".join(ends))
        body.append((*place, ", ".join(f"{x:g}" if x else "–" for x in epsilons), *reached))
    titles = ("data set", "model", "ε", *attacks.values())
    return f"{SUMMARY_HOW}\n\n{markdown(titles, body)}" if body else ""


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


def newest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines without those that a later run has all the attacks of, and more."""

    def run(line: dict[str, Any]) -> tuple[Any, ...]:
        # Settings that a line lacks were None.
        settings = {name: value for name, value in line["settings"].items() if value is not None}
        return *(line[name] for name in _RUN), json.dumps(settings, sort_keys=True)

    def replaced(line: dict[str, Any], later: Sequence[dict[str, Any]]) -> bool:
        mine = set(line["attacks"])
        return any(run(line) == run(other) and mine < set(other["attacks"]) for other in later)

    return [line for i, line in enumerate(lines) if not replaced(line, lines[i + 1 :])]


def layers_section(tables: Iterable[Table], lines: Sequence[dict[str, Any]]) -> str:
    """Writes the per-layer attack on all runs that have it; "" if none has."""
    titles = (
        *("data set", "model", "ε", "accuracy, network / forest", "allowed", "AUC"),
        *("TPR at 0.1% FPR", "AUC of layers", "runs"),
    )
    body = []
    for table, cell in _cells(tables, lines, LAYERS):
        row, epsilon, _, _, accuracy, _, allowed, auc, tpr, count = _line(cell, LAYERS, table)
        by_layer = (
            f"{np.mean([line['auc_by_layer'][layer] for line in cell]):.3f}"
            for layer in cell[0]["auc_by_layer"]
        )
        name = TITLES.get(table.dataset, table.dataset)
        numbers = accuracy, allowed, auc, tpr, ", ".join(by_layer), count
        body.append((name, row, epsilon, *numbers))
    return f"## Layers\n\n{LAYERS_HOW}\n\n{markdown(titles, body)}" if body else ""


def inversion_section(tables: Iterable[Table], lines: Sequence[dict[str, Any]]) -> str:
    """Writes the model inversion of all runs that have it; "" if none has."""
    titles = (
        *("data set", "model", "ε", "recognised", "distance to members", "to others"),
        *("of the prior", "AUC", "runs"),
    )
    body = []
    for table, cell in _cells(tables, lines, INVERSION):
        means = {
            name: np.mean([line["attacks"][INVERSION][name] for line in cell])
            for name in ("recognised", "members", "others", "prior", "auc")
        }
        row, epsilon = cell[0]["row"], _epsilon(cell)
        distances = (f"{means[name]:.4f}" for name in ("members", "others", "prior"))
        numbers = f"{means['recognised']:.2f}", *distances, f"{means['auc']:.3f}"
        name = TITLES.get(table.dataset, table.dataset)
        body.append((name, row, epsilon, *numbers, f"{len(cell)}"))
    return f"## Model inversion\n\n{INVERSION_HOW}\n\n{markdown(titles, body)}" if body else ""


def inversions(
    tables: Iterable[Table], lines: Sequence[dict[str, Any]], dataset: str
) -> Figure | None:
    """Draws the inverted classes of the first run of each cell; None if there are none."""
    cells = [cell for table, cell in _cells(tables, lines, INVERSION) if table.dataset == dataset]
    if not cells:
        return None
    rows = [inversion.unpacked(cell[0]["inversions"]) for cell in cells]
    classes, height, width, channels = rows[0].shape
    figure = Figure(figsize=(0.7 * classes + 1.5, 0.7 * len(rows)), layout="constrained")
    for panel, cell, images in zip(
        figure.subplots(len(rows), 1, squeeze=False)[:, 0], cells, rows, strict=True
    ):
        strip = images.transpose(1, 0, 2, 3).reshape(height, classes * width, channels)
        panel.imshow(strip.squeeze(), cmap="gray", vmin=0, vmax=1)
        panel.set(xticks=[], yticks=[])
        target = cell[0]["target_epsilon"]
        label = cell[0]["row"] + ("" if target is None else f"\nε = {target:g}")
        panel.set_ylabel(label, rotation=0, ha="right", va="center")
    return figure


def _cells(
    tables: Iterable[Table], lines: Sequence[dict[str, Any]], attack: str
) -> list[tuple[Table, list[dict[str, Any]]]]:
    """Returns the cells that have an attack, each once, with the first of their tables."""
    lines = [line for line in lines if attack in line["attacks"]]
    found: dict[tuple[Any, ...], tuple[Table, list[dict[str, Any]]]] = {}
    for table in tables:
        same = [line for line in lines if line["dataset"] == table.dataset]
        places = {(line["row"], line["target_epsilon"]): None for line in same}
        # Controls first, then by row.
        for row, epsilon in sorted(
            places, key=lambda place: (place[1] is not None, place[0], place[1] or 0.0)
        ):
            found.setdefault((table.dataset, row, epsilon), (table, _cell(same, row, epsilon)))
    return list(found.values())


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
    epsilon, allowed = _epsilon(cell), "–"
    if target is not None:
        spent, delta = _spent(cell), first["delta"]
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


def _spent(cell: Sequence[dict[str, Any]]) -> float:
    """Returns the largest epsilon of the runs, as the ledgers have it."""
    return max(line["epsilon"] for line in cell)


def _epsilon(cell: Sequence[dict[str, Any]]) -> str:
    return "–" if cell[0]["target_epsilon"] is None else f"{_spent(cell):.3f}"


def _name(row: str, epsilons: Iterable[float | None]) -> str:
    numbers = [f"{epsilon:g}" for epsilon in epsilons if epsilon is not None]
    return f"{row} at ε = {', '.join(numbers)}" if numbers else row
