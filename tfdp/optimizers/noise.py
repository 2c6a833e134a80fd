"""Where the noise of a private optimizer comes from."""

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class NoiseSource:
    """Gaussian noise that nobody can draw again.

    The key comes from the operating system's entropy, whatever `keras.utils.set_random_seed` was
    given, and is part of no checkpoint, config or saved graph: who has it can subtract the noise.
    Every draw uses the key with a counter that never goes back, also when an older checkpoint is
    restored, so that steps never share noise; variables get keys of their own.

    Args:
      seed: For tests: makes the draws a function of the seed and of `position`.
      stream: Which of several independent sources with one `seed` this is.
    """

    def __init__(self, seed: int | None = None, stream: int = 0):
        self.seed = seed
        with tf.init_scope():
            key = np.array([seed, stream]) if seed is not None else _entropy()
            self._key = tf.Variable(key.astype(np.int64), trainable=False, name="noise_key")
            self._counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="noise_counter")

    def step_key(self, position: tf.Tensor) -> tf.Tensor:
        """A new key, int64 `[2]`: for the next step, or with a test seed, for step `position`."""
        if self.seed is None:
            position = self._counter.assign_add(1)
        return _fold_in(self._key.read_value(), tf.cast(position, tf.int64))

    @property
    def variables(self) -> tuple[tf.Variable, tf.Variable]:
        """The key and the counter: nothing may ever set them back."""
        return self._key, self._counter

    @property
    def draws(self) -> tf.Variable:
        """Number of keys given out since the source was made."""
        return self._counter


def add_gaussian_noise(
    tensors: list[tf.Tensor | None],
    stddev: float | Sequence[float | tf.Tensor],
    key: tf.Tensor,
) -> list[tf.Tensor | None]:
    """Adds independent N(0, stddev^2) to every coordinate of every tensor.

    Args:
      tensors: Tensors of any shapes; None is left as it is.
      stddev: Standard deviation, in the units of the tensors; or one for each tensor.
      key: int64 `[2]`, used for nothing else.

    Returns:
      The noisy tensors.
    """
    stddevs = list(stddev) if isinstance(stddev, Sequence) else [stddev] * len(tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    silent = all(not tf.is_tensor(value) and value == 0 for value in stddevs)
    if silent or not present:
        return tensors
    # One draw for all: much faster than many small ones.
    sizes = [tf.size(tensor) for tensor in present]
    noise = tf.random.stateless_normal([tf.add_n(sizes)], key, alg="philox")
    noises = iter(tf.split(noise, sizes))
    return [
        None if tensor is None else tensor + tf.cast(_like(next(noises), tensor, s), tensor.dtype)
        for tensor, s in zip(tensors, stddevs, strict=True)
    ]


def _like(flat: tf.Tensor, tensor: tf.Tensor, stddev: float | tf.Tensor) -> tf.Tensor:
    """Standard normal numbers in the shape of a tensor, scaled."""
    return tf.reshape(flat * stddev, tf.shape(tensor))


def _fold_in(key: tf.Tensor, data: tf.Tensor | int) -> tf.Tensor:
    return tf.random.experimental.stateless_fold_in(key, tf.cast(data, tf.int64), alg="philox")


def _entropy() -> np.ndarray:
    return np.frombuffer(os.urandom(16), dtype=np.int64)
