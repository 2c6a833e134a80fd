"""The fuzzer finds nothing in a few cases; and what a mechanism prevents, once it is out."""

import numpy as np
import pytest

from tests.front_ends import needs_keras_3
from tests.fuzz import around, corpus, fuzz, mutants, recipes, shrink
from tests.fuzz.runner import Runner


@pytest.fixture(scope="module")
def runner():
    with Runner() as shared:
        yield shared


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in mutants.MUTANTS if m not in around.FAMILIES])
def test_finds_what_a_mechanism_prevents(mutant, runner):
    number = int(mutant.split()[0])
    outcomes = [runner.run(recipe, mutant) for recipe in corpus.of(number)]
    assert "finding" in [outcome["outcome"] for outcome in outcomes], outcomes


# For each family around the step: a seed whose first case finds the mutant of the family.
SEEDS = {"transforms": 3, "updates": 3, "files": 4, "copies": 2}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", around.FAMILIES)
def test_finds_what_a_mechanism_around_the_step_prevents(family):
    recipe = recipes.draw(np.random.default_rng([SEEDS[family], 0]), [family])
    with mutants.applied(family):
        assert around.run(recipe)["outcome"] == "finding"
    assert around.run(recipe)["outcome"] in ("ok", "refused")


@pytest.mark.slow
@pytest.mark.parametrize(("keras", "cases"), [(2, 1), pytest.param(3, 2, marks=needs_keras_3)])
@pytest.mark.parametrize("family", around.FAMILIES)
def test_finds_nothing_around_the_step(family, keras, cases, runner):
    summary = fuzz.fuzz(seed=5, cases=cases, families=[family], runner=runner, keras=keras)
    assert not summary.findings and not summary.errors, summary


@needs_keras_3
@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 7, 9])
def test_finds_it_with_keras_3(number, runner):
    (mutant,) = [mutant for mutant in mutants.MUTANTS if mutant.startswith(f"{number} ")]
    recipe = {**corpus.of(number)[0], "keras": 3}
    assert runner.run(recipe, mutant)["outcome"] == "finding"
    assert runner.run(recipe)["outcome"] in ("ok", "refused")


@pytest.mark.slow
def test_finds_nothing_where_it_once_did(runner):
    outcomes = [runner.run(recipe) for _, recipe in corpus.CORPUS]
    assert {outcome["outcome"] for outcome in outcomes} <= {"ok", "refused"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("keras", "cases"), [(2, 5), pytest.param(3, 5, marks=needs_keras_3)])
def test_finds_nothing_in_random_cases(keras, cases, runner):
    summary = fuzz.fuzz(seed=4, cases=cases, runner=runner, keras=keras)
    assert not summary.findings and not summary.errors, summary
    assert summary.outcomes["ok"] >= 2, summary


def test_a_seed_decides_on_the_cases():
    for family in recipes.FAMILIES:
        first, again = (recipes.draw(np.random.default_rng(3), [family]) for _ in range(2))
        assert first == again
        compile(recipes.script(first), family, "exec")


@pytest.mark.slow
def test_shrinking_removes_what_does_not_matter():
    recipe = corpus.of(9)[0]
    kept = {"op": "scale", "k": [0, 0, 0]}
    recipe = {**recipe, "blocks": [*recipe["blocks"], kept], "jit": True, "rows": 9}
    small = shrink.shrink(recipe, lambda candidate: kept in candidate["blocks"])
    assert small["blocks"] == [kept]
    assert (small["jit"], small["rows"], small["clip"]) == (False, 2, 1.0)
