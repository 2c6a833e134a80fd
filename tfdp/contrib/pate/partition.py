"""Disjoint parts of the data, one for each teacher."""

import dataclasses
from typing import Any

import numpy as np

from tfdp.accounting.sampling import EXAMPLE, USER
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.random.parts import random_parts
from tfdp.base.validation import (
    check_unmasked,
    error,
    integer,
    is_integer,
    positive_integer,
    using,
)
from tfdp.data.users import user_numbers

_MOST_EXAMPLES = 10**8  # As many random numbers are drawn at once.


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The teacher that each example is for.

    `random_partition` makes it. To use a saved one again, or where the data come in parts (one
    hospital each), make it of the array.

    The guarantee of PATE needs this: the teacher of an example (a user) depends on nothing but that
    example (user) and random numbers. Then zero-out of one changes the part of one teacher.
    Parts of equal size, of shuffled and split data, do not have this property: an example more
    would move others.

    Attributes:
      teacher_of: The teacher of each example, int64 `[examples]`, in [0, `num_teachers`). Parts may
        be empty. It is as private as the data.
      num_teachers: Number of teachers; a public number.
      users: The user of each example, integers or strings `[examples]`: the unit of privacy is then
        the user. None: it is the example.

    Raises:
      ValueError: An argument is not as described, or a user has examples in two parts.

    Example:
      >>> partition = Partition([0, 2, 0], num_teachers=3)
      >>> partition.indices(0), partition.unit
      (array([0, 2]), 'example')
    """

    teacher_of: np.ndarray = dataclasses.field(repr=False)
    num_teachers: int
    users: np.ndarray | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        num_teachers = positive_integer("num_teachers", self.num_teachers)
        check_unmasked("teacher_of", self.teacher_of)
        with using("teacher_of", self.teacher_of, "an array `[examples]` of integers"):
            given = np.array(self.teacher_of)
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise ValueError(
                "Argument `teacher_of` must hold one integer for each example, [examples]. "
                f"Received: shape {list(given.shape)}, dtype {given.dtype}."
            )
        if given.min() < 0 or given.max() >= num_teachers:
            raise ValueError(
                f"Argument `teacher_of` must be in [0, num_teachers), here [0, {num_teachers}). "
                f"Received: values in [{given.min()}, {given.max()}]."
            )
        teacher_of = given.astype(np.int64)
        teacher_of.setflags(write=False)
        if self.users is not None:
            numbers = user_numbers("users", self.users, len(teacher_of))
            one_of_each = np.zeros(numbers.max() + 1, np.int64)
            one_of_each[numbers] = teacher_of
            split = np.unique(numbers[one_of_each[numbers] != teacher_of])
            if split.size:
                raise ValueError(
                    "Argument `users` must be such that all examples of a user have one teacher. "
                    f"Received: {split.size} users with examples of several teachers."
                )
            numbers.setflags(write=False)
            object.__setattr__(self, "users", numbers)
        object.__setattr__(self, "num_teachers", num_teachers)
        object.__setattr__(self, "teacher_of", teacher_of)

    @property
    def unit(self) -> str:
        """The unit of privacy: "example" or "user"."""
        return EXAMPLE if self.users is None else USER

    @property
    def num_units(self) -> int:
        """Number of examples, or of users where these are the unit."""
        return len(self.teacher_of) if self.users is None else int(self.users.max()) + 1

    def indices(self, teacher: int) -> np.ndarray:
        """Returns the indices of the examples of a teacher, int64 `[n]`, in increasing order.

        Args:
          teacher: Number of the teacher, in [0, `num_teachers`).

        Raises:
          ValueError: There is no such teacher.
        """
        if not (is_integer(teacher) and 0 <= teacher < self.num_teachers):
            raise error("teacher", f"an integer in [0, {self.num_teachers})", teacher)
        return np.flatnonzero(self.teacher_of == teacher)


def random_partition(num_examples: int, num_teachers: int, users: Any = None) -> Partition:
    """Assigns each example, or each user, to a teacher, independently and uniformly.

    Guarantees: with the random numbers of all others as they are, zero-out of one example
    (one user) changes the part of one teacher. So it changes one vote of each query at most. Parts
    differ in size, and may be empty: to shuffle the data and split them evenly would make an
    example that is added move others, so that many teachers change.

    The random numbers follow from 256 bits of the operating system's entropy. The probabilities of
    two teachers differ by at most 2^-64, and are the same for every example, so that the guarantee
    does not suffer.

    Args:
      num_examples: Number of examples.
      num_teachers: Number of teachers, T; a public number, not chosen by looking at the data.
      users: The user of each example, integers or strings `[num_examples]`. All examples of a user
        get one teacher, and the unit of privacy is the user.

    Raises:
      ValueError: An argument is not as described.

    Example:
      >>> partition = random_partition(1000, num_teachers=20)
      >>> sum(len(partition.indices(teacher)) for teacher in range(20))
      1000
      >>> partition = random_partition(4, num_teachers=20, users=["a", "b", "a", "b"])
      >>> partition.unit, bool(partition.teacher_of[0] == partition.teacher_of[2])
      ('user', True)
    """
    num_examples = integer("num_examples", num_examples, 1, _MOST_EXAMPLES)
    num_teachers = integer("num_teachers", num_teachers, 1, _MOST_EXAMPLES)
    numbers = np.arange(num_examples)
    if users is not None:
        numbers = user_numbers("users", users, num_examples)
    parts = random_parts(KeyStream(domain="partition"), int(numbers.max()) + 1, num_teachers)
    return Partition(parts[numbers], num_teachers, users)
