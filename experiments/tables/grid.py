"""The grid behind the tables: what a row is, what was searched for it, which runs a table needs.

All of it is declared in `tables.toml`; the outcomes of searches and runs are lines of JSON.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from experiments import classify
from experiments.settings import RefusedError, Settings
from experiments.tables import declarations
from experiments.tables.declarations import Search

FILE = Path(__file__).with_name("tables.toml")

# Flags that a job gets from its place in the tables.
_DECIDED = ("dataset", "seed", "target_epsilon", "eval_split")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
      dataset: Its data set.
      row: Its row in the tables.
      target_epsilon: Its epsilon; None where there is no privacy.
      settings: All of its settings.
    """

    dataset: str
    row: str
    target_epsilon: float | None
    settings: Settings

    @property
    def key(self) -> str:
        """Name of its folder: readable, and different for different settings."""
        text = json.dumps(dataclasses.asdict(self.settings), sort_keys=True)
        epsilon = "" if self.target_epsilon is None else f"_eps{self.target_epsilon:g}"
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return f"{self.dataset}_{self.row}{epsilon}_seed{self.settings.seed}_{digest}"

    def matches(self, line: dict[str, Any]) -> bool:
        """Returns whether a record's line is about this run; settings that it lacks were None."""
        if (line["dataset"], line["row"]) != (self.dataset, self.row):
            return False
        mine, recorded = dataclasses.asdict(self.settings), line["settings"]
        return {name: recorded.get(name) for name in mine | recorded} == mine


