"""From a search to tables beside the published numbers."""

import collections
import dataclasses
import json

import matplotlib.image
import pytest
from absl import flags

from experiments import jobs, records, reproduce, tune
from experiments.settings import RefusedError
from tests.experiments.jobs_support import TABLES, WorkersHere, parse

# Without a choice to make: for tests that train.
ONE_TRIAL = TABLES.replace("[0.002, 0.2]", "[0.01]")


@pytest.fixture
def here(monkeypatch):
    """Runs jobs in this process; returns those that were begun."""
    workers = WorkersHere(1)
    monkeypatch.setattr(jobs, "_Workers", lambda *_: workers)
    return workers.ran


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tables.toml").write_text(TABLES)
    return tmp_path


@pytest.fixture
def at_once(here, monkeypatch):
    """In the place of runs: lines without any training. The larger the rate, the better."""

    def line(job, places):
        settings, epsilon = job.settings, job.target_epsilon
        accuracy = 0.5 + settings.learning_rate + settings.seed / 100
        return {
            **{"dataset": job.dataset, "row": job.row, "target_epsilon": epsilon},
            **{"seed": settings.seed, "settings": dataclasses.asdict(settings)},
            **{"accuracy": accuracy, "accuracy_by_class": {"0": accuracy, "1": 0.5}},
            **{"evaluated_on": settings.eval_split, "delta": 1e-5, "epsilon": epsilon},
            "epsilon_by_accountant": {} if epsilon is None else {"PLD": epsilon},
        }

    monkeypatch.setattr(jobs, "_run", line)
    return here


def is_picture(path):
    image = matplotlib.image.imread(path)
    return image.ndim == 3 and image.std() > 0.01


@pytest.mark.slow
def test_from_search_to_tables(tmp_path, here, capsys):
    """The whole way, with training."""
    (tmp_path / "tables.toml").write_text(ONE_TRIAL)
    (refusal,) = [
        text
        for text in reproduce.run(parse(reproduce, tmp_path, "--rows=DPSGD"))
        if "experiments.tune" in text
    ]
    assert "--datasets=digits --rows=DPSGD --epsilons=1" in refusal
    assert here == [] and not (tmp_path / "results").exists()

    assert tune.run(parse(tune, tmp_path, "--rows=DPSGD,DPSignSGD")) == []
    trials = records.read(tmp_path / "searches.jsonl")
    assert [line["evaluated_on"] for line in trials] == ["validation"] * 2
    assert "| validation % | runs | epochs | expected_batch_size | learning_rate |" in (
        capsys.readouterr().out
    )

    arguments = ["--rows=DPSGD,DPSignSGD", "--seeds=2", "--table=tiny"]
    assert reproduce.run(parse(reproduce, tmp_path, *arguments)) == []
    runs = records.read(tmp_path / "results" / "runs.jsonl")
    assert [(line["row"], line["seed"]) for line in runs] == [
        *(("DPSGD", 0), ("DPSignSGD", 0), ("DPSGD", 1), ("DPSignSGD", 1)),
    ]
    for line in runs:
        assert line["evaluated_on"] == "test" and line["epsilon"] <= line["target_epsilon"] == 1.0
        assert line["settings"]["learning_rate"] == 0.01
    report = (tmp_path / "results" / "tables.md").read_text()
    mean = 50 * sum(line["accuracy"] for line in runs if line["row"] == "DPSGD")
    assert f"| DPSGD | {mean:.2f} ± " in report and "(50.0)" in report
    assert "DPAGD: is elsewhere." in report and "| DPSignSGD - DPSGD | digits | 1 |" in report
    pictures = sorted(path.name for path in (tmp_path / "results").glob("*.png"))
    assert pictures == ["classes_digits.png", "tiny.png"]
    assert all(is_picture(tmp_path / "results" / name) for name in pictures)

    before = len(here)
    assert reproduce.run(parse(reproduce, tmp_path, *arguments)) == []
    assert tune.run(parse(tune, tmp_path, "--rows=DPSGD,DPSignSGD")) == []
    assert len(here) == before


