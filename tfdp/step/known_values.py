"""Values that trained variables have had, and what they had cost.

Values are known by hashes: a copy is recognized after its original has changed or is gone.
"""

import hashlib
import math
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.step.record import record_table

_SAMPLE = 8192  # Entries that are hashed, of variables that have more.
_ENOUGH = 6  # Entries by which values are still recognized after they were rounded to 8 bits.
_ROUNDED = (tf.bfloat16, tf.float16)
_RECENT = 2**16


def digest(values: Any) -> int | None:
    """Returns a hash of a tensor, or None where it identifies nothing: one round number.

    Values are compared as float32, so that a copy in float64 has the hash of its original. Of
    large tensors, 8,192 evenly spaced entries are hashed, and the sum of the bits of all.
    """
    return _digest(*_entries(values), values)


def digests(values: Any) -> list[int]:
    """Returns the hashes of a tensor, and of its copies in bfloat16 and float16."""
    entries, total = _entries(values)
    found = [_digest(entries, total, values)]
    if entries.size >= _ENOUGH:
        for dtype in _ROUNDED:
            with np.errstate(all="ignore"):
                rounded = entries.astype(dtype.as_numpy_dtype)
            found.append(_digest(rounded, total and _total(values, dtype), values))
    return list(dict.fromkeys(one for one in found if one is not None))


def _entries(values: Any) -> tuple[np.ndarray, bytes]:
    """Returns the entries to hash, and what `_total` says of all if there are more."""
    size = math.prod(values.shape)
    if size <= _SAMPLE:  # Fast: such tensors are read often.
        return np.asarray(values).ravel(), b""
    with tf.init_scope():  # Also no tape records it.
        flat = tf.reshape(values, [-1])
        sample = tf.gather(flat, np.linspace(0, size - 1, _SAMPLE).astype(np.int64))
        return sample.numpy(), _total(flat)


def _total(values: Any, dtype: tf.DType | None = None) -> bytes:
    """Returns the sum of the bits of all entries as float32, without those of signs (of zeros).

    It changes with any entry, as those of the few rows or coordinates that were trained.

    Args:
      values: A tensor.
      dtype: Type to which entries are rounded before.
    """
    with tf.init_scope():
        values = tf.convert_to_tensor(values)
        rounded = values if dtype is None else tf.cast(values, dtype)
        bits = tf.bitcast(tf.cast(rounded, tf.float32), tf.int32)
        return _bytes(int(tf.reduce_sum(bits)))


def _bytes(total: int) -> bytes:
    return (total % 2**31).to_bytes(4, "little")


def _digest(entries: np.ndarray, total: bytes, values: Any) -> int | None:
    if entries.dtype != np.float32:
        with np.errstate(all="ignore"):
            entries = entries.astype(np.float32)
    entries = entries + np.float32(0)  # -0 becomes 0.
    if not entries.size or _is_common(entries, total, math.prod(values.shape)):
        return None
    text = math.prod(values.shape).to_bytes(8, "little") + total + entries.tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _is_common(entries: np.ndarray, total: bytes, size: int) -> bool:
    """Returns whether all entries are one round number, of at most 11 bits, such as 0 or 0.5."""
    first = entries[:1]
    if first[0] != entries[-1]:  # Fast, for most.
        return False
    if np.any(entries != first) or total not in (b"", _bytes(int(first.view(np.int32)[0]) * size)):
        return False
    with np.errstate(all="ignore"):
        return bool(first == first.astype(np.float16)) or not np.isfinite(first[0])


class KnownValues:
    """Table of the hashes of values, and of the releases that went into them.

    Guarantees: nothing is forgotten. The latest 65,536 hashes have tables of their own; older ones,
    eight bytes each, share a table that covers what any of them had cost.

    Values that had cost nothing when they were first seen are free, also in a variable that was
    trained and got them back, such as its initial values.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._recent: dict[int, np.ndarray] = {}
            self._free: set[int] = set()
            self._old = np.zeros(0, np.uint64)
            self._cost_of_old = np.zeros([0, record_table.COLUMNS])

    def __bool__(self) -> bool:
        return bool(self._recent) or bool(self._old.size)

    def note(self, hashes: Iterable[int], rows: np.ndarray, certain: bool = False) -> None:
        """Notes that values of these hashes had cost what `rows` count.

        Args:
          hashes: Results of `digest`.
          rows: `[rows, COLUMNS]` of `record_table`.
          certain: Whether a file says so: it may be read after its values came by another way.
        """
        with self._lock:
            for one in hashes:
                if certain:
                    self._free.discard(one)
                elif one in self._free:
                    continue
                known = self._recent.get(one)
                self._recent[one] = rows if known is None else record_table.union([known, rows])
            if len(self._recent) > _RECENT:
                tables = {id(table): table for table in self._recent.values()}
                self._cost_of_old = record_table.union([self._cost_of_old, *tables.values()])
                new = np.fromiter(self._recent, np.uint64, len(self._recent))
                self._old = np.union1d(self._old, new)
                self._recent = {}

    def note_free(self, one: int | None) -> None:
        """Notes that values of this hash have cost nothing."""
        with self._lock:
            if len(self._free) >= _RECENT:
                self._free.clear()
            if one is not None and self.rows_of(one) is None:
                self._free.add(one)

    def is_free(self, one: int | None) -> bool:
        """Returns whether values of this hash had cost nothing when they were first seen."""
        return one in self._free

    def rows_of(self, one: int | None) -> np.ndarray | None:
        """Returns what values of this hash had cost; None if they are not known."""
        if one is None:
            return None
        with self._lock:
            found = [] if (rows := self._recent.get(one)) is None else [rows]
            at = int(np.searchsorted(self._old, np.uint64(one)))
            if at < self._old.size and self._old[at] == np.uint64(one):
                found.append(self._cost_of_old)
            return record_table.union(found) if found else None
