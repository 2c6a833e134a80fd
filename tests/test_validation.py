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
