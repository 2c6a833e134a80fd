"""Tasks of KerasHub, whose preprocessor makes of a text or an image what the model takes.

Nothing of KerasHub is imported: tasks are recognised by the class that they inherit.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.data.checks import arrays_of, check_data, is_source
from tfdp.data.columns import Features, chosen
from tfdp.data.elements import parts_of
from tfdp.data.transforms import keyed_rows

_ROWS = 256  # Examples that are stacked at a time.
_REMEDY = (
    "Give `make_private` the task and its texts or images, and train on the batches that it "
    "returns; or preprocess before: `x, y, *weights = task.preprocessor(texts)`, "
    "`task.preprocessor = None`, and `poisson_batches((x, y, *weights), ...)`."
)


def is_task(model: Any) -> bool:
    """Returns whether a model is a task of KerasHub, with a preprocessor or without."""
    return any(
        kind.__module__.startswith("keras_hub.") and kind.__name__ == "PipelineModel"
        for kind in type(model).__mro__
    )


def preprocessor_of(model: Any) -> Any:
    """Returns the preprocessor of a task; None for other models, and where it has none."""
    return model.preprocessor if is_task(model) else None


def preprocessed(task: Any, data: Any, features: Features, label: str | None) -> Any:
    """Applies a task's preprocessor to each example, as its `fit` applies it to batches.

    An example's result depends on that example alone: it is preprocessed by itself, and what is
    drawn at random for it, such as the tokens that a language model must fill in, follows from a
    secret of its own.

    Args:
      task: A task of KerasHub that has a preprocessor.
      data: The argument `data` of `poisson_batches`: texts, images, or pairs of these and labels.
      features: See there.
      label: See there.

    Returns:
      Arrays: inputs, or a tuple of inputs, targets, and weights if there are any.

    Raises:
      ValueError: The data are none, or the results have several shapes.
    """
    check_data(data, ())
    data = chosen(data, features, label)
    if not isinstance(data, tf.data.Dataset):
        parts = tuple(map(_stacked, data)) if isinstance(data, tuple) else _stacked(data)
        data = arrays_of(parts)
        if is_source(data):
            data = _read(data)
        data = tf.data.Dataset.from_tensor_slices(data)
    examples = keyed_rows(task.preprocess_samples, data)
    try:
        batches = list(examples.batch(_ROWS).as_numpy_iterator())
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "Argument `data` must become examples of one shape, which a batch can hold. Received a "
            f"{type(task.preprocessor).__name__} whose results have several: give it a "
            "`sequence_length`, or an `image_size`."
        ) from error
    if not batches:
        raise ValueError("Argument `data` must have examples. Received: none.")
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)


def _stacked(part: Any) -> Any:
    """Returns an array of a list of texts or labels; for several inputs tasks take a tuple."""
    is_list = isinstance(part, list) and bool(part)
    return np.array(part) if is_list and isinstance(part[0], (str, bytes, int, float)) else part


def _read(source: Any) -> Any:
    """Returns the examples of a random-access source, stacked."""
    examples = [source[i] for i in range(len(source))]
    return tf.nest.map_structure(lambda *parts: np.stack(parts), *examples)


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
    inputs = parts_of(batches.element_spec)[0]
    raise ValueError(
        f"Argument `x` of `fit` must be batches that the task's preprocessor was applied to, "
        f"example by example. Received batches of {inputs}, and a task with a "
        f"{type(task.preprocessor).__name__}. {_REMEDY}"
    )
