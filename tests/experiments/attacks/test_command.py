"""From a split to the table of an attack, with runs that resume."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tfdp
from experiments import jobs, records, training
from experiments.attacks import attackers, command, inversion, layers, runs
from experiments.attacks.declarations import ATTACKS, FILE, INVERSION, LAYERS, Tables
from experiments.settings import RefusedError
from experiments.tables import grid
from experiments.tables.runs import TITLES
from tests.experiments.jobs_support import TABLES, WorkersHere, line, parse

ROOT = Path(__file__).absolute().parents[3]
DECLARED = """
[[control]]
rows = ["SGD"]
datasets = ["digits"]
fixed = { epochs = 2, expected_batch_size = 16, learning_rate = 0.1 }

[tables.tiny]
title = "A tiny table"
dataset = "digits"
epsilons = [1.0, 2.0]
non_private = { black_box = 0.6 }

[tables.tiny.published.black_box]
DPSGD = [0.501, 0.502]

[tables.tiny.published.white_box]
DPSGD = [0.503, 0.504]
"""
# As small as what is split into the training set of 100 examples.
TINY = TABLES.replace("719", "50").replace("[0.002, 0.2]", "[0.2]")
TINY_EXAMPLES = 300


@pytest.fixture
def here(monkeypatch):
    """Runs jobs in this process; returns those that were begun."""
    workers = WorkersHere(1)

    def same(processes, run):
        workers.run = run
        return workers

    monkeypatch.setattr(jobs, "_Workers", same)
    return workers.ran


@pytest.fixture
def weak(monkeypatch):
    """Makes attacks weak, and fast."""
    monkeypatch.setattr(inversion, "_STEPS", 2)
    monkeypatch.setattr(layers, "_EPOCHS", 1)
    monkeypatch.setitem(attackers.ATTACKERS, "network", attackers.forest)


@pytest.fixture
def folder(tmp_path):
    """The files of tables, and the record of a search that has been made."""
    (tmp_path / "tables.toml").write_text(TINY)
    (tmp_path / "attacks.toml").write_text(DECLARED)
    for trial in grid.Grid(tmp_path / "tables.toml").trials((), ("DPSGD",), ()):
        records.append(tmp_path / "searches.jsonl", line(trial, 0.5))
    return tmp_path


def flags_in(folder, *arguments):
    return parse(command, folder, f"--attack_tables={folder / 'attacks.toml'}", *arguments)


@pytest.fixture
def at_once(here, monkeypatch):
    """In the place of runs: lines without any training."""

    def run(job, places):
        success = {"accuracy": 0.5, "auc": 0.51, "tpr": 0.002}
        both = {"network": success, "forest": {**success, "accuracy": 0.6}}
        names = ("recognised", "members", "others", "prior", "auc")
        found = {name: both for name in job.attacks}
        if INVERSION in found:
            found[INVERSION] = dict(zip(names, (0.9, 0.12, 0.125, 0.3, 0.5), strict=True))
        return {
            **{**line(job, 0.8), "evaluated_on": "test", "delta": 1e-5, "versions": {"b": "1"}},
            "epsilon": None if job.target_epsilon is None else job.target_epsilon - 0.001,
            "epsilon_by_accountant": {"PLD": job.target_epsilon and job.target_epsilon - 0.001},
            **{"examples": job.examples, "lira_models": job.lira_models},
            **{"members": 10, "accuracy_on_members": 0.9},
            "attacks": found,
            "auc_by_layer": {"conv": 0.52, "dense": 0.55},
            "inversions": inversion.packed(np.full([10, 8, 8, 1], 0.4)),
        }

    monkeypatch.setattr(runs, "run", run)
    return here


def report_in(folder):
    return (folder / "results" / "attacks.md").read_text()


def rows_in(text):
    """The rows of its only table."""
    return [row for row in text.splitlines() if row.startswith("| ")][2:]


@pytest.mark.slow
def test_from_a_split_to_a_table(folder, here, weak, monkeypatch):
    """The whole way, with training; the second call does not run again what the first ran."""
    arguments = [f"--examples={TINY_EXAMPLES}", "--epsilons=1"]
    assert command.run(flags_in(folder, *arguments)) == []
    control, private = records.read(folder / "results" / "attacks.jsonl")
    assert (control["row"], private["row"]) == ("SGD", "DPSGD")
    assert control["epsilon"] is None and control["settings"]["epochs"] == 2
    ledger = tfdp.accounting.PrivacyLedger.from_dict(private["ledger"])
    assert ledger.epsilon(private["delta"]).epsilon == private["epsilon"] <= 1.0
    assert private["dataset_size"] == private["members"] == 100
    assert private["evaluation_examples"] == 50
    for found in (control, private):
        assert set(found["attacks"]) == {"black_box", "white_box", "layers", "inversion"}
        assert all(0 <= share <= 1 for share in found["attacks"].pop("inversion").values())
        assert len(found["auc_by_layer"]) == 3
        assert inversion.unpacked(found["inversions"]).shape == (10, 8, 8, 1)
        for attack in found["attacks"].values():
            assert set(attack) == set(attackers.ATTACKERS)
            assert all(0 <= x <= 1 for success in attack.values() for x in success.values())
    assert not list((folder / "unfinished").iterdir())
    assert "| DPSGD | 0.99" in report_in(folder) or "| DPSGD | 1.000" in report_in(folder)
    assert (folder / "results" / "inversions_digits.png").stat().st_size > 1000

    monkeypatch.setattr(runs, "run", None)
    assert command.run(flags_in(folder, *arguments)) == []
    assert len(here) == 2


@pytest.mark.slow
def test_models_that_were_trained_are_not_trained_again(folder, here, monkeypatch):
    """A kill between the target and the shadow model, and one before the line is written."""
    arguments = [f"--examples={TINY_EXAMPLES}", "--rows=SGD"]
    trained, run = [], training.Training.run
    success = {name: {"accuracy": 0.5, "auc": 0.5, "tpr": 0.0} for name in attackers.ATTACKERS}
    monkeypatch.setattr(attackers, "success", lambda *_: success)
    monkeypatch.setattr(runs, "_by_layer", lambda *_: (success, {}))
    shares = dict.fromkeys(("recognised", "members", "others", "prior", "auc"), 0.5)
    no_images = inversion.packed(np.zeros([10, 8, 8, 1]))
    monkeypatch.setattr(runs, "_inverted", lambda *_: (shares, no_images))

    def count(self):
        trained.append(self.folder.path.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(training.Training, "run", count)
    with pytest.raises(KeyboardInterrupt):
        command.run(flags_in(folder, *arguments))
    assert trained == ["target", "shadow"]
    with monkeypatch.context() as patch:
        patch.setattr(jobs.records, "append", lambda *_: 1 / 0)
        (failure,) = command.run(flags_in(folder, *arguments))
    assert "ZeroDivisionError" in failure
    assert command.run(flags_in(folder, *arguments)) == []
    assert trained == ["target", "shadow", "shadow"]


@pytest.mark.slow
def test_likelihood_ratios_attack_models_of_the_same_row(folder, here):
    arguments = [f"--examples={TINY_EXAMPLES}", "--epsilons=1", "--lira_models=4"]
    assert command.run(flags_in(folder, *arguments)) == []
    control, private = records.read(folder / "results" / "attacks.jsonl")
    assert set(control["attacks"]) == set(private["attacks"]) == {"lira"}
    assert control["members"] == 75 and private["epsilon"] <= 1.0
    assert "| LiRA, 4 models |" in report_in(folder)


def test_the_target_and_the_shadow_are_trained_on_their_parts(folder, monkeypatch):
    """Nothing that the target was trained on may be among what the attacker learns from."""
    seen = []

    def trained(settings, data, folder):
        seen.append((settings.seed, data))
        return None, {}

    monkeypatch.setattr(runs, "_trained", trained)
    monkeypatch.setattr(attackers, "observe", lambda view, model, data: pytest.fail("late"))
    declared = grid.Grid(folder / "tables.toml")
    job = declared.job("digits", "SGD", None, 5, {"epochs": 1})
    places = jobs.Places(folder / "record", folder / "runs", None, None)
    with pytest.raises(pytest.fail.Exception):
        runs.run(runs.Job("digits", "SGD", None, job.settings, 300), places)
    (seed, target), (shadow_seed, shadow) = seen
    assert seed == 5 != shadow_seed
    assert (target.size, len(target.eval_y), shadow.size, len(shadow.eval_y)) == (100, 50, 100, 50)
    rows = [
        {row.tobytes() for row in part}
        for part in (target.train_x, target.eval_x, shadow.train_x, shadow.eval_x)
    ]
    assert len(set.union(*rows)) == sum(map(len, rows))


def test_what_needs_no_model_is_computed_once_for_a_split(folder, monkeypatch):
    """And is that of the model's own split: a prior or judge of members would help the attack."""
    grown, judge_of = [], inversion.judge_of

    def noted(data, seed):
        grown.append(data)
        return judge_of(data, seed)

    monkeypatch.setattr(inversion, "judge_of", noted)
    runs._without_model.cache_clear()
    places = jobs.Places(folder / "record", folder / "runs", None, None)
    declared = grid.Grid(folder / "tables.toml")
    cells = [("SGD", None, 0), ("DPSGD", 1.0, 0), ("DPSGD", 1.0, 1)]
    for row, epsilon, seed in cells:
        job = declared.job("digits", row, epsilon, seed, {"epochs": 1})
        job = runs.Job("digits", row, epsilon, job.settings, TINY_EXAMPLES)
        target, shadow = runs._split(job, places)
        args = ("digits", job.settings.eval_split, 0, seed, TINY_EXAMPLES, places)
        images, prior, _ = runs._without_model(*args)
        np.testing.assert_array_equal(images.train_x, target.train_x)
        np.testing.assert_array_equal(grown[-1].train_x, shadow.train_x)
        np.testing.assert_allclose(prior.mean, shadow.train_x.mean(axis=0), atol=1e-6)
    assert len(grown) == 2


