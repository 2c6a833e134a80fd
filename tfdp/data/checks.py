"""Error messages for data that Poisson batches cannot be drawn from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.validation import check_unmasked

_CONTAINERS = (dict, list, tuple)
# Datasets that make batches, and datasets that make something else of their elements.
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
      ValueError: The data give batches, have no end, or have masked entries.
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
        if data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "Argument `data` must be a finite dataset of single examples. Received an infinite "
                f"one: {data}: leave out `repeat`."
            )
        return
    for array in tf.nest.flatten(data):
        check_unmasked("data", array)


def arrays_of(data: Any) -> Any:
    """Returns data in nested tuples and dicts of arrays, or as they are where none are there.

    A list becomes a tuple: `tf.data` would stack it. Data frames, and the tensors of other
    libraries, become arrays of NumPy.

    Args:
      data: The argument `data` of `poisson_batches`, once `features` are chosen.

    Raises:
      ValueError: A part of the data is no dense array of numbers or strings.
    """
    if isinstance(data, list) and any(map(_is_scalar, data[:3])):
        _check_part(data)
    if isinstance(data, (list, tuple)):
        if not 1 <= len(data) <= 3:
            return data
        for part in data:
            _check_part(part)
        return tuple(map(_converted, data))
    if is_source(data):
        return data
    _check_part(data)
    return _converted(data)


def number_of_rows(data: Any) -> int:
    """Returns the number of rows of nested arrays.

    Raises:
      ValueError: They have none, or not all the same.
    """
    shapes = [tuple(np.shape(array)) for array in tf.nest.flatten(data)]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or not (length := lengths.pop()):
        raise ValueError(
            "Argument `data` must hold arrays whose first dimension is the example, all of one "
            f"positive length. Received shapes: {shapes}."
        )
    return length


def is_source(data: Any) -> bool:
    """Returns whether data are an object that examples are read from one by one."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return False
    if isinstance(data, (str, bytes, list, tuple, Mapping)):
        return False
    return not (tf.is_tensor(data) or is_stored(data) or _is_array(data))


def is_stored(array: Any) -> bool:
    """Returns whether an array is on disk, or elsewhere: a memory map, HDF5, Zarr.

    NumPy-like arrays in memory, unlike those on disk, have an `__array_priority__`.
    """
    if isinstance(array, np.memmap):
        return True
    if isinstance(array, (np.ndarray, np.generic)) or tf.is_tensor(array):
        return False
    if hasattr(array, "to_numpy") or hasattr(array, "__array_priority__"):
        return False
    return all(hasattr(array, name) for name in ("shape", "dtype", "__getitem__"))


def is_batched(dataset: Any) -> bool:
    """Returns whether the elements of a `tf.data.Dataset` are known to be made of batches."""
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
    return kind in _BATCHING or (
        kind not in _OPENING and any(is_batched(each) for each in dataset._inputs())
    )


def _is_loader(data: Any) -> bool:
    """Returns whether data are one of Keras's objects that give `fit` batches."""
    return any(
        base.__name__ in _LOADERS and base.__module__.split(".")[0] in ("keras", "tf_keras")
        for base in type(data).__mro__
    )


def _is_array(value: Any) -> bool:
    """Returns whether a value is an array in memory, of NumPy or another library, or a frame."""
    is_other = _is_sparse(value) or _is_arrow_table(value)
    return hasattr(value, "to_numpy") or hasattr(value, "__array__") or is_other


def _is_sparse(value: Any) -> bool:
    return hasattr(value, "toarray") and hasattr(value, "nnz")  # A SciPy array.


def _is_arrow_table(value: Any) -> bool:
    return _is_of("pyarrow", value) and hasattr(value, "column_names")


def _is_of(package: str, value: Any) -> bool:
    return type(value).__module__.split(".")[0] == package


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (
        isinstance(value, (int, float, complex, np.generic)) and np.ndim(value) == 0
    )


