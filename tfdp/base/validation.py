"""Checks of arguments, with errors that name the argument, what it must be and what it was."""

import math
import numbers
from typing import Any

import numpy as np


def error(name: str, requirement: str, value: Any) -> ValueError:
    """Returns the error for argument `name`, which must be `requirement` and is `value`.

    Example:
      >>> str(error("delta", "in (0, 1)", 2))
      'Argument `delta` must be in (0, 1). Received: delta=2.'
    """
    return ValueError(f"Argument `{name}` must be {requirement}. Received: {name}={value!r}.")


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number that a float can hold, other than NaN.

    Booleans are not numbers.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # An integer beyond all floats.
        return False


def is_integer(value: Any) -> bool:
    """Returns whether `value` is an integer, NumPy's included; `True` and `False` are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float if it is positive and finite, else raises a ValueError."""
    if not (is_number(value) and 0 < value < math.inf):
        raise error(name, "a positive finite number", value)
    return float(value)


def non_negative(name: str, value: Any) -> float:
    """Returns `value` as a float if it is >= 0 and finite, else raises a ValueError."""
    if not (is_number(value) and 0 <= value < math.inf):
        raise error(name, "a non-negative finite number", value)
    return float(value)


def positive_integer(name: str, value: Any) -> int:
    """Returns `value` as an int if it is a positive integer, else raises a ValueError."""
    if not (is_integer(value) and value > 0):
        raise error(name, "a positive integer", value)
    return int(value)


def between_zero_and_one(name: str, value: Any) -> float:
    """Returns `value` as a float if it is in (0, 1), else raises a ValueError."""
    if not (is_number(value) and 0 < value < 1):
        raise error(name, "in (0, 1)", value)
    return float(value)


def positive_probability(name: str, value: Any) -> float:
    """Returns `value` as a float if it is in (0, 1], else raises a ValueError."""
    if not (is_number(value) and 0 < value <= 1):
        raise error(name, "in (0, 1]", value)
    return float(value)


def small_probability(name: str, value: Any) -> float:
    """Returns `value` as a float if it is in [0, 1), else raises a ValueError."""
    if not (is_number(value) and 0 <= value < 1):
        raise error(name, "in [0, 1)", value)
    return float(value)


def check_unmasked(name: str, value: Any) -> None:
    """Raises a ValueError if an array has masked entries.

    `np.asarray` drops the mask of a `numpy.ma` array, and takes what stands under it for data.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        count = int(np.ma.count_masked(value))
        raise ValueError(
            f"Argument `{name}` must have no masked entries. Received: {type(value).__name__} with "
            f"{count} masked: leave these examples out, or fill in what they stand for."
        )