def test_controls_come_first_and_every_cell_gets_a_run(folder, at_once):
    assert command.run(flags_in(folder, "--seeds=2")) == []
    assert [(job.row, job.target_epsilon, job.settings.seed) for job in at_once] == [
        *(("SGD", None, 0), ("DPSGD", 1.0, 0), ("DPSGD", 2.0, 0)),
        *(("SGD", None, 1), ("DPSGD", 1.0, 1), ("DPSGD", 2.0, 1)),
    ]
    control, private = at_once[0].settings, at_once[1].settings
    assert (control.epochs, control.expected_batch_size) == (2, 16)
    assert (private.epochs, private.learning_rate) == (1, 0.2)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [("SGD", ["SGD"]), ("DPSGD", ["SGD", "DPSGD"]), ("SGD,DPSGD", ["SGD", "DPSGD"])],
)
def test_no_private_row_is_run_without_its_control(folder, at_once, rows, expected):
    assert command.run(flags_in(folder, f"--rows={rows}", "--epsilons=1")) == []
    assert [job.row for job in at_once] == expected


def test_cells_stand_beside_controls_published_numbers_and_what_is_allowed(folder, at_once):
    assert command.run(flags_in(folder, "--epsilons=1", "--seeds=2")) == []
    assert command.run(flags_in(folder, "--rows=SGD", "--lira_models=4")) == []
    rest = "0.510 / 0.510 | 0.002 / 0.002"
    text, _, more = report_in(folder).partition("## Layers")
    summary, _, text = text.partition("### ")
    by_layer, _, inverted = more.partition("## Model inversion")
    assert rows_in(text) == [
        f"| SGD | – | 0.900 / 0.800 | black box | 0.500 / 0.600 | 0.600 | – | {rest} | 2 |",
        f"| SGD | – | 0.900 / 0.800 | white box | 0.500 / 0.600 | – | – | {rest} | 2 |",
        f"| SGD | – | 0.900 / 0.800 | LiRA, 4 models | 0.500 / 0.600 | – | – | {rest} | 1 |",
        "| DPSGD | 0.999 | 0.900 / 0.800 | black box | 0.500 / 0.600 | 0.501 | 0.731 / 0.881 | "
        f"{rest} | 2 |",
        "| DPSGD | 0.999 | 0.900 / 0.800 | white box | 0.500 / 0.600 | 0.503 | 0.731 / 0.881 | "
        f"{rest} | 2 |",
    ]
    assert "Not run: DPSGD at ε = 2." in text
    both = "0.500 to 0.600"
    assert rows_in(summary) == [
        f"| digits | SGD | – | {both} | {both} | {both} | {both} |",
        f"| digits | DPSGD | 1 | {both} | {both} | {both} | – |",
    ]
    rest = "0.510 / 0.510 | 0.002 / 0.002 | 0.520, 0.550 | 2 |"
    assert rows_in(by_layer) == [
        f"| digits | SGD | – | 0.500 / 0.600 | – | {rest}",
        f"| digits | DPSGD | 0.999 | 0.500 / 0.600 | 0.731 / 0.881 | {rest}",
    ]
    rest = "0.90 | 0.1200 | 0.1250 | 0.3000 | 0.500 | 2 |"
    assert rows_in(inverted) == [
        f"| digits | SGD | – | {rest}",
        f"| digits | DPSGD | 0.999 | {rest}",
    ]


