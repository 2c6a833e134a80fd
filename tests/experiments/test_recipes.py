"""Recipes: pages agree with the record, and command lines with what is declared."""

import shlex
from pathlib import Path

import pytest
from absl import flags

from experiments import classify, recipes, records
from experiments.settings import RefusedError
from experiments.tables import grid
from tests.experiments import jobs_support
from tests.experiments.classify_support import ROOT, parse

TOML = """
[[recipe]]
dataset = "digits"
epsilon = 2.0
published = 90.0
by = "DPSGD"
flags = { method = "dpsgd", epochs = 1, expected_batch_size = 719 }

[[trials]]
datasets = ["digits"]
epsilons = [2.0]
fixed = { method = "dpsgd", epochs = 1 }
grid = { expected_batch_size = [359, 719] }
seeds = 2
"""


def written(folder):
    path = folder / "recipes.toml"
    path.write_text(TOML)
    return path


def lines_of(jobs, accuracies, **more):
    own = {"epsilon": 1.99, "seconds": 60.0, **more}
    return [
        {**jobs_support.line(job, accuracy), **own}
        for job, accuracy in zip(jobs, accuracies, strict=True)
    ]


@pytest.fixture(scope="module")
def declared():
    return recipes.declared()


@pytest.fixture(scope="module")
def lines():
    return records.read(ROOT / recipes.RECORD)


def test_commands_ask_for_the_settings_of_the_runs(declared):
    found, _ = declared
    places = [(recipe.dataset, recipe.epsilon) for recipe in found]
    data = ("mnist", "fashion_mnist", "cifar10", "imdb_reviews")
    assert sorted(places) == sorted((name, e) for name in data for e in (1.0, 2.0, 4.0))
    for recipe in found:
        program, *arguments = shlex.split(recipe.command)[1:]
        assert [program, arguments[0]] == ["-m", "experiments.classify"]
        for seed, job in enumerate(recipe.jobs()):
            asked = classify.settings_from(parse(*arguments[1:], f"--seed={seed}"))
            assert asked == job.settings and asked.eval_split == "test"


def test_every_recipe_has_its_runs_and_every_trial_is_declared(declared, lines):
    found, trials = declared
    for recipe in found:
        assert recipes.outcome(recipe, lines) is not None, recipe
    known = [*trials, *(job for recipe in found for job in recipe.jobs())]
    assert all(any(job.matches(line) for job in known) for line in lines)
    assert {line["settings"]["eval_split"] for line in lines if line["row"] == recipes.TRIAL} == {
        "validation"
    }


def test_the_page_agrees_with_the_record(declared, lines):
    text, others = (ROOT / recipes.PAGE).read_text(), recipes.elsewhere()
    assert recipes.rendered(text, recipes.tables(declared[0], lines, others)) == text
    changed = [
        {**line, "accuracy": line["accuracy"] - 0.01} if line["row"] == recipes.RUN else line
        for line in lines
    ]
    assert recipes.rendered(text, recipes.tables(declared[0], changed, others)) != text


def best_published(tables, recipe):
    """The best number of the papers' tables; that of DPSUR has a larger epsilon than it says."""
    numbers = {
        row: table.number(recipe.dataset, row, recipe.epsilon)
        for table in tables
        for row in table.accuracy.get(recipe.dataset, {})
        if "DPSUR" not in row
    }
    return max((number, row) for row, number in numbers.items() if number is not None)


def test_published_numbers_are_the_best_of_the_papers(declared):
    tables = list(grid.Grid().tables.values())
    for recipe in declared[0]:
        assert (recipe.published, recipe.by) == best_published(tables, recipe), recipe


def test_the_picture_has_the_numbers_of_the_records(declared, lines):
    tables_lines = records.read(ROOT / recipes.TABLES_RECORD)
    panels = recipes.panels(declared[0], lines, tables_lines, recipes.elsewhere())
    photos, reviews = panels
    assert photos.title.endswith("CIFAR-10") and reviews.title.endswith("IMDB")
    assert photos.ours == pytest.approx({1.0: 68.85, 2.0: 72.33, 4.0: 74.44}, abs=0.01)
    assert photos.published == {1.0: 63.23, 2.0: 67.94, 4.0: 70.55}
    assert photos.pretrained == {1.0: 72.3} and reviews.pretrained == {}
    assert (photos.not_private, reviews.not_private) == pytest.approx((78.5, 82.0), abs=0.01)
    figure = recipes.figures.draw_overview(panels)
    assert [axis.get_title() for axis in figure.axes] == [photos.title, reviews.title]


