"""What is known of where a tensor holds the examples."""

import dataclasses
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor that holds the examples along one axis.

    Attributes:
      axis: The axis.
      each: Entries of the axis that belong to one example, None if that is not known statically.
        The axis is `each` times as long as the batch.
      interleaved: Whether entry `j * batch + i` belongs to example i (as SpaceToBatchND makes it);
        otherwise the entries `i * each` to `(i + 1) * each - 1` do.
    """

    axis: int = 0
    each: int | None = 1
    interleaved: bool = False

    @property
    def leads(self) -> bool:
        """Whether the examples are contiguous in memory, one after the other."""
        return self.axis == 0 and not self.interleaved


@dataclasses.dataclass(frozen=True)
class Public:
    """A tensor that depends on no example and not on how many there are.

    Attributes:
      values: Of a scalar or a vector that was computed from shapes, its entries.
    """

    values: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """A tensor that depends on the number of rows of the batch alone: shapes, mostly.

    Attributes:
      values: Of a scalar or a vector, what is known of its entries: a number, the length of an axis
        that holds examples so, or None; None if nothing is known.
    """

    values: "tuple[int | Rows | None, ...] | None" = None


@dataclasses.dataclass(frozen=True)
class Filled:
    """A tensor whose shape may depend on the number of rows, with one value or one law throughout.

    Zeros, ones, or random numbers: whichever axis is taken for that of the examples, no example
    is in it and all positions are alike.
    """


@dataclasses.dataclass(frozen=True)
class Unproven:
    """A tensor of which nothing is proven, and why."""

    reason: str


State: TypeAlias = Rows | Public | BatchSize | Filled | Unproven
