"""What is declared in a file of tables: rows, searches, runs."""

import dataclasses
import itertools

import pytest

from experiments.settings import RefusedError
from experiments.tables import grid
from tests.experiments.jobs_support import TABLES, line

SEARCHED = """
[rows.DPSGD]
method = "dpsgd"
activation = "relu"
non_private = "SGD"

[rows.SGD]
method = "sgd"

[tables.one]
title = "A table"
epsilons = [0.5, 2.0, 8.0]

[tables.one.published.digits]
DPSGD = [1.0, "-", 2]

[[search]]
rows = ["DPSGD"]
datasets = ["digits", "mnist"]
epsilons = [1.0, 8.0]
fixed = { epochs = 3, momentum = 0.5 }
grid = { learning_rate = [0.1, 0.2, 1], expected_batch_size = [64, 128] }

[[search]]
rows = ["SGD"]
datasets = ["digits"]
"""

SEARCHED_AS = 'searched_as = "DPSGD"\n\n[tables.one]'


def declare(folder, text):
    (folder / "tables.toml").write_text(text)
    return grid.Grid(folder / "tables.toml")


@pytest.fixture
def declared(tmp_path):
    return declare(tmp_path, SEARCHED)


# Trials.


def test_every_combination_is_tried(declared):
    trials = declared.trials([], [], [])
    assert len(trials) == 2 * 2 * 3 * 2 + 1
    mine = [job for job in trials if (job.dataset, job.target_epsilon) == ("digits", 8.0)]
    tried = {(job.settings.learning_rate, job.settings.expected_batch_size) for job in mine}
    assert tried == set(itertools.product((0.1, 0.2, 1.0), (64, 128)))
    assert len({job.key for job in trials}) == len(trials)
    for job in mine:
        assert (job.settings.epochs, job.settings.momentum) == (3, 0.5)
        assert (job.settings.method, job.settings.activation) == ("dpsgd", "relu")
        assert (job.settings.dataset, job.settings.target_epsilon) == ("digits", 8.0)
        assert job.settings.seed == 0


def test_trials_of_what_is_asked_for(declared):
    assert {job.dataset for job in declared.trials(["mnist"], [], [])} == {"mnist"}
    assert {job.row for job in declared.trials([], ["SGD"], [])} == {"SGD"}
    assert {job.target_epsilon for job in declared.trials([], [], [8.0])} == {8.0}
    assert declared.trials(["mnist"], ["SGD"], []) == []
    seeds = [job.settings.seed for job in declared.trials(["mnist"], [], [8.0], seeds=2)]
    assert sorted(seeds) == [0] * 6 + [1] * 6


@pytest.mark.parametrize(("given", "known"), [("cifar", "digits, mnist"), ("DP-SGD", "DPSGD, SGD")])
def test_what_is_not_declared_cannot_be_asked_for(declared, given, known):
    declared.check_asked(["mnist"], ["SGD"])
    asked = ([given], []) if given == "cifar" else ([], ["SGD", given])
    with pytest.raises(RefusedError, match=rf"must be some of {known}\. Received: {given}\."):
        declared.check_asked(*asked)


def found_by(declared, accuracy):
    """A record of all trials with two seeds, of accuracies `accuracy(settings)`."""
    trials = declared.trials([], [], [], seeds=2)
    return [line(job, accuracy(job.settings)) for job in trials]


def touch_the_test_set(jobs):
    return [job.key for job in jobs if job.settings.eval_split != "validation"]


def test_searches_do_not_touch_the_test_set_and_cells_are_measured_on_it(declared):
    trials = declared.trials([], [], [])
    assert touch_the_test_set(trials) == []
    assert {job.settings.validation_examples for job in trials} == {287, 10_000}
    jobs = declared.cell("digits", "DPSGD", 2.0, 2, found_by(declared, lambda s: 0.5))
    assert len(touch_the_test_set(jobs)) == len(jobs) == 2
    assert all(job.settings.validation_examples is None for job in jobs)


# What a search has found.


