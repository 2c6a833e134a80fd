"""Tasks of KerasHub, whose preprocessor makes of a text or an image what the model takes.

Nothing of KerasHub is imported: tasks are recognized by the class that they inherit.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp.base.user_warnings import said_by_keras
from tfdp.data.checks import arrays_of, check_data, is_source, is_stored, number_of_rows
from tfdp.data.columns import Features, chosen
from tfdp.data.elements import parts_of
from tfdp.data.transforms import UntraceableError, keyed_rows

_ROWS = 256  # Examples that are stacked at a time.
_IMAGE_BYTES = 2**30  # Most bytes of preprocessed images that are kept in memory.
_TRIED_AGAIN = 8  # Examples that a preprocessor in Python gets again, and must treat alike.
# Arguments of preprocessors.
_LENGTHS = ("sequence_length", "encoder_sequence_length", "decoder_sequence_length")
_REMEDY = (
    "Give `make_private` the task and its texts or images, and train on the batches that it "
    "returns; or preprocess before: `x, y, *weights = task.preprocessor(texts)`, "
    "`task.preprocessor = None`, and `poisson_batches((x, y, *weights), ...)`. (Once a `transform` "
    "has applied it: `batches.preprocessor = task.preprocessor`.)"
)


class Prepared(NamedTuple):
    """Data of a task, for `poisson_batches`.

    Attributes:
      data: Preprocessed examples, or those that were given.
      transform: The transform that makes of them what the model takes; None if there is none.
    """

    data: Any
    transform: Callable[..., Any] | None


def is_task(model: Any) -> bool:
    """Returns whether a model is a task of KerasHub, with a preprocessor or without."""
    return any(
        kind.__module__.startswith("keras_hub.") and kind.__name__ == "PipelineModel"
        for kind in type(model).__mro__
    )


def preprocessor_of(model: Any) -> Any:
    """Returns the preprocessor of a task; None for other models, and where it has none."""
    return model.preprocessor if is_task(model) else None


def prepared(
    task: Any,
    data: Any,
    features: Features,
    label: str | None,
    transform: Callable[..., Any] | None,
    verbose: bool,
) -> Prepared:
    """Applies a task's preprocessor to each example, as its `fit` applies it to batches.

    An example's result depends on that example alone: it is preprocessed by itself, and what is
    drawn at random for it, such as the tokens that a language model must fill in, follows from a
    secret of its own. It is done once, and the results are kept in memory; but images that take
    more than 1 GiB are preprocessed whenever they are drawn.

    Args:
      task: A task of KerasHub that has a preprocessor.
      data: The argument `data` of `poisson_batches`: texts, images, or pairs of these and labels.
        What the preprocessor of texts returned before is taken as it is.
      features: See there.
      label: See there.
      transform: See there. It gets preprocessed examples.
      verbose: Whether to show a progress bar where the preprocessor runs in Python.

    Raises:
      ValueError: The data are none, or of another kind than the preprocessor takes; the results
        have several shapes, or are longer than the backbone's table of positions; or the
        preprocessor runs in Python, and draws random numbers or keeps a state.
    """
    check_data(data, ())
    data = chosen(data, features, label)
    if not isinstance(data, tf.data.Dataset):
        data = arrays_of(_stacked(data))
    if _is_preprocessed(task, _spec(data)):
        for name, spec in parts_of(_spec(data))[0].items():
            if name.endswith("token_ids") and spec.shape.rank:
                _check_length(task, f"Argument `data`: the length of `{name}`", spec.shape[0])
        return Prepared(data, transform)
    for name in _LENGTHS:
        length = getattr(task.preprocessor, name, None)
        _check_length(task, f"Argument `{name}` of the task's preprocessor", length)
    _check_kind(task.preprocessor, _spec(data))
    if not isinstance(data, tf.data.Dataset) and not is_source(data):
        number_of_rows(data)
    examples = data if isinstance(data, tf.data.Dataset) else _one_by_one(data)
    try:
        rows = keyed_rows(task.preprocess_samples, examples, _is_of_keras_hub(task))
        batches = rows.batch(_ROWS).as_numpy_iterator()
    except UntraceableError as error:
        batches = _in_python(task, examples, verbose, error)
    try:
        held = _within(_limit(task.preprocessor, data), batches)
    except (tf.errors.InvalidArgumentError, _ShapesError) as error:
        raise ValueError(
            "Argument `data` must become examples of one shape, which a batch can hold. Received a "
            f"{type(task.preprocessor).__name__} whose results have several: give it a "
            "`sequence_length`, or an `image_size`."
        ) from error
    if held is None:
        return Prepared(data, _after(task, transform))
    if not held:
        raise ValueError("Argument `data` must have examples. Received: none.")
    return Prepared(tf.nest.map_structure(lambda *parts: np.concatenate(parts), *held), transform)


def first_prepared(task: Any, data: Any) -> Any:
    """Returns the first two examples of arrays, as `prepared` makes them of all.

    Args:
      task: A task of KerasHub that has a preprocessor.
      data: Texts, images, or pairs of these and labels.

    Raises:
      ValueError: See `prepared`.
    """
    check_data(data, ())
    few = tf.nest.map_structure(lambda array: array[:2], arrays_of(_stacked(data)))
    return prepared(task, few, None, None, None, verbose=False).data


class _ShapesError(Exception):
    """Results have several shapes."""


def _spec(data: Any) -> Any:
    """Returns types and shapes of single examples."""
    if isinstance(data, tf.data.Dataset):
        return data.element_spec
    if is_source(data):
        return tf.nest.map_structure(_open, data[0])
    return tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape[1:], _type(a)), data)


def _open(value: Any) -> tf.TensorSpec:
    """Returns the type of a value of a source, whose examples may be images of several sizes."""
    array = np.asarray(value)
    return tf.TensorSpec([None] * (array.ndim - 1) + list(array.shape[-1:]), _type(array))


def _type(array: Any) -> tf.DType:
    is_text = isinstance(array, np.ndarray) and array.dtype.kind in "OSU"
    return tf.string if is_text else tf.as_dtype(array.dtype)


def _one_by_one(data: Any) -> tf.data.Dataset:
    """Returns the examples of arrays or of a source; what is on disk is read one by one."""
    if not is_source(data) and not any(map(is_stored, tf.nest.flatten(data))):
        return tf.data.Dataset.from_tensor_slices(data)
    size = len(data) if is_source(data) else len(tf.nest.flatten(data)[0])

    def read() -> Iterator[Any]:
        for index in range(size):
            yield (
                data[index]
                if is_source(data)
                else tf.nest.map_structure(lambda array, i=index: array[i], data)
            )

    examples = tf.data.Dataset.from_generator(read, output_signature=_spec(data))
    return examples.apply(tf.data.experimental.assert_cardinality(size))


def _is_preprocessed(task: Any, spec: Any) -> bool:
    """Returns whether examples are what a preprocessor of texts returns: named arrays of tokens."""
    inputs, known = parts_of(spec)[0], getattr(task, "input", None)
    if getattr(task.preprocessor, "tokenizer", None) is None:
        return False
    if not isinstance(inputs, dict) or not isinstance(known, dict) or set(inputs) != set(known):
        return False
    return not _has_texts(inputs)


def _has_texts(inputs: Any) -> bool:
    return any(spec.dtype == tf.string for spec in tf.nest.flatten(inputs))


def _check_length(task: Any, name: str, length: Any) -> None:
    """Raises a ValueError if texts are longer than the table of positions of a backbone."""
    backbone: Any = getattr(task, "backbone", None)
    layers = backbone._flatten_layers() if hasattr(backbone, "_flatten_layers") else ()
    positions = [
        layer.sequence_length for layer in layers if type(layer).__name__ == "PositionEmbedding"
    ]
    if positions and isinstance(length, int) and length > max(positions):
        raise ValueError(
            f"{name} must be at most {max(positions)}, the number of positions that the "
            f"{type(backbone).__name__} knows. Received: {length}. Give the "
            f"{type(task.preprocessor).__name__} a smaller `sequence_length`, or make the backbone "
            "with a larger `max_sequence_length`."
        )


def _is_of_keras_hub(task: Any) -> bool:
    """Returns whether all that preprocesses is KerasHub's own code."""
    function = getattr(task.preprocess_samples, "__func__", None)
    layers = getattr(task.preprocessor, "_flatten_layers", lambda: [task.preprocessor])()
    modules = [getattr(function, "__module__", ""), *[type(layer).__module__ for layer in layers]]
    return all(str(module).startswith("keras_hub.") for module in modules)


