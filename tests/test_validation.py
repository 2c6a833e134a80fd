"""Checks of arguments."""

import math

import numpy as np
import pytest

from tfdp.base import validation


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (validation.positive, [1, 0.5, np.float32(2)], [0, -1, math.inf, math.nan, "1", True]),
        (validation.non_negative, [0, 0.5, np.float32(2)], [-1, math.inf, math.nan, "1", True]),
        (validation.positive_integer, [1, np.int64(3)], [0, -1, 1.0, math.nan, "1", True]),
        (validation.between_zero_and_one, [0.5, 1e-300], [0, 1, -1, math.nan, None]),
        (validation.positive_probability, [0.5, 1], [0, 1.1, math.nan, None]),
        (validation.small_probability, [0, 0.5], [1, -0.1, math.nan, None]),
    ],
)
def test_checks(check, good, bad):
    for value in good:
        assert check("x", value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^Argument `x` must be .+\. Received: x="):
            check("x", value)


def test_masked_entries_are_refused():
    for value in (np.arange(3), np.ma.array([1, 2, 3]), [1, None], "text", None):
        validation.check_unmasked("x", value)
    with pytest.raises(ValueError, match=r"^Argument `x` must have no masked .* with 2 masked"):
        validation.check_unmasked("x", np.ma.array([1, 2, 3], mask=[1, 0, 1]))


class Broken:
    def __repr__(self):
        raise RuntimeError


def test_any_value_can_be_shown():
    assert (
        validation.shown("a" * 1000).count("a") > 300 and len(validation.shown("a" * 1000)) == 400
    )
    assert validation.shown(Broken()) == "<Broken>"
    assert "Received: x=" in str(validation.error("x", "small", 10**400))


ARRAYS = [
    np.zeros([3]),
    np.zeros([2, 3]),
    np.array(["a"]),
    np.zeros([2], "complex64"),
    [[1], [1, 2]],
]


@pytest.mark.parametrize(
    "value", [*ARRAYS, None, 1, "text", b"x", {}, object(), math.nan, np.array(1.0)]
)
def test_no_value_breaks_a_check(value):
    checks = [
        lambda: validation.one_of("x", value, ("a", "b")),
        lambda: validation.boolean("x", value),
        lambda: validation.integer("x", value, 2, 5),
        lambda: validation.instance("x", value, dict, "a dict") and validation.path("x", value),
        lambda: validation.function("x", value),
        lambda: validation.path("x", None if isinstance(value, str) else value),
        lambda: validation.array("x", value, "an array", ndim=5),
    ]
    for check in checks:
        try:
            check()
        except ValueError as error:
            assert str(error).startswith("Argument `x` must be ")
            assert "Received: x=" in str(error)
        else:
            assert value is None or value == {}


def test_elements_and_arrays():
    assert validation.elements("x", (i for i in range(3)), "numbers") == [0, 1, 2]
    for value in (None, 1, "text", b"x", {1: 2}, np.array(1.0)):
        with pytest.raises(ValueError, match=r"^Argument `x` must be numbers"):
            validation.elements("x", value, "numbers")
    np.testing.assert_array_equal(validation.array("x", [1, True], "numbers", 1), [1.0, 1.0])
    for value in (["1"], [1j], [[1], [1, 2]], {}, None, [10**400], [None], [[1]]):
        with pytest.raises(ValueError, match=r"^Argument `x` must be numbers"):
            validation.array("x", value, "numbers", 1)


def test_an_error_within_names_the_argument():
    named = pytest.raises(ValueError, match=r"^Argument `x` must be data.*KeyError: 'a'")
    with named as caught, validation.using("x", 3, "data"):
        raise KeyError("a")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(TypeError, match=r"^`x` is odd$"), validation.using("x", 3, "data"):
        raise TypeError("`x` is odd")