def test_runs_of_other_sizes_or_attacks_are_other_runs(folder, at_once):
    for more in ((), ("--examples=300",), ("--lira_models=4",), ("--examples=300",)):
        values = flags_in(folder, "--rows=SGD", "--seeds=1", *more)
        try:
            command.run(values)
        except RefusedError as refusal:
            assert "different --examples" in str(refusal)
    assert [(job.examples, job.lira_models) for job in at_once] == [
        *((None, None), (300, None), (None, 4)),
    ]
    # Nor do they share a folder with a training for the tables of accuracy.
    job = at_once[0]
    training = grid.Job(job.dataset, job.row, job.target_epsilon, job.settings)
    assert len({*(job.key for job in at_once), training.key}) == 4


def test_the_attacks_of_the_papers_alone(folder, at_once):
    """A later call makes the others, too, and a call that asks for less makes nothing again."""
    few, all_of_them = (
        [*("--rows=SGD", "--epsilons=1"), flag] for flag in ("--nomore_attacks", "--more_attacks")
    )
    assert command.run(flags_in(folder, *few)) == []
    assert at_once[0].attacks == set(ATTACKS)
    assert "## Layers" not in report_in(folder) and "white box" in report_in(folder)
    assert command.run(flags_in(folder, *all_of_them)) == []
    assert at_once[1].attacks == {*ATTACKS, LAYERS, INVERSION}
    assert "## Layers" in report_in(folder)
    assert command.run(flags_in(folder, *few)) == [] and len(at_once) == 2


