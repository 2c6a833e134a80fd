"""ChaCha20 (RFC 8439) as a TensorFlow function, and random numbers made of its bits.

XLA compiles the functions. (Without it, each operation of each round would pass over memory.) Sizes
are rounded up, and large ones cut into parts, so that a process compiles few of them.
"""

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.base.tf import one_loop
from tfdp.base.tf.shared_function import shared_function

# "expand 16-byte k": the constants for a key of 128 bits, which is used twice; and of 256 bits.
_CONSTANTS = {
    4: (0x61707865, 0x3120646E, 0x79622D36, 0x6B206574),
    8: (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574),
}
_WORDS = 16  # Words in a block, of 32 bits each.
# Words that the quarter rounds mix.
_COLUMNS = tuple((i, 4 + i, 8 + i, 12 + i) for i in range(4))
_DIAGONALS = tuple((i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4))
# Words that two normal numbers are made of: 75 bits for their radius, 53 for their angle.
_WORDS_OF_PAIR = 4
NUMBERS_OF_BLOCK = 2 * _WORDS // _WORDS_OF_PAIR
_LAST_BITS = 2**11 - 1  # The bits of the last word that belong to the radius.
# A radius of a smaller uniform number gets more bits: fewer than 53 of its own are significant.
_FEW_BITS = 2.0**-22
# A use of the key stream for further bits of the numbers that another use draws.
FURTHER = 2**31
# The bits of the square root of 1/2.
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD
_ONE = 2.0**-32  # The place value of the first word of a number in [0, 1).
# Blocks that are computed at once: least, most, and the number if it is not known before.
_FEWEST, _MOST, _PART = 2**6, 9 * 2**10, 2**8
# Blocks from which on one loop pays for normal numbers: it takes longer to compile. (It does not
# for words alone, and each iteration over batches would prepare its many operations anew.)
_MANY = 2**9
# Blocks that each size has in addition: rows a power of two apart would share few cache lines.
_ODD = 2**5


def blocks(key: tf.Tensor, nonce: tf.Tensor, first: tf.Tensor, count: int) -> tf.Tensor:
    """Computes blocks of the ChaCha20 key stream.

    Args:
      key: uint32 `[8]`, or `[4]` for a key of 128 bits.
      nonce: uint32 `[3]`.
      first: Number of the first block, a scalar uint32.
      count: Number of blocks.

    Returns:
      uint32 `[16, count]`: a block is a column, of the words that RFC 8439 serializes.

    References:
      - Nir and Langley, ChaCha20 and Poly1305 for IETF Protocols (RFC 8439), section 2.3.
      - Bernstein, ChaCha, a variant of Salsa20 (2008): keys of 128 bits.
    """
    initial = tf.split(_initial(key, nonce, first, count), 4)

    def double_round(i: tf.Tensor, a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor) -> tuple:
        a, b, c, d = _quarter_rounds(a, b, c, d)  # Mixes the columns, then the diagonals.
        b, c, d = _turned(b, 1), _turned(c, 2), _turned(d, 3)
        a, b, c, d = _quarter_rounds(a, b, c, d)
        return i + 1, a, _turned(b, 3), _turned(c, 2), _turned(d, 1)

    final = tf.while_loop(lambda i, *_: i < 10, double_round, (0, *initial))[1:]
    return tf.concat([x + y for x, y in zip(final, initial, strict=True)], axis=0)


def blocks_in_one_loop(key: tf.Tensor, nonce: tf.Tensor, first: tf.Tensor, count: int) -> tf.Tensor:
    """Computes `blocks`, in a function that XLA compiles: many of them in a third of the time."""
    initial = tf.unstack(_initial(key, nonce, first, count))
    return tf.stack(one_loop.in_one_loop(_block, initial))


