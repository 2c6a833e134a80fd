"""Values of options: numbers in a range, NaN and infinity excluded."""

import math
from collections.abc import Callable
from typing import Any

import click


class Number(click.ParamType):
    """A number that must meet a condition.

    Args:
      name: What `--help` shows.
      convert: Makes it of the text.
      holds: The condition.
      requirement: The condition in words.
    """

    def __init__(
        self,
        name: str,
        convert: Callable[[Any], float],
        holds: Callable[[float], bool],
        requirement: str,
    ):
        self.name, self._convert, self._holds, self._requirement = name, convert, holds, requirement

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number, or fails with a message that says what it must be."""
        try:
            number = self._convert(value)
        except ValueError:
            number = math.nan
        if not self._holds(number):
            self.fail(f"must be {self._requirement}. Received: {value}.", param, ctx)
        return number


COUNT = Number("count", int, lambda n: 0 < n < 10**15, "a positive integer")
POSITIVE = Number("number", float, lambda x: 0 < x < math.inf, "a positive finite number")
PROBABILITY = Number("number", float, lambda x: 0 < x < 1, "in (0, 1)")
