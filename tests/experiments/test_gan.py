"""The experiment on generative adversarial networks: what it trains, draws and refuses."""

import pytest
from absl import flags

from experiments import datasets, gan, records
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    gan.define_flags(values)
    values(["gan", *arguments])
    return values


@pytest.mark.slow
def test_a_picture_a_table_and_no_run_twice(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "pictures"
    values = _parse("--epochs=2", "--novae", "--loss=weight_clip", f"--output_dir={folder}")
    gan.compare(values)
    printed = capsys.readouterr().out
    assert (folder / "gan.png").exists() and "epsilon = " in printed
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")][-3:]
    assert [row[0] for row in rows] == ["| PrivateGAN", "| PrivateGAN, no privacy", "| real images"]
    assert 0 <= float(rows[0][2]) <= 100 and float(rows[2][2]) > 90
    private, control = records.read(folder / "gan.jsonl")
    assert 3.9 < private["epsilon"] <= 4 and control["epsilon"] is None
    assert private["run"]["target_epsilon"] == 4 and control["run"]["target_epsilon"] is None

    def none_is_left(run, data):
        raise AssertionError(run)

    monkeypatch.setattr(gan, "train", none_is_left)
    gan.compare(values)
    assert rows[0][2] == capsys.readouterr().out.split("| PrivateGAN | ")[1].split(" | ")[1]
    with pytest.raises(AssertionError, match="seed=1"):
        gan.compare(
            _parse(
                "--epochs=2", "--novae", "--seeds=2", "--loss=weight_clip", f"--output_dir={folder}"
            )
        )


def test_each_model_has_runs_of_its_own():
    data = datasets.load("digits")
    found = gan.runs_of(_parse("--seeds=2", "--target_epsilon=2", "--critic_steps=7"), data)
    assert list(found) == ["PrivateGAN", "PrivateGAN, no privacy", "TermWiseVAE"]
    assert [run.seed for own in found.values() for run in own] == [0, 1] * 3
    private, control, vae = (own[0] for own in found.values())
    assert private.critic_steps == control.critic_steps == 7
    assert (private.target_epsilon, control.target_epsilon, vae.target_epsilon) == (2, None, 2)
    assert private.learning_rate == gan.DEFAULTS["digits"].learning_rate


def test_networks_fit_each_other():
    for size in (8, 28):
        generator, critic = gan.networks((size, size, 1), 5)
        assert generator.output_shape == critic.input_shape[0] == (None, size, size, 1)
        assert critic.output_shape == (None, 1)


def test_batches_larger_than_the_data_are_refused():
    with pytest.raises(RefusedError, match="--expected_batch_size"):
        gan.compare(_parse("--expected_batch_size=5000"))
