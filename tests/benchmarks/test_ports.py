import re

import pytest

from benchmarks import ports, programs
from benchmarks.programs import PROGRAMS, Timed
from tfdp.clipping.report import Entry, Report


@pytest.mark.slow
def test_a_row_of_a_program(monkeypatch):
    tiny = Timed(programs.structured_data, 8, {})
    monkeypatch.setitem(PROGRAMS, "structured_data", tiny)
    text = ports.row("structured_data", repeats=2, turn_seconds=0.01)
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert len(cells) == ports.HEADER.splitlines()[0].count("|") - 1
    assert cells[:3] == ["structured_data", "one pass", "8"]
    assert all(float(cell) > 0 for cell in cells[3:5])
    for cell in cells[5:]:
        median, low, high = map(float, re.findall(r"\d+\.\d+", cell))
        assert low <= median <= high


def test_engines():
    fast, slow = Entry("a", 1, "bias", True, 1), Entry("b", 1, "vectorised: why", False, 1)
    assert ports.engine(Report((fast, fast))) == "one pass"
    assert ports.engine(Report((fast, slow))) == "1 of 2 variables vectorised"
    assert ports.engine(Report((slow,), "why")) == "vectorised"


def test_unknown_programs_are_errors(capsys):
    with pytest.raises(SystemExit):
        ports.main(["--program", "tail"])
    assert "invalid choice" in capsys.readouterr().err
