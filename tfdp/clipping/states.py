"""What is known of where a tensor holds the examples."""

import dataclasses
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tensor that holds the examples along one axis.

    The entries of an example follow from that example, from public values and from random numbers
    that were drawn for them: not from how many other examples there are, nor from its place among
    them. The other axes are as long as they are whatever the number of examples.

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


# A number; the length of an axis that holds examples so; a public number; or unknown.
Size: TypeAlias = int | Rows | Public | None
Sizes: TypeAlias = tuple[Size, ...] | None


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """A tensor that depends on the number of rows of the batch alone: shapes, mostly.

    Attributes:
      values: Of a scalar or a vector, what is known of its entries; None if nothing is known.
    """

    values: Sizes = None


@dataclasses.dataclass(frozen=True)
class Unproven:
    """A tensor of which nothing is proven, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class RowList:
    """A `TensorList`, as `tf.TensorArray` makes it, whose length is public.

    Attributes:
      element: The state of every entry that was written: `Rows`, or `Public`; None if there is no
        such entry.
    """

    element: Rows | Public | None = None


State: TypeAlias = Rows | Public | BatchSize | RowList | Unproven
