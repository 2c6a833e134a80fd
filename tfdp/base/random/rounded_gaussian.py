"""Normal numbers that are rounded to integers as exact arithmetic would round them.

float64 decides nearly always, with a proven bound on its error. Where the bound leaves open to
which side of a half a number lies, more random bits and `tfdp.base.random.fixed_point` decide. See
docs/noise.md for the proof.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfdp.base.random import chacha, fixed_point
from tfdp.base.tf.shared_function import shared_function

# `box_muller` is wrong by at most half of this, times the radius plus its inverse.
_DOUBT = 2.0**-48
# Squared radii beyond this are of so small a uniform number that its 75 bits are too coarse.
_FARTHEST = 33.0
LARGEST_SCALE = 2.0**40
_UNIT = 2.0**-16  # Scales are multiples of it.


def rounded_normals(
    key: tf.Tensor, count: int | tf.Tensor, scale: float | tf.Tensor, use: int = 0
) -> tf.Tensor:
    """Draws independent integers `round(s Z)`, with standard normal Z and s the scale.

    Formal guarantee: the distribution of n numbers is at most n 2^-180 from the exact one, in
    total variation, if ChaCha20's words are uniform.

    Args:
      key: See `tfdp.base.random.chacha.random_words`.
      count: Number of values.
      scale: A positive float64 scalar of at most 2^40: the standard deviation before rounding. It
        is raised to a multiple of 2^-16.
      use: See `tfdp.base.random.chacha.random_words`; below 2^31.

    Returns:
      float64 `[count]`.

    References:
      - Ziv, Fast evaluation of elementary mathematical functions with correctly rounded last bit
        (1991).
    """
    scale = tf.math.ceil(float64(scale) / _UNIT) * _UNIT

    def drawing(size: int) -> Callable[..., tf.Tensor]:
        draw, settle = _drawing(size, _DOUBT), _settling(size)

        def draw_all(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
            drawn = draw(key, use, first, scale)
            return tf.while_loop(
                lambda _, left: left > 0,
                lambda drawn, left: (settle(drawn, key, use, first, scale), left - 1),
                (drawn[:-1], drawn[-1]),
                parallel_iterations=1,
            )[0]

        return draw_all

    return chacha._in_parts(key, count, use, drawing, chacha.NUMBERS_OF_BLOCK, tf.float64)


def float64(number: float | tf.Tensor) -> tf.Tensor:
    """Returns a number in float64 (`tf.cast` takes numbers of Python by way of float32)."""
    if tf.is_tensor(number):
        return tf.cast(number, tf.float64)
    return tf.constant(number, tf.float64)


@functools.cache
def _drawing(size: int, doubt: float) -> Callable[..., tf.Tensor]:
    """Makes the function that draws numbers of `size` blocks, and says how many are left open."""

    def draw(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        words = chacha.words_of_pairs(key, use, first, size)
        drawn, is_open = round_pairs(words, scale, doubt)
        left = tf.reduce_sum(tf.cast(is_open, tf.float64))
        return tf.concat([drawn, left[tf.newaxis]], 0)

    return shared_function(draw, jit_compile=True)


def round_pairs(
    words: tf.Tensor, scale: tf.Tensor, doubt: float = _DOUBT
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes two rounded normal numbers of each four words, where float64 can.

    Args:
      words: uint32 `[4, n]`, of uniform bits.
      scale: The standard deviation before rounding.
      doubt: Twice the largest error of a normal number, over its radius plus its inverse.

    Returns:
      float64 `[2 n]`: integers, or for open numbers the nearest half; and bool `[2 n]`, which
      numbers are open.
    """
    normal = chacha.box_muller(words)
    pairs = words.shape[1]
    squares = tf.square(normal)
    squares = tf.tile(squares[:pairs] + squares[pairs:], [2])
    size = tf.abs(scale * normal)
    below = tf.floor(size)
    past_half = size - below - 0.5
    # |past_half| <= scale doubt (r + 1/r), without a root or a division.
    is_open = tf.square(past_half) * squares <= tf.square(scale * doubt * (1 + squares))
    is_open = tf.logical_or(is_open, squares > _FARTHEST)
    up = tf.cast(past_half > 0, tf.float64)
    rounded = below + tf.where(is_open, tf.constant(0.5, tf.float64), up)
    return tf.where(normal < 0, -rounded, rounded), is_open


