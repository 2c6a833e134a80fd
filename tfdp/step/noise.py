"""Generator of the noise of private optimizers."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.clipping.shared_tensors import reshaped
from tfdp.step import replicas

# Gets sums, the standard deviation of the noise of each, and the types of what is released; returns
# what is released.
StandIn: TypeAlias = Callable[
    [Sequence[tf.Tensor | None], Sequence[float | tf.Tensor], Sequence[tf.DType | None]],
    list[tf.Tensor | None],
]
_stand_in: contextvars.ContextVar[StandIn | None] = contextvars.ContextVar("stand_in", default=None)


@contextlib.contextmanager
def replaced_by(stand_in: StandIn) -> Iterator[None]:
    """Lets graphs that this thread builds meanwhile get what is released from a function.

    An audit replays a step so, with equal releases for different data. What `stand_in` returns must
    not depend on the sums, so that a graph that is kept releases nothing about the data.
    """
    token = _stand_in.set(stand_in)
    try:
        yield
    finally:
        _stand_in.reset(token)


def stand_in() -> StandIn | None:
    """Returns what stands in for the noise in the graph being built, if anything does."""
    return _stand_in.get()


def add_gaussian_noise(
    tensors: list[tf.Tensor | None],
    stddev: float | tf.Tensor | Sequence[float | tf.Tensor],
    key: tf.Tensor,
    correlate: Callable[[tf.Tensor], tf.Tensor] | None = None,
    digest: tf.Tensor | None = None,
) -> list[tf.Tensor | None]:
    """Adds independent N(0, stddev^2) to every coordinate of tensors, summed over all replicas.

    Each replica draws the noise of one slice of the coordinates, with a key of its own.

    Args:
      tensors: Tensors of any shapes; None is left as it is.
      stddev: Standard deviation, in the units of the tensors; or one for each tensor.
      key: Secret key, int64 `[5]` or `[2]`, used for nothing else.
      correlate: Makes of independent normal numbers, `[coordinates]`, those to add.
      digest: See `replicas.total`.

    Returns:
      The noisy sums, the same in each replica.
    """
    stddevs = list(stddev) if isinstance(stddev, Sequence) else [stddev] * len(tensors)
    if (replay := stand_in()) is not None:
        return replay(tensors, stddevs, [None if t is None else t.dtype for t in tensors])
    present = [tensor for tensor in tensors if tensor is not None]
    silent = all(not tf.is_tensor(value) and value == 0 for value in stddevs)
    if silent or not present:
        return replicas.total(tensors, digest)
    # One draw for all: much faster than many small ones.
    sizes = [tensor.shape.num_elements() for tensor in present]
    if None in sizes:
        sizes = [tf.size(tensor) for tensor in present]
    dtypes = {tensor.dtype for tensor in present}
    dtype = dtypes.pop() if len(dtypes) == 1 else tf.float64
    noise = replicas.own_share(lambda size: chacha.normals(key, size, dtype=dtype), sum(sizes))
    noise = noise if correlate is None else correlate(noise)
    common = not isinstance(stddev, Sequence)
    if common:
        noise *= tf.cast(stddev, dtype)
    noises = iter(tf.split(noise, sizes))
    noisy = [
        None if tensor is None else tensor + _like(next(noises), tensor, None if common else s)
        for tensor, s in zip(tensors, stddevs, strict=True)
    ]
    return replicas.total(noisy, digest)


def at_stage(
    values: Sequence[float], stage: tf.Tensor | None, dtype: tf.DType = tf.float64
) -> float | tf.Tensor:
    """Returns the value of a stage of a schedule, in the graph being built.

    Args:
      values: One value for each stage.
      stage: Number of the stage, a scalar int64; None where there is one stage alone.
      dtype: Type of the result, if it is a tensor.
    """
    if stage is None:
        return values[0]
    return tf.cast(tf.gather(tf.constant(values, tf.float64), stage), dtype)


def _like(flat: tf.Tensor, tensor: tf.Tensor, stddev: float | tf.Tensor | None) -> tf.Tensor:
    """Arranges normal numbers as a tensor, by shape and type; scales them by `stddev`, if any."""
    flat = flat if stddev is None else flat * tf.cast(stddev, flat.dtype)
    if tensor.shape.is_fully_defined():
        shaped = reshaped(flat, tensor.shape.as_list())
    else:
        shaped = tf.reshape(flat, tf.shape(tensor))
    return tf.cast(shaped, tensor.dtype)
