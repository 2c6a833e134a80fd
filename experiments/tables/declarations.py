"""Searches and published tables, as a TOML file declares them.

What is wrong raises a `RefusedError` that names the place.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

from experiments.settings import RefusedError
from experiments.tables.runs import Published

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclasses.dataclass(frozen=True)
class Search:
    """Values to choose from, on held-out training examples.

    Attributes:
      name: Name in messages: "[[search]] 1".
      rows: The rows that are searched alike.
      datasets: The data sets.
      epsilons: The epsilons that are searched; others take the nearest one's outcome. Empty: no
        privacy.
      fixed: Flags of `experiments.classify` that all trials share.
      grid: Flags, each with its values; every combination is tried.
    """

    name: str
    rows: tuple[str, ...]
    datasets: tuple[str, ...]
    epsilons: tuple[float, ...]
    fixed: dict[str, Any]
    grid: dict[str, list[Any]]

    def combinations(self) -> list[dict[str, Any]]:
        """Returns the flags of each trial."""
        values = itertools.product(*self.grid.values())
        return [self.fixed | dict(zip(self.grid, each, strict=True)) for each in values]


def parsed(path: str | Path) -> dict[str, Any]:
    """Reads a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(f"{path} must be TOML: {error}.") from error


def get(declared: dict[str, Any], key: str, place: str) -> Any:
    """Returns what must be declared at a place."""
    if key not in declared:
        raise RefusedError(f"{place} must have {key}.")
    return declared[key]


def search(name: str, declared: dict[str, Any]) -> Search:
    """Returns a search; `name` is what errors call it."""
    grid = declared.get("grid", {})
    for flag, values in grid.items():
        if not isinstance(values, list) or not values:
            raise RefusedError(
                f"grid of {name} must have a list of values for {flag}. Received: {values}."
            )
    return Search(
        name,
        tuple(get(declared, "rows", name)),
        tuple(get(declared, "datasets", name)),
        tuple(declared.get("epsilons", ())),
        declared.get("fixed", {}),
        grid,
    )


def table(name: str, declared: dict[str, Any]) -> Published:
    """Returns a published table."""
    place = f"tables.{name}"
    accuracy = {
        dataset: {
            row: _numbers(
                f"{place}: {row} on {dataset}", [None if x == "-" else x for x in numbers]
            )
            for row, numbers in rows.items()
        }
        for dataset, rows in get(declared, "published", place).items()
    }
    epsilons = _numbers(f"{place}: epsilons", get(declared, "epsilons", place))
    non_private = declared.get("non_private", {})
    return Published(
        name,
        get(declared, "title", place),
        epsilons,
        accuracy,
        {dataset: non_private.get(dataset) for dataset in accuracy},
    )


def _numbers(place: str, given: list[Any]) -> tuple[float | None, ...]:
    for number in given:
        if number is not None and not (isinstance(number, int | float) and number > 0):
            raise RefusedError(f"{place} must be positive numbers. Received: {number}.")
    return tuple(None if number is None else float(number) for number in given)
