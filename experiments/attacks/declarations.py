"""The published tables of membership inference, and how their controls are trained."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.settings import RefusedError
from experiments.tables import declarations, grid

BLACK_BOX, WHITE_BOX = ATTACKS = ("black_box", "white_box")
# Attacks that no table of the papers has: on each layer, and model inversion.
LAYERS, INVERSION = "layers", "inversion"
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
        self._controls = [self._control(f"[[control]] {i}", each) for i, each in controls]
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

    def _control(self, name: str, found: dict[str, Any]) -> declarations.Search:
        # It has the form of a search with nothing to choose from.
        control = declarations.search(name, found)
        if control.grid or control.epsilons:
            raise RefusedError(f"{name} must have no grid and no epsilons.")
        for dataset, row in itertools.product(control.datasets, control.rows):
            if row not in self._grid.rows:
                raise RefusedError(f"{name}: [rows] must have {row}.")
            if self._grid.job(dataset, row, None, 0, control.fixed).settings.private:
                raise RefusedError(f"{name} must have rows without privacy. Received: {row}.")
        return control

    def _table(self, name: str, found: dict[str, Any]) -> Table:
        place = f"tables.{name}"
        dataset = declarations.get(found, "dataset", place)
        # It has the form of tables of accuracy, with attacks in place of data sets.
        table = declarations.table(name, found)
        for attack, rows in table.accuracy.items():
            if attack not in ATTACKS:
                raise RefusedError(
                    f"{place}: published must have {' and '.join(ATTACKS)}. Received: {attack}."
                )
            for row, numbers in rows.items():
                if row not in self._grid.counterparts:
                    raise RefusedError(f"{place}: [rows.{row}] must have non_private.")
                if len(numbers) != len(table.epsilons):
                    raise RefusedError(
                        f"{place}: {row} must have {len(table.epsilons)} numbers. Received: "
                        f"{numbers}."
                    )
        return Table(name, table.title, dataset, table.epsilons, table.accuracy, table.non_private)
