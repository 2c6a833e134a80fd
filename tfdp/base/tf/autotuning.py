"""Datasets that `tf.data` does not tune: iterators of tuned ones can be slow to drop.

Each iterator of a tuned dataset has a thread that sleeps between rounds of tuning, 10 milliseconds
at first, then twice as long each time, up to a minute (TensorFlow's `Model::OptimizeLoop`).
Dropping the iterator wakes the thread first, and only then sets the flag that tells it to end
(`CancellationManager::StartCancel`). If the thread looks at the flag too early, it sleeps again,
and the iterator's destructor waits for it: at the end of an epoch, or in a pass of Python's garbage
collector.

Datasets are rewritten all the same (`apply_default_optimizations`), although each iterator then
begins with a made-up value for every tensor that their functions capture (Grappler's
`InitializeTensor`), of its size: so data are held in variables. Without rewriting, TensorFlow 2.21
crashes when an iterator that a strategy made over the dataset is dropped.
"""

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfdp.base import private_apis

_MODULE, _MAKE = "tensorflow.python.data.ops.multi_device_iterator_ops", "_create_device_dataset"
_patching = threading.RLock()


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with `tf.data`'s tuning turned off, there and in what is made of it.

    `num_parallel_calls=tf.data.AUTOTUNE` then stays what it begins with: the number of threads, at
    most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


@contextlib.contextmanager
def untuned_on_devices() -> Iterator[None]:
    """Within it, iterators that a distribution strategy makes for its replicas are not tuned.

    A strategy makes a dataset for each device out of the one that it distributes, without its
    options; it only prefetches, so that there is nothing to tune.
    """
    try:
        make = private_apis.find(f"{_MODULE}.{_MAKE}")
    except (AttributeError, ImportError):  # Another TensorFlow: it tunes them.
        yield
        return

    def untuned(*args: object) -> tf.data.Dataset:
        return without_autotuning(make(*args))

    with _patching:
        module = private_apis.find(_MODULE)
        setattr(module, _MAKE, untuned)
        try:
            yield
        finally:
            setattr(module, _MAKE, make)
