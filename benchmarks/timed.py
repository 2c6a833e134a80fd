"""Says how a program is timed."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Timed:
    """A program as it is timed.

    Attributes:
      build: Builds it for so many examples: a model, its loss, and its data.
      batch: Rows of a plain batch; expected examples of a private one.
      sizes: Further arguments of `build`.
      changed: Lines that make it private: the call of `make_private`, and that of `fit`, which gets
        its batches; and in a training step of one's own, that which gives the optimizer the loss.
    """

    build: Callable[..., Any]
    batch: int
    sizes: dict[str, Any]
    changed: int = 2
