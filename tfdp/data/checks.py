"""Error messages for data that Poisson batches cannot be drawn from."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._validation import check_unmasked

_CONTAINERS = (dict, list, tuple)
# Of datasets: what makes batches, and what makes something else of its elements.
_BATCHING = ("Batch", "ParallelBatch", "PaddedBatch", "DenseToRagged", "DenseToRaggedBatch")
_OPENING = ("Unbatch", "FlatMap", "Interleave", "ParallelInterleave", "Window")
# Classes of Keras 2 and 3 that give batches.
_LOADERS = ("Sequence", "PyDataset")


def check_data(data: Any, others: tuple) -> None:
    """Raises an error that says what to do, where data are of a kind that is often given.

    Args:
      data: The argument `data` of `poisson_batches`.
      others: Further positional arguments; there must be none.

    Raises:
      TypeError: There are further arguments.
      ValueError: The data are ragged, sparse, masked, batched, or lists of numbers.
    """
    if others:
        raise TypeError(
            "Argument `data` must be one pair, `(x, y)`, in parentheses. Received: x and "
            f"{len(others)} more positional argument{'s' if len(others) > 1 else ''}."
        )
    if _is_loader(data):
        raise ValueError(
            "Argument `data` must give single examples, the unit of privacy. Received: "
            f"{type(data).__name__}, which gives batches. Pass the arrays, (x, y), or an object "
            "with `__len__` and `__getitem__(i)` that returns one example; what augments examples "
            "becomes `transform`."
        )
    if isinstance(data, tf.data.Dataset):
        if is_batched(data):
            raise ValueError(
                "Argument `data` must be a dataset of single examples, the unit of privacy. "
                f"Received a batched dataset, whose elements are {data.element_spec}: leave out "
                "`batch` (`batch_size=None` where Keras makes the dataset), or call `unbatch()`."
            )
        return
    for part in data if isinstance(data, (list, tuple)) else ():
        _check_part(part)
    for array in tf.nest.flatten(data):
        check_unmasked("data", array)


def is_batched(dataset: Any) -> bool:
    """Returns whether the elements of a `tf.data.Dataset` are known to be made of batches."""
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
    return kind in _BATCHING or (
        kind not in _OPENING and any(is_batched(each) for each in dataset._inputs())
    )


def tuples_for_lists(data: Any) -> Any:
    """Returns nested data with a tuple for each list, which `tf.data` would stack."""
    if isinstance(data, dict):
        return {name: tuples_for_lists(part) for name, part in data.items()}
    return tuple(map(tuples_for_lists, data)) if isinstance(data, (list, tuple)) else data


def _is_loader(data: Any) -> bool:
    """Returns whether data are one of Keras's objects that give `fit` batches."""
    return any(
        base.__name__ in _LOADERS and base.__module__.split(".")[0] in ("keras", "tf_keras")
        for base in type(data).__mro__
    )


def _check_part(part: Any) -> None:
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        sparse = isinstance(part, tf.SparseTensor)
        raise ValueError(
            "Argument `data` must hold dense arrays. Received a "
            f"{'SparseTensor' if sparse else 'RaggedTensor'} of shape {part.shape}: use "
            f"`{'tf.sparse.to_dense(x)' if sparse else 'x.to_tensor()'}`"
            f"{'' if sparse else ', which pads, and a mask or an embedding with `mask_zero=True`'}."
        )
    array = part.to_numpy() if hasattr(part, "to_numpy") else part  # Of data frames.
    if isinstance(array, np.ndarray) and array.dtype == object and not _are_strings(array):
        remedy = (
            "pad sequences to one length (`pad_sequences` of Keras), or convert it with `astype`"
        )
        if array is not part and array.ndim > 1:
            remedy = "choose columns of one type, or give the model an input for each: `dict(x)`"
        raise ValueError(
            "Argument `data` must hold arrays of numbers or strings. Received: "
            f"{type(part).__name__} of type object and shape {array.shape}: {remedy}."
        )
    if isinstance(part, dict):
        for value in part.values():
            _check_part(value)
    if isinstance(part, (list, tuple)):
        for value in part[:2]:
            if isinstance(value, _CONTAINERS):
                _check_part(value)
            elif np.ndim(value) == 0 and not isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
                raise ValueError(
                    "Argument `data` must hold arrays or tensors; a list is taken for several "
                    f"inputs of the model. Received a list of {_kind(value)}, {_shown(part)}: use "
                    "`np.array(...)`, after `pad_sequences` of Keras where rows differ in "
                    "length."
                )
            else:
                _check_part(value)


def _are_strings(array: np.ndarray) -> bool:
    return all(isinstance(value, (str, bytes)) for value in array.flat)


def _kind(value: Any) -> str:
    return "strings" if isinstance(value, (str, bytes)) else "numbers"


def _shown(values: Any) -> str:
    text = repr(values[:3])[:40]
    return text if len(values) <= 3 else text.rstrip("])") + ", ...]"