def test_the_best_is_the_highest_mean_over_seeds(declared):
    def accuracy(settings):
        if (settings.learning_rate, settings.expected_batch_size) == (0.2, 128):
            return (0.7, 0.8)[settings.seed]
        return (0.1, 0.9)[settings.seed]  # The highest run is not of the highest mean.

    searched = found_by(declared, accuracy)
    for record in (searched, searched[::-1]):
        best = declared.best("digits", "DPSGD", 1.0, record)
        assert best == {
            **{"epochs": 3, "momentum": 0.5},
            **{"learning_rate": 0.2, "expected_batch_size": 128},
        }
    accuracies, _ = declared.ranking("digits", "DPSGD", 1.0, searched)[0]
    assert sorted(accuracies) == [0.7, 0.8]


def test_a_run_that_is_there_twice_counts_once(declared):
    searched = found_by(declared, lambda s: (0.2, 0.8)[s.seed])
    accuracies, _ = declared.ranking("digits", "DPSGD", 1.0, [*searched, *searched])[0]
    assert sorted(accuracies) == [0.2, 0.8]


@pytest.mark.parametrize(
    ("epsilon", "nearest"), [(0.01, 1.0), (1.0, 1.0), (2.8, 1.0), (2.9, 8.0), (4.4, 8.0), (50, 8.0)]
)
def test_a_cell_takes_the_outcome_of_the_nearest_epsilon(declared, epsilon, nearest):
    """By the logarithm: 2.9 is nearer to 8 than to 1, 2.8 is not."""
    best_rate = {1.0: 0.1, 8.0: 1.0}
    searched = found_by(declared, lambda s: s.learning_rate == best_rate.get(s.target_epsilon))
    jobs = declared.cell("digits", "DPSGD", epsilon, 1, searched)
    assert [job.settings.learning_rate for job in jobs] == [best_rate[nearest]]
    assert jobs[0].settings.target_epsilon == jobs[0].target_epsilon == epsilon


def test_runs_of_a_cell_differ_in_their_seed_alone(declared):
    searched = found_by(declared, lambda s: 0.5)
    jobs = declared.cell("digits", "DPSGD", 2.0, 3, searched)
    assert [job.settings.seed for job in jobs] == [0, 1, 2]
    assert len({dataclasses.replace(job.settings, seed=0) for job in jobs}) == 1
    assert len({job.key for job in jobs}) == 3
    without = declared.cell("digits", "SGD", None, 2, searched)
    assert [job.target_epsilon for job in without] == [None, None]


def test_a_search_with_a_hole_is_refused_with_the_command_that_fills_it(declared):
    searched = found_by(declared, lambda s: 0.5)
    hole = [
        x
        for x in searched
        if (x["dataset"], x["target_epsilon"], x["settings"]["learning_rate"])
        != ("digits", 8.0, 0.2)
    ]
    assert len(hole) < len(searched)
    with pytest.raises(RefusedError) as refusal:
        declared.cell("digits", "DPSGD", 5.0, 1, hole)
    assert "DPSGD on digits has not been tuned near epsilon 5:" in str(refusal.value)
    assert str(refusal.value).endswith(
        "python -m experiments.tune --datasets=digits --rows=DPSGD --epsilons=8"
    )
    declared.cell("digits", "DPSGD", 1.0, 1, hole)
    with pytest.raises(RefusedError, match=r"SGD on digits has not been tuned: .*--rows=SGD$"):
        declared.cell("digits", "SGD", None, 1, [])


def test_of_two_epsilons_as_near_the_smaller_is_taken(tmp_path):
    for epsilons in ("[1.0, 4.0]", "[4.0, 1.0]"):
        declared = declare(tmp_path, SEARCHED.replace("[1.0, 8.0]", epsilons))
        searched = found_by(
            declared, lambda s: s.learning_rate == (0.2 if s.target_epsilon == 1 else 0.1)
        )
        assert declared.best("digits", "DPSGD", 2.0, searched)["learning_rate"] == 0.2


def test_a_row_can_take_the_search_of_another(tmp_path):
    text = SEARCHED.replace("[tables.one]", '[rows.DPIS]\nmethod = "dpis"\n' + SEARCHED_AS)
    declared = declare(tmp_path, text)
    assert not declared.trials([], ["DPIS"], [])
    searched = found_by(declared, lambda s: s.learning_rate == 0.2)
    (job,) = declared.cell("digits", "DPIS", 2.0, 1, searched)
    assert (job.row, job.settings.method, job.settings.learning_rate) == ("DPIS", "dpis", 0.2)
    with pytest.raises(RefusedError, match=r"experiments\.tune .*--rows=DPSGD"):
        declared.cell("digits", "DPIS", 2.0, 1, [])


