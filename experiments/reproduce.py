"""Runs the published tables, every cell at the epsilon that it is printed with, and compares.

    python -m experiments.reproduce --table=dpsur_2 --data_dir=... --processes=2
    python -m experiments.reproduce --table=bottlenecked_3 --datasets=mnist --budget_minutes=60
    python -m experiments.reproduce --render_only --output_dir=docs/results

Each run is a line of JSON in OUTPUT_DIR/runs.jsonl: its settings, what it released (ledger),
epsilon by each accountant, the accuracy of the last model, by class, too, and versions. What is
found there is not run again, and a run that was killed resumes from its last epoch. All cells get
a first run before any gets a second. Hyperparameters are those that experiments.tune found on
held-out training examples (--searches).

Writes OUTPUT_DIR/tables.md, with all that the record holds, and pictures beside it; and
OUTPUT_DIR/searches.md, with the size and the outcome of each search.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
from pathlib import Path
from typing import Any

from absl import flags, logging

from experiments import cli, jobs, records, tune
from experiments.output import save
from experiments.settings import RefusedError, positive_numbers
from experiments.tables import figures, grid, report, searches
from experiments.tables.runs import private_rows
from tfdp.base.whole_files import write_text

_SIGN = "DPSign"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    tune.define_shared_flags(values)
    text = (
        "Tables to run, by their names in --tables; may be given several times. All unless given."
    )
    flags.DEFINE_multi_string("table", [], text, flag_values=values)
    flags.DEFINE_list("datasets", [], "Data sets; all unless given.", flag_values=values)
    flags.DEFINE_list("rows", [], "Rows; all unless given.", flag_values=values)
    text = "Epsilons; those that the tables are printed with unless given."
    flags.DEFINE_list("epsilons", [], text, flag_values=values)
    flags.DEFINE_integer("seeds", 3, "Runs of each cell.", lower_bound=1, flag_values=values)
    text = "Folder of the record and of what is made of it."
    flags.DEFINE_string("output_dir", "results/reproduce", text, flag_values=values)
    text = "Only makes tables and pictures of the record."
    flags.DEFINE_bool("render_only", False, text, flag_values=values)


def planned(
    declared: grid.Grid, values: flags.FlagValues, searched: list[dict[str, Any]]
) -> tuple[list[grid.Job], list[str]]:
    """Returns the runs that are asked for, the most informative first.

    Args:
      declared: The tables.
      values: The parsed flags.
      searched: The record of the searches.

    Returns:
      The runs, and why others cannot be done.

    Raises:
      RefusedError: What is asked for is in no table.
    """
    declared.check_asked(values.datasets, values.rows)
    epsilons = positive_numbers("epsilons", values.epsilons, may_be_empty=True)
    cells: dict[tuple[str, str, float | None], None] = {}
    for name in values["table"].value or declared.tables:
        if name not in declared.tables:
            known = ", ".join(declared.tables)
            raise RefusedError(f"--table must be one of {known}. Received: --table={name}.")
        table = declared.tables[name]
        for dataset, rows in table.accuracy.items():
            for row in rows:
                if row in declared.rows:
                    for epsilon in epsilons or table.epsilons:
                        cells[dataset, row, epsilon] = None
                    if row in declared.counterparts:
                        cells[dataset, declared.counterparts[row], None] = None
    jobs_of, missing = [], {}
    for dataset, row, epsilon in cells:
        if values.datasets and dataset not in values.datasets:
            continue
        if values.rows and row not in values.rows:
            continue
        try:
            jobs_of.append(declared.cell(dataset, row, epsilon, values.seeds, searched))
        except RefusedError as refusal:
            missing[str(refusal)] = None
    if not (jobs_of or missing):
        raise RefusedError("The tables that are asked for have no such rows on such data sets.")
    return [job for one_each in zip(*jobs_of, strict=True) for job in one_each], list(missing)


def render(declared: grid.Grid, lines: list[dict[str, Any]], folder: Path) -> None:
    """Writes `tables.md` and its pictures.

    Args:
      declared: The tables.
      lines: The runs.
      folder: Folder to write to.

    Raises:
      ValueError: Runs that would not count.
    """
    tables = list(declared.tables.values())
    baselines = declared.counterparts
    pairs = [(row, row.replace(_SIGN, "DP", 1)) for row in declared.rows if row.startswith(_SIGN)]
    private = [line for line in lines if line["target_epsilon"] is not None]
    others = report.other_section(tables, lines)
    parts = [
        "# The papers' tables",
        *(report.accuracy_section(table, lines, declared.notes, baselines) for table in tables),
        *([f"### Other cells\n\n{others}"] if others else ()),
        "### At or above the published numbers",
        report.count_section(tables, lines),
        "### Does sign beat no sign?",
        report.sign_section(lines, pairs),
        "### Subgroups",
        report.HOW_SUBGROUPS,
    ]
    for dataset in dict.fromkeys(line["dataset"] for line in private):
        names = declared.class_names.get(dataset)
        printed = {e for t in tables if dataset in t.accuracy for e in t.epsilons}
        ran = {line["target_epsilon"] for line in private if line["dataset"] == dataset}
        for epsilon in sorted(printed & ran or ran):
            parts.append(
                report.subgroup_table(lines, dataset, epsilon, baselines, class_names=names)
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tables.md", "\n\n".join(parts) + "\n")
    print(f"{folder / 'tables.md'}")
    for table in tables:
        if any(line["dataset"] in table.accuracy for line in lines):
            figure = figures.draw_accuracy([table], lines, baselines, table.title)
            save(figure, str(folder / f"{table.name}.png"))
    for dataset in dict.fromkeys(line["dataset"] for line in private):
        if private_rows(lines, dataset, 1.0):
            names = declared.class_names.get(dataset)
            figure = figures.draw_classes(lines, dataset, 1.0, baselines, class_names=names)
            save(figure, str(folder / f"classes_{dataset}.png"))


def run(values: flags.FlagValues) -> list[str]:
    """Does what the parsed flags ask for.

    Returns:
      What was not run, and why.

    Raises:
      RefusedError: It cannot be done; the message says why.
    """
    declared = grid.Grid(values.tables)
    folder = Path(values.output_dir)
    record = folder / "runs.jsonl"
    failures = []
    if not values.render_only:
        todo, failures = planned(declared, values, records.read(values.searches))
        failures += jobs.run_all(
            todo,
            tune.places(values, str(record)),
            processes=values.processes,
            budget_minutes=values.budget_minutes,
        )
    lines, trials = records.read(record), records.read(values.searches)
    if trials:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "searches.md"
        write_text(path, f"# The searches\n\n{searches.section(trials)}\n")
        print(path)
    if lines:
        try:
            render(declared, lines, folder)
        except ValueError as error:
            raise RefusedError(f"{record} cannot be rendered. {error}") from error
    return failures


def main(argv: list[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("reproduce", argv, RefusedError):
        jobs.tell(run(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