def _check_kind(preprocessor: Any, spec: Any) -> None:
    """Raises a ValueError if a preprocessor of texts gets none."""
    inputs = parts_of(spec)[0]
    if getattr(preprocessor, "tokenizer", None) is not None and not _has_texts(inputs):
        raise ValueError(
            "Argument `data` must hold the texts that the task's preprocessor takes, or all that "
            f"it makes of them. Received examples of {inputs}, and a task with a "
            f"{type(preprocessor).__name__}. If they are preprocessed, set `task.preprocessor = "
            "None`."
        )
    texts = [spec for spec in tf.nest.flatten(inputs) if spec.dtype == tf.string]
    if any(spec.shape.rank != 0 for spec in texts):
        raise ValueError(
            "Argument `data` must hold one text for each example, `[n]`, or a tuple of such arrays "
            f"for several. Received examples of {inputs}: choose a column, such as `texts[:, 0]`."
        )


def _limit(preprocessor: Any, data: Any) -> int | None:
    """Returns the bytes of results that are kept; None for all, if they are not images alone.

    What is preprocessed when it is drawn must be stored in one shape.
    """
    parts = ("tokenizer", "audio_converter", "video_converter")
    others = [getattr(preprocessor, name, None) for name in parts]
    is_of_images = getattr(preprocessor, "image_converter", None) is not None
    if not is_of_images or any(other is not None for other in others):
        return None
    if isinstance(data, tf.data.Dataset) and not all(
        spec.shape.is_fully_defined() for spec in tf.nest.flatten(data.element_spec)
    ):
        return None
    return _IMAGE_BYTES


