"""Compares the normal numbers of tfdp with the normal distribution, out to its tails.

    python -m experiments.noise.distribution --draws=1000000000

Prints the chi-square test of 400 bins, the outermost of which hold 10 expected numbers, and counts
in both tails; `--generator=philox` does so for `tf.random.stateless_normal`, which ends at 5.68.

Unlike other experiments, this one imports internals of tfdp: the generator has no public name.
"""

import numpy as np
import scipy.stats
import tensorflow as tf
from absl import flags

from experiments import cli
from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream

_DRAWS = flags.DEFINE_integer("draws", 10**9, "How many numbers to draw.", lower_bound=10**4)
_GENERATOR = flags.DEFINE_enum("generator", "chacha", ["chacha", "philox"], "What draws them.")

_AT_ONCE = 4_000_000
_BINS = 400
_TAILS = (4.0, 5.0, 5.5, 5.68, 6.0)


def philox(key: tf.Tensor, count: int) -> tf.Tensor:
    """Normal numbers of TensorFlow, float64."""
    seed = tf.gather(key, [0, 4])  # A part of the secret, and the number of the key.
    return tf.random.stateless_normal([count], seed, dtype=tf.float64, alg="philox")


def main(argv: list[str]) -> None:
    """Prints the comparison."""
    del argv
    normals = {"chacha": chacha.normals, "philox": philox}[_GENERATOR.value]
    keys = KeyStream(domain="distribution")
    rounds = -(-_DRAWS.value // _AT_ONCE)
    draws = rounds * _AT_ONCE
    edge = -scipy.stats.norm.ppf(10 / draws)
    edges = np.linspace(-edge, edge, _BINS - 1)
    width = edges[1] - edges[0]

    @tf.function
    def count() -> tuple:
        sample = normals(keys.next_key(), _AT_ONCE)
        place = tf.clip_by_value(tf.floor((sample + edge) / width) + 1, 0, _BINS - 1)
        found = tf.math.bincount(tf.cast(place, tf.int32), minlength=_BINS, dtype=tf.int64)
        beyond = [tf.math.count_nonzero(tf.abs(sample) > t) for t in _TAILS]
        return found, tf.stack(beyond), tf.reduce_max(tf.abs(sample))

    found, beyond, largest = np.zeros(_BINS, np.int64), np.zeros(len(_TAILS), np.int64), 0.0
    for _ in range(rounds):
        new, new_beyond, new_largest = count()
        found += new.numpy()
        beyond += new_beyond.numpy()
        largest = max(largest, float(new_largest))

    expected = draws * np.diff(scipy.stats.norm.cdf([-np.inf, *edges, np.inf]))
    test = scipy.stats.chisquare(found, expected)
    print(f"{draws:,} draws; largest {largest:.3f} standard deviations")
    print(
        f"chi-square {test.statistic:.1f} of {_BINS - 1} degrees of freedom, p = {test.pvalue:.3g}"
    )
    for limit, number in zip(_TAILS, beyond, strict=True):
        print(f"beyond {limit}: {number:,}; expected {2 * draws * scipy.stats.norm.sf(limit):,.1f}")


if __name__ == "__main__":
    cli.run(main)
