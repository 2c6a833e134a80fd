"""Streams of secret keys for random numbers. No two keys are equal."""

import hashlib
import os
import weakref

import numpy as np
import tensorflow as tf

from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal

_PHILOX = 1  # The numbering of `tf.raw_ops.RngReadAndSkip`.


class KeyStream(ProcessLocal):
    """A stream of secret keys that gives out each key once.

    The secret is 256 bits of the operating system's entropy, independent of
    `keras.utils.set_random_seed`, and is in no checkpoint, config or saved graph. A counter numbers
    the keys. It is read and advanced in one atomic operation, so threads, iterators and steps never
    share a key, and it never goes back. Copies, pickles and forked processes get secrets of their
    own.

    Args:
      seed: For tests: makes the keys a function of `seed`, `domain` and `position`.
      domain: Purpose of the keys. With one `seed`, streams of different domains are independent.
      first: With a test seed, the number of keys that an interrupted run has used already.
    """

    def __init__(self, seed: int | None = None, domain: str = "", first: int = 0):
        self.seed, self.domain, self._first = seed, domain, first
        with plain_variables(hold_data=True):
            self._secret = tf.Variable(self._new_secret(), trainable=False, name="secret_key")
        with plain_variables():
            # The state of a random generator: the counter is its first entry.
            self._state = tf.Variable(tf.zeros([3], tf.int64), trainable=False, name="key_counter")
        _live.add(self)

    def next_key(self, position: tf.Tensor | int | None = None) -> tf.Tensor:
        """Returns a new key, int64 `[5]`, each time that the graph being built runs.

        It is the secret and a number: key and nonce of ChaCha20 (`chacha.random_words`).

        Args:
          position: With a test seed, the number of the key; None counts the keys given out.
        """
        if self.seed is None or position is None:
            position = self._count() + self._first
        number = tf.cast(position, tf.int64)
        return tf.concat([self.secret(), number[tf.newaxis]], axis=0)

    def secret(self) -> tf.Tensor:
        """Returns the secret of all keys, int64 `[4]`, in the graph being built."""
        return self._secret.read_value()

    def _count(self) -> tf.Tensor:
        """Returns the number of keys given out so far, and counts one more, atomically."""
        before = tf.raw_ops.RngReadAndSkip(
            resource=self._state.handle,
            alg=tf.constant(_PHILOX),
            delta=tf.constant(1, tf.uint64),
        )
        return before[0] // 256  # The operation counts in steps of 256.

    @property
    def variables(self) -> tuple[tf.Variable, tf.Variable]:
        """The secret and the counter, which must never be rolled back."""
        return self._secret, self._state

    @property
    def count(self) -> int:
        """Number of keys given out since the stream was made, without a test seed."""
        return int(self._state.numpy()[0]) // 256

    def _new_secret(self) -> np.ndarray:
        if self.seed is None:
            return np.frombuffer(os.urandom(32), np.int64).copy()
        digest = hashlib.sha256(f"{self.domain} {self.seed}".encode()).digest()
        return np.frombuffer(digest, np.int64).copy()

    def _arguments(self) -> tuple:
        return self.seed, self.domain

    def begin_anew(self) -> None:
        """Takes another secret."""
        self._secret.assign(self._new_secret())


_live: "weakref.WeakSet[KeyStream]" = weakref.WeakSet()


def all_variables() -> list[tf.Variable]:
    """Returns the secrets and the counters of all streams: nothing may ever set them back."""
    return [variable for stream in list(_live) for variable in stream.variables]
