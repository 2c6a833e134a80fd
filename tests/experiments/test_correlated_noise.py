"""Correlated noise is compared with independent noise, each with its best learning rate."""

import pytest
from absl import flags

from experiments import correlated_noise
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    correlated_noise.define_flags(values)
    values(["correlated_noise", *arguments])
    return values


@pytest.mark.slow
def test_a_row_for_each_kind_of_noise(tmp_path, monkeypatch):
    train = correlated_noise.accuracy

    def once_a_kind(data, plan, rate, *rest):
        return train(data, plan, rate, *rest) if rate == 0.1 else 0.0

    monkeypatch.setattr(correlated_noise, "accuracy", once_a_kind)
    values = _parse("--epochs=1", "--seeds=1", "--epsilons=16", "--learning_rates=0.1,1e-9")
    rows = correlated_noise.compare(values)
    assert [row[1] for row in rows] == list(correlated_noise._KINDS)
    cycles = [row[2][0] for row in rows]
    assert cycles[0] == 1 < cycles[1] and cycles[2] == cycles[3]
    assert all(row[3] == 0.1 for row in rows)
    assert len(correlated_noise.table(rows).splitlines()) == 6
    correlated_noise.draw(rows, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_row_for_each_memory():
    table = correlated_noise.error_table(_parse("--passes=1,3", "--pass_steps=20"))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [row[1] for row in rows] == ["0", "19", *"12346"]
    for column in (2, 3):
        independent, bands, one, two, *more = (float(row[column]) for row in rows)
        assert bands <= min(more) <= max(more) <= two <= one < independent
    for passes in ("0", "1.5", "a", "100000"):
        with pytest.raises(RefusedError, match="--passes"):
            correlated_noise.error_table(_parse(f"--passes={passes}", "--pass_steps=20"))


@pytest.mark.parametrize("flag", ["--epsilons=a", "--epsilons=-1", "--expected_batch_size=5000"])
def test_what_cannot_be_is_refused(flag):
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        correlated_noise.compare(_parse(flag))
