"""Poisson-sampled batches of a data set."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import (
    BUCKETS,
    EXAMPLE,
    FULL,
    NONE,
    PADDED_TRUNCATION_PROBABILITY,
    TRUNCATION_PROBABILITY,
    USER,
    PoissonSampling,
    padded_batch_size,
)
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.tf.autotuning import without_autotuning
from tfdp.base.validation import boolean, error, integer
from tfdp.data import draw_record
from tfdp.data.batches import PoissonBatches
from tfdp.data.checks import arrays_of, check_data, number_of_rows
from tfdp.data.columns import Features, chosen
from tfdp.data.cycle import Cycle, RedrawnCycle, Sets
from tfdp.data.elements import check_padding, has_labels, parts_of
from tfdp.data.source import PoissonSource, Rows, in_variables
from tfdp.data.stored import stored
from tfdp.data.transforms import Transform
from tfdp.data.users import Users

_sources = itertools.count()
# More rows of one example than fit in any memory, or in an int32.
_MOST_AUGMENTATIONS = 10**6
MOST_STEPS = 2**52


def poisson_batches(
    data: Any,
    *others: Any,
    expected_batch_size: int | None = None,
    chunk_size: int | None = None,
    steps_per_epoch: int | None = None,
    transform: Callable[..., Any] | None = None,
    padding: str = NONE,
    seed: int | None = None,
    first_step: int = 0,
    features: Features = None,
    label: str | None = None,
    privacy_unit: Any = None,
    examples_per_user: int | None = None,
    augmentations: int = 1,
    cycle_length: int = 1,
    redraw_sets: bool = False,
    max_truncation_probability: float | None = None,
) -> PoissonBatches:
    """Returns batches that contain each example independently, with probability q = B / N.

    Every element has the structure of the data, `(x, y)`, `(x, y, sample_weight)`, `x` or `(x,)`,
    with one row for each example that was drawn. So a training step gets what it would get from
    `fit` on a `tf.data.Dataset` of the same structure. The number of rows varies from batch to
    batch. (It is capped at a number that is exceeded with a tiny probability; the privacy ledger
    charges that to delta.)

    Functions that XLA compiles need fixed shapes: see `padding`. Every element is then `(x, y,
    weights)`, and Keras takes the weights as sample weights. Rows of padding have weight zero, and
    tfdp's optimizers ignore them. (Keras leaves `metrics=[...]` unweighted: pass
    `weighted_metrics=[...]` to `model.compile`.)

    Every iteration over the dataset (every epoch) draws new batches. An optimizer with
    `sampling=batches.sampling` accepts each draw once, as it was drawn. Batches that are cached,
    used again or changed on the way are refused. (In functions compiled by XLA, they are counted as
    steps for which no epsilon holds.)

    Args:
      data: `(x, y)` or `(x, y, sample_weight)`: arrays, tensors or data frames, or nested tuples or
        dicts of them, with N rows each. (In it, a list of arrays is several inputs, as in Keras.)
        Without labels: `x`, an array or a dict of arrays, or `(x,)`; several inputs in a tuple are
        `((a, b),)`. A weight multiplies the loss of its example, before the example's gradient is
        clipped; each output of a model can have weights of its own. Of memory-mapped arrays, HDF5
        and Zarr, only the rows of a batch are read. The same holds for random-access sources: what
        `tfdp.data.read_examples` opens, and any object with `__len__` and `__getitem__(i)` (or
        `__getitems__(list)`) that returns such examples. Threads call `__getitem__` at each draw;
        Python code that decodes or crops belongs there. Its random numbers come by an argument
        `rng` (or `rngs`), a `np.random.Generator` for each row. A finite `tf.data.Dataset` of
        single examples, such as `tfds.load(..., as_supervised=True)`, is read into memory.
      *others: Must be empty: `(x, y)` is one argument.
      expected_batch_size: Expected number of examples in a batch, B <= N. None: 256, or N / 10 if
        that is less. (N is public: the guarantee is for zero-out, which does not change it.)
      chunk_size: Rows that are delivered at a time, if a whole batch does not fit in memory.
        `sampling.gradient_accumulation_steps` chunks then make one batch. None: whole batches.
      steps_per_epoch: Batches per iteration over the dataset; by default N / B, rounded.
      transform: Function of one example, `(x, y)` without a batch dimension, that returns the
        example to train on: decoding, cropping, augmentation. It consists of TensorFlow operations
        without side effects or states, is traced once, and runs anew for each draw. Its random
        numbers are secret, for each row its own, whatever their seeds are. Of examples without
        labels it is a function of `x` alone, which returns another `x`, or a pair `(x, y)`: then
        batches have these labels. None: examples as they are.
      padding: "none"; "buckets", for `jit_compile=True` and for GPUs: batches have one of a few
        sizes, `sampling.bucket_sizes`, and XLA compiles the step once for each; or "full": all
        batches have one size, and the examples stand at random places. "full" is for models whose
        random layers cannot be given secret keys (an error says so). Data without labels cannot be
        padded: Keras takes weights after labels alone.
      seed: Makes the sampling reproducible, for tests and experiments only: privacy amplification
        requires a secret sample. By default sampling uses the operating system's entropy.
      first_step: With `seed`, the number of batches that an interrupted run has already drawn.
      features: For examples that are dicts (data sources of TFDS, Hugging Face's data sets,
        `tfds.load` without `as_supervised`, a dict of arrays): the name of the input; or a list of
        names, which gives the model a dict of inputs.
      label: For examples that are dicts: the name of the target; None: they have no labels.
      privacy_unit: For user-level privacy, the user of each example: an integer or a string for
        each, `[examples]`, in the order of `data`. Users are then sampled in place of examples, N
        and B count users, and neighboring data sets differ in all examples of one user. Elements
        are `(x, y, weights)`; without labels, as the data. None: each example is a unit of its
        own.
      examples_per_user: With `privacy_unit`, the number of examples that a draw takes of a user, at
        most; a uniformly random choice, anew for each draw. 1 for data without labels. The gradient
        of their mean loss is clipped. Every user has as many rows in a batch, so that a large
        number costs time.
      augmentations: Rows that each example has in a batch, next to each other. `transform`, and the
        random layers of the model, treat each of them anew; the gradient of their mean loss is
        clipped, so that they cost no more privacy than one (augmentation multiplicity: De et al.,
        2022, https://arxiv.org/abs/2204.13650, section 3.2).
      cycle_length: Steps c, at most N / B, in which each example has one chance to be sampled. With
        c > 1 each example is in one of c sets, at random, from which batches are sampled in turns,
        with q = c B / N. For noise that is correlated from step to step: `tfdp.BandedNoise`. With
        c = N / B each step takes the whole of a set, and nothing is sampled: `tfdp.BufferedNoise`.
      redraw_sets: With `cycle_length`, whether each cycle draws new sets, for independent noise:
        epochs by random allocation, which cost less than Poisson batches: see
        docs/random_allocation.md. False: the sets stay, as correlated noise requires.
      max_truncation_probability: With padding, the largest probability that a batch has more
        examples than rows, and is cut off; a power of ten from 1e-80 to 1e-6. The ledger charges it
        to delta: see docs/accounting.md. A larger one saves rows: with 256 of 60,000 examples,
        batches with `padding="full"` have 408 rows at 1e-18, and 376 at 1e-12. None: 1e-18.

    Returns:
      A `tf.data.Dataset` that cannot be mapped, cached or shuffled; see `PoissonBatches`.

    Raises:
      ValueError: An argument is out of its range, or the arrays have different lengths.
      TypeError: `x` and `y` are two arguments.

    Example:
      >>> import numpy as np, tfdp
      >>> x, y = np.zeros([1000, 3], "float32"), np.zeros([1000], "int64")
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
      >>> batches.element_spec[0]
      TensorSpec(shape=(None, 3), dtype=tf.float32, name=None)
      >>> tfdp.data.poisson_batches(x, expected_batch_size=50).element_spec  # Without labels.
      TensorSpec(shape=(None, 3), dtype=tf.float32, name=None)
    """
    integer("augmentations", augmentations, 1, _MOST_AUGMENTATIONS)
    source = source_of(data, others, seed, transform, features, label)
    source = _of_units(source, data, privacy_unit, examples_per_user, augmentations)
    dataset_size = source.dataset_size
    if expected_batch_size is None:
        expected_batch_size = default_batch_size(dataset_size)
    check_integer("expected_batch_size", expected_batch_size, 1, dataset_size)
    integer("steps_per_epoch", steps_per_epoch, 1, MOST_STEPS, optional=True)
    check_integer("seed", seed, None, None, optional=True)
    integer("first_step", first_step, 0, MOST_STEPS)
    boolean("redraw_sets", redraw_sets)
    if redraw_sets and cycle_length == 1:
        raise error("redraw_sets", "False with cycle_length=1", redraw_sets)
    check_padding(padding, chunk_size, source.element_spec)
    truncation = truncation_of(padding, max_truncation_probability)
    sampling = PoissonSampling(
        dataset_size,
        expected_batch_size,
        padding=padding,
        rows_per_example=source.rows_per_example,
        unit=EXAMPLE if source.users is None else USER,
        cycle_length=cycle_length,
        redraws_sets=redraw_sets,
        max_truncation_probability=truncation,
    )
    if sampling.cycle_length > 1:
        size, length = dataset_size, sampling.cycle_length
        cycle = RedrawnCycle(size, length) if redraw_sets else Cycle(size, length, seed)
        source = dataclasses.replace(source, cycle=cycle)
    check_integer("chunk_size", chunk_size, source.rows_per_example, None, optional=True)
    if chunk_size is not None:
        sampling = sampling_in_chunks(sampling, chunk_size)
    if steps_per_epoch is None:
        steps_per_epoch = max(1, round(dataset_size / expected_batch_size))
    return _made_of(source, sampling, steps_per_epoch, seed, first_step)


def in_chunks(batches: PoissonBatches, chunk_size: int) -> PoissonBatches:
    """Returns batches of the same data in chunks, drawn anew.

    Args:
      batches: Batches that are whole, made without `seed`.
      chunk_size: See `poisson_batches`.
    """
    sampling = sampling_in_chunks(batches.sampling, chunk_size)
    return _made_of(batches.source, sampling, int(batches.cardinality()))


def of_batch_size(
    batches: PoissonBatches, expected_batch_size: int, chunk_size: int | None = None
) -> PoissonBatches:
    """Returns batches of the same data with another expected size, drawn anew.

    Args:
      batches: Batches that were made without `seed`, `steps_per_epoch` and `cycle_length`.
      expected_batch_size: See `poisson_batches`.
      chunk_size: See `poisson_batches`.
    """
    sampling = dataclasses.replace(
        batches.sampling, expected_batch_size=expected_batch_size, gradient_accumulation_steps=1
    )
    if chunk_size is not None:
        sampling = sampling_in_chunks(sampling, chunk_size)
    steps_per_epoch = max(1, round(sampling.dataset_size / expected_batch_size))
    return _made_of(batches.source, sampling, steps_per_epoch)


def in_epochs(batches: PoissonBatches) -> PoissonBatches:
    """Returns epochs of the same data, of which each example is in one batch, drawn anew.

    See `redraw_sets` of `poisson_batches`; the steps of an epoch are N / B, rounded down.

    Args:
      batches: Batches that are whole, made without `seed` and `cycle_length`.

    Raises:
      ValueError: An epoch has one step only.
    """
    size, expected = batches.sampling.dataset_size, batches.sampling.expected_batch_size
    length = size // expected
    if length < 2:
        requirement = f"at most {size // 2}, half of the {size} units, with sampling='epochs'"
        raise error("batch_size", requirement, expected)
    sampling = dataclasses.replace(batches.sampling, cycle_length=length, redraws_sets=True)
    source = dataclasses.replace(batches.source, cycle=RedrawnCycle(size, length))
    return _made_of(source, sampling, length)


def sampling_in_chunks(sampling: PoissonSampling, chunk_size: int) -> PoissonSampling:
    """Returns the sampling of batches that come in chunks; those of a GPU have one size then.

    Args:
      sampling: The sampling of whole batches.
      chunk_size: See `poisson_batches`.
    """
    # Without padding a batch may be larger still, and so its chunks: with a probability of 1e-30.
    truncation = sampling.max_truncation_probability
    if sampling.padding == NONE:
        truncation = TRUNCATION_PROBABILITY
    most = padded_batch_size(sampling.dataset_size, sampling.expected_batch_size, truncation)
    chunks = -(-most // (chunk_size // sampling.rows_per_example))
    padding = FULL if sampling.padding == BUCKETS else sampling.padding
    return dataclasses.replace(sampling, gradient_accumulation_steps=chunks, padding=padding)


def truncation_of(padding: str, max_truncation_probability: float | None) -> float:
    """Returns the largest truncation probability of padded batches: see `poisson_batches`.

    Raises:
      ValueError: It is given without padding.
    """
    if max_truncation_probability is None:
        return PADDED_TRUNCATION_PROBABILITY
    if padding == NONE:
        raise error(
            "max_truncation_probability",
            'None with padding="none", which cuts no batch off but with probability 1e-80',
            max_truncation_probability,
        )
    return max_truncation_probability


def _made_of(
    source: PoissonSource,
    sampling: PoissonSampling,
    steps_per_epoch: int,
    seed: int | None = None,
    first_step: int = 0,
) -> PoissonBatches:
    with tf.device("cpu"):
        keys = KeyStream(seed, "batches", first_step)

    def make(source: PoissonSource) -> PoissonBatches:
        batches = drawn_batches(source, sampling, keys, steps_per_epoch).prefetch(2)
        return PoissonBatches(batches, sampling, source, make)

    return make(source)


def default_batch_size(dataset_size: int) -> int:
    """Returns the expected batch size where none is given: 256, or N / 10 if that is less.

    Args:
      dataset_size: Number of examples, N: a public number, as it is under zero-out.

    Example:
      >>> [default_batch_size(size) for size in (60000, 200, 3)]
      [256, 20, 1]
    """
    return max(1, min(256, dataset_size // 10))


def _of_units(
    source: PoissonSource,
    data: Any,
    privacy_unit: Any,
    examples_per_user: int | None,
    augmentations: int,
) -> PoissonSource:
    """Returns the data set, of which users are sampled or examples have several rows."""
    if privacy_unit is None:
        if examples_per_user is not None:
            raise error("examples_per_user", "None without `privacy_unit`", examples_per_user)
        return dataclasses.replace(source, augmentations=augmentations)
    if isinstance(data, tf.data.Dataset):
        raise ValueError(
            "Argument `data` must be arrays or a random-access source with `privacy_unit`, in an "
            "order that is fixed. Received a tf.data.Dataset, whose order may be another each time."
        )
    users = Users.of(privacy_unit, examples_per_user, source.examples)
    if users.most > 1 and not has_labels(source.element_spec):
        raise ValueError(
            "Argument `examples_per_user` must be 1 for data without labels: the rows of a user "
            "with fewer examples have weight zero, and Keras takes weights after labels alone, "
            f"(x, y, sample_weight). Received: {examples_per_user=}, and examples "
            f"{source.element_spec}. Give the data any y, such as (x, x)."
        )
    return dataclasses.replace(source, augmentations=augmentations, users=users)


def source_of(
    data: Any,
    others: tuple,
    seed: int | None,
    transform: Any,
    features: Features = None,
    label: str | None = None,
) -> PoissonSource:
    """Returns what `poisson_batches` draws from; see there for its arguments and errors."""
    check_data(data, others)
    data = chosen(data, features, label)
    if not isinstance(data, tf.data.Dataset):
        data = arrays_of(data)
    examples = stored(data)
    if examples is None:
        source = PoissonSource(*_load(data), seed)
    else:
        for weight in tf.nest.flatten(parts_of(examples.element_spec)[2:]):
            _check_weights(weight)
        source = PoissonSource(None, len(examples), seed, stored=examples)
    if transform is not None:
        example = parts_of(source.given_spec)[:2]
        source = dataclasses.replace(source, transform=Transform(transform, *example))
    check_real(source.element_spec)
    return source


def check_real(spec: Any) -> None:
    """Refuses complex numbers, of which losses and norms of gradients are not defined."""
    for part in tf.nest.flatten(spec):
        if part.dtype.is_complex:
            raise ValueError(
                "Argument `data` must hold real numbers. Received: numbers of type "
                f"{part.dtype.name}. Give real and imaginary parts as two numbers, such as "
                "`np.stack([x.real, x.imag], -1)`, or let `transform` make real ones."
            )


def drawn_batches(
    source: PoissonSource, sampling: PoissonSampling, keys: KeyStream, steps: int, part: int = 0
) -> tf.data.Dataset:
    """Returns batches that are drawn from a source when they are asked for, each entered as a draw.

    Args:
      source: The data set, or one part of it.
      sampling: The sampling.
      keys: Gives every draw its key.
      steps: Batches in one iteration.
      part: Index of the part that the source is.
    """
    chunks, padded = sampling.gradient_accumulation_steps, sampling.padding != NONE
    own_number, each = next(_sources), source.rows_per_example
    draw_record.RECORD.prepare(len(tf.nest.flatten(source.element_spec)) + 2)

    def draw(key: tf.Tensor, sets: Sets | None = None) -> tuple:
        rows = source.draw_rows(key, sampling, sets)._asdict()
        rows = {name: values for name, values in rows.items() if values is not None}
        return tf.stack([draw_record.RECORD.number(), key[-1]]), rows

    def draw_in_turn(cycle: RedrawnCycle, last: Sets, _: tf.Tensor) -> tuple:
        key = keys.next_key()
        sets = cycle.sets_of(key, last)
        return sets, draw(key, sets)

    def in_chunks(numbers: tf.Tensor, rows: dict[str, tf.Tensor]) -> tf.data.Dataset:
        if chunks == 1:
            return tf.data.Dataset.from_tensors((numbers, tf.constant(0, tf.int64), rows))
        units = tf.size(rows["indices"], tf.int64) // each
        ends = tf.range(chunks + 1, dtype=tf.int64) * units // chunks * each
        return tf.data.Dataset.range(chunks).map(
            lambda i: (numbers, i, {n: t[ends[i] : ends[i + 1]] for n, t in rows.items()})
        )

    def deliver(numbers: tf.Tensor, chunk: tf.Tensor, rows: dict[str, tf.Tensor]) -> tuple:
        batch = source.rows(Rows(**rows), padded=padded)
        tensors, mask = (batch[:-1], batch[-1]) if padded else (batch, None)
        flat, size = tf.nest.flatten(tensors), tf.size(rows["indices"])
        number, sequence = tf.unstack(numbers)
        entered = draw_record.RECORD.enter(
            sampling, own_number, number, chunk, mask, flat, size, part, sequence
        )
        with tf.control_dependencies([entered]):
            return tf.nest.map_structure(tf.identity, batch)

    batches = tf.data.Dataset.range(steps)
    if isinstance(source.cycle, RedrawnCycle):
        in_turn = functools.partial(draw_in_turn, source.cycle)
        batches = batches.scan(source.cycle.no_sets, in_turn).flat_map(in_chunks)
    else:
        batches = batches.flat_map(lambda _: in_chunks(*draw(keys.next_key())))
    batches = batches.map(deliver, num_parallel_calls=tf.data.AUTOTUNE)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps * chunks))
    return without_autotuning(batches)


def _load(data: Any) -> tuple[Any, int]:
    """Loads the data set into memory, in its structure, and counts its examples."""
    if isinstance(data, tf.data.Dataset):
        data = _read(data)
    is_array = isinstance(data, (np.ndarray, dict)) or tf.is_tensor(data)
    if not is_array and not (isinstance(data, tuple) and 1 <= len(data) <= 3):
        raise ValueError(
            "Argument `data` must be a pair (x, y), or (x, y, sample_weight), or x alone: arrays; "
            f"or a tf.data.Dataset of such examples. Received: {type(data).__name__}"
            f"{f' of length {len(data)}' if isinstance(data, (tuple, list)) else ''}."
            f"{_advice(data)}"
        )
    with tf.device("cpu"):
        data = tf.nest.map_structure(tf.convert_to_tensor, data)
        if isinstance(data, tuple):
            data = (*data[:2], *tf.nest.map_structure(_weights, data[2:]))
    return in_variables(data), number_of_rows(data)


def _advice(data: Any) -> str:
    """Says what to do with data of another kind."""
    if hasattr(data, "__next__"):
        return (
            " If it gives single examples, a finite number of them, make a dataset of it: "
            "`tf.data.Dataset.from_generator`."
        )
    if isinstance(data, (list, tuple)):
        return (
            " A list is no array: use `np.array(...)`, after `tf.keras.utils.pad_sequences` where "
            "rows differ in length; of a list of examples, stack each part."
        )
    return ""


def _read(data: tf.data.Dataset) -> Any:
    """Reads a data set of single examples into memory."""
    if not 1 <= len(parts_of(data.element_spec)) <= 3:
        raise ValueError(
            "Argument `data` must be a dataset of examples (x, y), as "
            "`tfds.load(..., as_supervised=True)` gives them, or (x, y, sample_weight), or x "
            f"alone. Received elements: {data.element_spec}."
        )
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(data.element_spec)):
        raise ValueError(
            "Argument `data` must have examples of dense tensors, none of them None. Received "
            f"elements: {data.element_spec}: `map` them, such as by `tf.sparse.to_dense`, or leave "
            "out what is None."
        )
    examples = list(_as_far_as_memory(data))
    if not examples:
        raise ValueError(f"Argument `data` must have examples. Received an empty dataset: {data}.")
    try:
        return tf.nest.map_structure(lambda *values: np.stack(values), *examples)
    except ValueError as error:
        raise ValueError(
            "Argument `data` must hold examples of one shape. Received elements: "
            f"{data.element_spec}. Where they are batches, call `unbatch()`; where examples have "
            "several sizes, `map` them to one before, by padding, cropping or resizing."
        ) from error


def _as_far_as_memory(data: tf.data.Dataset) -> Iterator[Any]:
    """Yields the examples of a data set that is not too large for memory."""
    size, most = 0, _available_bytes() // 3  # They are copied once.
    for example in data.as_numpy_iterator():
        size += sum(np.asarray(value).nbytes for value in tf.nest.flatten(example))
        if size > most:
            raise ValueError(
                "Argument `data` must fit in memory if it is a tf.data.Dataset, of which single "
                f"examples cannot be read. Received one of more than {size / 2**30:.1f} GiB, a "
                "third of what is free. Write it once, with `tfdp.data.write_examples(dataset, "
                "folder)`, and give `tfdp.data.read_examples(folder)`."
            )
        yield example


def _available_bytes() -> int:
    """Returns the available memory; where the system does not tell, an unlimited amount."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63


def _weights(given: Any) -> tf.Tensor:
    """Returns the weights of the examples, as numbers that losses are multiplied by."""
    _check_weights(given)
    return tf.cast(given, tf.float32)


def _check_weights(given: Any) -> None:
    """Raises an error unless weights, or their spec, are one array of numbers, or bools."""
    dtype = getattr(given, "dtype", None)
    is_number = isinstance(dtype, tf.DType) and (dtype.is_floating or dtype.is_integer)
    if not is_number and dtype != tf.bool:
        raise ValueError(
            "Argument `data` must hold an array of numbers as its third part, the weights of the "
            "examples or of their tokens (or one for each output of the model). Received: "
            f"{given!r}."
        )


def check_integer(
    name: str, value: Any, lowest: int | None, highest: int | None, optional: bool = False
) -> None:
    """Raises a ValueError unless an argument is an integer in its range, or an allowed None."""
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
        raise error(name, f"an integer{bounds}{' or None' if optional else ''}", value)
