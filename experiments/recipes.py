"""Runs the recipes: one command for each data set and epsilon, the most accurate that was found.

    python -m experiments.recipes --data_dir=... --datasets=fashion_mnist --epsilons=1
    python -m experiments.recipes --data_dir=... --trials
    python -m experiments.recipes --render_only

Recipes, and the trials on held-out training examples from which they were chosen, are declared in
experiments/tables/recipes.toml. Each run is a line of JSON in --record, whose "row" says whether it
is a "trial" or, on the test set, a "run"; what is found there is not run again, and neither is what
the record of the papers' tables has with the same settings. Then the tables of docs/recipes.md and
the picture of README.md, docs/accuracy.png, are made of the records.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from experiments import cli, datasets, jobs, records
from experiments.output import markdown, save
from experiments.settings import RefusedError, positive_numbers
from experiments.tables import declarations, figures, grid
from experiments.tables.runs import TITLES, cells

FILE = Path(__file__).parent / "tables" / "recipes.toml"
RECORD = "docs/results/recipes.jsonl"
TABLES_RECORD = "docs/results/runs.jsonl"
RUN, TRIAL = "run", "trial"
SEEDS = 3
BEGIN, END = "<!-- made by experiments.recipes: {} -->", "<!-- end -->"
PAGE = "docs/recipes.md"
PICTURE = "docs/accuracy.png"
PICTURED = {"cifar10": "Photos: CIFAR-10", "imdb_reviews": "Movie reviews: IMDB"}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Folder in which features are kept."
    flags.DEFINE_string("features_dir", "results/features", text, flag_values=values)
    text = "Folder of unfinished runs."
    flags.DEFINE_string("runs_dir", "results/runs", text, flag_values=values)
    flags.DEFINE_string("record", RECORD, "The record of the runs.", flag_values=values)
    text = "The record of the papers' tables."
    flags.DEFINE_string("tables_record", TABLES_RECORD, text, flag_values=values)
    flags.DEFINE_string("recipes", str(FILE), "The file that declares them.", flag_values=values)
    flags.DEFINE_list("datasets", [], "Data sets; all unless given.", flag_values=values)
    flags.DEFINE_list("epsilons", [], "Epsilons; all unless given.", flag_values=values)
    flags.DEFINE_bool("trials", False, "Runs the trials instead.", flag_values=values)
    text = "Only makes the tables of the record."
    flags.DEFINE_bool("render_only", False, text, flag_values=values)
    text = "Runs at a time; they share the cores."
    flags.DEFINE_integer("processes", 1, text, lower_bound=1, flag_values=values)
    text = "No run is begun that would end later, counted from the start; no limit unless given."
    flags.DEFINE_float("budget_minutes", None, text, lower_bound=0, flag_values=values)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that are recommended for a data set and an epsilon.

    Attributes:
      dataset: The data set.
      epsilon: The epsilon.
      flags: Other flags of `experiments.classify`.
      published: The best published accuracy in percent that has this epsilon.
      by: Method of the published accuracy.
    """

    dataset: str
    epsilon: float
    flags: dict[str, Any]
    published: float
    by: str

    @property
    def command(self) -> str:
        """The command that does it, but for where the data is."""
        given = {"dataset": self.dataset, "target_epsilon": f"{self.epsilon:g}", **self.flags}
        arguments = [shlex.quote(f"--{name}={value}") for name, value in given.items()]
        return " ".join(["python -m experiments.classify", *arguments])

    def jobs(self) -> list[grid.Job]:
        """Returns its runs on the test set."""
        given = {"dataset": self.dataset, "target_epsilon": self.epsilon, **self.flags}
        return [
            grid.Job(self.dataset, RUN, self.epsilon, grid.settings_of({**given, "seed": seed}))
            for seed in range(SEEDS)
        ]


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Number of a paper that is not one of those whose tables are reproduced.

    Attributes:
      dataset: The data set.
      epsilon: The epsilon.
      published: The accuracy in percent.
      by: Who has it, in Markdown.
      data: Other data that were used.
    """

    dataset: str
    epsilon: float
    published: float
    by: str
    data: str


def elsewhere(path: str | Path = FILE) -> list[Elsewhere]:
    """Returns the numbers of other papers that a file declares."""
    return [Elsewhere(**each) for each in declarations.parsed(path).get("elsewhere", [])]


def declared(path: str | Path = FILE) -> tuple[list[Recipe], list[grid.Job]]:
    """Returns the recipes and the trials that a file declares.

    Raises:
      RefusedError: It declares what cannot be; the message says where.
    """
    parsed = declarations.parsed(path)
    recipes = [Recipe(**each) for each in parsed.get("recipe", [])]
    trials = []
    for i, each in enumerate(parsed.get("trials", []), 1):
        each = dict(each)
        seeds = each.pop("seeds", 1)
        search = declarations.search(f"[[trials]] {i}", {"rows": [TRIAL], **each})
        trials += [
            _trial(dataset, epsilon, seed, given)
            for dataset in search.datasets
            for epsilon in search.epsilons
            for given in search.combinations()
            for seed in range(seeds)
        ]
    return recipes, trials


def _trial(dataset: str, epsilon: float, seed: int, given: dict[str, Any]) -> grid.Job:
    given = {"dataset": dataset, "target_epsilon": epsilon, **given, "seed": seed}
    settings = grid.settings_of({**given, "eval_split": "validation"})
    return grid.Job(dataset, TRIAL, epsilon, settings)


def adopted(wanted: Sequence[grid.Job], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines of another record that are runs of these jobs, as lines of this one."""
    return [
        {**line, "row": job.row}
        for job in wanted
        for line in lines
        if dataclasses.replace(job, row=line["row"]).matches(line)
    ]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a recipe, from the record.

    Attributes:
      accuracies: Accuracies of its runs on the test set in percent.
      minutes: Minutes that the fastest of them trained for; None where no run was timed, as none of
        a selective method is: the time says how many attempts were rejected.
      trials: Number of settings that were tried on its data set, at any epsilon.
      trial_runs: Number of runs of these.
    """

    accuracies: list[float]
    minutes: float | None
    trials: int
    trial_runs: int

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)


def outcome(recipe: Recipe, lines: Sequence[dict[str, Any]]) -> Outcome | None:
    """Returns the outcome of a recipe; None if not all of its runs are in the record.

    Raises:
      RefusedError: A run spent more than the recipe's epsilon.
    """
    runs = [line for job in recipe.jobs() for line in lines if job.matches(line)]
    if len(runs) < SEEDS:
        return None
    if max(line["epsilon"] for line in runs) > recipe.epsilon:
        raise RefusedError(f"A run of the record spent more than epsilon {recipe.epsilon:g}.")
    trials = [x for x in lines if (x["row"], x["dataset"]) == (TRIAL, recipe.dataset)]
    settings = {repr({**line["settings"], "seed": None}) for line in trials}
    seconds = [line["seconds"] for line in runs if line["seconds"] is not None]
    accuracies = [100 * line["accuracy"] for line in runs]
    minutes = min(seconds) / 60 if seconds else None
    return Outcome(accuracies, minutes, len(settings), len(trials))


def tables(
    recipes: Sequence[Recipe], lines: Sequence[dict[str, Any]], others: Sequence[Elsewhere] = ()
) -> dict[str, str]:
    """Returns the tables of the page, by name: recipes whose runs are in the record."""
    found = [(recipe, outcome(recipe, lines)) for recipe in recipes]
    ended = [(recipe, each) for recipe, each in found if each is not None]
    rows = [
        [
            TITLES.get(recipe.dataset, recipe.dataset),
            f"{recipe.epsilon:g}",
            f"{each.mean:.2f} ± {statistics.stdev(each.accuracies):.2f}",
            f"{recipe.published:.2f} ({recipe.by})",
            "not timed" if each.minutes is None else f"{each.minutes:.1f}",
            f"{each.trials} ({each.trial_runs} runs)",
        ]
        for recipe, each in ended
    ]
    titles = ["data set", "ε", "test accuracy, %", "best published, %", "minutes", "further trials"]
    means = {(recipe.dataset, recipe.epsilon): f"{each.mean:.1f}" for recipe, each in ended}
    beside = [
        [
            TITLES.get(each.dataset, each.dataset),
            f"{each.epsilon:g}",
            f"{each.published:.1f}",
            each.by,
            each.data,
            means.get((each.dataset, each.epsilon), "no recipe"),
        ]
        for each in others
    ]
    others_titles = ["data set", "ε", "published, %", "by", "other data", "tfdp, %"]
    return {
        "recipes": markdown(titles, rows),
        "commands": "\n".join(["```", *(recipe.command for recipe, _ in ended), "```"]),
        "elsewhere": markdown(others_titles, beside),
    }


def panels(
    recipes: Sequence[Recipe],
    lines: Sequence[dict[str, Any]],
    tables_lines: Sequence[dict[str, Any]],
    others: Sequence[Elsewhere],
) -> list[figures.Panel]:
    """Returns what the picture shows, of the data sets that it is about."""
    public = cells([line for line in tables_lines if line["target_epsilon"] is None])
    shown = []
    for dataset, title in PICTURED.items():
        here = [recipe for recipe in recipes if recipe.dataset == dataset]
        found = [(recipe, outcome(recipe, lines)) for recipe in here]
        ours = {recipe.epsilon: each.mean for recipe, each in found if each is not None}
        without = [cell.mean for (data, *_), cell in public.items() if data == dataset]
        if ours and without:
            best = {r.epsilon: r.published for r in here if r.epsilon in ours}
            more = {o.epsilon: o.published for o in others if _is_shown(o, dataset, ours)}
            shown.append(figures.Panel(title, ours, best, more, max(without)))
    return shown


def _is_shown(other: Elsewhere, dataset: str, ours: dict[float, float]) -> bool:
    return other.dataset == dataset and other.epsilon in ours and other.data != "none"


def rendered(text: str, made: dict[str, str]) -> str:
    """Returns a page with its tables made again, each between its markers."""
    for name, table in made.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise RefusedError(f"The page must have {BEGIN.format(name)} and {END}.")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def run(values: flags.FlagValues) -> list[str]:
    """Does what the parsed flags ask for.

    Returns:
      What was not run, and why.

    Raises:
      RefusedError: It cannot be done; the message says why.
    """
    recipes, trials = declared(values.recipes)
    epsilons = positive_numbers("epsilons", values.epsilons, may_be_empty=True)
    todo = trials if values.trials else [job for recipe in recipes for job in recipe.jobs()]
    asked = [
        job
        for job in todo
        if (not values.datasets or job.dataset in values.datasets)
        and (not epsilons or job.target_epsilon in epsilons)
    ]
    record = Path(values.record)
    failures = []
    if not values.render_only:
        for line in adopted(jobs.outstanding(asked, record), records.read(values.tables_record)):
            records.append(record, line)
        places = jobs.Places(
            record, Path(values.runs_dir), values.data_dir, values.features_dir or None
        )
        failures = jobs.run_all(
            asked, places, processes=values.processes, budget_minutes=values.budget_minutes
        )
    lines, others, page = records.read(record), elsewhere(values.recipes), Path(PAGE)
    page.write_text(rendered(page.read_text(), tables(recipes, lines, others)))
    print(page)
    pictured = panels(recipes, lines, records.read(values.tables_record), others)
    if pictured:
        save(figures.draw_overview(pictured), PICTURE)
    return failures


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("recipes", argv, RefusedError, datasets.DataError):
        jobs.tell(run(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