def test_outcomes_of_a_recipe(tmp_path):
    (recipe,), trials = recipes.declared(written(tmp_path))
    jobs = recipe.jobs()
    assert [job.settings.seed for job in jobs] == [0, 1, 2]
    assert len(trials) == 4 and {job.settings.eval_split for job in trials} == {"validation"}
    lines = lines_of(jobs, [0.9, 0.91, 0.92]) + lines_of(trials, [0.99] * 4)
    found = recipes.outcome(recipe, lines)
    assert found.mean == pytest.approx(91) and found.minutes == 1
    assert (found.trials, found.trial_runs) == (2, 4)
    assert recipes.outcome(recipe, lines[1:]) is None  # Not of two runs.
    table = recipes.tables([recipe], lines)["recipes"].splitlines()[-1]
    assert table == "| digits | 2 | 91.00 ± 1.00 | 90.00 (DPSGD) | 1.0 | 2 (4 runs) |"
    untimed = lines_of(jobs, [0.9, 0.91, 0.92], seconds=None)  # As all of a selective method.
    table = recipes.tables([recipe], untimed)["recipes"].splitlines()[-1]
    assert table == "| digits | 2 | 91.00 ± 1.00 | 90.00 (DPSGD) | not timed | 0 (0 runs) |"
    with pytest.raises(RefusedError, match="spent more than epsilon 2"):
        recipes.outcome(recipe, lines_of(jobs, [0.9] * 3, epsilon=2.01))


def test_runs_of_the_tables_are_taken_if_their_settings_are_the_same(tmp_path):
    (recipe,), trials = recipes.declared(written(tmp_path))
    jobs = recipe.jobs()
    lines = [{**line, "row": "DPSGD"} for line in lines_of(jobs[:2], [0.9, 0.8])]
    lines += [{**line, "row": "DPSGD"} for line in lines_of(trials, [0.99] * 4)]
    found = recipes.adopted(jobs, lines)
    assert [line["accuracy"] for line in found] == [0.9, 0.8]
    assert all(job.matches(line) for job, line in zip(jobs, found, strict=False))


def run(folder, *arguments):
    values = flags.FlagValues()
    recipes.define_flags(values)
    places = [f"--{name}={folder / name}" for name in ("record", "runs_dir", "tables_record")]
    values(["recipes", f"--recipes={written(folder)}", *places, *arguments])
    return recipes.run(values)


def test_a_recipe_is_run_once_and_its_pages_are_written(tmp_path, monkeypatch):
    path = tmp_path / recipes.PAGE
    path.parent.mkdir()
    names = ("recipes", "commands", "elsewhere")
    path.write_text("".join(f"{recipes.BEGIN.format(name)}{recipes.END}" for name in names))
    ran = []

    def train(job, places):
        ran.append(job)
        return lines_of([job], [0.5 + job.settings.seed / 10])[0]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes.jobs, "_run", train)
    monkeypatch.setattr(recipes.jobs, "_Workers", jobs_support.WorkersHere)
    (recipe,), trials = recipes.declared(written(tmp_path))
    records.append(tmp_path / "tables_record", lines_of(recipe.jobs()[:1], [0.5])[0])
    assert run(tmp_path) == run(tmp_path) == []
    assert ran == recipe.jobs()[1:]
    assert "| 60.00 ± 10.00 |" in Path(recipes.PAGE).read_text()
    assert run(tmp_path, "--trials") == [] and ran[2:] == trials
    assert run(tmp_path, "--trials", "--datasets=mnist") == [] and len(ran) == 6
    with pytest.raises(RefusedError, match="--epsilons must be positive"):
        run(tmp_path, "--epsilons=0")


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(RefusedError, match="The page must have <!-- made by"):
        recipes.rendered("A page", {"recipes": ""})