def _after(task: Any, transform: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a transform that applies the preprocessor of a task, and then another."""

    def preprocess(*example: Any) -> Any:
        parts = task.preprocess_samples(*example)
        return parts if transform is None else transform(*parts_of(parts))

    return preprocess


def _within(limit: int | None, batches: Iterator[Any]) -> list[Any] | None:
    """Returns all batches; None if they take more bytes than a limit."""
    held, size = [], 0
    for batch in batches:
        held.append(batch)
        size += sum(array.nbytes for array in tf.nest.flatten(batch))
        if limit is not None and size > limit:
            return None
    return held


def _in_python(
    task: Any, examples: tf.data.Dataset, verbose: bool, untraceable: Exception
) -> Iterator[Any]:
    """Yields batches of results of a preprocessor that TensorFlow cannot trace.

    A state that shows in no repetition, such as a vocabulary that grows, is not seen: it is
    preprocessing that uses private data, which no epsilon covers.

    Raises:
      ValueError: It draws random numbers or keeps a state, so that its result for one example may
        depend on others; or it does not take the examples.
    """

    def preprocess(example: Any) -> Any:
        parts = tf.nest.map_structure(_decoded, parts_of(example))
        try:
            return tf.nest.map_structure(np.asarray, task.preprocess_samples(*parts))
        except Exception as error:
            raise ValueError(
                "Argument `data` must hold what the task's preprocessor takes. Received examples of"
                f" {examples.element_spec}, for which the {type(task.preprocessor).__name__} "
                f"raises: {said_by_keras(error)}"
            ) from untraceable

    first = list(examples.take(_TRIED_AGAIN).as_numpy_iterator())
    before = [preprocess(example) for example in first]
    after = [preprocess(example) for example in reversed(first)][::-1]
    if not _are_equal(before, after):
        raise ValueError(
            "The preprocessor of a task must return the same for the same example: TensorFlow "
            "cannot trace it, and so it gets no secret random numbers that belong to the example. "
            f"Received: a {type(task.preprocessor).__name__} that draws random numbers or keeps a "
            "state. Write it with TensorFlow's operations."
        ) from untraceable
    total = int(examples.cardinality())
    bar = tf.keras.utils.Progbar(
        None if total < 0 else total, verbose=int(verbose), unit_name="example"
    )
    held: list[Any] = []
    for number, example in enumerate(examples.as_numpy_iterator(), 1):
        held.append(preprocess(example))
        if len(held) == _ROWS or number == total:
            bar.update(number)
            yield _stack(held)
            held = []
    if held:
        yield _stack(held)


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _are_equal(first: Any, second: Any) -> bool:
    pairs = zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def _stack(results: list[Any]) -> Any:
    try:
        return tf.nest.map_structure(lambda *parts: np.stack(parts), *results)
    except ValueError as error:
        raise _ShapesError from error


def _stacked(part: Any) -> Any:
    """Returns an array of a list of texts or labels; for several inputs tasks take a tuple."""
    if isinstance(part, dict):
        return {name: _stacked(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_stacked, part))
    is_list = isinstance(part, list) and bool(part)
    return np.array(part) if is_list and isinstance(part[0], (str, bytes, int, float)) else part


def unmapped(batches: Any, function: Any) -> bool:
    """Returns whether a task's `fit` need not apply its preprocessor to Poisson batches.

    Args:
      batches: The batches.
      function: What `fit` gives to `map`.

    Raises:
      ValueError: It is the preprocessor, and the batches hold what it was not applied to: it would
        be applied to a batch, whose examples it may mix.
    """
    task: Any = getattr(function, "__self__", None)
    if not is_task(task) or getattr(function, "__name__", "") != "preprocess_samples":
        return False
    if task.preprocessor is None or batches.preprocessor is task.preprocessor:
        return True
    if _is_preprocessed(task, batches.element_spec):
        return True
    inputs = parts_of(batches.element_spec)[0]
    raise ValueError(
        f"Argument `x` of `fit` must be batches that the task's preprocessor was applied to, "
        f"example by example. Received batches of {inputs}, and a task with a "
        f"{type(task.preprocessor).__name__}. {_REMEDY}"
    )
