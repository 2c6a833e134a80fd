"""Averages are compared with the last weights of the same runs."""

import pytest
from absl import flags

from experiments import averaging
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    averaging.define_flags(values)
    values(["averaging", *arguments])
    return values


@pytest.mark.slow
def test_a_row_for_the_last_weights_and_for_each_decay():
    table = averaging.table(_parse("--epochs=1", "--seeds=1", "--decays=0,0.5"))
    _, _, last, none, half = ([c.strip() for c in line.split("|")] for line in table.splitlines())
    assert [row[1:3] for row in (last, none, half)] == [
        *(["constant", "last weights"], ["constant", "0.0"], ["constant", "0.5"])
    ]
    assert last[3] == none[3]  # With a decay of 0 the average is the last weights.
    assert float(half[3]) > 0 and last[4] == none[4] == "+0.00"


def test_decays_that_are_none_are_refused():
    with pytest.raises(RefusedError, match="--decays: "):
        averaging.table(_parse("--decays=1"))
