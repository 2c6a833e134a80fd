"""Datasets that `tf.data` takes as they are: it neither tunes nor rewrites them.

Each iterator of a tuned dataset has a thread that sleeps between rounds of tuning, 10 milliseconds
at first, then twice as long each time, up to a minute (TensorFlow's `Model::OptimizeLoop`).
Dropping the iterator wakes the thread first, and only then sets the flag that tells it to end
(`CancellationManager::StartCancel`). If the thread looks at the flag too early, it sleeps again,
and the iterator's destructor waits for it: at the end of an epoch, or in a pass of Python's garbage
collector.

Each iterator of a rewritten dataset is optimized anew, and Grappler makes up a value for every
tensor that the dataset's functions use (`InitializeTensor`). It has the tensor's size: iterating
over 2 GB took 2 GB more for a moment, and 0.6 s.
"""

import tensorflow as tf


def as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without `tf.data`'s tuning and rewriting, also in what is made of it.

    `num_parallel_calls=tf.data.AUTOTUNE` then stays what it begins with: the number of threads, at
    most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)
