"""The table of Keras 3 programs says what became of each."""

import pytest

from benchmarks import keras_apis
from tests.front_ends import needs_keras_3


@needs_keras_3
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "begin"),
    [("Program", "trains"), ("BatchStatistics", "ValueError: The model writes a statistic")],
)
def test_outcomes_of_tfdp(name, begin):
    assert keras_apis.outcome("tfdp", name).startswith(begin)


@needs_keras_3
def test_a_process_that_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(keras_apis.Program, "optimizer", None)
    assert keras_apis.outcome("tfdp", "Program").startswith("TypeError")
    assert keras_apis.in_a_process("false", "tfdp", "Program", 60) == "the process died"


def test_programs_have_titles():
    titles = [keras_apis.TITLES.get(p) or p.__doc__ for p in keras_apis.PROGRAMS]
    assert len(set(titles)) == len(titles) > 20
