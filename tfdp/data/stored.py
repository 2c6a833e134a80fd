"""Stored data sets: only the rows of a batch are read."""

import abc
import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.clipping import step_check
from tfdp.data import unchanged
from tfdp.data.checks import is_source, is_stored
from tfdp.data.columns import takes_generators

_THREADS = 16  # Threads that read single examples at the same time. They mostly wait.
_SELECTED = 256  # Rows that are selected at a time.
_READS = 5  # Reads of the first example, to check that it is the same each time.


class Examples(abc.ABC):
    """Examples that are read by their indices.

    Attributes:
      element_spec: Types and shapes of an example: of `x`, `(x,)`, `(x, y)` or `(x, y,
        sample_weight)`.
      draws: Whether they are read with random numbers, so that each row needs a secret.
    """

    element_spec: Any
    draws = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray, secrets: np.ndarray | None = None) -> list[np.ndarray]:
        """Reads examples.

        Args:
          indices: int64 `[rows]`; increasing, no two equal, without secrets.
          secrets: Where random numbers are drawn, a secret of each row, int64 `[rows, 3]`.

        Returns:
          The tensors of the flattened structure, `[rows, ...]` each.
        """

    def __getitem__(self, index: int) -> Any:
        """Returns one example."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There are {len(self)} examples. Received: {index}.")
        flat = self.read(np.array([index % len(self)]))
        return tf.nest.pack_sequence_as(self.element_spec, [values[0] for values in flat])

    def gather(self, indices: tf.Tensor, secrets: tf.Tensor | None = None) -> Any:
        """Reads examples in the graph being built.

        Args:
          indices: Indices in any order, int64 `[rows]`.
          secrets: With `draws`, a secret of each row, int64 `[rows, 3]`.

        Returns:
          Nested tensors, `[rows, ...]` each.
        """
        specs = tf.nest.flatten(self.element_spec)

        def read(indices: np.ndarray, *secrets: np.ndarray) -> list[np.ndarray]:
            if secrets:  # Equal indices stand for rows that draw other numbers.
                return list(map(self._checked, self.read(indices, *secrets), specs))
            increasing = bool(np.all(indices[1:] > indices[:-1]))  # Poisson samples are.
            ordered, places = (
                (indices, ...) if increasing else np.unique(indices, return_inverse=True)
            )
            return [
                self._checked(values, spec)[places]
                for values, spec in zip(self.read(ordered), specs, strict=True)
            ]

        with step_check.own_operations():  # Python code is refused elsewhere in a step.
            given = [indices] if secrets is None else [indices, secrets]
            tensors = tf.numpy_function(read, given, [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape([indices.shape[0], *spec.shape])
        return tf.nest.pack_sequence_as(self.element_spec, tensors)

    @staticmethod
    def _checked(values: np.ndarray, spec: tf.TensorSpec) -> np.ndarray:
        if tf.as_dtype(values.dtype) == tf.string:
            return values.astype(object)
        return values.astype(spec.dtype.as_numpy_dtype, copy=False)


class Arrays(Examples):
    """Arrays on disk, or elsewhere, whose rows can be read: memory maps, HDF5, Zarr.

    Args:
      data: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, nested arrays with one row for each
        example.
    """

    def __init__(self, data: Any):
        # Tensors, of which rows cannot be taken with an array of indices, become arrays.
        data = tf.nest.map_structure(lambda a: a if is_stored(a) else np.asarray(a), data)
        self._arrays = tf.nest.flatten(data)
        lengths = {array.shape[0] if array.shape else None for array in self._arrays}
        if len(lengths) != 1 or not lengths.pop():
            raise ValueError(
                "Argument `data` must hold arrays whose first dimension is the example, all of one "
                f"positive length. Received shapes: {[tuple(a.shape) for a in self._arrays]}."
            )
        self.element_spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), data
        )

        self._size = int(self._arrays[0].shape[0])
        self._files = unchanged.files(self._arrays)

    def __len__(self) -> int:
        return self._size

    def read(self, indices: np.ndarray, secrets: np.ndarray | None = None) -> list[np.ndarray]:
        """See the base class.

        Raises:
          RuntimeError: The arrays, or their files, have changed.
        """
        unchanged.check_size(int(self._arrays[0].shape[0]), self._size)
        unchanged.check_files(self._files)
        return [_rows(array, indices) for array in self._arrays]


class Items(Examples):
    """Any object with `__len__` and `__getitem__`, read by several threads.

    If `__getitem__` takes a keyword argument `rng` (or `__getitems__` an argument `rngs`), it gets
    a `np.random.Generator` with a secret seed, another one for each row of each draw.

    Args:
      items: Gives `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, nested arrays or numbers.

    Raises:
      ValueError: It gives no such examples, or another one when an index is read again.
    """

    def __init__(self, items: Any):
        self._items, self._size = items, len(items)
        if not self._size:
            raise ValueError("Argument `data` must have examples. Received one of length 0.")
        self._together = hasattr(items, "__getitems__")
        self.draws = takes_generators(items)
        first = self._read_one(0, np.zeros([3], np.int64)) if self.draws else items[0]
        if isinstance(first, (tuple, list)) and not 1 <= len(first) <= 3:
            raise ValueError(
                "Argument `data` must give examples (x, y), (x, y, sample_weight), or x alone. "
                f"Received an object whose `data[0]` is {_described(first)}. Choose from dicts "
                "with `features` and `label`; else wrap the object in a class with `__len__` and "
                "`__getitem__` that returns arrays, or such a tuple of them."
            )
        arrays = _arrays_of(tuple(first) if isinstance(first, list) else first)
        for array in tf.nest.flatten(arrays):
            if array.dtype.kind not in "biufcSUV" and not isinstance(array.flat[0], (str, bytes)):
                raise ValueError(
                    "Argument `data` must give examples of numbers or strings. Received an object "
                    f"whose `data[0]` holds a value of type {type(array.flat[0]).__name__}."
                )
        self.element_spec = tf.nest.map_structure(_spec_of, arrays)
        self._kinds = [(array.shape, array.dtype) for array in tf.nest.flatten(arrays)]
        self._check_again()

    def __len__(self) -> int:
        return self._size

    def read(self, indices: np.ndarray, secrets: np.ndarray | None = None) -> list[np.ndarray]:
        """See the base class.

        Raises:
          RuntimeError: An example could not be read, or the number of examples has changed.
        """
        unchanged.check_size(len(self._items), self._size)
        numbers = indices.tolist()
        if self.draws and secrets is None:
            secrets = np.frombuffer(os.urandom(24 * len(numbers)), np.int64).reshape([-1, 3])
        wanted = list(zip(numbers, numbers if secrets is None else secrets, strict=True))
        if self._together:
            examples = self._read_together(wanted) if numbers else []
        else:
            parts = [wanted[i::_THREADS] for i in range(_THREADS)]
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
                read = list(pool.map(self._read_each, parts))
            examples = [read[i % _THREADS][i // _THREADS] for i in range(len(numbers))]
        rows = [self._flat(index, e) for index, e in zip(numbers, examples, strict=True)]
        return [
            np.stack([row[i] for row in rows]) if rows else np.zeros([0, *shape], dtype)
            for i, (shape, dtype) in enumerate(self._kinds)
        ]

    def _check_again(self) -> None:
        """Refuses objects whose examples depend on what was read before."""
        one, secret = np.array([0]), np.zeros([1, 3], np.int64)
        first, *others = [self.read(one, secret if self.draws else None) for _ in range(_READS)]
        if not all(_equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
            raise ValueError(
                "Argument `data` must return an example that depends on its index alone. Received "
                "an object whose `data[0]` is another whenever it is read. If it draws random "
                "numbers, let `__getitem__(self, index, rng)` draw them from `rng`, a "
                "`np.random.Generator` that tfdp gives it, with secret numbers for each row; or "
                "augment in `transform=`."
            )

    def _read_together(self, wanted: list[tuple[int, Any]]) -> list[Any]:
        indices = [index for index, _ in wanted]
        rngs = {"rngs": [_generator(secret) for _, secret in wanted]} if self.draws else {}
        try:
            examples = list(self._items.__getitems__(indices, **rngs))
        except Exception:
            if not self.draws:
                self._read_each(wanted)  # Names the example that cannot be read.
            raise
        if len(examples) != len(indices):
            raise ValueError(
                "`__getitems__` of argument `data` must give one example for each index. Received "
                f"{len(examples)} examples for {len(indices)} indices."
            )
        return examples

    def _read_each(self, wanted: list[tuple[int, Any]]) -> list[Any]:
        return [self._read_one(index, secret) for index, secret in wanted]

    def _read_one(self, index: int, secret: Any) -> Any:
        try:
            if not self.draws:
                return self._items[index]
            if self._together:
                return self._read_together([(index, secret)])[0]
            return self._items.__getitem__(index, rng=_generator(secret))
        except Exception as error:
            raise RuntimeError(f"Example {index} could not be read: {error!r}") from error

    def _flat(self, index: int, example: Any) -> list[np.ndarray]:
        try:
            arrays: list[np.ndarray] = []
            _collect(example, self.element_spec, arrays)
        except ValueError as error:  # Lists of several lengths are not an array.
            raise ValueError(f"Example {index} is not like the first: {error}") from error
        kinds = [(array.shape, array.dtype) for array in arrays]
        if kinds != self._kinds and not self._are_strings(kinds):
            raise ValueError(
                f"All examples must be like the first, {self.element_spec}. Received example "
                f"{index}, of shapes and types {[(s, str(d)) for s, d in kinds]}."
            )
        return arrays

    def _are_strings(self, kinds: list) -> bool:
        """Returns whether the examples differ in the lengths of strings alone."""

        def plain(kind: tuple) -> tuple:
            shape, dtype = kind
            return shape, "strings" if dtype.kind in "OSU" else dtype

        return list(map(plain, kinds)) == list(map(plain, self._kinds))


class Parts(Examples):
    """Examples in several parts, one after the other.

    Args:
      parts: The parts, of the same types.
    """

    def __init__(self, parts: Sequence[Examples]):
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.element_spec = parts[0].element_spec

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray, secrets: np.ndarray | None = None) -> list[np.ndarray]:
        """See the base class."""
        bounds = np.searchsorted(indices, self._ends)
        starts = [0, *self._ends[:-1]]
        read = [
            part.read(indices[first:last] - start)
            for part, first, last, start in zip(
                self._parts, [0, *bounds[:-1]], bounds, starts, strict=True
            )
            if last > first
        ]
        if not read:
            return self._parts[0].read(indices)
        return [np.concatenate(values) for values in zip(*read, strict=True)]


class Weighted(Examples):
    """Examples with the weights of their classes.

    Args:
      examples: Examples `(x, y)` or `(x, y, sample_weight)`.
      weigh: Function of their tensors, with one row for each example, that returns
        `(x, y, sample_weight)`.
    """

    def __init__(self, examples: Examples, weigh: Callable[..., tuple]):
        self._examples, self._weigh, self.draws = examples, weigh, examples.draws
        _, weights = self._weighted(np.array([0]))
        spec = tf.TensorSpec(weights.shape[1:], tf.float32)
        self.element_spec = (*examples.element_spec[:2], spec)

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, indices: np.ndarray, secrets: np.ndarray | None = None) -> list[np.ndarray]:
        """See the base class."""
        rows, weights = self._weighted(indices, secrets)
        return [*rows, weights]

    def _weighted(
        self, indices: np.ndarray, secrets: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the rows of `(x, y)`, flattened, and the weights."""
        rows = self._examples.read(indices, secrets)
        spec = self._examples.element_spec
        tensors = tf.nest.map_structure(tf.constant, tf.nest.pack_sequence_as(spec, rows)[1:])
        given = [tf.cast(weights, tf.float32) for weights in tensors[1:]]
        with tf.device("cpu"):  # It finds labels without a weight.
            try:
                weights = self._weigh(None, tensors[0], *given)[2]
            except tf.errors.InvalidArgumentError as error:
                raise ValueError(
                    "Argument `class_weight` must have a weight for each label. Received labels, "
                    f"among those of {len(indices)} examples, that have none: {error.message}"
                ) from error
        return rows[: len(rows) - len(given)], tf.cast(weights, tf.float32).numpy()


def stored(data: Any) -> Examples | None:
    """Returns what reads data that are not in memory, or None where they are.

    Args:
      data: What `arrays_of` returns.
    """
    if isinstance(data, Examples):
        return data
    if is_source(data):
        return Items(data)
    return Arrays(data) if any(map(is_stored, _leaves(data))) else None


def _generator(secret: np.ndarray) -> np.random.Generator:
    """Returns a generator of a secret, int64 `[3]`, of which the first 128 bits are its key."""
    return np.random.Generator(np.random.Philox(key=secret[:2].view(np.uint64)))


def _equal(first: np.ndarray, again: np.ndarray) -> bool:
    if first.dtype.kind in "fc":
        return np.array_equal(first, again, equal_nan=True)
    return np.array_equal(first, again)


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [leaf for part in data.values() for leaf in _leaves(part)]
    if isinstance(data, (tuple, list)):
        return [leaf for part in data for leaf in _leaves(part)]
    return [data]


def _arrays_of(example: Any) -> Any:
    """Returns an example as nested tuples and dicts of arrays; lists are arrays, as in tf.data."""
    if isinstance(example, dict):
        return {key: _arrays_of(part) for key, part in example.items()}
    if isinstance(example, tuple):
        return tuple(map(_arrays_of, example))
    return np.asarray(example)


def _collect(value: Any, spec: Any, arrays: list[np.ndarray]) -> None:
    """Appends the arrays of an example, in the order of `tf.nest`, which is slower."""
    if isinstance(spec, dict):
        if not isinstance(value, dict) or value.keys() != spec.keys():
            raise ValueError(f"it has no dict of {sorted(spec)}, but {_described(value)}.")
        for key in sorted(spec):
            _collect(value[key], spec[key], arrays)
    elif isinstance(spec, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(spec):
            raise ValueError(f"it has no tuple of {len(spec)}, but {_described(value)}.")
        for part, part_spec in zip(value, spec, strict=True):
            _collect(part, part_spec, arrays)
    else:
        arrays.append(np.asarray(value))


def _rows(array: Any, indices: np.ndarray) -> np.ndarray:
    """Reads rows of an array in parts: HDF5's time for one selection grows with its square."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[indices])
    found = np.empty((len(indices), *array.shape[1:]), tf.as_dtype(array.dtype).as_numpy_dtype)
    for start in range(0, len(indices), _SELECTED):
        found[start : start + _SELECTED] = array[indices[start : start + _SELECTED]]
    return found


def _spec_of(array: np.ndarray) -> tf.TensorSpec:
    return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
