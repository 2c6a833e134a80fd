"""Order of the callbacks that back up a training and those that publish its weights."""

from typing import Any

import tensorflow as tf

from tfdp.base.user_warnings import warn_user

_EPOCH = "epoch"


def warn_of_steps_to_forget(keras: Any, callbacks: Any) -> None:
    """Warns if a checkpoint may hold steps of which no backup knows.

    A training that resumes from the backup counts only the steps that are in it. So each step must
    be backed up before it is published. Keras counts batches in each callback, and the counts
    differ once a training has resumed (Keras 2) or with `steps_per_execution` (Keras 3): a backup
    of batches is safe after each of them only.

    Args:
      keras: The Keras of the model.
      callbacks: The argument of `fit`.
    """
    given = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    is_backup = [isinstance(one, keras.callbacks.BackupAndRestore) for one in given]
    if not any(is_backup):
        return
    place = is_backup.index(True)
    backed_up = given[place].save_freq
    for other, one in enumerate(given):
        if not isinstance(one, keras.callbacks.ModelCheckpoint):
            continue
        published = one.save_freq
        if backed_up != 1 and (backed_up, published) != (_EPOCH, _EPOCH):
            why = f"save_freq={backed_up!r} and save_freq={published!r}"
        elif other < place and (backed_up, published) != (1, _EPOCH):  # Batches end first.
            why = "the checkpoint before the backup"
        else:
            continue
        warn_user(
            "A training that resumes from `BackupAndRestore` may forget steps that "
            "`ModelCheckpoint` has published, and state too small an epsilon. Give `fit` the "
            "backup before the checkpoint, with save_freq=1, or both with save_freq='epoch' "
            f"(docs/sharp_edges.md, After a crash). Received: {why}."
        )
        return