@pytest.mark.slow
def test_attacks_that_are_not_asked_for_are_not_made(folder, here, weak, monkeypatch):
    for name in ("_by_layer", "_inverted"):
        monkeypatch.setattr(runs, name, None)
    arguments = [f"--examples={TINY_EXAMPLES}", "--rows=SGD", "--nomore_attacks"]
    assert command.run(flags_in(folder, *arguments)) == []
    (found,) = records.read(folder / "results" / "attacks.jsonl")
    assert set(found["attacks"]) == set(ATTACKS)
    assert not {"auc_by_layer", "inversions"} & set(found)


def test_a_run_that_lacks_attacks_is_made_again_and_replaced(folder, at_once):
    """The record of an earlier version, with the attacks of the papers' tables alone."""
    values = flags_in(folder, "--epsilons=1")
    assert command.run(values) == []
    record = folder / "results" / "attacks.jsonl"
    complete = records.read(record)
    old = json.loads(json.dumps(complete))
    for each in old:
        for name in (LAYERS, INVERSION):
            del each["attacks"][name]
        each["accuracy"] = 0.123
    record.write_text("".join(f"{json.dumps(each)}\n" for each in old))
    assert command.run(flags_in(folder, "--render_only")) == []
    assert "0.900 / 0.123" in report_in(folder) and "## Layers" not in report_in(folder)

    at_once.clear()
    assert command.run(values) == []
    assert [job.row for job in at_once] == ["SGD", "DPSGD"]
    assert records.read(record) == [*old, *complete]
    assert "0.123" not in report_in(folder) and "## Layers" in report_in(folder)
    assert command.run(values) == [] and len(at_once) == 2
    # Mutant: two runs with the same attacks and different results are not taken for one.
    record.write_text(
        "".join(f"{json.dumps(each)}\n" for each in (old[0], old[0] | {"accuracy": 0.5}))
    )
    with pytest.raises(RefusedError, match="there twice"):
        command.run(flags_in(folder, "--render_only"))


