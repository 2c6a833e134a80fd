"""Noise whose floating-point numbers say no more than the ideal Gaussian mechanism.

A number is moved to the nearest point of a public grid, and an integer number of steps of the grid
is added: a normal number that is rounded exactly. For x on the grid, x plus a rounded normal number
is the rounded sum of x and the normal number: post-processing of the Gaussian mechanism. See
docs/noise.md for the proof.

References:
  - Mironov, On significance of the least significant bits for differential privacy (2012).
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdp.base.random.rounded_gaussian import LARGEST_SCALE, float64, rounded_normals
from tfdp.step import replicas
from tfdp.step.noise import stand_in

# Steps of the grid in a sensitivity: at least this number, less than twice as many.
STEPS = 2.0**22
# With a moved sensitivity of at most four times itself, scales stay within their limit.
LARGEST_NOISE_MULTIPLIER = LARGEST_SCALE / STEPS / 8
LARGEST_COUNT_NOISE = 2.0**17
# More than the rounding of the few operations by which a standard deviation is computed.
_SLACK = 1 + 2.0**-40


def grid_of(sensitivity: float | tf.Tensor) -> tf.Tensor:
    """Returns the step of the grid: a power of two, float64, at most `sensitivity * 2^-22`."""
    bits = tf.bitcast(float64(sensitivity), tf.int64)
    power = tf.bitcast(tf.bitwise.bitwise_and(bits, tf.constant(0x7FF << 52, tf.int64)), tf.float64)
    return power / STEPS


def moved_sensitivity(
    sensitivity: float | tf.Tensor, error: float | tf.Tensor, size: int | tf.Tensor
) -> tf.Tensor:
    """Bounds how far an example moves a sum on the grid, as an l2 norm; float64.

    Two sums that are `sensitivity` apart in exact arithmetic are twice their error further apart as
    they are computed. Each of `size` coordinates is moved by at most half a step on the way to the
    grid, in both sums.

    Args:
      sensitivity: Sensitivity of the exact sum.
      error: A bound on the rounding of the sum, in units of the sensitivity.
      size: Number of coordinates.
    """
    sensitivity, error = float64(sensitivity), float64(error)
    # Scales would exceed their limit: a sum of that many terms is never noisy enough.
    error = tf.where(error <= 1, error, tf.constant(float("nan"), tf.float64))
    steps = tf.sqrt(float64(size)) * grid_of(sensitivity)
    return (sensitivity * (1 + 2 * error) + steps) * _SLACK


def add_secure_noise(
    tensors: Sequence[tf.Tensor | None],
    sensitivity: float | tf.Tensor,
    noise_multiplier: float | tf.Tensor,
    error: float | tf.Tensor,
    key: tf.Tensor,
    dtypes: Sequence[tf.DType],
    digest: tf.Tensor | None = None,
) -> list[tf.Tensor | None]:
    """Adds noise to sums that one example moves by at most `sensitivity`, all together.

    Formal guarantee: the result is post-processing of a Gaussian mechanism of the given noise
    multiplier, up to the distance of `rounded_normals` from exact numbers.

    Args:
      tensors: The sums, float64, of any shapes; None is left as it is.
      sensitivity: l2 sensitivity of the exact sums, public.
      noise_multiplier: Standard deviation of the noise over what an example moves the sums by on
        the grid, see `moved_sensitivity`; positive, at most `LARGEST_NOISE_MULTIPLIER`. A number
        or a float64.
      error: A bound on the rounding of the sums, in units of the sensitivity, public. Beyond 1, the
        results are NaN.
      key: Secret key, int64 `[5]` or `[2]`; its use 0 is drawn here.
      dtypes: To which types the noisy sums are rounded.
      digest: See `replicas.total`.

    Returns:
      The noisy sums.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return list(tensors)
    sizes = [tensor.shape.num_elements() for tensor in present]
    grid = grid_of(sensitivity)
    scale = noise_multiplier * moved_sensitivity(sensitivity, error, sum(sizes)) / grid
    if (replay := stand_in()) is not None:
        return replay(tensors, [scale * grid] * len(tensors), dtypes)
    noise = replicas.own_share(lambda size: rounded_normals(key, size, scale * _SLACK), sum(sizes))
    noises = iter(tf.split(noise, sizes))
    steps = [
        None if tensor is None else tf.round(tensor / grid) + tf.reshape(next(noises), tensor.shape)
        for tensor in tensors
    ]
    return [
        None if total is None else _on_grid(total, grid, dtype)
        for total, dtype in zip(replicas.total(steps, digest), dtypes, strict=True)
    ]


def _on_grid(steps: tf.Tensor, grid: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a number of steps of the grid. Sums of integers are exact but for the sign of zero.

    -0.0 is the sum of -0.0 and -0.0 alone, and so would show the sign of what was rounded to 0.
    Compilers drop an addition of 0.0, but not this.
    """
    steps = tf.where(steps == 0, tf.zeros_like(steps), steps)
    return tf.cast(tf.multiply(steps, grid), dtype)


def add_secure_noise_to_count(
    count: tf.Tensor, stddev: float | tf.Tensor, key: tf.Tensor
) -> tf.Tensor:
    """Adds noise to a multiple of 1/2, a float32 scalar of at most 2^22, which is on its grid.

    Args:
      count: The number.
      stddev: Standard deviation of the noise, at most `LARGEST_COUNT_NOISE`.
      key: Secret key, int64 `[5]` or `[2]`; its use 1 is drawn here.

    Returns:
      The noisy number, a float32 scalar.
    """
    step = 2.0**-23
    if (replay := stand_in()) is not None:
        (released,) = replay([count], [stddev], [tf.float32])
        return tf.convert_to_tensor(released)
    noise = replicas.own_share(lambda size: rounded_normals(key, size, stddev / step, use=1), 1)
    (steps,) = replicas.total([tf.cast(count, tf.float64) / step + noise[0]])
    return _on_grid(steps, step, tf.float32)
