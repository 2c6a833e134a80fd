"""Attacks trained classifiers by membership inference, as the papers' tables do, and by inversion.

    python -m experiments.attacks --table=dpsur_3 --data_dir=... --processes=2
    python -m experiments.attacks --table=bottlenecked_7 --rows=DPSGD --epsilons=2 --data_dir=...
    python -m experiments.attacks --lira_models=16 --rows=SGD,DPSGD --epsilons=1 --data_dir=...

A data set is split at random, 2:1:2:1, into what a target model and a shadow model are trained and
tested on. A black-box attacker sees posteriors, and learns from the shadow model; a white-box
attacker sees losses, activations and gradients of the target, and learns from half of its members.
On the same models, unless --nomore_attacks is given: the per-layer attack of Leino and Fredrikson,
and, except of texts, model inversion. Each run is a line of JSON in OUTPUT_DIR/attacks.jsonl, with
the ledger's epsilon; what is found there is not run again, and a run that was killed resumes from
its last epoch. Hyperparameters are those of the papers' tables (--searches). Rows without privacy
are controls, which are trained until they fit their training sets: an attack that does not see
their members says nothing about others.

Writes OUTPUT_DIR/attacks.md and OUTPUT_DIR/inversions_DATASET.png. What attacks find is no part of
any epsilon: it reads the members.
"""

from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli, datasets, jobs, output, records, reproduce, tune
from experiments.attacks import report, runs
from experiments.attacks.declarations import FILE, Table, Tables
from experiments.settings import RefusedError, positive_numbers
from experiments.tables import grid
from tfdp.base.whole_files import write_text


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`: those of `experiments.reproduce`, and a few more."""
    reproduce.define_flags(values)
    values.set_default("seeds", 1)
    values.set_default("output_dir", "results/attacks")
    text = "The file that declares the tables of attacks."
    flags.DEFINE_string("attack_tables", str(FILE), text, flag_values=values)
    text = "Attacks by likelihood ratios instead, with so many models (even, at least 4)."
    flags.DEFINE_integer("lira_models", None, text, lower_bound=4, flag_values=values)
    flags.register_validator(
        "lira_models",
        lambda value: value is None or value % 2 == 0,
        message="--lira_models must be even.",
        flag_values=values,
    )
    text = (
        "Also the per-layer attack and, on images, model inversion: they take most of a run's time."
    )
    flags.DEFINE_bool("more_attacks", True, text, flag_values=values)
    text = "For tests: number of examples to use; all unless given."
    flags.DEFINE_integer("examples", None, text, lower_bound=1, flag_values=values)


def planned(
    declared: grid.Grid,
    tables: dict[str, Table],
    controls: Tables,
    values: flags.FlagValues,
    searched: list[dict[str, Any]],
) -> tuple[list[runs.Job], list[str]]:
    """Returns the runs that are asked for, controls first.

    Args:
      declared: The rows, and what was searched for them.
      tables: The tables to run.
      controls: How controls are trained.
      values: The parsed flags.
      searched: The record of the searches.

    Returns:
      The runs, and why others cannot be done.

    Raises:
      RefusedError: What is asked for is in no table.
    """
    declared.check_asked((), values.rows)
    epsilons = positive_numbers("epsilons", values.epsilons, may_be_empty=True)
    asked = set(values.rows or declared.rows)
    cells: dict[tuple[str, str, float | None], None] = {}
    # No private cell without its control.
    for table in tables.values():
        for row in table.rows:
            control = declared.counterparts[row]
            if {row, control} & asked:
                cells[table.dataset, control, None] = None
    for table in tables.values():
        for row in table.rows:
            for epsilon in epsilons or table.epsilons:
                if row in asked:
                    cells[table.dataset, row, epsilon] = None
    found, missing = [], {}
    for dataset, row, epsilon in cells:
        if values.datasets and dataset not in values.datasets:
            continue
        try:
            given = (
                controls.control(dataset, row)
                if epsilon is None
                else declared.best(dataset, row, epsilon, searched)
            )
        except RefusedError as refusal:
            missing[str(refusal)] = None
            continue
        for seed in range(values.seeds):
            job = declared.job(dataset, row, epsilon, seed, given)
            names = ("examples", "lira_models", "more_attacks")
            more = {name: values[name].value for name in names}
            found.append(runs.Job(dataset, row, epsilon, job.settings, **more))
    if not (found or missing):
        raise RefusedError("The tables that are asked for have no such rows on such data sets.")
    return sorted(found, key=lambda job: job.settings.seed), list(missing)


def render(
    declared: grid.Grid, tables: dict[str, Table], lines: list[dict[str, Any]], folder: Path
) -> None:
    """Writes `attacks.md`, and a picture of inversions for each data set that has them.

    Args:
      declared: The rows.
      tables: The tables.
      lines: The record.
      folder: Folder to write to.

    Raises:
      ValueError: Runs that would not count.
    """
    lines = report.newest(lines)
    report.checked(lines)
    parts = [
        "# Membership inference",
        report.HOW,
        report.summary(tables.values(), lines),
        *(report.section(table, declared.counterparts, lines) for table in tables.values()),
        report.layers_section(tables.values(), lines),
        report.inversion_section(tables.values(), lines),
        f"Versions: {report.versions(lines)}.",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "attacks.md", "\n\n".join(filter(None, parts)) + "\n")
    print(f"{folder / 'attacks.md'}")
    for dataset in dict.fromkeys(table.dataset for table in tables.values()):
        figure = report.inversions(tables.values(), lines, dataset)
        if figure is not None:
            output.save(figure, str(folder / f"inversions_{dataset}.png"))


def run(values: flags.FlagValues) -> list[str]:
    """Does what the parsed flags ask for.

    Returns:
      What was not run, and why.

    Raises:
      RefusedError: It cannot be done; the message says why.
    """
    declared = grid.Grid(values.tables)
    everything = Tables(values.attack_tables, declared)
    asked = values["table"].value or list(everything.tables)
    for name in asked:
        if name not in everything.tables:
            known = ", ".join(everything.tables)
            raise RefusedError(f"--table must be one of {known}. Received: --table={name}.")
    folder = Path(values.output_dir)
    record = folder / "attacks.jsonl"
    failures = []
    if not values.render_only:
        tables = {name: everything.tables[name] for name in asked}
        todo, failures = planned(
            declared, tables, everything, values, records.read(values.searches)
        )
        failures += jobs.run_all(
            todo,
            tune.places(values, str(record)),
            processes=values.processes,
            budget_minutes=values.budget_minutes,
            run=runs.run,
        )
    lines = records.read(record)
    if lines:
        try:
            render(declared, everything.tables, lines, folder)
        except ValueError as error:
            raise RefusedError(f"{record} cannot be rendered. {error}") from error
    return failures


def main(argv: list[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("attacks", argv, RefusedError, datasets.DataError):
        jobs.tell(run(flags.FLAGS))
