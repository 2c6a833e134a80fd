import re

import pytest

from benchmarks import ports
from benchmarks.timed import Timed
from tfdp.clipping.report import Entry, Report


@pytest.mark.slow
@pytest.mark.parametrize(("keras", "name"), [(2, "structured_data"), (3, "trainer")])
def test_a_row_of_a_program(keras, name, monkeypatch):
    known = ports.programs(keras)
    changed = known[name].changed
    monkeypatch.setitem(known, name, Timed(known[name].build, 8, {}, changed))
    text = ports.row(keras, name, repeats=2, turn_seconds=0.01)
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert len(cells) == ports.HEADER.splitlines()[0].count("|") - 1
    assert cells[:4] == [name, str(changed), "one pass", "8"]
    assert all(float(cell) > 0 for cell in (*cells[4:6], *cells[8:]))
    for cell in cells[6:8]:
        median, low, high = map(float, re.findall(r"\d+\.\d+", cell))
        assert low <= median <= high


def test_engines():
    fast, slow = Entry("a", 1, "bias", True, 1), Entry("b", 1, "vectorized: why", False, 1)
    assert ports.engine(Report((fast, fast))) == "one pass"
    assert ports.engine(Report((fast, slow))) == "1 of 2 variables vectorized"
    assert ports.engine(Report((slow,), "why")) == "vectorized"


def test_unknown_programs_are_errors(capsys):
    with pytest.raises(SystemExit):
        ports.main(["--program", "tail"])
    assert "--program must be of convnet" in capsys.readouterr().err
