"""Folders of examples in memory-mapped arrays, part by part."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base import validation
from tfdp.base.whole_files import write_text
from tfdp.data.checks import is_batched
from tfdp.data.columns import Features, chosen
from tfdp.data.elements import parts_of
from tfdp.data.stored import Arrays, Examples, Parts

_PART_BYTES = 2**28
_STRING_BYTES = 2**14  # That a string is taken to have, of which the type does not tell.
_INDEX = "examples.json"


def write_examples(
    dataset: tf.data.Dataset,
    folder: str | os.PathLike,
    *,
    features: Features = None,
    label: str | None = None,
    verbose: bool = True,
) -> None:
    """Writes a data set of single examples to a folder, as memory-mapped arrays.

    It holds one part at a time in memory. If it is interrupted, the next call resumes at the
    incomplete part; the data set must then give the same examples in the same order.

    Args:
      dataset: A finite dataset of examples `(x, y)`, `(x, y, sample_weight)`, `x` or `(x,)` of
        fixed shapes.
      folder: Folder to write to; it is made if it does not exist.
      features: For examples that are dicts, the features that are written as x: a name, or a list
        of names.
      label: For examples that are dicts, the name of the feature that is written as y; None: x is
        written alone.
      verbose: Whether to show a progress bar.

    Raises:
      ValueError: The dataset is infinite or batched, its examples have no fixed shapes or have
        types that NumPy lacks, or the folder holds other examples.

    Example:
      >>> import tempfile, tensorflow as tf, tfdp
      >>> folder = tempfile.mkdtemp()
      >>> dataset = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [0, 1]))
      >>> tfdp.data.write_examples(dataset, folder, verbose=False)
      >>> len(tfdp.data.read_examples(folder))
      2
    """
    requirement = "a `tf.data.Dataset` of single examples"
    validation.instance("dataset", dataset, tf.data.Dataset, requirement)
    validation.path("folder", folder)
    verbose = validation.boolean("verbose", verbose)
    if is_batched(dataset):
        raise ValueError(
            "Argument `dataset` must have single examples, the unit of privacy. Received batches, "
            f"{dataset.element_spec}: leave out `batch`, or call `unbatch()`."
        )
    dataset = chosen(dataset, features, label)
    specs = _checked_specs(dataset)
    total = int(dataset.cardinality())
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    row = sum(spec.shape.num_elements() * _size(spec.dtype) for spec in specs)
    index = {
        "structure": _encoded(dataset.element_spec),
        "rows": max(1, _PART_BYTES // max(1, row)),
    }
    with _locked(place):
        _write_rest(dataset, place, index, total, verbose)


def _write_rest(
    dataset: tf.data.Dataset, place: pathlib.Path, index: dict[str, Any], total: int, verbose: bool
) -> None:
    """Writes the parts that are not there yet."""
    known = _read_index(place)
    if known:
        if known["structure"] != index["structure"]:
            raise ValueError(
                f"Argument `folder` must be empty or hold a part of these examples. Received "
                f"{str(place)!r}, which holds examples of {known['structure']}."
            )
        index = known
    else:
        write_text(place / _INDEX, json.dumps(index))
    if index.get("complete"):
        if 0 <= total != (length := len(read_examples(place))):
            raise ValueError(
                "Argument `folder` must be empty or hold a part of these examples. Received "
                f"{str(place)!r}, which holds {length} examples, and a dataset of {total}."
            )
        return
    done = len(_part_folders(place))
    bar = tf.keras.utils.Progbar(
        None if total < 0 else total, verbose=int(verbose), unit_name="example"
    )
    batches = dataset.skip(done * index["rows"]).batch(index["rows"]).as_numpy_iterator()
    written = done * index["rows"]
    for number, batch in enumerate(batches, done):
        _write_part(place / f"{number:05d}", tf.nest.flatten(batch))
        written += len(tf.nest.flatten(batch)[0])
        bar.update(written)
    write_text(place / _INDEX, json.dumps({**index, "complete": True}))


def read_examples(folder: str | os.PathLike) -> Examples:
    """Opens what `write_examples` has written, without reading it.

    Args:
      folder: The folder.

    Returns:
      An object for `tfdp.data.poisson_batches`, with `len` and `[index]`.

    Raises:
      ValueError: There is no such folder, or it is not complete.
    """
    place = pathlib.Path(validation.path("folder", folder))
    index = _read_index(place)
    if not index.get("complete"):
        raise ValueError(
            "Argument `folder` must be one that `tfdp.data.write_examples` has completed. "
            f"Received: {str(folder)!r}. Call `write_examples` again to resume."
        )
    parts = []
    for part in _part_folders(place):
        arrays = iter(
            np.load(part / f"{i}.npy", mmap_mode="r") for i in range(len(list(part.glob("*.npy"))))
        )
        parts.append(Arrays(_decoded(index["structure"], arrays)))
    if not parts:
        raise ValueError(f"Argument `folder` must hold examples. Received: {str(folder)!r}: none.")
    return Parts(parts)


@contextlib.contextmanager
def _locked(place: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time write to a folder; others wait."""
    folder = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read_index(place: pathlib.Path) -> dict[str, Any]:
    """Returns what a folder says of its examples; nothing if it is new."""
    path = place / _INDEX
    if not path.exists():
        return {}
    with contextlib.suppress(ValueError):  # Not JSON, or no text.
        index = json.loads(path.read_text())
        if isinstance(index, dict) and {"structure", "rows"} <= set(index):
            return index
    raise ValueError(
        "Argument `folder` must be one that `tfdp.data.write_examples` wrote. Received "
        f"{str(place)!r}, whose {path.name} is damaged: remove the folder, and write it again."
    )


