"""Random sets of examples that are sampled in turns."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.random.parts import random_parts

# Use of a key for sets, besides its uses for a draw.
_OF_SETS = 3


class Sets(NamedTuple):
    """Sets of examples.

    Attributes:
      key: Key of the cycle that they are of.
      order: The examples of the first set, those of the second, ..., int64 `[examples]`.
      starts: Where each set begins, and where the last one ends, int64 `[sets + 1]`.
    """

    key: tf.Tensor
    order: tf.Tensor
    starts: tf.Tensor


class Cycle:
    """Assignment of examples to sets, which batches are sampled from in turns.

    Each example is in one of the sets, each with the same probability, independently of all others:
    an example that is added to the data set, or removed, moves no other.

    Args:
      size: Number of examples.
      length: Number of sets.
      seed: Makes the assignment reproducible, for tests; None: it is secret.
    """

    def __init__(self, size: int, length: int, seed: int | None):
        sets = random_parts(KeyStream(seed, "cycle"), size, length)
        self.length = length
        # The examples of set 0, those of set 1, ..., and where each set begins.
        self.order = tf.constant(np.argsort(sets, kind="stable"), tf.int64)
        sizes = np.bincount(sets, minlength=length)
        self._starts = tf.constant([0, *np.cumsum(sizes)], tf.int64)

    def draw(self, number: tf.Tensor, sample: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Draws a sample of the set whose turn it is, in the graph being built.

        Args:
          number: Number of the draw.
          sample: Samples the indices below a scalar int64; larger ones are padding.

        Returns:
          Indices of examples, or larger ones where there is padding.
        """
        return _sampled(number % self.length, self.order, self._starts, sample)


class RedrawnCycle:
    """Assignment of examples to sets, which is drawn anew for each cycle of batches.

    Each example is in one of the sets, each with the same probability (but for 2^-63), independent
    of all others and of all other cycles: random allocation. The sets of a cycle follow from its
    key alone, of a random word for each example. Draws that follow each other hand them on.

    Args:
      size: Number of examples.
      length: Number of sets.
    """

    def __init__(self, size: int, length: int):
        self.length = length
        self._size = size

    @property
    def no_sets(self) -> Sets:
        """Sets of no cycle, which the first draw is handed."""
        key, starts = tf.fill([5], tf.constant(-1, tf.int64)), tf.zeros([self.length + 1], tf.int64)
        return Sets(key, tf.zeros([self._size], tf.int64), starts)

    def sets_of(self, key: tf.Tensor, last: Sets) -> Sets:
        """Returns the sets of a draw's cycle.

        Args:
          key: Secret and number of the draw: those of a cycle have the same secret, int64 `[5]`.
          last: Sets of another draw, which are those of this one if they are of its cycle.
        """
        # The secret is that of the draws: no others can have the same sets.
        of_cycle = tf.concat([key[:-1], key[-1:] // self.length], axis=0)

        def drawn() -> Sets:
            words = chacha.random_words(of_cycle, 2 * self._size, _OF_SETS)
            words = tf.bitcast(tf.reshape(words, [-1, 2]), tf.int64)
            sets = tf.math.floormod(words, tf.constant(self.length, tf.int64))
            sizes = tf.math.bincount(tf.cast(sets, tf.int32), minlength=self.length)
            starts = tf.concat([[0], tf.cumsum(tf.cast(sizes, tf.int64))], axis=0)
            order = tf.cast(tf.argsort(sets, stable=True), tf.int64)
            return Sets(of_cycle, order, tf.ensure_shape(starts, [self.length + 1]))

        return tf.cond(tf.reduce_all(last.key == of_cycle), lambda: last, drawn)

    def draw(
        self, key: tf.Tensor, sets: Sets, sample: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Draws a sample of the set whose turn it is.

        Args:
          key: Secret and number of the draw.
          sets: The sets of its cycle.
          sample: Samples the indices below a scalar int64; larger ones are padding.

        Returns:
          Indices of examples, or larger ones where there is padding.
        """
        return _sampled(key[-1] % self.length, sets.order, sets.starts, sample)


def _sampled(
    which: tf.Tensor,
    order: tf.Tensor,
    starts: tf.Tensor,
    sample: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns a sample of one of the sets: indices of examples, or the size where there is padding.

    Args:
      which: Number of the set.
      order: The examples of the first set, those of the second, ...
      starts: Where each set begins.
      sample: Samples the indices below a scalar int64; larger ones are padding.
    """
    start, end = starts[which], starts[which + 1]
    indices = sample(end - start)
    size = tf.size(order, tf.int64)
    places = tf.minimum(start + indices, size - 1)
    return tf.where(indices < end - start, tf.gather(order, places), size)