def test_texts_are_not_inverted():
    job = grid.Grid().job("imdb_reviews", "Adam", None, 0, {})
    attacks = runs.Job("imdb_reviews", "Adam", None, job.settings).attacks
    assert attacks == {*ATTACKS, LAYERS}


def test_runs_that_do_not_count_are_refused(folder, at_once):
    command.run(flags_in(folder, "--epsilons=1"))
    record = folder / "results" / "attacks.jsonl"
    found = records.read(record)
    for change, complaint in (
        ({"epsilon": 1.5}, "spent ε = 1.5"),
        ({"evaluated_on": "validation"}, "evaluated on 'validation'"),
        ({"examples": 300}, "different --examples"),
    ):
        record.write_text(f"{json.dumps(found[0])}\n{json.dumps({**found[1], **change})}\n")
        with pytest.raises(RefusedError, match=rf"cannot be rendered(?s:.*){complaint}"):
            command.run(flags_in(folder, "--render_only"))


def test_what_is_not_tuned_is_said_and_the_rest_is_run(folder, at_once):
    (folder / "searches.jsonl").unlink()
    failures = command.run(flags_in(folder))
    assert [failure.partition(":")[0] for failure in failures] == [
        f"DPSGD on digits has not been tuned near epsilon {epsilon}" for epsilon in (1, 2)
    ]
    assert [job.row for job in at_once] == ["SGD"]


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--table=big", r"--table must be one of tiny\. Received: --table=big\."),
        ("--rows=DPSDG", r"--rows must be some of DPSGD, DPSignSGD, SGD\. Received: DPSDG\."),
        ("--rows=DPSignSGD", "have no such rows"),
        ("--datasets=mnist", "have no such rows"),
        ("--epsilons=0", "--epsilons must be positive numbers"),
        ("--attack_tables=none.toml", r"none\.toml cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(folder, at_once, argument, complaint):
    with pytest.raises(RefusedError, match=complaint):
        command.run(flags_in(folder, argument))
    assert at_once == []


@pytest.mark.parametrize("argument", ["--lira_models=5", "--lira_models=2", "--examples=0"])
def test_bad_flag_is_refused_with_a_sentence(folder, argument):
    with pytest.raises(command.flags.Error, match=argument.partition("=")[0]):
        flags_in(folder, argument)


def test_a_number_of_examples_that_does_not_fit_is_told(folder, here):
    (failure,) = command.run(flags_in(folder, "--rows=SGD", "--examples=5000"))
    assert "--examples must be in [12, 1797]" in failure


def test_an_argument_that_is_no_flag_is_refused():
    with pytest.raises(SystemExit, match=r"attacks: .*Received: dpsur_3"):
        command.main(["attacks", "dpsur_3"])


@pytest.mark.slow
def test_the_module_runs_from_the_command_line(folder):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-m", "experiments.attacks", "--table=none"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert process.returncode not in (0, None)
    assert "attacks: --table must be one of" in process.stderr
    assert "Traceback" not in process.stderr


# What is declared.


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('dataset = "digits"\n', "", r"tables\.tiny must have dataset"),
        ("[0.501, 0.502]", "[0.501]", r"tables\.tiny: DPSGD must have 2 numbers"),
        ("[0.501, 0.502]", "[0.501, -1]", "must be positive numbers"),
        (
            "DPSGD = [0.503",
            "DPSDG = [0.503",
            r"tables\.tiny: \[rows\.DPSDG\] must have non_private",
        ),
        ("DPSGD = [0.503", "SGD = [0.503", r"tables\.tiny: \[rows\.SGD\] must have non_private"),
        ("published.white_box", "published.gray_box", r"white_box\. Received: gray_box"),
        ('rows = ["SGD"]', 'rows = ["DPSGD"]', "1 must have rows without privacy.*: DPSGD"),
        ('rows = ["SGD"]', 'rows = ["SDG"]', r"1: \[rows\] must have SDG"),
        ("fixed = {", "epsilons = [1.0]\nfixed = {", "1 must have no grid and no epsilons"),
        ("learning_rate = 0.1", "learning_rat = 0.1", "learning_rat"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(folder, old, new, complaint):
    path = folder / "attacks.toml"
    path.write_text(DECLARED.replace(old, new))
    with pytest.raises(RefusedError, match=complaint):
        Tables(path, grid.Grid(folder / "tables.toml"))


@pytest.fixture(scope="module")
def committed():
    return Tables(FILE, grid.Grid())


def test_the_committed_tables_can_be_run(committed):
    """Each row has a control, and a search for each epsilon."""
    values = command.flags.FlagValues()
    command.define_flags(values)
    values(["attacks"])
    declared = grid.Grid()
    searched = [line(trial, 0.5) for trial in declared.trials((), (), ())]
    todo, missing = command.planned(declared, committed.tables, committed, values, searched)
    assert missing == []
    cells = {
        (table.dataset, row, epsilon)
        for table in committed.tables.values()
        for row in table.rows
        for epsilon in table.epsilons
    }
    private = [job for job in todo if job.target_epsilon is not None]
    assert {(job.dataset, job.row, job.target_epsilon) for job in private} == cells
    assert all(job.settings.private == (job.target_epsilon is not None) for job in todo)
    controls = {(job.dataset, job.row) for job in todo if job.target_epsilon is None}
    assert controls == {
        *itertools.product(("mnist", "fashion_mnist"), ("SGD", "SGD-TS")),
        *itertools.product(("fashion_mnist", "cifar10"), ("SGD-HF",)),
        *(("cifar10", "SGD"), ("imdb_reviews", "Adam"), ("imdb_reviews", "Adam-TS")),
    }


def test_the_committed_report_is_what_the_committed_runs_say(committed, tmp_path):
    folder = ROOT / "docs" / "results"
    lines = records.read(folder / "attacks.jsonl")
    command.render(grid.Grid(), committed.tables, lines, tmp_path)
    text = (tmp_path / "attacks.md").read_text()
    assert (folder / "attacks.md").read_text() == text
    # The page has the summary, and no other numbers than the report.
    page = (ROOT / "docs" / "auditing.md").read_text()
    rows = [
        row
        for row in page.splitlines()
        if row.startswith(tuple(f"| {name} | " for name in TITLES.values()))
    ]
    assert rows and set(rows) <= set(text.splitlines())
    assert set(rows_in(text.partition("### ")[0])) <= set(rows)


# Copied from the papers by hand, once more: black box, then white box, row by row.
HALF = "0.500 0.500 0.500 " * 4
PRINTED = {
    "bottlenecked_6": "0.502 0.501 0.499 0.495 0.500 0.498 0.500 0.502 0.506 0.495 0.495 0.498 "
    + HALF,
    "bottlenecked_7": "0.500 0.500 0.497 0.500 0.498 0.494 0.502 0.502 0.499 0.500 0.498 0.494 "
    + HALF,
    "bottlenecked_8": "0.499 0.499 0.500 0.500 0.498 0.494 0.502 0.502 0.499 0.500 0.498 0.494 "
    + HALF,
    "dpsur_3": "0.498 0.500 0.503 0.506 0.498 0.503 0.493 0.494 "
    "0.499 0.504 0.501 0.502 0.501 0.502 0.502 0.505",
    "dpsur_4": "0.495 0.498 0.503 0.504 0.504 0.505 0.504 0.505 "
    "0.499 0.501 0.502 0.503 0.500 0.501 0.501 0.503",
}


def test_published_numbers_are_those_of_the_papers(committed):
    assert set(committed.tables) == set(PRINTED)
    for name, text in PRINTED.items():
        table = committed.tables[name]
        assert list(table.accuracy) == list(ATTACKS)
        numbers = [
            number for rows in table.accuracy.values() for row in rows.values() for number in row
        ]
        assert numbers == [float(number) for number in text.split()]
    controls = {name: table.non_private for name, table in committed.tables.items()}
    none = {"black_box": None, "white_box": None}
    assert controls == {
        **dict.fromkeys(("bottlenecked_6", "bottlenecked_7", "bottlenecked_8"), none),
        "dpsur_3": {"black_box": 0.582, "white_box": 0.584},
        "dpsur_4": {"black_box": 0.732, "white_box": 0.743},
    }
