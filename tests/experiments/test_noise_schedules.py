"""Schedules of the noise at equal epsilon: runs stay within the budget, and none is repeated."""

import numpy as np
import pytest
from absl import flags

from experiments import noise_schedules, records
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    noise_schedules.define_flags(values)
    values(["noise_schedules", *arguments])
    return values


def test_schedules_fall_or_grow_in_equal_steps():
    for ratio in (4.0, 0.5):
        schedule = noise_schedules.noise_of(ratio, 4.0, 1e-5, 1437, 256, 90)
        assert schedule.boundaries == (15, 30, 45, 60, 75)
        values = np.array(schedule.values)
        assert values[0] / values[-1] == pytest.approx(ratio)
        np.testing.assert_allclose(values[1:] / values[:-1], ratio**-0.2)
    constant = noise_schedules.noise_of(1.0, 4.0, 1e-5, 1437, 256, 90)
    assert isinstance(constant, float) and values[0] < constant < values[-1]


@pytest.mark.slow
def test_a_table_a_picture_and_no_run_twice(tmp_path, monkeypatch):
    record = tmp_path / "record"
    values = _parse(
        *("--ratios=2,1", "--epsilons=4", "--learning_rates=0.3", "--seeds=1", "--epochs=2"),
        f"--record={record}",
    )
    found = noise_schedules.compare(values)
    assert list(found) == [(2.0, 4.0), (1.0, 4.0)]
    lines = records.read(record)
    assert len(lines) == 4 and all(3.9 < line["epsilon"] <= 4 for line in lines)

    def none_is_left(run):
        raise AssertionError(run)

    monkeypatch.setattr(noise_schedules, "train", none_is_left)
    assert noise_schedules.compare(values) == found
    assert len(noise_schedules.table(found).splitlines()) == 4
    noise_schedules.draw(found, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("flag", ["--ratios=-1", "--epsilons=x", "--expected_batch_size=5000"])
def test_what_cannot_be_is_refused(flag, tmp_path):
    values = _parse(flag, f"--record={tmp_path / 'record'}")
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        noise_schedules.compare(values)
    assert not (tmp_path / "record").exists()