class Grid:
    """Tables that a file declares.

    Args:
      path: The file.

    Raises:
      RefusedError: The file contradicts itself; the message says where.
    """

    def __init__(self, path: str | Path = FILE):
        declared = declarations.parsed(path)
        self.rows: dict[str, dict[str, Any]] = declared.get("rows", {})
        self.notes: dict[str, str] = declared.get("notes", {})
        self.class_names: dict[str, dict[str, str]] = {
            dataset: {str(i): name for i, name in enumerate(names)}
            for dataset, names in declared.get("classes", {}).items()
        }
        self.counterparts = self._popped("non_private")
        self._searched_as = self._popped("searched_as")
        searches = enumerate(declared.get("search", []), 1)
        self.searches = [declarations.search(f"[[search]] {i}", each) for i, each in searches]
        tables = declared.get("tables", {})
        self.tables = {name: declarations.table(name, each) for name, each in tables.items()}
        self._check_searches()
        self._check_tables()

    def _popped(self, name: str) -> dict[str, str]:
        """Returns what the rows that have `name` say there."""
        return {row: flags.pop(name) for row, flags in self.rows.items() if name in flags}

    @property
    def datasets(self) -> list[str]:
        """All data sets, of searches and of tables."""
        of_both = [
            *(s.datasets for s in self.searches),
            *(t.accuracy for t in self.tables.values()),
        ]
        return list(dict.fromkeys(itertools.chain.from_iterable(of_both)))

    def check_asked(self, datasets: Sequence[str], rows: Sequence[str]) -> None:
        """Checks that what is asked for is declared.

        Raises:
          RefusedError: It is not; the message says what is.
        """
        for flag, asked, known in (
            ("datasets", datasets, self.datasets),
            ("rows", rows, self.rows),
        ):
            for name in asked:
                if name not in known:
                    raise RefusedError(
                        f"--{flag} must be some of {', '.join(known)}. Received: {name}."
                    )

    def trials(
        self,
        datasets: Sequence[str],
        rows: Sequence[str],
        epsilons: Sequence[float | None],
        seeds: int = 1,
    ) -> list[Job]:
        """Returns the runs of the searches that are asked for, on held-out training examples.

        Args:
          datasets: Data sets; empty for all.
          rows: Rows; empty for all.
          epsilons: Epsilons, out of those that are searched; empty for all.
          seeds: Runs of each trial.
        """
        return [
            self.job(dataset, row, epsilon, seed, {**flags, "eval_split": "validation"})
            for search in self.searches
            for dataset, row, epsilon in _places(search)
            if (not datasets or dataset in datasets)
            and (not rows or row in rows)
            and (not epsilons or epsilon in epsilons)
            for seed in range(seeds)
            for flags in search.combinations()
        ]

    def job(
        self, dataset: str, row: str, epsilon: float | None, seed: int, flags: dict[str, Any]
    ) -> Job:
        """Returns a run of a row with `flags`.

        Raises:
          RefusedError: They are no flags of `experiments.classify`, or do not go together.
        """
        given = {"dataset": dataset, "seed": seed, "target_epsilon": epsilon}
        return Job(dataset, row, epsilon, settings_of({**given, **self.rows[row], **flags}))

    def cell(
        self,
        dataset: str,
        row: str,
        epsilon: float | None,
        seeds: int,
        searched: Iterable[dict[str, Any]],
    ) -> list[Job]:
        """Returns the runs of a cell of a table, with what its search has found.

        Args:
          dataset: Its data set.
          row: Its row.
          epsilon: Its column; None where there is no privacy.
          seeds: Number of runs.
          searched: The record of the searches.

        Raises:
          RefusedError: The search has not been made, or not to its end.
        """
        flags = self.best(dataset, row, epsilon, searched)
        return [self.job(dataset, row, epsilon, seed, flags) for seed in range(seeds)]

    def best(
        self, dataset: str, row: str, epsilon: float | None, searched: Iterable[dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the flags with the highest mean accuracy in the search nearest to `epsilon`.

        Raises:
          RefusedError: See `cell`.
        """
        row = self._searched_as.get(row, row)
        found = self.ranking(dataset, row, epsilon, searched)
        if not found[-1][0]:
            _, at = self._nearest(dataset, row, epsilon)
            near = "" if epsilon is None else f" near epsilon {epsilon:g}"
            raise RefusedError(
                f"{row} on {dataset} has not been tuned{near}: run python -m experiments.tune "
                f"--datasets={dataset} --rows={row}" + ("" if at is None else f" --epsilons={at:g}")
            )
        return found[0][1]

    def ranking(
        self, dataset: str, row: str, epsilon: float | None, searched: Iterable[dict[str, Any]]
    ) -> list[tuple[list[float], dict[str, Any]]]:
        """Accuracies and flags of each trial in the search nearest to `epsilon`.

        Args:
          dataset: Its data set.
          row: Its row.
          epsilon: Its epsilon; None where there is no privacy.
          searched: The record of the searches.

        Returns:
          An accuracy for each seed, and the flags; the best mean first, trials that were not made
          last.
        """
        search, at = self._nearest(dataset, row, epsilon)
        lines = [line for line in searched if (line["dataset"], line["row"]) == (dataset, row)]
        found = []
        for flags in search.combinations():
            trial = self.job(dataset, row, at, 0, {**flags, "eval_split": "validation"})
            same = [line for line in lines if trial.matches(_with_seed(line, 0))]
            found.append((list({line["seed"]: line["accuracy"] for line in same}.values()), flags))
        return sorted(found, key=lambda pair: -statistics.fmean(pair[0] or [-math.inf]))

    def _nearest(
        self, dataset: str, row: str, epsilon: float | None
    ) -> tuple[Search, float | None]:
        pairs = [
            (search, at)
            for search in self.searches
            for *place, at in _places(search)
            if place == [dataset, row] and (at is None) == (epsilon is None)
        ]
        if not pairs:
            privacy = "without privacy" if epsilon is None else "with an epsilon"
            raise RefusedError(f"[[search]] must have {row} on {dataset}, {privacy}.")
        if epsilon is None:
            return pairs[0]
        return min(pairs, key=lambda pair: (abs(math.log(pair[1] / epsilon)), pair[1]))

    def _check_searches(self) -> None:
        for name, row in self.rows.items():
            _check_names(f"[rows.{name}]", row)
            for other in (self.counterparts.get(name), self._searched_as.get(name)):
                if other is not None and other not in self.rows:
                    raise RefusedError(f"[rows.{name}]: [rows] must have {other}.")
        seen: dict[tuple[str, str, float | None], str] = {}
        for search in self.searches:
            for row, (part, given) in itertools.product(
                search.rows, (("fixed", search.fixed), ("grid", search.grid))
            ):
                if row not in self.rows:
                    raise RefusedError(f"{search.name}: [rows] must have {row}.")
                taken = self.rows[row] if part == "fixed" else self.rows[row] | search.fixed
                _check_names(f"{part} of {search.name}", given, taken)
            for place in _places(search):
                other = seen.setdefault(place, search.name)
                if other != search.name:
                    raise RefusedError(
                        f"{other} and {search.name} must not both have {_name(*place)}."
                    )
                self._check_flags(search, *place)

    def _check_flags(self, search: Search, dataset: str, row: str, epsilon: float | None) -> None:
        for flags in search.combinations():
            try:
                private = self.job(dataset, row, epsilon, 0, flags).settings.private
            except RefusedError as refusal:
                name = _name(dataset, row, epsilon)
                raise RefusedError(f"{search.name}, {name}: {refusal}") from refusal
            if private != (epsilon is not None):
                must = "epsilons" if private else "no epsilons"
                raise RefusedError(f"{search.name} must have {must}, because of {row}.")

    def _check_tables(self) -> None:
        for table in self.tables.values():
            for dataset, rows in table.accuracy.items():
                for row, numbers in rows.items():
                    if len(numbers) != len(table.epsilons):
                        raise RefusedError(
                            f"tables.{table.name}: {row} on {dataset} must have "
                            f"{len(table.epsilons)} numbers. Received: {numbers}."
                        )
                    if row not in self.rows and row not in self.notes:
                        raise RefusedError(
                            f"tables.{table.name}: [rows] or [notes] must have {row}."
                        )
                    if row in self.rows:
                        self._check_searched(f"tables.{table.name}", dataset, row, table.epsilons)

    def _check_searched(
        self, place: str, dataset: str, row: str, epsilons: tuple[float, ...]
    ) -> None:
        try:
            for epsilon in epsilons:
                self._nearest(dataset, self._searched_as.get(row, row), epsilon)
            if row in self.counterparts:
                self._nearest(dataset, self.counterparts[row], None)
        except RefusedError as refusal:
            raise RefusedError(f"{place}: {refusal}") from refusal


@functools.lru_cache(maxsize=4096)
def _parsed_flags(arguments: tuple[str, ...]) -> Settings:
    values = absl_flags.FlagValues()
    classify.define_flags(values)
    try:
        values(["classify", *arguments])
    except absl_flags.Error as error:
        raise RefusedError(str(error)) from error
    return classify.settings_from(values)


def settings_of(given: dict[str, Any]) -> Settings:
    """Returns the settings that a command line with these flags would ask for.

    Raises:
      RefusedError: They are no flags of `experiments.classify`, or do not go together.
    """
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return _parsed_flags(tuple(flags))


def _check_names(place: str, given: dict[str, Any], taken: Iterable[str] = ()) -> None:
    for name in given:
        if name in _DECIDED:
            raise RefusedError(f"{place} must leave {name} out: the tables decide it.")
        if name not in Settings.__dataclass_fields__:
            raise RefusedError(
                f"{place} must have flags of experiments.classify that say what is trained. "
                f"Received: {name}."
            )
        if name in taken:
            raise RefusedError(f"{place} must leave {name} out: it is given already.")


def _places(search: Search) -> list[tuple[str, str, float | None]]:
    """Data sets, rows and epsilons of a search."""
    return list(itertools.product(search.datasets, search.rows, search.epsilons or (None,)))


def _name(dataset: str, row: str, epsilon: float | None) -> str:
    return f"{row} on {dataset}" + ("" if epsilon is None else f" at epsilon {epsilon:g}")


def _with_seed(line: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns a line of a record as if its run had had that seed."""
    return {**line, "settings": {**line["settings"], "seed": seed}}
