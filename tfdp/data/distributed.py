"""Poisson-sampled batches for the replicas of a distribution strategy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from tfdp.accounting.sampling import (
    FULL,
    MOST_EXAMPLES,
    NONE,
    TRUNCATION_PROBABILITY,
    PoissonSampling,
)
from tfdp.base import private_logs
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.tf.autotuning import untuned_on_devices
from tfdp.base.tf.workers import check_alike, gathered
from tfdp.base.validation import error, instance, one_of
from tfdp.data.columns import Features
from tfdp.data.elements import check_padding
from tfdp.data.poisson import MOST_STEPS, check_integer, drawn_batches, source_of, truncation_of
from tfdp.data.source import PoissonSource

_PADDINGS = (NONE, FULL)
_STEPS = 2**20  # Steps after which an iteration begins anew, which takes a moment.


class _Batches(input_lib.DistributedDatasetsFromFunction):
    """Batches whose iterators are dropped at once, at the end of `fit`."""

    def __iter__(self) -> Any:
        private_logs.check_fit()
        with untuned_on_devices():
            return super().__iter__()


def distributed_poisson_batches(
    strategy: tf.distribute.Strategy,
    open_shard: Callable[[int, int], Any],
    *,
    dataset_size: int,
    expected_batch_size: int,
    chunk_size: int | None = None,
    steps_per_epoch: int | None = None,
    transform: Callable[..., Any] | None = None,
    padding: str = NONE,
    seed: int | None = None,
    features: Features = None,
    label: str | None = None,
    max_truncation_probability: float | None = None,
) -> tf.distribute.DistributedDataset:
    """Returns batches that contain each example independently, with probability q = B / N.

    Every replica has its own, disjoint part of the data set, and draws a Poisson sample of it, with
    the same q and its own entropy. The samples of all replicas together are one Poisson sample of
    the whole data set; no indices are exchanged. Each step takes one batch of every replica.

    All workers of a strategy must call this, with the same arguments.

    Args:
      strategy: A `tf.distribute.MirroredStrategy` or `tf.distribute.MultiWorkerMirroredStrategy`.
      open_shard: Function `(index, count)` that returns part `index` of `count` disjoint ones, in
        any form that `tfdp.data.poisson_batches` takes. It is called once for each replica of this
        worker. Parts may be of unequal size, and none may be empty.
      dataset_size: Number of examples of all parts together, N.
      expected_batch_size: Expected number of examples in a batch, of all replicas together, B.
      chunk_size: Rows that are delivered to a replica at a time, if its batch does not fit in
        memory. `sampling.gradient_accumulation_steps` chunks then make one batch.
      steps_per_epoch: Batches in an epoch; by default N / B, rounded.
      transform: See `tfdp.data.poisson_batches`.
      padding: "none" or "full": see `tfdp.data.poisson_batches`.
      seed: Makes the sampling reproducible, for tests and experiments only.
      features: See `tfdp.data.poisson_batches`.
      label: See `tfdp.data.poisson_batches`.
      max_truncation_probability: See `tfdp.data.poisson_batches`.

    Returns:
      A distributed dataset without end, for `model.fit(batches, steps_per_epoch=
      batches.steps_per_epoch)`. Its attributes are `sampling`, the argument `sampling` of an
      optimizer, and `steps_per_epoch`, in calls of the training step.

    Raises:
      ValueError: An argument is out of its range; the sizes of the parts do not sum to N; or the
        workers were given different arguments or examples of different types.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.zeros([1000, 3], "float32"), np.zeros([1000], "int64")
      >>> batches = tfdp.data.distributed_poisson_batches(
      ...     tf.distribute.MirroredStrategy(["CPU:0"]),
      ...     lambda index, count: (x[index::count], y[index::count]),
      ...     dataset_size=1000,
      ...     expected_batch_size=50,
      ... )
      >>> batches.steps_per_epoch
      20
    """
    requirement = "a strategy of `tf.distribute`"
    instance("strategy", strategy, tf.distribute.Strategy, requirement)
    if not callable(open_shard):
        raise error("open_shard", "a function `(index, count)`", open_shard)
    check_integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
    check_integer("expected_batch_size", expected_batch_size, 1, dataset_size)
    check_integer("chunk_size", chunk_size, 1, None, optional=True)
    check_integer("steps_per_epoch", steps_per_epoch, 1, MOST_STEPS, optional=True)
    check_integer("seed", seed, None, None, optional=True)
    one_of("padding", padding, _PADDINGS)
    sources = _opened(strategy, open_shard, seed, transform, features, label)
    for source in sources.values():
        check_padding(padding, chunk_size, source.element_spec)
    given = {
        "dataset_size": dataset_size,
        "expected_batch_size": expected_batch_size,
        "chunk_size": chunk_size,
        "steps_per_epoch": steps_per_epoch,
        "padding": padding,
        "max_truncation_probability": max_truncation_probability,
    }
    specs = sorted({str(source.element_spec) for source in sources.values()})
    check_alike(strategy, {**given, "examples": specs}, "`distributed_poisson_batches`")
    sizes = [int(size) for (size,) in gathered(strategy, lambda i: [sources[i].dataset_size])]
    if sum(sizes) != dataset_size:
        raise ValueError(
            "Argument `dataset_size` must be the number of examples of all parts together, "
            f"{sum(sizes)}, of {len(sizes)} parts. Received: {dataset_size=}. Every part must be "
            "opened by one replica: `open_shard(index, count)` gets which one of how many."
        )
    sampling = PoissonSampling(
        dataset_size,
        expected_batch_size,
        padding=padding,
        parts=len(sizes),
        largest_part=max(sizes),
        max_truncation_probability=truncation_of(padding, max_truncation_probability),
    )
    # Without padding a batch may be larger still, and so its chunks: with a probability of 1e-30.
    chunked = sampling
    if padding == NONE:
        chunked = dataclasses.replace(
            sampling, padding=FULL, max_truncation_probability=TRUNCATION_PROBABILITY
        )
    most = chunked.padded_batch_size
    chunks = -(-most // (chunk_size or most))
    sampling = dataclasses.replace(sampling, gradient_accumulation_steps=chunks)

    def local(context: tf.distribute.InputContext) -> tf.data.Dataset:
        parts = [
            drawn_batches(source, sampling, keys[part], _STEPS, part).repeat()
            for part, source in sources.items()
        ]
        order = tf.data.Dataset.range(len(parts)).repeat()  # Replicas take them in turns.
        return tf.data.Dataset.choose_from_datasets(parts, order).prefetch(2 * len(parts))

    with tf.device("cpu"):
        keys = {part: KeyStream(seed, f"batches {part}") for part in sources}
        batches = strategy.distribute_datasets_from_function(local)
    batches.__class__ = _Batches
    steps = max(1, round(dataset_size / expected_batch_size))
    batches.sampling, batches.steps_per_epoch = sampling, chunks * (steps_per_epoch or steps)
    batches.keys = keys  # They must live as long.
    batches.local_element_spec = _batch_spec(sources, sampling)
    return batches


def _batch_spec(sources: dict[int, PoissonSource], sampling: PoissonSampling) -> Any:
    """Returns the types and shapes of a replica's batch."""
    examples = next(iter(sources.values())).element_spec
    if sampling.padding != NONE and len(examples) == 2:
        examples = (*examples, tf.TensorSpec([], tf.bool))
    return tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), examples)


def _opened(
    strategy: tf.distribute.Strategy,
    open_shard: Any,
    seed: int | None,
    transform: Any,
    features: Features,
    label: str | None,
) -> dict[int, PoissonSource]:
    """Returns the parts of this worker's replicas, by their indices among all."""
    sources: dict[int, PoissonSource] = {}

    def open_one(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        part = context.replica_id_in_sync_group
        data = open_shard(part, context.num_replicas_in_sync)
        sources[part] = source_of(data, (), seed, transform, features, label)
        return tf.zeros([])

    strategy.experimental_distribute_values_from_function(open_one)
    return sources
