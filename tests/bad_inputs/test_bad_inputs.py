"""Public functions refuse bad values with errors that name the argument."""

import collections
from pathlib import Path

import pytest

from tests.bad_inputs import accepted, cases, runner
from tests.front_ends import needs_keras_3

pytestmark = [needs_keras_3, pytest.mark.slow]

# What takes long for each call is left to the command: trainings, calibrations, checks of models.
_SLOW = (
    *("make_private", "check_sensitivity", "validate", "calibrate_", "private_selection", "plan"),
    *("features", "lira", "BlackBoxAudit", "scores", "subgroup_report", "plot", "report"),
    *("poisson_batches", "AdaptiveGradientDescent", "VAE", "GAN", "replace_batch", "GNMax"),
    *("DPSUR", "DPAdam", "DPSign", "get_delta", "write_examples"),
)
_EVERY = 5
_SELDOM, _EVERY_SELDOM = ("tfdp.tune",), 20  # It takes a third of a second for a call.


@pytest.fixture(scope="module")
def one():
    made = runner.Runner(limit=120.0)  # Of time, and not of work: the machine may be busy.
    yield made
    made.close()


def test_bad_values_are_refused_by_the_name_of_the_argument(one, tmp_path):
    known = one.known(without=(*_SLOW, *_SELDOM))
    assert known["missing"] == []  # Everything public has a valid call, or a reason.
    sample = cases.sample(known, _EVERY)
    sample += cases.sample(one.known(_SELDOM, _SLOW), _EVERY_SELDOM)
    found = runner.run_all(one, sample, tmp_path / "results.jsonl")
    assert collections.Counter(kind for kind, _ in found.values())[cases.NAMED] > 3000
    reviewed = accepted.read()
    problems = [
        f"{case}: {kind} {detail[:200]}"
        for case, (kind, detail) in found.items()
        if kind == cases.OTHER
        or (kind == cases.ACCEPTED and case.value not in reviewed[case.call, case.argument])
    ]
    assert problems == []


# The last one ends the process.
_MUTANTS = {
    "accepts": ("lambda value: None", cases.ACCEPTED),
    "another error": ("lambda value: int('x')", cases.OTHER),
    "says nothing of it": ("lambda value: [][value]", cases.OTHER),
    "hangs": ("lambda value: time.sleep(600)", cases.OTHER),
    "warns": ("lambda value: warnings.warn('x', RuntimeWarning)", cases.OTHER),
    "ends": ("lambda value: os.abort()", cases.OTHER),
}
_CHILD = """
import os, time, warnings
from tests.bad_inputs import child, valid_calls
def add(name, function):
    valid_calls.CALLS[name] = lambda: valid_calls.Call(function, dict(value=1))
"""


def test_mutants_of_outcomes_are_caught():
    added = [f"add({name!r}, {source})" for name, (source, _) in _MUTANTS.items()]
    made = runner.Runner(limit=2.0, program="\n".join([_CHILD, *added, "child.main()"]))
    try:
        for name, (_, expected) in _MUTANTS.items():
            assert made.run(cases.Case(name, "value", "none"))[0] == expected, name
    finally:
        made.close()


def test_files_of_calls_are_not_in_the_repository_and_go():
    program = "\n".join([_CHILD, "add('writes', lambda value: open(value, 'w'))", "child.main()"])
    made = runner.Runner(program=program)
    try:
        assert made.run(cases.Case("writes", "value", "text")) == (cases.ACCEPTED, "")
        (written,) = Path(made.folder).glob("text")
    finally:
        made.close()
    assert not written.exists() and not (runner.ROOT / "text").exists()


def test_a_sample_has_each_argument_and_does_not_change_with_other_calls():
    known = {"calls": {"f": [*"abcdef"], "g": [*"abcdef"]}, "values": ["v", "w", "x"]}
    found = cases.sample(known, 3)
    assert [case.argument for case in found] == [*"abcdef"] * 2
    assert {case.value for case in found} == {"v", "w", "x"}
    of_g = [case for case in found if case.call == "g"]
    assert cases.sample({**known, "calls": {"g": [*"abcdef"]}}, 3) == of_g
    assert cases.sample(known, 1) == cases.of(known)


def test_results_are_read_back(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('["f", "x", "nan", "named", ""]\n["f", "x", "in')
    assert runner.read(path) == {cases.Case("f", "x", "nan"): ("named", "")}
