"""Networks that were trained on public images are fine-tuned privately, in part or as a whole."""

import numpy as np
import pytest
from absl import flags

from experiments import fine_tuning, records
from experiments.settings import RefusedError
from tests.front_ends import keras, needs_keras_3

pytestmark = needs_keras_3


def _parse(*arguments):
    values = flags.FlagValues()
    fine_tuning.define_flags(values)
    values(["fine_tuning", "--public=digits", "--dataset=digits", *arguments])
    return values


def _run(part, **changed):
    given = {
        **{"public": "digits", "dataset": "digits", "part": part, "rank": 2, "epsilon": 2.0},
        **{"delta": 1e-5, "epochs": 1, "expected_batch_size": 256, "validation_examples": 287},
        **{"split": "test", "learning_rate": 1.0, "seed": 0},
    }
    return fine_tuning.Run(**(given | changed))


@pytest.fixture
def public(monkeypatch):
    """In the place of weights that were trained on public images."""
    learnt = [np.full(v.shape, 0.5) for v in fine_tuning.network("digits", keras).weights]
    monkeypatch.setattr(fine_tuning, "_public_weights", lambda *_: learnt)


@pytest.mark.parametrize("part", fine_tuning.PARTS)
def test_what_is_trained(public, part):
    """Nothing of the private data decides what a network begins with."""
    model = fine_tuning.prepared(_run(part), None, keras)
    *below, head = model.layers
    assert not np.any(head.kernel.numpy() == 0.5)
    learnt = [np.all(layer.weights[0].numpy() == 0.5) for layer in below if layer.weights]
    assert learnt == [part != fine_tuning.NEW] * 2
    trained = {v.path.split("/")[-1] for layer in below for v in layer.trainable_variables}
    kernels, factors = {"kernel", "bias"}, {"lora_kernel_a", "lora_kernel_b", "bias"}
    assert (
        trained
        == {
            fine_tuning.NEW: kernels,
            fine_tuning.WHOLE: kernels,
            fine_tuning.ADAPTERS: factors,
            fine_tuning.HEAD: set(),
        }[part]
    )
    assert len(head.trainable_variables) == 2


@pytest.mark.slow
def test_runs_stay_within_the_budget(public):
    accuracy, spent = fine_tuning.train(_run(fine_tuning.ADAPTERS), None)
    assert 0 <= accuracy <= 100
    assert 1.9 < spent <= 2.0


def test_a_line_for_each_part_and_no_run_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "train", lambda run, _: (50.0 + run.learning_rate, 0.9))
    values = _parse("--learning_rates=1,2", "--seeds=2", f"--record={tmp_path / 'record'}")
    found = fine_tuning.compare(values)
    assert [part for part, _ in found] == list(fine_tuning.PARTS)
    assert all((one.learning_rate, one.mean) == (2.0, 52.0) for one in found.values())
    assert len(records.read(tmp_path / "record")) == 4 * (2 + 2)
    monkeypatch.setattr(fine_tuning, "train", None)
    assert fine_tuning.compare(values) == found
    assert len(fine_tuning.table(found).splitlines()) == 6


@pytest.mark.parametrize(
    "flag",
    ["--parts=tail", "--epsilons=0", "--learning_rates=x", "--public=mnist"],
)
def test_what_cannot_be_is_refused(flag, tmp_path):
    values = _parse(flag, f"--record={tmp_path / 'record'}")
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        fine_tuning.compare(values)
    assert not (tmp_path / "record").exists()


def test_a_batch_larger_than_the_data_is_refused(public):
    with pytest.raises(RefusedError, match="--expected_batch_size must be at most 1438"):
        fine_tuning.train(_run(fine_tuning.HEAD, expected_batch_size=5000), None)
