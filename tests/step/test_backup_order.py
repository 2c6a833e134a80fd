"""`fit` warns of callbacks with which a resumed training would forget what was published."""

import warnings

import numpy as np
import pytest

import tfdp
from tests.front_ends import with_both

X = np.zeros([8, 3], "float32")


def fitted(front, callbacks, private=True):
    batches = tfdp.data.poisson_batches((X, X[:, 0]), expected_batch_size=4, steps_per_epoch=1)
    keras = front.keras
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    optimizer = front.tfdp.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling)
    model.compile(optimizer if private else "sgd", "mse")
    data = (batches,) if private else (X, X[:, 0])
    model.fit(*data, callbacks=callbacks, verbose=0)


def callbacks_of(front, folder, backup, checkpoint):
    kinds = front.keras.callbacks
    return [
        kinds.BackupAndRestore(str(folder / "backup"), save_freq=backup),
        kinds.ModelCheckpoint(
            str(folder / "{epoch}.weights.h5"), save_freq=checkpoint, save_weights_only=True
        ),
    ]


UNSAFE = [(2, 2), (2, "epoch"), ("epoch", 1)]
SAFE = [(1, 2), (1, "epoch"), ("epoch", "epoch")]


@with_both
@pytest.mark.parametrize(("backup", "checkpoint"), UNSAFE)
def test_backups_that_are_too_rare_are_warned_of(front, tmp_path, backup, checkpoint):
    given = callbacks_of(front, tmp_path, backup, checkpoint)
    with pytest.warns(UserWarning, match=f"Received: save_freq={backup!r} and save_freq="):
        fitted(front, given)


@with_both
@pytest.mark.parametrize(("backup", "checkpoint"), SAFE)
def test_backups_of_all_that_is_published_are_not(front, tmp_path, backup, checkpoint):
    given = callbacks_of(front, tmp_path, backup, checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fitted(front, given)
    if (backup, checkpoint) == (1, "epoch"):  # Batches end before epochs do, in any order.
        fitted(front, given[::-1])
        return
    with pytest.warns(UserWarning, match="the checkpoint before the backup"):
        fitted(front, given[::-1])


@with_both
def test_other_trainings_are_not_warned(front, tmp_path):
    backup, checkpoint = callbacks_of(front, tmp_path, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fitted(front, [backup])
        fitted(front, [checkpoint])
        fitted(front, None)
        fitted(front, [backup, checkpoint], private=False)
