import re

import pytest

from benchmarks import padding


@pytest.mark.slow
def test_every_step_of_every_padding_is_timed(capsys):
    padding.main(["--model", "mnist_cnn", "--batch", "4", "--steps", "3"])
    *rows, machine = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["buckets", "full", "none"]
    assert all(re.fullmatch(r"\w+ +\d+ \d+ \d+", row) for row in rows) and "cores" in machine
