"""Error messages for data that Poisson batches cannot be drawn from."""

from typing import Any

import numpy as np
import tensorflow as tf

_CONTAINERS = (dict, list, tuple)
# Of datasets: what leaves elements as they are, and what makes batches of them.
_KEEPING = ("Cache", "Options", "Prefetch", "Repeat", "Shuffle", "Skip", "Take")
_BATCHING = ("Batch", "ParallelBatch", "PaddedBatch", "DenseToRagged")


def check_data(data: Any, others: tuple) -> None:
    """Raises an error that says what to do, where data are of a kind that is often given.

    Args:
      data: The argument `data` of `poisson_batches`.
      others: Further positional arguments; there must be none.

    Raises:
      TypeError: There are further arguments.
      ValueError: The data are ragged, sparse, batched, or lists of numbers.
    """
    if others:
        raise TypeError(
            "Argument `data` must be one pair: `poisson_batches((x, y), expected_batch_size=...)`. "
            f"Received: {1 + len(others)} positional arguments."
        )
    if isinstance(data, tf.data.Dataset):
        if is_batched(data):
            raise ValueError(
                "Argument `data` must be a dataset of single examples, the unit of privacy. "
                f"Received a batched dataset, whose elements are {data.element_spec}: leave out "
                "`batch`, or call `unbatch()`."
            )
        return
    for part in data if isinstance(data, (list, tuple)) else ():
        _check_part(part)


def is_batched(dataset: Any) -> bool:
    """Returns whether the elements of a `tf.data.Dataset` are known to be batches."""
    while True:
        kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
        if kind in _BATCHING:
            return True
        inputs = dataset._inputs()
        if kind not in _KEEPING or len(inputs) != 1:
            return False
        dataset = inputs[0]


def _check_part(part: Any) -> None:
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        sparse = isinstance(part, tf.SparseTensor)
        raise ValueError(
            "Argument `data` must hold dense arrays. Received a "
            f"{'SparseTensor' if sparse else 'RaggedTensor'} of shape {part.shape}: use "
            f"`{'tf.sparse.to_dense(x)' if sparse else 'x.to_tensor()'}`"
            f"{'' if sparse else ', which pads, and a mask or an embedding with `mask_zero=True`'}."
        )
    if isinstance(part, np.ndarray) and part.dtype == object:
        raise ValueError(
            "Argument `data` must hold arrays of numbers or strings. Received a NumPy array of "
            f"type object and shape {part.shape}: pad sequences to one length "
            "(`tf.keras.utils.pad_sequences`), or convert it with `astype`."
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
                    f"inputs of the model. Received a list of numbers, {_shown(part)}: use "
                    "`np.array(...)`, after `tf.keras.utils.pad_sequences` where rows differ in "
                    "length."
                )
            else:
                _check_part(value)


def _shown(values: Any) -> str:
    text = repr(values[:3])[:40]
    return text if len(values) <= 3 else text.rstrip("])") + ", ...]"
