"""A training that resumes after a crash has counted all that was published before."""

import h5py
import numpy as np
import pytest

import tfdp
from tests.front_ends import keras, needs_keras_3
from tests.page_examples import blocks_of
from tfdp.step.record.file_ledger import ledger_of_file

pytestmark = [needs_keras_3, pytest.mark.slow]
X, Y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 2


class Crash(Exception):
    pass


class CrashAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.ledger.steps >= self.step:
            raise Crash


def made():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10, steps_per_epoch=5)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(
        tfdp.keras3.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model, batches


def of_the_page():
    """The callbacks that docs/sharp_edges.md has."""
    (block,) = [block for block in blocks_of("docs/sharp_edges.md") if "def durable(" in block]
    names = {"keras": keras}
    exec(block, names)
    return names["durable"]


def resumed_and_published(folder, callbacks):
    """Returns the steps that a resumed training has counted, and those of the newest file."""
    model, batches = made()
    with pytest.raises(Crash):
        model.fit(batches, epochs=4, verbose=0, callbacks=[*callbacks(folder), CrashAt(9)])
    published = max(ledger_of_file(path).ledger.steps for path in folder.glob("*.weights.h5"))
    model, batches = made()
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: seen.append(model.optimizer.ledger.steps)
    )
    model.fit(batches, epochs=4, verbose=0, callbacks=[*callbacks(folder), look])
    return seen[0], published


def test_the_backup_is_on_disk_before_what_is_published(tmp_path):
    resumed, published = resumed_and_published(tmp_path, of_the_page())
    assert resumed >= published == 8


def test_mutant_of_fewer_backups_is_caught(tmp_path):
    def of_epochs(folder):
        backup, checkpoint = of_the_page()(folder)
        return [keras.callbacks.BackupAndRestore(backup.backup_dir), checkpoint]

    with pytest.warns(UserWarning, match="may forget steps"):
        resumed, published = resumed_and_published(tmp_path, of_epochs)
    assert resumed < published


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_backup_that_was_cut_is_replaced_by_the_one_before(share, tmp_path):
    model, batches = made()
    with pytest.raises(Crash):
        model.fit(batches, epochs=4, verbose=0, callbacks=[of_the_page()(tmp_path)[0], CrashAt(4)])
    latest = tmp_path / "backup" / "latest.weights.h5"
    whole = latest.read_bytes()
    latest.write_bytes(whole[: int(share * len(whole))])
    model, batches = made()
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs=None: seen.append(model.optimizer.ledger.steps)
    )
    model.fit(
        batches,
        epochs=1,
        steps_per_epoch=1,
        verbose=0,
        callbacks=[of_the_page()(tmp_path)[0], look],
    )
    assert seen == [3]  # That of step 4 was cut.


def test_what_h5py_says_of_a_file_that_a_kill_left_is_an_os_error(tmp_path, monkeypatch):
    """Its beginning is whole, and points at what was not written."""
    path = tmp_path / "model.weights.h5"
    made()[0].save_weights(path)
    said = ["Unable to synchronously open object (address of object past end of allocation)", "x"]

    def missing(self, name):
        raise KeyError(said[0])

    monkeypatch.setattr(h5py.Group, "__getitem__", missing)
    with pytest.raises(OSError, match=r"cannot be read.*past end of allocation"):
        made()[0].load_weights(path)
    said.pop(0)
    with pytest.raises(KeyError, match="x"):
        made()[0].load_weights(path)
