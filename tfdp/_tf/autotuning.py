"""Datasets without the tuning of `tf.data`, whose iterators are slow to drop.

An iterator of a dataset that is tuned has a thread that sleeps between rounds of tuning, from 10
milliseconds at first, twice as long each time, to one minute (`Model::OptimizeLoop` of TensorFlow).
Dropping the iterator wakes this thread before the flag is set by which it sees that it must end
(`CancellationManager::StartCancel`). A thread that looks too early sleeps again, and the iterator's
destructor waits for it: at the end of an epoch, or in a pass of Python's garbage collector.
"""

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with `tf.data`'s tuning turned off, there and in what is made of it.

    `num_parallel_calls=tf.data.AUTOTUNE` then stays what it begins with: the number of threads, at
    most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
