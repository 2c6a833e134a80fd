"""Generator of noise that is correlated from step to step."""

import random
from collections.abc import Sequence

import tensorflow as tf

from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal
from tfdp.correlated_noise import BandedNoise

# Numbers of the memory's owner, and of its only user, in parts that are exact in a float32.
_PART = 2**22
_TAG = 5


class NoiseMemory(ProcessLocal):
    """The noise of the last steps, from which that of the next follows.

    With the coefficients c_0, ..., c_{b-1} of the band, the noise of step t is

        x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0,    z_t ~ N(0, s^2) independent,

    so that C x = z for the banded lower triangular Toeplitz matrix C of these coefficients. Where
    the memory cannot be used, it counts as empty: C then consists of several such blocks, and each
    of its columns still has at most the norm of the coefficients.

    The memory names the only step that may use it: the one with the next draw of the same source,
    with this optimizer, in this process. Memory and name are one variable, which is read and
    written in one operation each. So no noise gets into two steps with the same coefficient,
    whatever threads do. It holds noise that must stay secret, and is in no checkpoint.

    Args:
      noise: The coefficients.
    """

    def __init__(self, noise: BandedNoise):
        self._noise = noise
        self._memory: tf.Variable | None = None
        with plain_variables():
            self._owner = tf.Variable(_new_owner(), trainable=False)

    def next(self, fresh: tf.Tensor, source: tf.Tensor, sequence: tf.Tensor) -> tf.Tensor:
        """Returns the noise of a step, in the graph being built, and remembers it.

        Args:
          fresh: Independent noise z_t, `[size]`.
          source: Number of the object that drew the step's batch, a scalar int64.
          sequence: Number of the draw among those of this source, a scalar int64.

        Raises:
          ValueError: The variables have no static shapes.
        """
        dtype = fresh.dtype if fresh.dtype.size >= 4 else tf.float32
        memory, c = self._of(fresh.shape[0], dtype), self._noise.coefficients
        held = memory.read_value()
        fits = tf.reduce_all(held[:_TAG] == self._tag(source, sequence, dtype))
        before = tf.reshape(held[_TAG:], [len(c) - 1, -1])
        before = tf.where(fits, before, tf.zeros_like(before))
        weights = tf.constant(c[1:], dtype)
        taken_back = tf.linalg.matvec(before, weights, transpose_a=True)
        noise = (tf.cast(fresh, dtype) - taken_back) / tf.constant(c[0], dtype)
        after = tf.concat([noise[tf.newaxis], before[:-1]], axis=0)
        tag = self._tag(source, sequence + 1, dtype)
        with tf.control_dependencies([held]):
            written = memory.assign(
                tf.concat([tag, tf.reshape(after, [-1])], axis=0), read_value=False
            )
        with tf.control_dependencies([written]):
            return tf.cast(tf.identity(noise), fresh.dtype)

    def _of(self, size: int | None, dtype: tf.DType) -> tf.Variable:
        """Returns the memory for noise of so many coordinates."""
        if size is None:
            raise ValueError(
                "Argument `noise_correlation` must be None for variables without static shapes."
            )
        length = (len(self._noise.coefficients) - 1) * size + _TAG
        memory = self._memory
        if memory is None or (memory.shape[0], memory.dtype) != (length, dtype):
            with plain_variables(hold_data=True):
                memory = tf.Variable(tf.fill([length], tf.constant(-1, dtype)), trainable=False)
            self._memory = memory
        return memory

    def _tag(self, source: tf.Tensor, sequence: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the name of a step, `[5]`, exact in a float32."""
        owner = self._owner.read_value()
        low, high = sequence % _PART, sequence // _PART
        parts: Sequence[tf.Tensor] = [owner[0], owner[1], source % _PART, low, high]
        return tf.cast(tf.stack(parts), dtype)

    def _arguments(self) -> tuple:
        return (self._noise,)

    def begin_anew(self) -> None:
        """Has nobody use what is in the memory."""
        self._owner.assign(_new_owner())


def _new_owner() -> tf.Tensor:
    draw = random.SystemRandom().randrange
    return tf.constant([draw(_PART), draw(_PART)], tf.int64)
