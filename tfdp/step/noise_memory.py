"""Generator of noise that is correlated from step to step."""

import random
from collections.abc import Sequence

import tensorflow as tf

from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal
from tfdp.correlated_noise import BandedNoise, CorrelatedNoise

# Numbers of the memory's owner, and of its only user, in parts that are exact in a float32.
_PART = 2**22
_TAG = 5


class NoiseMemory(ProcessLocal):
    """The noise of the last steps, or weighted sums of it, from which that of the next follows.

    With the coefficients c_0, ..., c_{b-1} of a band, the noise of step t is

        x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0,    z_t ~ N(0, s^2) independent,

    so that C x = z for the banded lower triangular Toeplitz matrix C of these coefficients. With
    buffers of weights w_j and decays d_j, it is

        x_t = z_t / c_0 - w_1 s_{1,t} - ... - w_n s_{n,t},    s_{j,t+1} = d_j s_{j,t} + x_t.

    Where the memory cannot be used, it counts as empty: C then consists of several such blocks,
    each the beginning of the whole. So it does at the end of the cycles of a `BufferedNoise`:
    before each draw whose number is a multiple of `noise.renewal`.

    The memory names the only step that may use it: the one with the next draw of the same source,
    with this optimizer, in this process. Memory and name are one variable, which is read and
    written in one operation each. So no noise gets into two steps with the same coefficient,
    whatever threads do. It holds noise that must stay secret, and is in no checkpoint.

    Args:
      noise: The correlation.
    """

    def __init__(self, noise: CorrelatedNoise):
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
        memory = self._of(fresh.shape[0], dtype)
        held = memory.read_value()
        fits = tf.reduce_all(held[:_TAG] == self._tag(source, sequence, dtype))
        fits = tf.logical_and(fits, tf.logical_not(self._ends_before(sequence)))
        before = tf.reshape(held[_TAG:], [self._noise.vectors, -1])
        before = tf.where(fits, before, tf.zeros_like(before))
        noise, after = self._noise_after(before, tf.cast(fresh, dtype))
        tag = self._tag(source, sequence + 1, dtype)
        with tf.control_dependencies([held]):
            written = memory.assign(
                tf.concat([tag, tf.reshape(after, [-1])], axis=0), read_value=False
            )
        with tf.control_dependencies([written]):
            return tf.cast(tf.identity(noise), fresh.dtype)

    def _ends_before(self, sequence: tf.Tensor) -> tf.Tensor:
        """Returns whether the noise begins anew with this draw, whatever is in the memory."""
        length = self._noise.renewal
        return tf.constant(False) if length is None else sequence % length == 0

    def _noise_after(self, before: tf.Tensor, fresh: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the noise of a step, `[size]`, and what is remembered after it.

        Args:
          before: What is remembered, `[vectors, size]`.
          fresh: Independent noise, `[size]`.
        """
        if isinstance(self._noise, BandedNoise):
            c = tf.constant(self._noise.coefficients, fresh.dtype)
            noise = (fresh - tf.linalg.matvec(before, c[1:], transpose_a=True)) / c[0]
            return noise, tf.concat([noise[tf.newaxis], before[:-1]], axis=0)
        scale, weights, decays = (
            tf.constant(numbers, fresh.dtype)
            for numbers in (self._noise.scale, self._noise.weights, self._noise.decays)
        )
        noise = fresh / scale - tf.linalg.matvec(before, weights, transpose_a=True)
        return noise, decays[:, tf.newaxis] * before + noise

    def _of(self, size: int | None, dtype: tf.DType) -> tf.Variable:
        """Returns the memory for noise of so many coordinates."""
        if size is None:
            raise ValueError(
                "Argument `noise_correlation` must be None for variables without static shapes."
            )
        length = self._noise.vectors * size + _TAG
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
