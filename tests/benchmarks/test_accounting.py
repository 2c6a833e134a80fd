import re

from benchmarks import accounting


def test_calls_are_timed(capsys):
    accounting.main(["--only", "for 1,000 steps"])
    _, _, row, _, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| noise for 1,000 steps \| \d+\.\d\d \| 1\.\d+ \|", row)
    assert "scipy" in last and "cores" in last
