"""A training that resumes after a crash has counted all that was published before."""

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
