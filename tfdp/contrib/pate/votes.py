"""Votes: of each teacher one class for each query, or none."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.validation import (
    check_unmasked,
    elements,
    error,
    is_integer,
    is_number,
    using,
)

NONE = -1  # No vote, and no answer.
_MOST_CLASSES = 2**20
_LEAST_STDDEV = 1e-30  # Of which the square is a number, too.


def teacher_votes(outputs: Iterable[Any], num_classes: int) -> np.ndarray:
    """Returns the votes of teachers: of each one class for each query, or -1 for none.

    Guarantees: the votes of a teacher depend on its own outputs alone. Where they are NaN, or a
    label that is no class, the teacher has no vote. (An error would reveal what one teacher has
    learned.)

    Args:
      outputs: For each teacher its outputs for all queries: logits or probabilities, floats
        `[queries, num_classes]`, of which the largest has the vote and the first of those that are
        equal; or labels, integers `[queries]`. Votes are such labels. A generator needs the memory
        of one teacher: `(model.predict(x) for model in teachers)`.
      num_classes: Number of classes K, in [2, 2^20].

    Returns:
      int64 `[teachers, queries]`. They are as private as the data.

    Raises:
      ValueError: The outputs have another shape or type, or differ in their number of queries.

    Example:
      >>> teacher_votes([[[0.1, 0.9], [0.7, 0.3]], [[np.nan, 0.0], [0.5, 0.5]]], num_classes=2)
      array([[ 1,  0],
             [-1,  0]])
      >>> teacher_votes([[1, 0], [7, 0]], num_classes=2)
      array([[ 1,  0],
             [-1,  0]])
    """
    num_classes = checked_classes(num_classes)
    requirement = "for each teacher its logits, probabilities or labels"
    votes = [_votes_of_one(one, num_classes) for one in elements("outputs", outputs, requirement)]
    sizes = sorted({len(one) for one in votes})
    if len(sizes) != 1:
        raise ValueError(
            "Argument `outputs` must hold, for each teacher, as many outputs as there are queries. "
            f"Received: {len(votes)} teachers, with outputs for {sizes} queries."
        )
    return np.stack(votes)


def vote_counts(votes: Any, num_classes: int) -> np.ndarray:
    """Returns how many teachers vote for each class, int64 `[queries, num_classes]`.

    Guarantees: if one teacher changes, at most one vote of a query moves from one class to another,
    appears, or vanishes. The counts of a query change by at most sqrt(2) in l2 norm, and the
    largest of them by at most 1.

    Args:
      votes: Result of `teacher_votes`, or what that takes.
      num_classes: Number of classes.

    Raises:
      ValueError: See `teacher_votes`.

    Example:
      >>> vote_counts([[1, 0], [1, 2], [-1, 2]], num_classes=3)
      array([[0, 2, 0],
             [1, 0, 2]])
    """
    num_classes = checked_classes(num_classes)
    with using("votes", votes, "the result of `teacher_votes`, or what that takes"):
        votes = teacher_votes(votes, num_classes)
    return np.stack([(votes == k).sum(axis=0) for k in range(int(num_classes))], axis=1)


def checked_classes(num_classes: Any) -> int:
    """Returns the number of classes, or raises the error that says what it must be."""
    if not (is_integer(num_classes) and 2 <= num_classes <= _MOST_CLASSES):
        raise error("num_classes", "an integer in [2, 2^20]", num_classes)
    return int(num_classes)


def checked_stddev(name: str, stddev: Any) -> float:
    """Returns a standard deviation of noise on counts, or raises the error of the argument."""
    if not (is_number(stddev) and _LEAST_STDDEV <= stddev <= 1 / _LEAST_STDDEV):
        allowed = f"from {_LEAST_STDDEV:g} to {1 / _LEAST_STDDEV:g}"
        raise error(name, f"a positive finite number, {allowed}", stddev)
    return float(stddev)


def _votes_of_one(output: Any, num_classes: int) -> np.ndarray:
    check_unmasked("outputs", output)
    with using("outputs", output, "for each teacher an array of numbers"):
        array = np.asarray(output)
    if array.ndim == 1 and array.dtype.kind in "iu":
        valid = (array >= 0) & (array < num_classes)
        return np.where(valid, np.where(valid, array, 0).astype(np.int64), NONE)
    if array.ndim == 2 and array.shape[1] == num_classes and _is_floating(array):
        numbers = array.astype(np.float64)
        has_nan = np.isnan(numbers).any(axis=1)
        return np.where(has_nan, NONE, numbers.argmax(axis=1))
    raise ValueError(
        "Argument `outputs` must hold, for each teacher, logits or probabilities, floats [queries, "
        f"num_classes], here [queries, {num_classes}], or labels, integers [queries]. Received: "
        f"shape {list(array.shape)}, dtype {array.dtype}."
    )


def _is_floating(array: np.ndarray) -> bool:
    try:
        return bool(tf.as_dtype(array.dtype).is_floating)  # bfloat16, too.
    except TypeError:
        return False
