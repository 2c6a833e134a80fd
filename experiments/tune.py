"""Searches the hyperparameters of the rows of the tables, on held-out training examples.

    python -m experiments.tune --data_dir=... --datasets=mnist --rows=DPSGD,DPSignSGD
    python -m experiments.tune --data_dir=... --processes=2

What is tried is declared in experiments/tables/tables.toml ([[search]]): as many trials for a
baseline as for a method. Every trial is a line of JSON in --searches, from which
experiments.reproduce takes the best; a search that was interrupted resumes when it is called again.
The test set is not touched. What a search costs in privacy is not part of any epsilon: it reads
held-out examples of the training set once per trial. `--private_selection` chooses the settings of
one model instead, at an epsilon that includes the choice: experiments/private_selection.py.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import statistics
from pathlib import Path
from typing import Any

from absl import flags, logging

from experiments import cli, datasets, jobs, private_selection, records
from experiments.output import markdown
from experiments.settings import RefusedError, positive_numbers
from experiments.tables import grid

SEARCHES = "docs/results/searches.jsonl"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    define_shared_flags(values)
    private_selection.define_flags(values)
    flags.DEFINE_list("datasets", [], "Data sets; all unless given.", flag_values=values)
    flags.DEFINE_list("rows", [], "Rows of the tables; all unless given.", flag_values=values)
    text = "Epsilons, out of those that are searched; all unless given."
    flags.DEFINE_list("epsilons", [], text, flag_values=values)
    flags.DEFINE_integer("seeds", 1, "Runs of each trial.", lower_bound=1, flag_values=values)


def define_shared_flags(values: flags.FlagValues) -> None:
    """Defines what `experiments.reproduce` takes, too."""
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Folder in which features are kept."
    flags.DEFINE_string("features_dir", "results/features", text, flag_values=values)
    text = "Folder of unfinished runs."
    flags.DEFINE_string("runs_dir", "results/runs", text, flag_values=values)
    text = "The record of the searches, a line of JSON per trial."
    flags.DEFINE_string("searches", SEARCHES, text, flag_values=values)
    text = "The file that declares tables, rows and searches."
    flags.DEFINE_string("tables", str(grid.FILE), text, flag_values=values)
    text = "Runs at a time; they share the cores."
    flags.DEFINE_integer("processes", 1, text, lower_bound=1, flag_values=values)
    text = "No run is begun that would end later, counted from the start; no limit unless given."
    flags.DEFINE_float("budget_minutes", None, text, lower_bound=0, flag_values=values)


def places(values: flags.FlagValues, record: str) -> jobs.Places:
    """Returns where the flags say that things are."""
    return jobs.Places(
        Path(record),
        Path(values["runs_dir"].value),
        values.data_dir,
        values.features_dir or None,
    )


def run(values: flags.FlagValues) -> list[str]:
    """Runs the trials that are outstanding, and prints what was found.

    Returns:
      What was not run, and why.

    Raises:
      RefusedError: Nothing is declared for what is asked for.
    """
    declared = grid.Grid(values.tables)
    declared.check_asked(values.datasets, values.rows)
    epsilons = positive_numbers("epsilons", values.epsilons, may_be_empty=True)
    trials = declared.trials(values.datasets, values.rows, epsilons, values.seeds)
    if not trials:
        raise RefusedError(
            f"[[search]] of {values.tables} must declare what is asked for. Received: --datasets="
            f"{','.join(values.datasets)} --rows={','.join(values.rows)} --epsilons="
            f"{','.join(values.epsilons)}."
        )
    failures = jobs.run_all(
        trials,
        places(values, values.searches),
        processes=values.processes,
        budget_minutes=values.budget_minutes,
    )
    print(summary(declared, trials, records.read(values.searches)))
    return failures


def summary(declared: grid.Grid, trials: list[grid.Job], lines: list[dict[str, Any]]) -> str:
    """Returns the trials of each search, the best first."""
    parts = []
    places = dict.fromkeys((job.dataset, job.row, job.target_epsilon) for job in trials)
    for dataset, row, epsilon in places:
        made = [pair for pair in declared.ranking(dataset, row, epsilon, lines) if pair[0]]
        names = list(dict.fromkeys(name for _, given in made for name in given))
        body = [
            [
                f"{100 * statistics.fmean(accuracies):.2f}",
                f"{len(accuracies)}",
                *(f"{given[name]}" for name in names),
            ]
            for accuracies, given in made
        ]
        at = "" if epsilon is None else f", epsilon {epsilon:g}"
        table = markdown(["validation %", "runs", *names], body)
        parts.append(f"{dataset}, {row}{at}\n\n{table}")
    return "\n\n".join(parts)


def main(argv: list[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("tune", argv, RefusedError, datasets.DataError):
        if flags.FLAGS.private_selection:
            private_selection.run(flags.FLAGS)
        else:
            jobs.tell(run(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
