"""Numbers of 304 binary places, for the few decisions that float64 leaves open.

A number is an int64 tensor `[20]`: digits to the base 2^16, the first of which is the integer part
and has a sign. Integers are what no compiler reorders or rounds. One number is worked on at a time:
this is slow, and rarely needed.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

_BITS, _DIGITS = 16, 20
_PLACES = _BITS * (_DIGITS - 1)
_MASK = 2**_BITS - 1


def _digits(scaled: int) -> list[int]:
    """Returns the digits of `scaled * 2^-304`."""
    below = [scaled >> _BITS * (_DIGITS - 1 - i) & _MASK for i in range(1, _DIGITS)]
    return [scaled >> _PLACES, *below]


def _inverse_tangents(n: int, one: int, hyperbolic: bool) -> int:
    """Computes `one` times the inverse (hyperbolic) tangent of 1/n, by its series."""
    total, term, k = 0, one // n, 1
    while term:
        total += term // k
        term, k = term // (n * n) * (1 if hyperbolic else -1), k + 2
    return total


def _coefficients(ratio: int, one: int, step: int) -> list[list[int]]:
    """Returns the series of cosine (`step` 2) or exponential (1): `(-ratio)^k / (step k)!`."""
    found, term, k = [], one, 0
    while abs(term) >> (one.bit_length() - 1 - _PLACES):
        found.append(_digits(term >> (one.bit_length() - 1 - _PLACES)))
        k += 1
        term = -term * ratio // (one * math.prod(range(step * (k - 1) + 1, step * k + 1)))
    return found


_ONE = 1 << (_PLACES + 64)
_PI = 16 * _inverse_tangents(5, _ONE, False) - 4 * _inverse_tangents(239, _ONE, False)
_LOG_2 = _digits(2 * _inverse_tangents(3, _ONE, True) >> 64)
_COSINE = _coefficients(4 * _PI * _PI // _ONE, _ONE, 2)
_EXPONENTIAL = _coefficients(_ONE, _ONE, 1)
# Coefficients of log(1 + x). For |x| below 2^-26, the remainder is below 2^-312.
_LOG = [_digits((-1) ** (k + 1) * (1 << _PLACES) // k if k else 0) for k in range(12)]


def of_integer(number: tf.Tensor) -> tf.Tensor:
    """Returns `number * 2^-48`, of an int64 scalar."""
    shifts = tf.constant([48, 32, 16, 0], tf.int64)
    digits = tf.bitwise.right_shift(tf.fill([4], number), shifts)
    digits = tf.concat([digits[:1], tf.bitwise.bitwise_and(digits[1:], _mask())], 0)
    return tf.pad(digits, [[0, _DIGITS - 4]])


def of_words(words: tf.Tensor) -> tf.Tensor:
    """Returns the middle of the numbers in [0, 1) that begin with eight words: uint32 `[8]`."""
    words = tf.cast(words, tf.int64)
    high = tf.bitwise.right_shift(words, _shift())
    low = tf.bitwise.bitwise_and(words, _mask())
    digits = tf.reshape(tf.stack([high, low], axis=1), [-1])
    half = tf.constant([2 ** (_BITS - 1)], tf.int64)
    return tf.pad(tf.concat([digits, half], 0), [[1, _DIGITS - 18]])


def fraction(number: tf.Tensor) -> tf.Tensor:
    """Returns a number without its integer part; none of its digits may be negative."""
    number = _carried(number)
    return tf.concat([tf.zeros([1], tf.int64), number[1:]], 0)


def product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Multiplies, up to an error of 2^-283."""
    terms = tf.pad(a[:, tf.newaxis] * b, [[0, 0], [0, _DIGITS]])
    # Each row is one place further to the right than the one before.
    turned = tf.reshape(terms, [-1])[: _DIGITS * (2 * _DIGITS - 1)]
    return _carried(tf.reduce_sum(tf.reshape(turned, [_DIGITS, -1]), axis=0)[:_DIGITS])


def is_positive(number: tf.Tensor) -> tf.Tensor:
    """Returns whether a number is at least 0."""
    carry = tf.constant(0, tf.int64)
    for i in range(_DIGITS - 1, 0, -1):
        carry = tf.bitwise.right_shift(number[i] + carry, _shift())
    return number[0] + carry >= 0


def cosine_of_turns(turns: tf.Tensor) -> tf.Tensor:
    """Returns `cos(2 pi turns)`, for 0 to 1 turns."""
    return _series(_COSINE, product(turns, turns))


def logarithm(words: tf.Tensor) -> tf.Tensor:
    """Returns `-log(of_words(words))`.

    With u = m 2^-e and a number y next to log(m), it is `e log(2) - y - log(m exp(-y))`: the last
    logarithm is of a number next to 1, whatever the precision of float64's.
    """
    places = tf.constant([2.0 ** (-32 * (k + 1)) for k in range(8)], tf.float64)
    about = tf.reduce_sum(tf.cast(words, tf.float64) * places) + 2.0**-257
    bits = tf.bitcast(about, tf.int64)
    exponent = 1023 - tf.bitwise.right_shift(bits, tf.constant(52, tf.int64))
    mantissa = tf.bitcast(bits + exponent * 2**52, tf.float64)
    y = of_integer(tf.cast(tf.math.log(mantissa) * 2.0**48, tf.int64))
    digits = tf.pad(of_words(words), [[0, _DIGITS]])
    shifted = tf.gather(digits, exponent // _BITS + tf.range(_DIGITS, dtype=tf.int64))
    m = _carried(shifted * tf.bitwise.left_shift(tf.constant(1, tf.int64), exponent % _BITS))
    near_one = product(m, _series(_EXPONENTIAL, y))
    one = of_integer(tf.constant(2**48, tf.int64))
    rest = _series(_LOG, near_one - one)
    return _carried(exponent * tf.constant(_LOG_2, tf.int64) - y - rest)


def _series(coefficients: Sequence[Sequence[int]], x: tf.Tensor) -> tf.Tensor:
    """Evaluates a polynomial of `x`, which is at most 1: no step magnifies an earlier error."""
    table = tf.constant(coefficients, tf.int64)

    def step(k: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return k - 1, _carried(product(total, x) + tf.gather(table, k))

    last = len(coefficients) - 1
    return tf.while_loop(lambda k, _: k >= 0, step, (last, tf.zeros([_DIGITS], tf.int64)))[1]


def _carried(digits: tf.Tensor) -> tf.Tensor:
    """Returns the same number with digits from -1 to 2^17, of digits below 2^48."""
    below = tf.constant([0] + [1] * (_DIGITS - 1), tf.int64)
    for _ in range(2):
        carry = tf.bitwise.right_shift(digits, _shift()) * below
        digits += tf.pad(carry[1:], [[0, 1]]) - carry * 2**_BITS
    return digits


def _mask() -> tf.Tensor:
    return tf.constant(_MASK, tf.int64)


def _shift() -> tf.Tensor:
    return tf.constant(_BITS, tf.int64)
