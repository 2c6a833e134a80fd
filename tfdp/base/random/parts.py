"""Random parts of a data set, which an example that is added does not change for the others."""

import numpy as np

from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream

_AT_A_TIME = 2**20


def random_parts(keys: KeyStream, count: int, parts: int) -> np.ndarray:
    """Puts each of `count` units into one of `parts` parts, independently and uniformly.

    Each takes a random word of 64 bits: the probabilities of two parts differ by at most 2^-64, and
    are the same for every unit.

    Args:
      keys: A stream of secret keys, used for nothing else.
      count: Number of units.
      parts: Number of parts.

    Returns:
      The part of each unit, int64 `[count]`.
    """
    words = [
        chacha.random_words(keys.next_key(i), 2 * min(_AT_A_TIME, count - start)).numpy()
        for i, start in enumerate(range(0, count, _AT_A_TIME))
    ]
    return (np.concatenate(words).view(np.uint64) % np.uint64(parts)).astype(np.int64)
