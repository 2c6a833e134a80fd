"""Poisson-sampled batches of a data set that fits in memory."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp import _draws
from tfdp._streams import KeyStream
from tfdp.accounting.sampling import PoissonSampling
from tfdp.clipping import isolation
from tfdp.data.batches import PoissonBatches
from tfdp.data.checks import check_data
from tfdp.data.source import PoissonSource, sample_places

_sources = itertools.count()


def poisson_batches(
    data: Any,
    *others: Any,
    expected_batch_size: int,
    chunk_size: int | None = None,
    steps_per_epoch: int | None = None,
    transform: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    seed: int | None = None,
    first_step: int = 0,
) -> PoissonBatches:
    """Returns batches in which each example is independently with probability q = B / N.

    Every element is `(x, y, mask)`: rows of `x` and `y`, padded with zeros to a fixed number of
    rows, and a boolean `mask` that says which rows are examples. Keras takes the mask as sample
    weights: masked rows have loss zero, and tfdp's optimizers give them no part in the update.
    (Keras leaves `metrics=[...]` unweighted: pass `weighted_metrics=[...]` to `model.compile`.)
    The number of rows is such that a batch exceeds it with probability at most 1e-30, which the
    privacy ledger charges to delta.

    The examples stand at random places among the padding: see `sample_places`.

    Every iteration over the dataset (every epoch) draws new batches. An optimizer that is given
    `sampling=batches.sampling` accepts each draw once, as it was drawn: batches that are cached,
    used again or changed on the way are refused (in functions compiled by XLA: counted as steps
    for which no epsilon holds).

    Args:
      data: `(x, y)`, arrays or tensors, or nested tuples or dicts of them, with N rows each; or a
        finite `tf.data.Dataset` of single examples `(x, y)`, such as
        `tfds.load(..., as_supervised=True)`, which is read into memory.
      *others: None: `(x, y)` is one argument.
      expected_batch_size: Expected number of examples in a batch, B <= N.
      chunk_size: Rows that are delivered at a time, when a whole batch does not fit in memory.
        `sampling.gradient_accumulation_steps` chunks are then one batch. None: whole batches.
      steps_per_epoch: Batches per iteration over the dataset; by default N / B, rounded.
      transform: Function of one example, `(x, y)` without a batch dimension, that returns the
        example to train on: decoding, cropping, augmentation. TensorFlow operations, traced once;
        called anew for each draw; without side effects. None: examples as they are.
      seed: Makes the sampling reproducible, which is for tests and experiments: privacy
        amplification by sampling needs that nobody knows who was sampled. By default sampling
        comes from the operating system's entropy.
      first_step: With `seed`, the number of batches that an interrupted run has drawn already.

    Returns:
      A `tf.data.Dataset` that cannot be mapped, cached or shuffled; see `PoissonBatches`.

    Raises:
      ValueError: An argument is out of its range, or the data is not of one length.
      TypeError: `x` and `y` are two arguments.

    Example:
      >>> import numpy as np, tfdp
      >>> x, y = np.zeros([1000, 3], "float32"), np.zeros([1000], "int64")
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
      >>> batches.sampling.padded_batch_size
      146
    """
    check_data(data, others)
    x, y, dataset_size = _load(data)
    if transform is not None:
        _check_transform(transform, x, y)
    source = PoissonSource(x, y, dataset_size, seed, transform)
    _check_integer("expected_batch_size", expected_batch_size, 1, dataset_size)
    _check_integer("chunk_size", chunk_size, 1, None, optional=True)
    _check_integer("steps_per_epoch", steps_per_epoch, 1, None, optional=True)
    _check_integer("seed", seed, None, None, optional=True)
    _check_integer("first_step", first_step, 0, None)
    sampling = PoissonSampling(dataset_size, expected_batch_size)
    rows, chunks = sampling.padded_batch_size, 1
    if chunk_size is not None and chunk_size < rows:
        chunks = -(-rows // chunk_size)
        rows = chunks * chunk_size
        sampling = PoissonSampling(dataset_size, expected_batch_size, chunks)
    if steps_per_epoch is None:
        steps_per_epoch = max(1, round(dataset_size / expected_batch_size))
    with tf.device("cpu"):
        keys = KeyStream(seed, "batches", first_step)
    own_number = next(_sources)
    _draws.RECORD.prepare(len(tf.nest.flatten((x, y))) + 1)

    def draw(_: tf.Tensor) -> tf.data.Dataset:
        q = sampling.sampling_probability
        places = sample_places(keys.next_key(), dataset_size, q, rows)
        number = tf.fill([chunks], _draws.RECORD.number())
        parts = (number, tf.range(chunks), tf.reshape(places, [chunks, rows // chunks]))
        return tf.data.Dataset.from_tensor_slices(parts)

    def deliver(number: tf.Tensor, chunk: tf.Tensor, places: tf.Tensor) -> tuple:
        batch = source.rows(places)
        entered = _draws.RECORD.enter(
            sampling, own_number, number, chunk, batch[-1], tf.nest.flatten(batch[:-1])
        )
        with tf.control_dependencies([entered]):
            return tf.nest.map_structure(tf.identity, batch)

    batches = tf.data.Dataset.range(steps_per_epoch).flat_map(draw)
    batches = batches.map(deliver, num_parallel_calls=tf.data.AUTOTUNE)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps_per_epoch * chunks))
    return PoissonBatches(batches.prefetch(2), sampling, source)


def _check_transform(transform: Any, x: Any, y: Any) -> None:
    """Refuses functions by which examples could get into each other."""
    if not callable(transform):
        raise ValueError(
            "Argument `transform` must be a function of one example, (x, y) -> (x, y), or None. "
            f"Received: transform={transform!r}."
        )
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), (x, y))
    outputs = isolation.trace("transform", transform, specs).structured_outputs
    if not (isinstance(outputs, tuple) and len(outputs) == 2):
        raise ValueError(
            "Argument `transform` must return a pair (x, y). Received a function that returns: "
            f"{outputs!r}."
        )
    for tensor in tf.nest.flatten(outputs):
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                "Argument `transform` must return tensors of fixed shapes, which a batch can hold. "
                f"Received a function that returns a tensor of shape {tensor.shape}: fix it with "
                "`tf.ensure_shape` or `tf.image.resize`."
            )


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
