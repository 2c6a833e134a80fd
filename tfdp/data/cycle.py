"""Random sets of examples that are sampled in turns."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.random.parts import random_parts

# Use of a key for sets, besides its uses for a draw.
_OF_SETS = 3


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
        which = number % self.length
        start, end = self._starts[which], self._starts[which + 1]
        indices = sample(end - start)
        size = tf.size(self.order, tf.int64)
        places = tf.minimum(start + indices, size - 1)
        return tf.where(indices < end - start, tf.gather(self.order, places), size)


class RedrawnCycle:
    """Assignment of examples to sets, which is drawn anew for each cycle of batches.

    Each example is in one of the sets, each with the same probability (but for 2^-63), independent
    of all others and of all other cycles: random allocation. Nothing is kept from draw to draw: a
    draw makes the sets of its cycle, of a random word for each example.

    Args:
      size: Number of examples.
      length: Number of sets.
    """

    def __init__(self, size: int, length: int):
        self.length = length
        self._size = size

    def members(self, key: tf.Tensor) -> tf.Tensor:
        """Returns the indices of the examples in the set whose turn it is, int64 `[members]`.

        Args:
          key: Secret and number of the draw: those of a cycle have the same secret.
        """
        # The secret is that of the draws: no others can have the same sets.
        of_cycle = tf.concat([key[:-1], key[-1:] // self.length], axis=0)
        words = chacha.random_words(of_cycle, 2 * self._size, _OF_SETS)
        words = tf.bitcast(tf.reshape(words, [-1, 2]), tf.int64)
        sets = tf.math.floormod(words, tf.constant(self.length, tf.int64))
        return tf.where(sets == key[-1] % self.length)[:, 0]

    def draw(self, key: tf.Tensor, sample: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Draws a sample of the set whose turn it is.

        Args:
          key: See `members`.
          sample: Samples the indices below a scalar int64; larger ones are padding.

        Returns:
          Indices of examples, or larger ones where there is padding.
        """
        members = self.members(key)
        count = tf.size(members, tf.int64)
        indices = tf.minimum(sample(count), count)
        return tf.gather(tf.concat([members, [self._size]], axis=0), indices)
