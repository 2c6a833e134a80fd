"""Poisson-sampled batches of a data set that fits in memory."""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import PoissonSampling


def poisson_batches(
    data: Any,
    *,
    expected_batch_size: int,
    chunk_size: int | None = None,
    steps_per_epoch: int | None = None,
    seed: int | None = None,
    first_step: int = 0,
) -> tf.data.Dataset:
    """Batches in which each example is independently with probability q = B / N.

    Every element is `(x, y, mask)`: rows of `x` and `y`, padded with zeros to a fixed number of
    rows, and a boolean `mask` that says which rows are examples. Keras takes the mask as sample
    weights: masked rows have loss zero, and tfdp's optimizers give them no part in the update.
    (Keras leaves `metrics=[...]` unweighted: pass `weighted_metrics=[...]` to `model.compile`.)
    The number of rows is such that a batch exceeds it with probability at most 1e-16, which the
    privacy ledger charges to delta.

    Every iteration over the dataset (every epoch) draws new batches.

    The returned dataset has an attribute `sampling`, whose `optimizer_arguments()` tell an
    optimizer how its batches are sampled, and an attribute `source`, from which a model with a
    training loop of its own (`tfdp.SelectiveModel`) draws batches itself.

    Args:
      data: `(x, y)`, arrays or tensors, or nested tuples or dicts of them, with N rows each; or a
        finite `tf.data.Dataset` of single examples `(x, y)`, such as
        `tfds.load(..., as_supervised=True)`, which is read into memory.
      expected_batch_size: Expected number of examples in a batch, B <= N.
      chunk_size: Rows that are delivered at a time, when a whole batch does not fit in memory; one
        more in the first chunk of a batch, which shows where it begins. The
        optimizer's `gradient_accumulation_steps` chunks are then one batch. None: whole batches.
      steps_per_epoch: Batches per iteration over the dataset; by default N / B, rounded.
      seed: Makes the sampling reproducible, which is for tests and experiments: privacy
        amplification by sampling needs that nobody knows who was sampled. By default sampling
        comes from the operating system's entropy.
      first_step: With `seed`, the number of batches that an interrupted run has drawn already.

    Returns:
      A `tf.data.Dataset` with the attributes `sampling` (a
      `tfdp.accounting.sampling.PoissonSampling`) and `source` (a `PoissonSource`).

    Raises:
      ValueError: An argument is out of its range, or the data is not of one length.

    Example:
      >>> import numpy as np, tfdp
      >>> x, y = np.zeros([1000, 3], "float32"), np.zeros([1000], "int64")
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
      >>> batches.sampling.padded_batch_size
      116
    """
    x, y, dataset_size = _load(data)
    source = PoissonSource(x, y, dataset_size, seed)
    _check_integer("expected_batch_size", expected_batch_size, 1, dataset_size)
    _check_integer("chunk_size", chunk_size, 1, None, optional=True)
    _check_integer("steps_per_epoch", steps_per_epoch, 1, None, optional=True)
    _check_integer("seed", seed, None, None, optional=True)
    _check_integer("first_step", first_step, 0, None)
    sampling = PoissonSampling(dataset_size, expected_batch_size)
    rows, chunks = sampling.padded_batch_size, 1
    if chunk_size is not None and chunk_size < rows:
        chunks = -(-(rows - 1) // chunk_size)
        rows = chunks * chunk_size + 1
        sampling = PoissonSampling(dataset_size, expected_batch_size, chunks)
    if steps_per_epoch is None:
        steps_per_epoch = max(1, round(dataset_size / expected_batch_size))

    key = np.frombuffer(os.urandom(16), np.int64) if seed is None else np.array([seed, 0])
    key = tf.constant(key, tf.int64)
    # A variable, so that the next epoch goes on where the last one stopped.
    step = tf.Variable(first_step, dtype=tf.int64, trainable=False)

    def draw(_: tf.Tensor) -> tf.Tensor:
        step_key = tf.random.experimental.stateless_fold_in(key, step.assign_add(1))
        return sample_indices(step_key, dataset_size, sampling.sampling_probability, rows)

    batches = tf.data.Dataset.range(steps_per_epoch).map(draw)
    if chunks > 1:
        batches = batches.flat_map(lambda indices: _cut(indices, chunks))
    batches = batches.map(source.rows, num_parallel_calls=tf.data.AUTOTUNE)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps_per_epoch * chunks))
    batches = batches.prefetch(2)
    batches.sampling, batches.source = sampling, source
    return batches


