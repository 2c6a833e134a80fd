"""The benchmark of several workers: its cost model. (What it measures, tests of workers train.)"""

import pytest

from benchmarks import distributed
from benchmarks.distributed import CostModel


def test_a_step_of_many_replicas():
    cost = CostModel(step_ms=30.0, parameters=10**6, noise_ns=20.0, gigabits=8.0, latency_us=50.0)
    alone, pair = cost.parts(1), cost.parts(2)
    assert sum(alone.values()) == pytest.approx(30.0)
    assert alone["noise"] == pytest.approx(20.0) and pair["noise"] == pytest.approx(10.0)
    assert pair["bytes"] == pytest.approx(4.0)  # 4 MB, at 1 GB a second.
    assert pair["latency"] == pytest.approx(0.1)


def test_predictions_are_printed(capsys):
    distributed.main(["--predict", "--step_ms", "50", "--replicas", "1", "1000"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 1 |") and lines[2].endswith("| 50.0 | 1.00 |")
    assert lines[3].startswith("| 1,000 |")


@pytest.mark.slow
def test_draws_are_timed_for_one_part_and_for_many():
    _, _, *rows = distributed.draws(64, 1).splitlines()
    most = [int(row.split("|")[4].replace(",", "")) for row in rows]
    assert 64 < most[0] <= most[2] < most[3]  # The last two: 10^9 examples in 1 part and in 1,000.
