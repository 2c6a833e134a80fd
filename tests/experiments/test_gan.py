"""The experiment on generative adversarial networks: what it trains, draws and refuses."""

import pytest
from absl import flags

from experiments import gan
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    gan.define_flags(values)
    values(["gan", *arguments])
    return values


@pytest.mark.slow
def test_a_picture_and_a_table(tmp_path, capsys):
    folder = tmp_path / "pictures"
    gan.compare(_parse("--epochs=2", "--novae", "--loss=weight_clip", f"--output_dir={folder}"))
    printed = capsys.readouterr().out
    assert (folder / "gan.png").exists() and "epsilon = " in printed
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")][-2:]
    assert [row[0] for row in rows] == ["| PrivateGAN", "| real images"]
    assert 0 <= float(rows[0][2]) <= 1 and float(rows[1][2]) > 0.9


def test_networks_fit_each_other():
    for size in (8, 28):
        generator, critic = gan.networks((size, size, 1), 5)
        assert generator.output_shape == critic.input_shape[0] == (None, size, size, 1)
        assert critic.output_shape == (None, 1)


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(RefusedError, match="--expected_batch_size"):
        gan.compare(_parse("--expected_batch_size=5000"))