def _converted(part: Any) -> Any:
    """Returns a part of data with tuples for lists, and arrays of NumPy for those of others."""
    if isinstance(part, Mapping):
        return {name: _converted(value) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return tuple(map(_converted, part))
    if hasattr(part, "to_numpy"):
        return part.to_numpy()
    if isinstance(part, np.ndarray) or tf.is_tensor(part) or is_stored(part):
        return part
    is_sequence = isinstance(part, Sequence) and not isinstance(part, (str, bytes))
    return np.asarray(part) if is_sequence or hasattr(part, "__array__") else part


def _check_part(part: Any) -> None:
    if part is None:
        raise ValueError(
            "Argument `data` must hold no None: data without labels are `x`, or `(x,)`. Weights "
            "follow labels: give the data any labels, (x, x, weight), or let a training step of "
            "your own take them from a dict, {'x': x, 'weight': weight}. Received: None."
        )
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)) or _is_sparse(part):
        is_ragged = isinstance(part, tf.RaggedTensor)
        remedy = "x.toarray()" if _is_sparse(part) else "tf.sparse.to_dense(x)"
        remedy = "x.to_tensor()" if is_ragged else remedy
        raise ValueError(
            "Argument `data` must hold dense arrays. Received a "
            f"{type(part).__name__} of shape {part.shape}: use `{remedy}`"
            f"{', which pads, and a mask or an embedding with `mask_zero=True`' * is_ragged}."
        )
    if _is_arrow_table(part):
        raise ValueError(
            f"Argument `data` must hold arrays. Received a {type(part).__name__} of PyArrow: use "
            "`x.to_pandas()`."
        )
    if isinstance(part, tf.data.Dataset) or (is_source(part) and not isinstance(part, Sequence)):
        raise ValueError(
            "Argument `data` must hold arrays or tensors, or be one source of examples. Received "
            f"a {type(part).__name__} in it: choose a split, such as `data['train']`, and let its "
            "examples have all the parts."
        )
    array = part.to_numpy() if hasattr(part, "to_numpy") else part  # A data frame.
    kind = array.dtype.kind if isinstance(array, np.ndarray) else ""
    if kind in ("m", "M") or _has_fields(array) or (kind == "O" and not _are_strings(array)):
        remedy = (
            "pad sequences to one length (`pad_sequences` of Keras), or convert it with `astype`"
        )
        if kind == "O" and _misses_values(array):
            remedy = "it misses values (None or NaN): leave out these examples, or fill them in"
        if array is not part and array.ndim > 1:
            each = "x.to_dict()" if _is_of("polars", part) else "dict(x)"
            remedy = f"choose columns of one type, or give the model an input for each: `{each}`"
        raise ValueError(
            "Argument `data` must hold arrays of numbers or strings. Received: "
            f"{type(part).__name__} of type {array.dtype} and shape {array.shape}: {remedy}."
        )
    if isinstance(part, Mapping):
        for value in part.values():
            _check_part(value)
    if isinstance(part, (list, tuple)):
        for value in part[:2]:
            if isinstance(value, _CONTAINERS):
                _check_part(value)
            elif value is None and any(isinstance(other, str | bytes) for other in part):
                _check_part(np.array(part, object))
            elif np.ndim(value) == 0 and not isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
                raise ValueError(
                    "Argument `data` must hold arrays or tensors; a list is taken for several "
                    f"inputs of the model. Received a list of {_kind(value)}, {_shown(part)}: use "
                    "`np.array(...)`, after `pad_sequences` of Keras where rows differ in "
                    "length."
                )
            else:
                _check_part(value)
        if part:
            _check_are_inputs(part)


def _check_are_inputs(parts: Sequence[Any]) -> None:
    """Refuses a list of examples, which would be taken for inputs of other, fewer examples."""
    if isinstance(parts[0], _CONTAINERS):
        return
    rows = np.shape(parts[0])[0]
    if len(parts) > rows:
        raise ValueError(
            "Argument `data` must hold arrays with one row for each example; a list of arrays is "
            f"several inputs of the model. Received a list of {len(parts)} arrays of "
            f"{rows} rows: if these are the examples, use `np.stack(...)`."
        )


def _has_fields(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.names is not None


def _are_strings(array: np.ndarray) -> bool:
    return all(isinstance(value, (str, bytes)) for value in array.flat)


def _misses_values(array: np.ndarray) -> bool:
    """Returns whether entries of strings are None, NaN or the like."""
    texts = [isinstance(value, (str, bytes)) for value in array.flat]
    return any(texts) and all(
        text or np.ndim(value) == 0 for text, value in zip(texts, array.flat, strict=True)
    )


def _kind(value: Any) -> str:
    return "strings" if isinstance(value, (str, bytes)) else "numbers"


def _shown(values: Any) -> str:
    text = repr(values[:3])[:40]
    return text if len(values) <= 3 else text.rstrip("])") + ", ...]"