@pytest.mark.parametrize(
    "other",
    [
        {"epochs": 4},
        {"eval_split": "test", "validation_examples": None},
        {"target_epsilon": 1.5},
        {"activation": "tanh"},
        {"a_flag_of_old": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_trials_of_other_settings_are_ignored(declared, other):
    trials = declared.trials(["digits"], ["DPSGD"], [1.0])
    mine = [line(job, job.settings.learning_rate == 0.1) for job in trials]
    others = [line(job, 1.0 + job.settings.learning_rate, **other) for job in trials]
    best = declared.best("digits", "DPSGD", 1.0, [*mine, *others])
    assert best["learning_rate"] == 0.1
    with pytest.raises(RefusedError, match="has not been tuned"):
        declared.best("digits", "DPSGD", 1.0, others)


@pytest.mark.parametrize(("dataset", "row"), [("mnist", "DPSGD"), ("digits", "SGD")])
def test_trials_of_others_are_ignored(declared, dataset, row):
    trials = declared.trials(["digits"], ["DPSGD"], [1.0])
    others = [line(dataclasses.replace(job, dataset=dataset, row=row), 0.5) for job in trials]
    with pytest.raises(RefusedError, match="has not been tuned"):
        declared.best("digits", "DPSGD", 1.0, others)


# Keys and lines.


def test_keys_differ_where_settings_do(declared):
    job = declared.job("digits", "DPSGD", 1.0, 0, {})
    assert job.key == declared.job("digits", "DPSGD", 1.0, 0, {}).key
    changed = {field.name: "other" for field in dataclasses.fields(job.settings)}
    keys = {job.key}
    for name, value in changed.items():
        settings = dataclasses.replace(job.settings, **{name: value})
        keys.add(dataclasses.replace(job, settings=settings).key)
    assert len(keys) == 1 + len(changed)
    assert dataclasses.replace(job, row="DPSGD-TS").key != job.key
    assert job.key.startswith("digits_DPSGD_eps1_seed0_")


def test_keys_do_not_depend_on_how_a_number_is_written(declared):
    """And a search that was made with 1 counts when the file says 1.0."""
    first, second = (
        declared.job("digits", "DPSGD", e, 0, {"learning_rate": rate, "momentum": 0})
        for e, rate in ((1, 2), (1.0, 2.0))
    )
    assert first.key == second.key and second.matches(line(first, 0.5))


def test_a_line_is_of_the_job_that_left_it_and_of_no_other(declared):
    job, *others = declared.trials(["digits"], [], [], seeds=2)
    assert job.matches(line(job, 0.5))
    assert not any(other.matches(line(job, 0.5)) for other in others)
    assert not dataclasses.replace(job, row="SGD").matches(line(job, 0.5))


def test_a_line_from_before_a_flag_came_is_still_of_its_job(declared):
    job = declared.job("digits", "DPSGD", 1.0, 0, {})
    older = line(job, 0.5)
    assert older["settings"].pop("max_attempts") is None and job.matches(older)
    older["settings"].pop("momentum")
    assert not job.matches(older)


# The file.


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("momentum = 0.5", "learning_rat = 0.5", r"fixed of \[\[search\]\] 1 .*: learning_rat\."),
        ("{ learning_rate", "{ learning_rat", r"grid of \[\[search\]\] 1 .*: learning_rat\."),
        ('activation = "relu"', 'activatoin = "relu"', r"\[rows\.DPSGD\] .*: activatoin\."),
        ('activation = "relu"', "data_dir = 1", r"\[rows\.DPSGD\] .*: data_dir\."),
        ("momentum = 0.5", "seed = 3", r"fixed of \[\[search\]\] 1 must leave seed out"),
        ("momentum = 0.5", 'eval_split = "test"', r"\] 1 must leave eval_split out"),
        ("{ learning_rate", "{ target_epsilon", r"\] 1 must leave target_epsilon out"),
        ("momentum = 0.5", "learning_rate = 1.0", r"grid .* must leave learning_rate out: .*given"),
        ("momentum = 0.5", 'activation = "tanh"', r"fixed .* must leave activation out: .*given"),
        ("momentum = 0.5", "momentum = 1.5", r"\] 1, DPSGD on digits at epsilon 1: .*--momentum"),
        ("epochs = 3", "epochs = 2.5", r"\] 1, DPSGD on digits at epsilon 1: .*--epochs=2\.5"),
        ("momentum = 0.5", "threshold = 1", r"\] 1, DPSGD on digits .*: --threshold must come"),
        ('"dpsgd"', '"dpsdg"', r"\] 1, DPSGD on digits at epsilon 1: .*--method=dpsdg"),
        ('"digits", "mnist"', '"digits", "minst"', r"\] 1, DPSGD on minst .*--dataset=minst"),
        ("[1.0, 8.0]", "[1.0, -8.0]", r"\] 1, DPSGD on digits at epsilon -8: .*--target_epsilon"),
        ("epsilons = [1.0, 8.0]", "", r"\] 1 must have epsilons, because of DPSGD"),
        ('["SGD"]', '["SGD"]\nepsilons = [1]', r"\] 2 must have no epsilons, because of SGD"),
        ('["SGD"]', '["DPSUR"]', r"\[\[search\]\] 2: \[rows\] must have DPSUR"),
        ('rows = ["SGD"]', "", r"\[\[search\]\] 2 must have rows"),
        ('["DPSGD"]\ndatasets', '["DPSGD"]\ndata', r"\[\[search\]\] 1 must have datasets"),
        ("[64, 128]", "64", r"grid of \[\[search\]\] 1 .* values for expected_batch_size\. .* 64"),
        ("[64, 128]", "[]", r"grid of \[\[search\]\] 1 must have a list of values"),
        (
            '["SGD"]',
            '["DPSGD"]\nepsilons = [4, 8]',
            r"\] 1 and \[\[search\]\] 2 must not both have DPSGD on digits at epsilon 8\.",
        ),
        ('["digits", "mnist"]', '["mnist"]', r"tables\.one: .* must have DPSGD on digits, with an"),
        ('["SGD"]\ndatasets = ["digits"]', '["SGD"]\ndatasets = ["mnist"]', "must have SGD on dig"),
        ('non_private = "SGD"', 'non_private = "Adam"', r"\[rows\.DPSGD\]: .*must have Adam"),
        (
            'method = "dpsgd"',
            'method = "dpsgd"\nsearched_as = "DPIS"',
            r"\[rows\.DPSGD\]: .*must have DPIS",
        ),
        (
            "DPSGD = [1.0, ",
            "DPSGD = [",
            r"tables\.one: DPSGD on digits must have 3 numbers\. Received",
        ),
        ('[1.0, "-", 2]', '["1,0", "-", 2]', r"tables\.one: DPSGD on digits .*numbers.*1,0"),
        ('DPSGD = [1.0, "-", 2]', "DPSUR = [1, 2, 3]", r"tables\.one: .*notes\] must have DPSUR"),
        ("[0.5, 2.0, 8.0]", "[0.5, 2.0, 0]", r"tables\.one: epsilons must be positive numbers"),
        ('title = "A table"', "", r"tables\.one must have title"),
        ("[tables.one]", "[tables.one", r"tables\.toml must be TOML: "),
    ],
)
def test_contradictions_are_refused_with_their_place(tmp_path, old, new, complaint):
    declare(tmp_path, SEARCHED)
    assert SEARCHED.count(old) >= 1
    with pytest.raises(RefusedError, match=complaint):
        declare(tmp_path, SEARCHED.replace(old, new, 1))


def test_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"none\.toml cannot be read"):
        grid.Grid(tmp_path / "none.toml")


def test_tables_are_read_as_they_are_written(declared):
    (table,) = declared.tables.values()
    assert (table.name, table.title, table.epsilons) == ("one", "A table", (0.5, 2.0, 8.0))
    assert table.accuracy == {"digits": {"DPSGD": (1.0, None, 2.0)}}
    assert table.non_private == {"digits": None}
    assert declared.counterparts == {"DPSGD": "SGD"}


def test_the_tables_of_the_tests_are_sound(tmp_path):
    assert len(declare(tmp_path, TABLES).trials([], [], [])) == 5
