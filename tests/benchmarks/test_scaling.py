import dataclasses

import matplotlib.image
import pytest

from benchmarks import scaling, worker
from benchmarks.settings import StepSettings


def test_points_are_those_asked_for():
    options = scaling.parse(["--batch", "64", "128", "--parameters", "1e4", "--chunk", "32"])
    groups = scaling.plan_points(options)
    batch, wider, parameters, chunks, whole = groups
    assert [point.measurement.contestant for point in batch] == list(scaling.CONTESTANTS_BY_DEFAULT)
    assert {point.x for point in batch} == {64} and {point.x for point in wider} == {128}
    assert all(abs(point.x - 1e4) < 500 for point in parameters)
    assert [point.measurement.settings.chunk_size for point in chunks] == [None, 32]
    assert chunks[1].measurement.settings.batch == whole[1].measurement.settings.batch == 8192
    assert whole[1].measurement.settings.chunk_size is None


def fill(groups):
    """Made-up results: each point takes twice the time of the one before."""
    for i, point in enumerate(point for group in groups for point in group):
        m = point.measurement
        m.seconds, m.first, m.peak, m.growth = [0.001 * 2**i], 1.0, 100.0, 10.0


@pytest.mark.slow
def test_tables_and_picture_show_every_point(tmp_path):
    groups = scaling.plan_points(scaling.parse(["--batch", "64", "--chunk", "32", "128"]))
    fill(groups)
    points = [point for group in groups for point in group]
    for what in ("batch", "parameters", "logical"):
        table = scaling.table(groups, what).splitlines()[2:]
        shown = [point for point in points if point.what == what]
        assert [line.split("|")[2].strip() for line in table] == [p.title for p in shown]
        medians = [1e3 * point.measurement.median for point in shown]
        assert [float(line.split("|")[3]) for line in table] == medians
    *_, whole_plain, whole_private = table
    assert whole_plain.split("|")[5].strip() == "1.00" and whole_plain.startswith("| 8,192 ")
    assert whole_private.split("|")[5].strip() == "2.00"
    scaling.plot(tmp_path / "plot.png", points)
    assert matplotlib.image.imread(tmp_path / "plot.png").std() > 0


@pytest.mark.slow
def test_logical_step_in_chunks_is_measured():
    """Measures a contestant as its own process does, in the process of the test."""
    settings = dataclasses.asdict(StepSettings(16, dataset_size=64, chunk_size=16))
    arguments = {"contestant": "tfdp_one_pass", "problem": "mlp_4", "settings": settings}
    answers = []
    worker.serve(arguments, ['{"steps": 1}', '{"warm_up": 1, "steps": 2}'], answers.append)
    assert "tensorflow" in answers[0]["versions"]
    assert all(answer["seconds"] > 0 for answer in answers[1:]) and len(answers) == 3


@pytest.mark.parametrize("arguments", [["--what", "depth"], ["--contestants", "keras"]])
def test_bad_argument_is_refused(arguments):
    with pytest.raises(SystemExit):
        scaling.parse(arguments)