def _initial(key: tf.Tensor, nonce: tf.Tensor, first: tf.Tensor, count: int) -> tf.Tensor:
    constants = tf.constant(_CONSTANTS[key.shape[0]], tf.uint32)
    of_key = key if key.shape[0] == 8 else tf.tile(key, [2])
    same = tf.concat([constants, of_key], axis=0)[:, tf.newaxis]
    counter = first + tf.cast(tf.range(count), tf.uint32)
    rows = tf.tile(same, [1, count]), counter[tf.newaxis], tf.tile(nonce[:, tf.newaxis], [1, count])
    return tf.concat(rows, axis=0)


def _block(initial: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    words = list(initial)
    for _ in range(10):
        words = _double_round(*words)
    return [x + y for x, y in zip(words, initial, strict=True)]


def _mixed(*words: tf.Tensor) -> list[tf.Tensor]:
    mixed = list(words)
    for places in _COLUMNS + _DIAGONALS:
        results = _quarter_rounds(*(mixed[place] for place in places))
        for place, word in zip(places, results, strict=True):
            mixed[place] = word
    return mixed


_double_round = shared_function(_mixed)  # Traced once, not ten times.


def _quarter_rounds(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor) -> tuple:
    a = a + b
    d = _rotated(tf.bitwise.bitwise_xor(d, a), 16)
    c = c + d
    b = _rotated(tf.bitwise.bitwise_xor(b, c), 12)
    a = a + b
    d = _rotated(tf.bitwise.bitwise_xor(d, a), 8)
    c = c + d
    return a, _rotated(tf.bitwise.bitwise_xor(b, c), 7), c, d


def _rotated(words: tf.Tensor, bits: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(words, tf.constant(bits, tf.uint32))
    right = tf.bitwise.right_shift(words, tf.constant(32 - bits, tf.uint32))
    return tf.bitwise.bitwise_or(left, right)


def _turned(rows: tf.Tensor, by: int) -> tf.Tensor:
    return tf.roll(rows, -by, axis=0)


def _words(numbers: tf.Tensor) -> tf.Tensor:
    """Returns the 32-bit words of int64 `[n]`, the lower of each first; uint32 `[2 n]`."""
    return tf.reshape(tf.bitcast(numbers, tf.uint32), [-1])


def random_words(key: tf.Tensor, count: int | tf.Tensor, use: int = 0) -> tf.Tensor:
    """Draws uniform words: the first of the stream of a key and a use.

    Args:
      key: int64 `[5]`, from `KeyStream.next_key`: a secret of 256 bits, the key of ChaCha20, and a
        number, the nonce. Or int64 `[2]`: a secret of 128 bits that has no number.
      count: Number of values.
      use: With one key, numbers of different uses are independent, those of equal ones the same.

    Returns:
      uint32 `[count]`.
    """
    return _in_parts(key, count, use, _drawing_words, _WORDS, tf.uint32)


def uniforms(key: tf.Tensor, count: int | tf.Tensor, use: int = 0) -> tf.Tensor:
    """Draws uniform numbers in [0, 1) of 53 bits: float64 `[count]`. See `random_words`."""
    words = tf.cast(random_words(key, 2 * count, use), tf.float64)
    low = tf.floor(words[count:] * 2.0**-11)
    return words[:count] * _ONE + low * 2.0**-53


def exponentials(words: tf.Tensor) -> tf.Tensor:
    """Makes standard exponential numbers, float64 `[n]`, of four words each: uint32 `[4, n]`."""
    return -tf.math.log(_uniform(tf.cast(words, tf.float64)))


def normals(
    key: tf.Tensor, count: int | tf.Tensor, use: int = 0, dtype: tf.DType = tf.float64
) -> tf.Tensor:
    """Draws independent standard normal numbers, by the Box-Muller transform in float64.

    A pair's angle is made of 53 random bits, and its radius of 75; where fewer than 53 of these are
    significant, of 64 more. The tail is accurate to 13.9 standard deviations, where the
    distribution ends; a normal number lies beyond with probability 1e-42.
    (`tf.random.stateless_normal` ends at 5.7.)

    Args:
      key: See `random_words`.
      count: Number of values.
      use: See `random_words`; below 2^31.
      dtype: To which type they are rounded.

    Returns:
      `[count]`, of that type.
    """
    drawing = functools.partial(_drawing_normals, dtype)
    return _in_parts(key, count, use, drawing, NUMBERS_OF_BLOCK, dtype)


def _in_parts(
    key: tf.Tensor,
    count: int | tf.Tensor,
    use: int,
    drawing: Callable[[int], Callable[..., tf.Tensor]],
    per_block: int,
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws `count` numbers; each block of the key stream gives at least `per_block`."""
    key, zero = tf.cast(key, tf.int64), tf.constant(0, tf.uint32)
    use = tf.constant(use, tf.uint32)
    known = tf.get_static_value(count)
    size = _PART
    if known is not None:
        needed = int(known) // per_block + 1
        size = _rounded(-(-needed // -(-needed // _MOST)))  # Makes all parts equally large.
        if needed <= size:
            return drawing(size)(key, use, zero)[:known]
    draw = drawing(size)
    count = tf.cast(count, tf.int32)
    firsts = tf.cast(tf.range(count // (size * per_block) + 1) * size, tf.uint32)
    drawn = tf.map_fn(lambda first: draw(key, use, first), firsts, fn_output_signature=dtype)
    return tf.ensure_shape(tf.reshape(drawn, [-1])[:count], [known])


def _rounded(size: int) -> int:
    """Rounds a number of blocks up: to four binary digits, at least `_FEWEST`, and `_ODD` more."""
    size = max(_FEWEST, size)
    unit = 2 ** (size.bit_length() - 4)
    return -(-size // unit) * unit + _ODD


def _stream(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    """Returns words of a key's stream for one use: uint32 `[16, size]`, from block `first` on."""
    return blocks(*_secret_and_nonce(key, use), first, size)


def _secret_and_nonce(key: tf.Tensor, use: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    words = _words(key)
    secret, number = (words[:8], words[8:]) if key.shape == [5] else (words, [0, 0])
    return secret, tf.concat([number, use[tf.newaxis]], axis=0)


@functools.cache
def _drawing_words(size: int) -> Callable[..., tf.Tensor]:
    """Returns the function that draws the words of `size` blocks, from a first one on."""

    def draw(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.transpose(_stream(key, use, first, size)), [-1])

    return shared_function(draw, jit_compile=True)


@functools.cache
def _drawing_normals(dtype: tf.DType, size: int) -> Callable[..., tf.Tensor]:
    """Returns the function that draws normal numbers of `size` blocks, from a first one on."""

    def draw(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = words_of_pairs(key, use, first, size)
        has_few_bits = tf.reduce_any(radius_uniform(words) < _FEW_BITS)
        return tf.cast(box_muller(words), dtype), has_few_bits

    def draw_finely(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        words = words_of_pairs(key, use, first, size)
        use = use + tf.constant(FURTHER, tf.uint32)
        further = words_of_pairs(key, use, first, size)
        return tf.cast(box_muller(words, further), dtype)

    draw = shared_function(draw, jit_compile=True)
    draw_finely = shared_function(draw_finely, jit_compile=True)

    def draw_all(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        drawn, has_few_bits = draw(key, use, first)
        return tf.cond(has_few_bits, lambda: draw_finely(key, use, first), lambda: drawn)

    return draw_all


def words_of_pairs(key: tf.Tensor, use: tf.Tensor, first: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the words that pairs of normal numbers are made of, of `size` blocks: `[4, n]`."""
    in_one_loop = size >= _MANY and one_loop.is_fast()
    compute = blocks_in_one_loop if in_one_loop else blocks
    words = compute(*_secret_and_nonce(key, use), first, size)
    return tf.reshape(words, [_WORDS_OF_PAIR, -1])


def box_muller(words: tf.Tensor, further: tf.Tensor | None = None) -> tf.Tensor:
    """Makes two normal numbers of each four words.

    Args:
      words: uint32 `[4, n]`, of uniform bits.
      further: Words that continue the bits of the radius, uint32 `[2, n]` or more; without them,
        it is that of the middle of the numbers that begin with these bits.

    Returns:
      float64 `[2 n]`.
    """
    radius = tf.sqrt(-2 * _log(radius_uniform(words, further)))
    # Turns between -1/2 and 1/2: float64 holds the middle of 53 bits exactly.
    high, low = tf.bitcast(words[2], tf.int32), words[3] - _last_bits(words)
    middle = (_LAST_BITS + 1) / 2
    turn = tf.cast(high, tf.float64) * _ONE + (tf.cast(low, tf.float64) + middle) * _ONE**2
    cosine, sine = _on_circle(turn)
    return tf.concat([radius * cosine, radius * sine], axis=0)


def radius_uniform(words: tf.Tensor, further: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the uniform numbers in (0, 1] of pairs' radii, float64 `[n]`. See `box_muller`."""
    numbers = tf.cast(words[:2], tf.float64)
    rest: tf.Tensor | float = 0.5
    if further is not None:
        rest = tf.cast(further[0], tf.float64) * _ONE
        rest += (tf.cast(further[1], tf.float64) + 0.5) * _ONE**2
    last = tf.cast(_last_bits(words), tf.float64) + rest
    return numbers[0] * _ONE + (numbers[1] * _ONE**2 + last * 2.0**-75)


def _last_bits(words: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(words[3], tf.constant(_LAST_BITS, tf.uint32))


def _log(x: tf.Tensor) -> tf.Tensor:
    """Computes the logarithm of positive normal numbers, by a series that XLA vectorizes."""
    bits = tf.bitcast(x, tf.int64)
    above = bits - _ROOT_OF_HALF
    exponent = tf.bitwise.right_shift(above, tf.constant(52, tf.int64))
    m = tf.bitcast(bits - tf.bitwise.left_shift(exponent, tf.constant(52, tf.int64)), tf.float64)
    z = (m - 1) / (m + 1)  # Between +-0.172: log(m) is twice its artanh, below 5e-17 is left out.
    square, series = z * z, tf.zeros_like(z)
    for k in range(11, -1, -1):
        series = series * square + 2 / (2 * k + 1)
    return tf.cast(tf.cast(exponent, tf.int32), tf.float64) * math.log(2) + z * series


def _on_circle(turn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes cosine and sine of an angle in [-1, 1] turns, by series that XLA vectorizes."""
    quarter = tf.round(4 * turn)
    x = (4 * turn - quarter) * (math.pi / 2)  # At most pi / 4 from 0: below 5e-17 is left out.
    square = x * x
    cosine, sine = tf.zeros_like(x), tf.zeros_like(x)
    for k in range(8, -1, -1):
        cosine = cosine * square + (-1) ** k / math.factorial(2 * k)
        sine = sine * square + (-1) ** k / math.factorial(2 * k + 1)
    sine = sine * x
    swapped = tf.math.floormod(quarter, 2) == 1
    cosine, sine = tf.where(swapped, -sine, cosine), tf.where(swapped, cosine, sine)
    sign = tf.where(tf.math.floormod(tf.floor(quarter / 2), 2) == 1, -1.0, 1.0)
    sign = tf.cast(sign, x.dtype)
    return sign * cosine, sign * sine


def _uniform(words: tf.Tensor) -> tf.Tensor:
    """Returns numbers in (0, 1] of words `[4, n]`: all the precision of float64 also next to 0."""
    small = words[2] * _ONE**3 + (words[3] + 0.5) * _ONE**4
    return words[0] * _ONE + (words[1] * _ONE**2 + small)
