"""Features of images, computed batch by batch and kept in a file."""

import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from tfdp.base.validation import using

try:
    import fcntl
except ImportError:  # On Windows: of two processes that compute the same, one may fail.
    fcntl = None  # type: ignore[assignment]

_SECONDS_UNTIL_PROGRESS_BAR = 5


def features_of(
    images: np.ndarray,
    shape: tuple[int, ...],
    batches: Callable[[int], Iterator[np.ndarray]],
    batch_size: int,
    path: pathlib.Path | None,
    dtype: type[np.floating] = np.float32,
) -> np.ndarray:
    """Returns features of images, from a file if they are there.

    Args:
      images: Images `[N, height, width, channels]`.
      shape: Shape of the features of one image.
      batches: Called with the number of images that are done, a multiple of `batch_size` or N.
        Returns the features of the others, in batches of `batch_size`, the last may be smaller.
      batch_size: Number of images in a batch.
      path: The `.npy` file that keeps them, whose name says all that they depend on. None keeps
        nothing.
      dtype: Type of the features.

    Returns:
      The features `[N, *shape]`; a read-only memory map if there is a file.
    """
    shape = (len(images), *shape)
    if path is None:
        features = np.empty(shape, dtype)
        start = 0
        for batch in batches(0):
            features[start : start + len(batch)] = batch
            start += len(batch)
        return features
    cached = _read(path, shape, dtype)
    if cached is None:
        _complete(path, batches, batch_size, shape, dtype)
        cached = np.load(path, mmap_mode="r")
    return cached


def key(images: np.ndarray, description: dict[str, Any]) -> str:
    """Returns a fingerprint of images, and of a description of what is computed of them."""
    described = {"shape": images.shape, **description}
    fingerprint = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=20)
    fingerprint.update(images.data)
    return fingerprint.hexdigest()


def checked_images(images: Any, least_side: int, side_name: str) -> np.ndarray:
    """Returns the images as a contiguous float32 array.

    Args:
      images: What the user gave.
      least_side: Smallest height and width.
      side_name: The formula of it, for the error.

    Raises:
      ValueError: They are not floating-point images in [0, 1] of this size.
    """
    with using("images", images, "an array of floating-point numbers in [0, 1]"):
        array = np.asarray(images)
    if array.ndim != 4 or 0 in array.shape or min(array.shape[1:3]) < least_side:
        raise ValueError(
            "Argument `images` must be images [N, height, width, channels], at least one, with "
            f"height and width of at least {side_name} = {least_side}. Received shape: "
            f"{list(array.shape)}."
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            "Argument `images` must be floating-point numbers in [0, 1]; divide pixels by 255. "
            f"Received dtype: {array.dtype}."
        )
    lowest, highest = array.min(), array.max()
    if not (lowest >= 0 and highest <= 1):  # also if they are NaN
        raise ValueError(
            "Argument `images` must be floating-point numbers in [0, 1]. Received values in "
            f"[{lowest}, {highest}]."
        )
    return np.ascontiguousarray(array, np.float32)


def _read(
    path: pathlib.Path, shape: tuple[int, ...], dtype: type[np.floating], warn: bool = True
) -> np.ndarray | None:
    """Returns the cached features; None if there are none, or not such as these."""
    try:
        # What `np.load` does for a .npy file, but for no other format.
        cached = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever its bytes make NumPy's parser raise
        problem = f"it cannot be read: {error}"
    else:
        if cached.shape == shape and cached.dtype == dtype:
            return cached
        problem = (
            f"it holds {cached.dtype} {list(cached.shape)}, not {np.dtype(dtype)} {list(shape)}"
        )
    if warn:
        warnings.warn(f"Features are computed again, in place of {path}: {problem}.", stacklevel=4)
    return None


def _complete(
    path: pathlib.Path,
    batches: Callable[[int], Iterator[np.ndarray]],
    batch_size: int,
    shape: tuple[int, ...],
    dtype: type[np.floating],
) -> None:
    """Writes a .npy file batch by batch, and resumes where it was interrupted.

    One process writes at a time; others wait for it. Only batches that are whole are kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with _locked(partial) as file:
        # It may have been written by the one that was waited for.
        if _read(path, shape, dtype, warn=False) is not None:
            partial.unlink(missing_ok=True)
            return
        header = io.BytesIO()
        description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, description)
        begin, row = len(header.getvalue()), np.dtype(dtype).itemsize * math.prod(shape[1:])
        whole = _whole_batches(max(0, file.seek(0, os.SEEK_END) - begin), row * batch_size)
        done = min(whole * batch_size, shape[0])
        file.seek(0)
        file.write(header.getvalue())
        file.truncate(begin + done * row)
        file.seek(0, os.SEEK_END)
        for batch in batches(done):
            file.write(np.ascontiguousarray(batch, dtype).data)
            file.flush()
        os.fsync(file.fileno())
        os.replace(partial, path)


def _whole_batches(size: int, batch: int) -> int:
    """Returns the number of batches of a size in bytes that a file holds."""
    return size // batch


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file that no other process has opened so, which is waited for."""
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another may have renamed it while this one waited for its lock.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return


@contextlib.contextmanager
def progress_bar(
    name: str, total: int, done: int, unit: str = "images"
) -> Iterator[Callable[[int], Any]]:
    """Returns what advances a progress bar, where tqdm is installed and it takes long."""
    try:
        import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm.tqdm(
        total=total,
        initial=done,
        desc=name,
        unit=f" {unit}",
        delay=_SECONDS_UNTIL_PROGRESS_BAR,
        disable=None,  # where the output is not a terminal
    ) as bar:
        yield bar.update