def ranking(text):
    """The rows of the printed tables, by their titles."""
    parts = text.strip().split("\n\n")
    return {
        title: [
            tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in table.splitlines()[2:]
        ]
        for title, table in zip(parts[::2], parts[1::2], strict=True)
    }


def test_tune_prints_a_ranking_of_means(folder, at_once, capsys):
    assert tune.run(parse(tune, folder, "--seeds=2")) == []
    assert ranking(capsys.readouterr().out) == {
        "digits, DPSGD, epsilon 1": [
            ("70.50", "2", "1", "719", "0.2"),
            ("50.70", "2", "1", "719", "0.002"),
        ],
        "digits, DPSignSGD, epsilon 1": [
            ("70.50", "2", "1", "719", "0.2"),
            ("50.70", "2", "1", "719", "0.002"),
        ],
        "digits, SGD": [("60.50", "2", "1", "719")],
    }


def test_a_search_resumes_where_it_stopped(folder, at_once, capsys):
    failures = tune.run(parse(tune, folder, "--budget_minutes=0"))
    assert len(failures) == 5 and at_once == []
    assert ranking(capsys.readouterr().out) == {
        "digits, DPSGD, epsilon 1": [],
        "digits, DPSignSGD, epsilon 1": [],
        "digits, SGD": [],
    }
    assert tune.run(parse(tune, folder, "--epsilons=1")) == []
    assert [job.row for job in at_once] == ["DPSGD"] * 2 + ["DPSignSGD"] * 2
    assert tune.run(parse(tune, folder)) == []
    assert [job.row for job in at_once[4:]] == ["SGD"]


def test_all_cells_get_a_first_run_before_any_gets_a_second(folder, at_once):
    tune.run(parse(tune, folder))
    at_once.clear()
    assert reproduce.run(parse(reproduce, folder, "--seeds=3", "--epsilons=1,2")) == []
    seeds = [job.settings.seed for job in at_once]
    assert seeds == sorted(seeds) and collections.Counter(seeds) == {0: 5, 1: 5, 2: 5}
    cells = collections.Counter((job.row, job.target_epsilon) for job in at_once)
    expected = [(row, epsilon) for row in ("DPSGD", "DPSignSGD") for epsilon in (1.0, 2.0)]
    assert cells == dict.fromkeys([*expected, ("SGD", None)], 3)
    assert all(job.settings.eval_split == "test" for job in at_once)
    assert {job.settings.learning_rate for job in at_once if job.settings.private} == {0.2}


def test_what_is_not_tuned_is_said_and_the_rest_is_run(folder, at_once):
    tune.run(parse(tune, folder, "--rows=DPSGD"))
    at_once.clear()
    failures = reproduce.run(parse(reproduce, folder, "--seeds=1"))
    assert [job.row for job in at_once] == ["DPSGD"]
    assert [failure.split(" has not been tuned")[0] for failure in failures] == [
        "SGD on digits",
        "DPSignSGD on digits",
    ]


def test_a_failure_does_not_keep_the_rest_from_the_report(folder, at_once, monkeypatch):
    tune.run(parse(tune, folder))
    run = jobs._run

    def fail(job, places):
        if job.row == "DPSGD":
            raise RefusedError("no")
        return run(job, places)

    monkeypatch.setattr(jobs, "_run", fail)
    (failure,) = reproduce.run(parse(reproduce, folder, "--seeds=1"))
    assert failure.endswith("RefusedError: no")
    report = (folder / "results" / "tables.md").read_text()
    assert "| DPSGD | – (50.0) |" in report and "| DPSignSGD | 70.00 ¹ |" in report


