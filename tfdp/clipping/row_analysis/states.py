"""States: where a tensor holds the examples, as far as it is known."""

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
        """True if the examples are contiguous in memory, one after the other."""
        return self.axis == 0 and not self.interleaved


@dataclasses.dataclass(frozen=True)
class Public:
    """A tensor that depends on no example and not on how many there are.

    Attributes:
      values: For a scalar or a vector that was computed from shapes, its entries: numbers, and
        `Public()` for those that are not known statically.
    """

    values: tuple["int | Public", ...] | None = None


# A number; the length of an axis that holds examples so; a public number; or unknown.
Size: TypeAlias = int | Rows | Public | None
Sizes: TypeAlias = tuple[Size, ...] | None


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """A tensor that depends on the number of rows of the batch alone: shapes, mostly.

    Attributes:
      values: For a scalar or a vector, what is known of its entries; None if nothing is known.
    """

    values: Sizes = None


@dataclasses.dataclass(frozen=True)
class Unproven:
    """A tensor about which nothing is proven, and the reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class RowList:
    """A `TensorList`, as `tf.TensorArray` makes it, whose length is public.

    Attributes:
      element: The state of every entry that was written: `Rows`, or `Public`; None if there is no
        such entry.
    """

    element: Rows | Public | None = None


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A part of a ragged tensor whose rows are the examples, each of any length.

    How many entries an example has, and what they are, follows from that example alone and from
    public values. Where they are in `values` follows from the others' lengths as well, so that no
    part is a tensor like those that hold `Rows`: only operations that are known to keep the rows
    apart may use it.

    Attributes:
      part: "values", the entries of all examples, one after the other, `[entries]`; "ids", the
        example of each of them; "indices", that and its place in the example, `[entries, 2]`;
        "shape", the number of examples and the largest number of entries, `[2]`; "lengths", the
        number of entries of each example; "ends", their cumulative sum; "splits", that after a 0.
      source: Name of the operation that made the rows. Parts of one source belong together.
    """

    part: str
    source: str


@dataclasses.dataclass(frozen=True)
class RepeatedAxes:
    """The axes over which a gradient is summed, since an operation repeated a tensor along them.

    Attributes:
      kept: For each axis of the operation's result: `True` if the tensor was repeated along it,
        and otherwise its length. The axis is then summed over only if that length is 1. None if
        it is not known whether it was repeated.
    """

    kept: tuple["Size | bool", ...]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A tensor that an operation made for its own gradient, in a form of its own.

    Attributes:
      source: Name of the operation.
    """

    source: str


State: TypeAlias = (
    Rows | Public | BatchSize | Ragged | RowList | RepeatedAxes | Statistics | Unproven
)
