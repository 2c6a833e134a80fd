"""Checks of arguments."""

import math

import numpy as np
import pytest

from tfdp import _validation


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_validation.positive, [1, 0.5, np.float32(2)], [0, -1, math.inf, math.nan, "1", True]),
        (_validation.non_negative, [0, 0.5, np.float32(2)], [-1, math.inf, math.nan, "1", True]),
        (_validation.positive_integer, [1, np.int64(3)], [0, -1, 1.0, math.nan, "1", True]),
        (_validation.between_zero_and_one, [0.5, 1e-300], [0, 1, -1, math.nan, None]),
        (_validation.positive_probability, [0.5, 1], [0, 1.1, math.nan, None]),
        (_validation.small_probability, [0, 0.5], [1, -0.1, math.nan, None]),
    ],
)
def test_checks(check, good, bad):
    for value in good:
        assert check("x", value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"^Argument `x` must be .+\. Received: x="):
            check("x", value)