def _checked_specs(dataset: tf.data.Dataset) -> list[tf.TensorSpec]:
    """Returns types and shapes of examples that can be written, flattened."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"Argument `dataset` must be finite. Received an infinite one: {dataset}.")
    if not 1 <= len(parts_of(dataset.element_spec)) <= 3:
        raise ValueError(
            "Argument `dataset` must have examples (x, y) or (x, y, sample_weight), or x alone. "
            f"Received elements: {dataset.element_spec}: choose x and y with `map`."
        )
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in specs):
        raise ValueError(
            "Argument `dataset` must have examples of fixed shapes. Received elements: "
            f"{dataset.element_spec}: fix them with `map` and `tf.ensure_shape`, or pad them."
        )
    for spec in specs:
        if spec.dtype != tf.string and np.dtype(spec.dtype.as_numpy_dtype).isbuiltin != 1:
            raise ValueError(
                "Argument `dataset` must have examples of types that NumPy has. Received: "
                f"{spec.dtype.name}: convert them with `map` and `tf.cast`."
            )
    return specs


def _size(dtype: tf.DType) -> int:
    return _STRING_BYTES if dtype == tf.string else dtype.size


def _write_part(folder: pathlib.Path, arrays: Sequence[np.ndarray]) -> None:
    """Writes a part so that it is there with all of its rows, or not at all."""
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(exist_ok=True)
    for i, array in enumerate(arrays):
        fixed = array.astype("S") if array.dtype == object else array
        if array.dtype == object and np.any(fixed.astype(object) != array):
            raise ValueError(
                "Argument `dataset` must have no strings that end with a zero byte, which NumPy "
                "leaves out. Received one: decode it first, with `map` and `tf.io.decode_raw`."
            )
        _save(unfinished / f"{i}.npy", np.ascontiguousarray(fixed))
    unfinished.rename(folder)


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes a `.npy` file, or raises: `np.save` misses some writes that fail on a full disk."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _part_folders(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted(part for part in place.iterdir() if part.is_dir() and part.name.isdigit())


def _encoded(structure: Any) -> Any:
    """Returns a nested structure of specs as JSON has it."""
    if isinstance(structure, dict):
        return {"dict": {key: _encoded(structure[key]) for key in sorted(structure)}}
    if isinstance(structure, (tuple, list)):
        return {"tuple": [_encoded(part) for part in structure]}
    return [structure.dtype.name, structure.shape.as_list()]


def _decoded(structure: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(structure, list):
        return next(leaves)
    if "dict" in structure:
        return {key: _decoded(part, leaves) for key, part in structure["dict"].items()}
    return tuple(_decoded(part, leaves) for part in structure["tuple"])