@dataclasses.dataclass(frozen=True)
class PoissonSource:
    """A data set in memory, of which Poisson batches can be drawn, also inside of a graph.

    Attributes:
      x: Inputs: a tensor, or nested tuples or dicts of them, with `dataset_size` rows each.
      y: Targets, likewise.
      dataset_size: Number of examples N.
      seed: What was given to `poisson_batches`.
      uses: Counts those who draw from it, so that no two of them draw the same.
    """

    x: Any
    y: Any
    dataset_size: int
    seed: int | None
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def draw(self, key: tf.Tensor, expected_batch_size: int) -> tuple[Any, Any, tf.Tensor]:
        """A Poisson batch `(x, y, mask)`, padded as those of `poisson_batches`.

        Args:
          key: Seed of this draw, int64 `[2]`, used for nothing else.
          expected_batch_size: Expected number of examples in the batch, B <= N.
        """
        sampling = PoissonSampling(self.dataset_size, expected_batch_size)
        q, rows = sampling.sampling_probability, sampling.padded_batch_size
        return self.rows(sample_indices(key, self.dataset_size, q, rows))

    def rows(self, indices: tf.Tensor) -> tuple[Any, Any, tf.Tensor]:
        """The examples with these indices; zeros, masked, for indices from `dataset_size` on."""
        mask = indices < self.dataset_size
        safe = tf.where(mask, indices, 0)

        def rows_of(values: tf.Tensor) -> tf.Tensor:
            taken = tf.gather(values, safe)
            keep = tf.reshape(mask, [-1] + [1] * (taken.shape.rank - 1))
            return tf.where(keep, taken, tf.zeros([], taken.dtype))

        return (*_open(tf.nest.map_structure(rows_of, (self.x, self.y))), _open(mask))


def sample_indices(
    key: tf.Tensor, dataset_size: int, sampling_probability: float, rows: int
) -> tf.Tensor:
    """A Poisson sample of `range(dataset_size)`, in increasing order.

    The distances between successive sampled indices are independent and geometric, so that the
    work is that of a batch, not of the data set.

    Args:
      key: Seed of this draw, int64 `[2]`.
      dataset_size: Number of examples N.
      sampling_probability: Probability of each to be sampled, in (0, 1].
      rows: Length of the result.

    Returns:
      Indices, int64 `[rows]`: those of the sample, then values of at least `dataset_size`. A
      sample of more than `rows` is cut off.
    """
    # In (0, 1], in float64: the smallest positive value, 2^-53, decides how far a gap can reach.
    uniform = 1 - tf.random.stateless_uniform([rows], key, dtype=tf.float64)
    log_miss = np.log1p(-sampling_probability) if sampling_probability < 1 else -np.inf
    misses = tf.floor(tf.math.log(uniform) / log_miss)
    gaps = 1 + tf.cast(tf.minimum(misses, dataset_size), tf.int64)
    return tf.cumsum(gaps) - 1


def _load(data: Any) -> tuple[Any, Any, int]:
    """The data set as tensors in memory, and its number of examples."""
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "Argument `data` must be a finite dataset of single examples. Received an "
                f"infinite one: {data}."
            )
        examples = list(data.as_numpy_iterator())
        if not examples or not isinstance(examples[0], tuple) or len(examples[0]) != 2:
            raise ValueError(
                "Argument `data` must be a dataset of examples (x, y), as "
                "`tfds.load(..., as_supervised=True)` gives them. Received elements: "
                f"{data.element_spec}."
            )
        try:
            data = tf.nest.map_structure(lambda *values: np.stack(values), *examples)
        except ValueError as error:
            raise ValueError(
                "Argument `data` must hold examples of one shape. Received elements: "
                f"{data.element_spec}."
            ) from error
    if not (isinstance(data, (tuple, list)) and len(data) == 2):
        raise ValueError(
            "Argument `data` must be a pair (x, y) or a tf.data.Dataset of such examples. "
            f"Received: {type(data).__name__}"
            + (f" of length {len(data)}." if isinstance(data, (tuple, list)) else ".")
        )
    with tf.device("cpu"):
        x, y = (tf.nest.map_structure(tf.convert_to_tensor, part) for part in data)
    shapes = [tensor.shape for tensor in tf.nest.flatten((x, y))]
    lengths = {shape[0] if shape.rank else None for shape in shapes}
    if len(lengths) != 1 or not (length := lengths.pop()):
        raise ValueError(
            "Argument `data` must hold arrays whose first dimension is the example, all of one "
            f"positive length. Received shapes: {[tuple(shape) for shape in shapes]}."
        )
    return x, y, length


def _cut(indices: tf.Tensor, chunks: int) -> tf.data.Dataset:
    """Chunks of a batch; the first has one row more, so that it is seen where a batch begins."""
    first = (indices.shape[0] - 1) // chunks + 1
    others = tf.reshape(indices[first:], [chunks - 1, first - 1])
    whole = tf.data.Dataset.from_tensors(indices[:first])
    return whole.concatenate(tf.data.Dataset.from_tensor_slices(others))


def _open(tensors: Any) -> Any:
    """Leaves the first dimension open in the graph: a model must work for any number of rows."""

    def open_one(tensor: tf.Tensor) -> tf.Tensor:
        return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])

    return tf.nest.map_structure(open_one, tensors)


def _check_integer(
    name: str, value: Any, lowest: int | None, highest: int | None, optional: bool = False
) -> None:
    if value is None and optional:
        return
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if (
        not is_integer
        or (lowest is not None and value < lowest)
        or (highest is not None and value > highest)
    ):
        bounds = "" if lowest is None else f" of at least {lowest}"
        bounds += "" if highest is None else f" and at most {highest}, the number of examples"
        raise ValueError(
            f"Argument `{name}` must be an integer{bounds}{' or None' if optional else ''}. "
            f"Received: {name}={value!r}."
        )