def test_rendering_alone_runs_nothing(folder, at_once):
    tune.run(parse(tune, folder))
    reproduce.run(parse(reproduce, folder, "--seeds=1"))
    at_once.clear()
    files = sorted((folder / "results").iterdir())
    before = (folder / "results" / "tables.md").read_text()
    for path in files:
        if path.name != "runs.jsonl":
            path.unlink()
    assert reproduce.run(parse(reproduce, folder, "--render_only", "--seeds=5")) == []
    assert at_once == [] and sorted((folder / "results").iterdir()) == files
    assert (folder / "results" / "tables.md").read_text() == before


def test_runs_that_do_not_count_are_refused(folder, at_once):
    tune.run(parse(tune, folder))
    reproduce.run(parse(reproduce, folder, "--seeds=1"))
    record = folder / "results" / "runs.jsonl"
    line = records.read(record)[0]
    for other, complaint in (
        ({"evaluated_on": "validation", "seed": 7}, "evaluated on 'validation'"),
        ({"accuracy": 0.9}, "there twice, with different accuracy"),
        ({"epsilon": 1.5, "seed": 7}, "spent ε = 1.5"),
    ):
        lines = [*records.read(record), {**line, **other}]
        spoiled = folder / "spoiled"
        spoiled.mkdir(exist_ok=True)
        (spoiled / "runs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        with pytest.raises(
            RefusedError, match=rf"runs\.jsonl cannot be rendered(?s:.*){complaint}"
        ):
            reproduce.run(parse(reproduce, folder, "--render_only", f"--output_dir={spoiled}"))


@pytest.mark.parametrize(
    ("module", "argument", "complaint"),
    [
        (tune, "--rows=DPSGD,DPSDG", r"--rows must be some of DPSGD, DPSignSGD, SGD\. .* DPSDG\."),
        (tune, "--datasets=mnist", r"--datasets must be some of digits\. Received: mnist\."),
        (tune, "--epsilons=1,many", r"--epsilons must be positive numbers\. .*=1,many\."),
        (tune, "--epsilons=3", r"tables\.toml must declare what is asked for\. .*--epsilons=3"),
        (tune, "--tables=none.toml", r"none\.toml cannot be read"),
        (reproduce, "--table=big", r"--table must be one of tiny\. Received: --table=big\."),
        (reproduce, "--rows=DPAGD", r"--rows must be some of DPSGD, DPSignSGD, SGD\. .*: DPAGD\."),
        (reproduce, "--datasets=mnist", r"--datasets must be some of digits\."),
        (reproduce, "--epsilons=0", r"--epsilons must be positive numbers\. Received: .*=0\."),
        (reproduce, "--epsilons=-1", "--epsilons must be positive numbers"),
        (reproduce, "--epsilons=nan", "--epsilons must be positive numbers"),
        (reproduce, "--epsilons=inf", "--epsilons must be positive numbers"),
    ],
)
def test_what_cannot_be_done_is_refused(folder, at_once, module, argument, complaint):
    with pytest.raises(RefusedError, match=complaint):
        module.run(parse(module, folder, argument))
    assert at_once == []


@pytest.mark.parametrize("module", [tune, reproduce])
def test_bad_flag_is_refused_with_a_sentence(folder, module):
    for argument, complaint in (
        ("--processes=0", "--processes"),
        ("--seeds=0", "--seeds"),
        ("--budget_minutes=-1", "--budget_minutes"),
        ("--epsilon=1", "Unknown command line flag 'epsilon'"),
    ):
        with pytest.raises(flags.Error, match=complaint):
            parse(module, folder, argument)


@pytest.mark.parametrize("module", [tune, reproduce])
def test_the_program_ends_with_a_sentence(folder, module, monkeypatch):
    name = module.__name__.rpartition(".")[2]
    with pytest.raises(SystemExit, match=f"{name}: .*Received: digits"):
        module.main([name, "digits"])
    monkeypatch.setattr(module.flags, "FLAGS", parse(module, folder, "--rows=none"))
    with pytest.raises(SystemExit, match=f"{name}: --rows must be some of"):
        module.main([name])
