"""Users, each with some of the examples: what is sampled where the unit of privacy is a user."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.validation import check_unmasked, error, integer, using

# The use of a draw's key; the others are those of `tfdp.data.source`.
_OF_CHOICE = 1


@dataclasses.dataclass(frozen=True)
class Users:
    """The examples of each user, of which a draw takes a few.

    Attributes:
      order: Indices of the examples, those of a user one after the other, int64 `[examples]`.
      starts: For each user the place in `order` of the first, int64 `[users]`.
      counts: For each user the number of examples, int64 `[users]`.
      most: Examples of a user that a draw takes at most.
    """

    order: tf.Tensor
    starts: tf.Tensor
    counts: tf.Tensor
    most: int

    @classmethod
    def of(cls, privacy_unit: Any, examples_per_user: Any, examples: int) -> "Users":
        """Returns the users of a data set.

        Args:
          privacy_unit: For each example its user, an integer or a string.
          examples_per_user: Examples of a user that a draw takes at most.
          examples: Number of examples.

        Raises:
          ValueError: An argument is out of its range.
        """
        if examples_per_user is None:
            raise error("examples_per_user", "given with `privacy_unit`: a positive integer", None)
        most = integer("examples_per_user", examples_per_user, 1, 2**31 - 1)
        places = user_numbers("privacy_unit", privacy_unit, examples)
        counts = np.bincount(places)
        with tf.device("cpu"):
            return cls(
                tf.constant(np.argsort(places, kind="stable"), tf.int64),
                tf.constant(np.cumsum(counts) - counts, tf.int64),
                tf.constant(counts, tf.int64),
                most,  # Not what the largest user has, which is private: it is in saved files.
            )

    @property
    def number(self) -> int:
        """The number of users."""
        return int(self.counts.shape[0])

    def choose(self, key: tf.Tensor, users: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Chooses examples of users: of each a uniformly random subset, of `most` if there are.

        A user with fewer examples has rows without weight, which repeat the first of them. So what
        stands in the rows of a user depends on that user's examples alone.

        Args:
          key: Secret of this draw; see `tfdp.base.random.chacha.random_words`.
          users: Indices of users, int64 `[n]`; from `number` on they stand for no user.

        Returns:
          Indices of examples, int64 `[n * most]`: those of the first user, of the second, and so
          on; the number of examples where there is no user. And their weights, float32: for each
          user they are positive for chosen examples, all equal, and their mean is 1.
        """
        examples = tf.size(self.order, tf.int64)
        none = users >= self.number
        known = tf.where(none, tf.zeros_like(users), users)
        counts = tf.gather(self.counts, known)[:, tf.newaxis]
        places = self._places(key, counts)
        taken = tf.range(self.most, dtype=tf.int64) < counts
        indices = tf.gather(self.starts, known)[:, tf.newaxis] + tf.where(
            taken, places, tf.zeros_like(places)
        )
        indices = tf.where(none[:, tf.newaxis], examples, tf.gather(self.order, indices))
        chosen = tf.cast(tf.minimum(counts, self.most), tf.float32)
        weights = tf.where(taken, self.most / chosen, 0.0)
        return tf.reshape(indices, [-1]), tf.reshape(weights, [-1])

    def _places(self, key: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Draws `most` different numbers below each of `counts`, `[n, 1]`; all, if there are fewer.

        Floyd's algorithm: uniform over subsets, in `most` steps whatever the counts are.
        """
        n = tf.size(counts)
        words = chacha.random_words(key, 2 * self.most * n, _OF_CHOICE)
        numbers = tf.bitcast(tf.reshape(words, [self.most, n, 2]), tf.int64)
        numbers = tf.bitwise.right_shift(tf.bitcast(numbers, tf.uint64), tf.constant(1, tf.uint64))
        numbers = tf.cast(numbers, tf.int64)
        steps = tf.range(self.most, dtype=tf.int64)

        def step(index: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            last = tf.maximum(counts - self.most, 0) + index
            drawn = numbers[index][:, tf.newaxis] % (last + 1)
            known = tf.reduce_any(found == drawn, axis=1, keepdims=True)
            # If there are few examples, all are taken, in their order.
            drawn = tf.where(tf.logical_or(known, counts <= self.most), last, drawn)
            return index + 1, tf.where(steps == index, drawn, found)

        start = -tf.ones([n, self.most], tf.int64)
        zero = tf.constant(0, tf.int64)
        return tf.while_loop(lambda index, _: index < self.most, step, [zero, start])[1]


def user_numbers(name: str, users: Any, examples: int) -> np.ndarray:
    """Returns a number for the user of each example, int64 `[examples]`: 0 and up, none left out.

    Args:
      name: Name of the argument, for errors.
      users: For each example its user, an integer or a string.
      examples: Number of examples.

    Raises:
      ValueError: `users` is not of that form.
    """
    check_unmasked(name, users)
    with using(name, users, "an array with one integer or string for each example"):
        ids = np.asarray(users)
    if ids.dtype == object and all(isinstance(one, str | bytes) for one in ids.flat):
        ids = ids.astype(bytes if ids.size and isinstance(ids.flat[0], bytes) else str)
    if ids.shape != (examples,) or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"Argument `{name}` must hold the user of each example: one integer or string for each "
            f"of the {examples} examples. Received: shape {ids.shape}, type {ids.dtype}. Give an "
            "example without a user (None, NaN) one of its own."
        )
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)
