"""Checks of arguments, with errors that name the argument, what it must be and what it was."""

import contextlib
import math
import numbers
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_LONGEST = 400  # Characters of a value in a message.


def shown(value: Any) -> str:
    """Returns a value as messages show it: its `repr`, shortened; its type where that fails.

    Example:
      >>> shown(2.5), len(shown("a" * 1000))
      ('2.5', 400)
    """
    try:
        text = repr(value)
    except Exception:  # An integer of more digits than Python prints, or a class of the user's.
        text = f"<{type(value).__name__}>"
    half = (_LONGEST - 5) // 2
    return text if len(text) <= _LONGEST else f"{text[: half + 1]} ... {text[-half:]}"


def error(name: str, requirement: str, value: Any) -> ValueError:
    """Returns the error for argument `name`, which must be `requirement` and is `value`.

    Example:
      >>> str(error("delta", "in (0, 1)", 2))
      'Argument `delta` must be in (0, 1). Received: delta=2.'
    """
    return ValueError(f"Argument `{name}` must be {requirement}. Received: {name}={shown(value)}.")


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


def integer(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    optional: bool = False,
) -> Any:
    """Returns `value` as an int if it is an integer in a range, else raises a ValueError.

    Args:
      name: Name of the argument.
      value: Its value.
      least: The least allowed value, or None.
      most: The largest allowed value, or None.
      optional: Whether None is allowed.
    """
    if value is None and optional:
        return None
    fits = is_integer(value) and not (
        (least is not None and value < least) or (most is not None and value > most)
    )
    if not fits:
        kinds = {0: "a non-negative integer", 1: "a positive integer"}
        ends = [] if least is None or least in kinds else [f"at least {least}"]
        ends += [] if most is None else [f"at most {most}"]
        requirement = kinds.get(-1 if least is None else least, "an integer")
        requirement += f" of {' and '.join(ends)}" if ends else ""
        raise error(name, f"{requirement}{' or None' if optional else ''}", value)
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False, NumPy's included, else raises a ValueError."""
    if not isinstance(value, bool | np.bool_):
        raise error(name, "True or False", value)
    return bool(value)


def one_of(name: str, value: Any, allowed: Collection[str]) -> Any:
    """Returns `value` if it is one of the allowed strings, else raises a ValueError.

    (`value in allowed` fails itself for arrays and lists.)
    """
    if not (isinstance(value, str) and value in allowed):
        raise error(name, f"one of {list(allowed)}", value)
    return value


def instance(name: str, value: Any, kind: type[T] | tuple[type[T], ...], requirement: str) -> T:
    """Returns `value` if it is of a class, else raises a ValueError."""
    if not isinstance(value, kind):
        raise error(name, requirement, value)
    return value


def function(name: str, value: Any, requirement: str = "a function or None") -> Any:
    """Returns `value` if it is callable or None, else raises a ValueError."""
    if not (value is None or callable(value)):
        raise error(name, requirement, value)
    return value


def path(name: str, value: Any) -> Any:
    """Returns `value` if a file can have this name, else raises a ValueError."""
    try:
        bytes_of_it = os.fsencode(value) if isinstance(value, str | os.PathLike) else b""
    except (TypeError, UnicodeError):
        bytes_of_it = b""
    if not bytes_of_it or b"\0" in bytes_of_it:
        raise error(name, "the path of a file or a folder, a string or a `pathlib.Path`", value)
    return value


def elements(name: str, value: Any, requirement: str) -> list[Any]:
    """Returns the elements of an iterable other than a string, else raises a ValueError.

    Errors of a generator stay what they are.
    """
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise error(name, requirement, value)
    try:
        iterator = iter(value)
    except TypeError:  # Arrays and tensors of rank 0.
        raise error(name, requirement, value) from None
    return list(iterator)


def array(name: str, value: Any, requirement: str, ndim: int | None = None) -> np.ndarray:
    """Returns `value` as an array of real numbers in float64, else raises a ValueError.

    Args:
      name: Name of the argument.
      value: Its value: an array, a tensor, a number or nested sequences.
      requirement: What it must be.
      ndim: The number of dimensions, or None for any.
    """
    check_unmasked(name, value)
    try:
        given = np.asarray(value)
        numeric = given.dtype.kind in "biuf" or (given.dtype.kind == "V" and not given.dtype.names)
        if given.dtype.kind == "O":  # Of integers beyond int64, too.
            numeric = all(isinstance(part, numbers.Real) for part in given.flat)
        converted = given.astype(np.float64) if numeric else None
    except (TypeError, ValueError, OverflowError):
        converted = None
    if converted is None or (ndim is not None and converted.ndim != ndim):
        raise error(name, requirement, value)
    return converted


@contextlib.contextmanager
def using(name: str, value: Any, requirement: str) -> Iterator[None]:
    """Raises what fails within as the error of an argument, with what failed as its cause.

    It is for what NumPy, TensorFlow or Keras do with data, whose errors say nothing of arguments.
    Errors that name the argument are raised as they are.

    Args:
      name: Name of the argument.
      value: Its value.
      requirement: What it must be.
    """
    try:
        yield
    except Exception as problem:
        text = str(problem)
        if isinstance(problem, ValueError | TypeError) and f"`{name}`" in text:
            raise
        first = text.strip().partition("\n")[0][:_LONGEST]
        raise ValueError(
            f"{error(name, requirement, value)} {type(problem).__name__}: {first}"
        ) from problem


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
