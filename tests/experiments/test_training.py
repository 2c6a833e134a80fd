import csv
import io

import numpy as np
import pytest
import tensorflow as tf

from experiments import training
from experiments.datasets import load
from experiments.methods import make_training
from experiments.report import RunFolder
from experiments.settings import resolve

FIXED = {"dataset": "digits", "seed": 5, "insecure_fixed_noise": True}


@pytest.fixture(autouse=True)
def no_global_determinism(monkeypatch):
    """Keeps a setting that cannot be undone from the other tests of this process."""
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)


def make(path, every_epoch, **flags):
    settings = resolve({**FIXED, **flags})
    data, folder = load("digits"), RunFolder(path)
    return make_training(settings, data, folder, progress=False, every_epoch=every_epoch)


def column(path, name):
    rows = csv.DictReader(io.StringIO((path / "metrics.csv").read_text()))
    return [row[name] for row in rows]


def without_spenders(ledger):
    """Returns a ledger's JSON without the names of those that spent, which differ in each run."""
    if isinstance(ledger, dict):
        return {k: without_spenders(v) for k, v in ledger.items() if k != "spender"}
    return [without_spenders(v) for v in ledger] if isinstance(ledger, list) else ledger


@pytest.mark.slow
@pytest.mark.parametrize(("method", "epochs"), [("dpsgd", 3), ("dpsur_sgd", 2), ("dpagd", 3)])
def test_the_last_model_is_the_same_whether_or_not_those_before_it_were_evaluated(
    tmp_path, method, epochs
):
    every = make(tmp_path / "every", True, method=method, epochs=epochs).run()
    last = make(tmp_path / "last", False, method=method, epochs=epochs).run()
    assert last["accuracy"] > 0.3
    # Up to sums whose order threads decide.
    assert last["accuracy"] == pytest.approx(every["accuracy"], abs=0.003)
    assert last["loss"] == pytest.approx(every["loss"], abs=1e-3)
    assert last.get("epsilon") == every.get("epsilon") and last.get("steps") == every.get("steps")
    assert without_spenders(last.get("ledger")) == without_spenders(every.get("ledger"))
    *before, at_last = column(tmp_path / "last", "accuracy")
    assert at_last and not any(before) and all(column(tmp_path / "every", "accuracy"))
    assert column(tmp_path / "last", "step") == column(tmp_path / "every", "step")
    assert (tmp_path / "last" / "curve.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "padding"), [(None, "buckets"), (64, "full")])
def test_a_gpu_gets_batches_of_few_sizes(tmp_path, monkeypatch, chunk_size, padding):
    flags = {"method": "dpsgd", "epochs": 2, "chunk_size": chunk_size}
    expected = make(tmp_path / "cpu", False, **flags).run()
    monkeypatch.setattr(training.devices, "has_gpu", lambda: True)
    on_gpu = make(tmp_path / "gpu", False, **flags)
    found = on_gpu.run()
    assert on_gpu.batches.sampling.padding == padding
    assert found["epsilon"] == pytest.approx(expected["epsilon"], rel=1e-9)
    assert expected["accuracy"] > 0.3
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.003)


@pytest.mark.slow
def test_a_run_killed_before_its_only_evaluation_makes_it_later(tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.Training, "_evaluate", killed)
        make(tmp_path, False, method="dpsgd", epochs=3).run()
    assert column(tmp_path, "accuracy") == ["", "", ""]
    run = make(tmp_path, False, method="dpsgd", epochs=3)
    result = run.run()
    assert len(run.rows) == 3 and result["accuracy"] > 0.3
    assert column(tmp_path, "accuracy") == ["", "", str(result["accuracy"])]


def test_copies_of_an_image_are_shifts_of_it_by_two_pixels_at_most():
    image = np.zeros([8, 8, 1], np.float32)
    image[3, 4] = 1.0
    seen = set()
    for _ in range(60):
        copy, label = training._shifted(tf.constant(image), tf.constant(7))
        assert copy.shape == image.shape and label == 7 and np.sum(copy) == 1
        row, column, _ = np.argwhere(copy.numpy())[0]
        seen.add((int(row) - 3, int(column) - 4))
    assert len(seen) > 10 and all(abs(n) <= 2 for pair in seen for n in pair)
    border = np.ones([8, 8, 1], np.float32)
    copies = [training._shifted(tf.constant(border), 0)[0].numpy() for _ in range(20)]
    assert {float(x) for copy in copies for x in copy.ravel()} == {0.0, 1.0}


def test_weights_decay_as_asked_for(tmp_path):
    assert make(tmp_path / "plain", False).model.optimizer.weight_decay is None
    assert make(tmp_path / "decay", False, weight_decay=0.3).model.optimizer.weight_decay == 0.3


@pytest.mark.slow
def test_batches_have_the_copies_that_were_asked_for(tmp_path):
    def sampling(**flags):
        run = make(tmp_path / str(flags), False, expected_batch_size=100, **flags)
        return run.batches.sampling, next(iter(run.batches))[0].numpy()

    plain, images = sampling()
    assert plain.rows_per_example == 1
    once, shifted = sampling(augmentations=1)
    assert once.rows_per_example == 1 and images.shape == shifted.shape  # The seed is the same.
    assert not np.array_equal(images, shifted)
    thrice, rows = sampling(augmentations=3)
    assert thrice.rows_per_example == 3 and len(rows) == 3 * len(images)
