"""The published tables of membership inference, and how their controls are trained."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.settings import RefusedError
from experiments.tables import declarations, grid

FILE = Path(__file__).with_name("tables.toml")


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of a paper.

    Attributes:
      name: Short: "dpsur_3".
      title: "DPSUR, table 3".
      dataset: The data set of all its cells.
      epsilons: The columns.
      accuracy: For each attack and row, the attack's accuracy in [0, 1], one per epsilon.
      non_private: For each attack, its accuracy without privacy, where the paper has one.
    """

    name: str
    title: str
    dataset: str
    epsilons: tuple[float, ...]
    accuracy: Mapping[str, Mapping[str, tuple[float | None, ...]]]
    non_private: Mapping[str, float | None]

    @property
    def rows(self) -> list[str]:
        """The rows, of all attacks."""
        return list(dict.fromkeys(row for rows in self.accuracy.values() for row in rows))

    def number(self, attack: str, row: str, epsilon: float | None) -> float | None:
        """Returns what the paper has for a cell, or None; without an epsilon, its control."""
        if epsilon is None:
            return self.non_private.get(attack)
        numbers = self.accuracy.get(attack, {}).get(row, ())
        return dict(zip(self.epsilons, numbers, strict=False)).get(epsilon)


class Tables:
    """Tables that a file declares.

    Args:
      path: The file.
      declared: The rows, and what was searched for them.

    Raises:
      RefusedError: The file contradicts itself; the message says where.
    """

    def __init__(self, path: str | Path, declared: grid.Grid):
        found = declarations.parsed(path)
        self._grid = declared
        controls = enumerate(found.get("control", []), 1)
        self._controls = [declarations.search(f"[[control]] {i}", each) for i, each in controls]
        self.tables = {
            name: self._table(name, each) for name, each in found.get("tables", {}).items()
        }

    def control(self, dataset: str, row: str) -> dict[str, Any]:
        """Returns the flags of a row without privacy.

        Raises:
          RefusedError: There are none.
        """
        for each in self._controls:
            if dataset in each.datasets and row in each.rows:
                return each.fixed
        raise RefusedError(f"[[control]] must have {row} on {dataset}.")

    def _table(self, name: str, found: dict[str, Any]) -> Table:
        place = f"tables.{name}"
        dataset = declarations.get(found, "dataset", place)
        # Of the same form as tables of accuracy, with attacks in the place of data sets.
        table = declarations.table(name, found)
        for rows in table.accuracy.values():
            for row, numbers in rows.items():
                if row not in self._grid.rows:
                    raise RefusedError(f"{place}: [rows] must have {row}.")
                if len(numbers) != len(table.epsilons):
                    raise RefusedError(
                        f"{place}: {row} must have {len(table.epsilons)} numbers. Received: "
                        f"{numbers}."
                    )
        return Table(name, table.title, dataset, table.epsilons, table.accuracy, table.non_private)