@functools.cache
def _settling(size: int) -> Callable[..., tf.Tensor]:
    """Makes the function that rounds the first number that `_drawing(size)` left open."""
    pairs = size * chacha.NUMBERS_OF_BLOCK // 2

    def words_of(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor, pair: tf.Tensor) -> tuple:
        number = first * (chacha.NUMBERS_OF_BLOCK // 2) + tf.cast(pair, tf.uint32)
        further = chacha._stream(key, use + tf.constant(chacha.FURTHER, tf.uint32), number, 1)
        words = tf.gather(chacha.words_of_pairs(key, use, first, size), pair, axis=1)
        return words, tf.reshape(further, [-1])

    look_up = shared_function(words_of, jit_compile=True)
    round_exactly = shared_function(rounded_exactly, jit_compile=True)

    def settle(
        drawn: tf.Tensor, key: tf.Tensor, use: tf.Tensor, first: tf.Tensor, scale: tf.Tensor
    ) -> tf.Tensor:
        place = tf.argmax(tf.cast(drawn != tf.floor(drawn), tf.int32), output_type=tf.int32)
        pair = place % pairs
        words, further = look_up(key, use, first, pair)
        about = tf.floor(tf.abs(tf.gather(drawn, place)))
        rounded = round_exactly(words, further, place >= pairs, scale, about)
        return tf.where(tf.range(2 * pairs) == place, rounded, drawn)

    return shared_function(settle)


def rounded_exactly(
    words: tf.Tensor, further: tf.Tensor, is_sine: tf.Tensor, scale: tf.Tensor, about: tf.Tensor
) -> tf.Tensor:
    """Rounds a scaled normal number as exact arithmetic would.

    With the radius `sqrt(-2 log u)` and v turns, `|s sqrt(-2 log u) cos(2 pi v)| > t` just where
    `-log(u) (1 + cos(4 pi v)) s^2 > t^2`; for the sine, with a minus sign. The halves t are tried
    from `about` on until two neighbors are found between which the absolute value lies.

    Args:
      words: The pair's words, uint32 `[4]`.
      further: The 13 words or more that continue them.
      is_sine: Whether it is the second number of the pair, a scalar bool.
      scale: s, a multiple of 2^-16 of at most 2^40, float64.
      about: An integer near the absolute value, at least 0, float64.

    Returns:
      The integer, a float64 scalar.
    """
    radius, angle = continued(words, further)
    v = fixed_point.of_words(angle)
    cosine = fixed_point.cosine_of_turns(fixed_point.fraction(v + v))
    one = fixed_point.of_integer(tf.constant(2**48, tf.int64))
    factor = one + tf.where(is_sine, -cosine, cosine)
    # Both sides times 2^-64, so that no integer part is too large.
    s = fixed_point.of_integer(tf.cast(scale / _UNIT, tf.int64))
    square = fixed_point.product(fixed_point.logarithm(radius), factor)
    square = fixed_point.product(square, fixed_point.product(s, s))

    def step(n: tf.Tensor, at_most: tf.Tensor, at_least: tf.Tensor) -> tuple:
        below = tf.where(at_most, n - 1, n)
        t = fixed_point.of_integer(tf.cast((2 * below + 1) * 2.0**15, tf.int64))
        beyond = fixed_point.is_positive(square - fixed_point.product(t, t))
        n = tf.where(beyond, below + 1, below)
        # Whether the absolute value is known to be at most n + 1/2, and at least n - 1/2.
        return n, at_most | ~beyond, at_least | beyond | (n == 0)

    unknown = tf.constant(False)
    n, _, _ = tf.while_loop(
        lambda _, at_most, at_least: ~(at_most & at_least), step, (about, unknown, about == 0)
    )
    quarter = tf.bitwise.right_shift(angle[0], tf.constant(30, tf.uint32))
    is_negative = tf.where(is_sine, quarter >= 2, (quarter == 1) | (quarter == 2))
    return tf.where(is_negative, -n, n)


def continued(words: tf.Tensor, further: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first 256 bits of a pair's uniform numbers, of its radius and of its angle.

    Args:
      words: See `rounded_exactly`; their bits come first.
      further: See `rounded_exactly`.

    Returns:
      uint32 `[8]` each.
    """
    shift_left, shift_right = tf.bitwise.left_shift, tf.bitwise.right_shift
    eleven, others = tf.constant(11, tf.uint32), tf.constant(21, tf.uint32)
    # The last word's first 21 bits are the angle's, and its last 11 the radius's.
    of_radius = shift_left(words[3], others) + shift_right(further[0], eleven)
    of_angle = shift_left(shift_right(words[3], eleven), eleven) + shift_right(further[6], others)
    radius = tf.concat([words[:2], of_radius[tf.newaxis], further[1:6]], 0)
    angle = tf.concat([words[2:3], of_angle[tf.newaxis], further[7:13]], 0)
    return radius, angle
