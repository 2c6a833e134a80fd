"""Numbers that are the same on every machine.

Sums and exponentials differ in their last bits from processor to processor. What is calculated with
them is rounded, before it becomes a parameter of a training that may resume on another machine.
"""

import decimal

_DIGITS = 6


def rounded_up(number: float) -> float:
    """Returns the least number of six significant digits that is not below `number`.

    Example:
      >>> rounded_up(1.2345671), rounded_up(1.25)
      (1.23457, 1.25)
    """
    return _rounded(number, decimal.ROUND_CEILING)


def rounded_down(number: float) -> float:
    """Returns the largest number of six significant digits that is not above `number`."""
    return _rounded(number, decimal.ROUND_FLOOR)


def _rounded(number: float, rounding: str) -> float:
    return float(decimal.Context(prec=_DIGITS, rounding=rounding).create_decimal(number))
