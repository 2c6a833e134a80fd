"""Times the Gaussian noise of tfdp beside TensorFlow's.

    python -m benchmarks.noise

Prints a Markdown table: sums of so many parameters to which noise is added, with normal numbers of
`tf.random.stateless_normal` (Philox), with those of tfdp (ChaCha20, 128 bits each), both in
float32, and with secure noise, of a float64 sum. The three take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tfdp._random.key_streams import KeyStream
from tfdp.optimizers.noise import add_gaussian_noise
from tfdp.optimizers.secure_noise import add_secure_noise

SIZES = (26_010, 550_570, 2_000_000, 10_000_000)


def philox(total: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Adds noise with TensorFlow's normal numbers."""
    return total + tf.random.stateless_normal(tf.shape(total), key, alg="philox")


def chacha(total: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Adds noise as the private optimizers do."""
    return add_gaussian_noise([total], 1.0, key)[0]


def secure(total: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Adds noise as the private optimizers do with `secure_noise`."""
    return add_secure_noise([total], 1.0, 1.0, 1e-9, key, [tf.float32])[0]


def steps(add: Callable, total: tf.Variable) -> Callable:
    """Returns a function that adds noise of a new key."""
    keys = KeyStream(domain="noise")

    result = tf.Variable(tf.zeros(total.shape))

    @tf.function
    def step() -> None:
        result.assign(add(total.read_value(), keys.next_key()))

    return step


def seconds(function: Callable, repeats: int) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    print("| parameters | Philox, ms | ChaCha20, ms | secure, ms | secure / ChaCha20 |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        functions = [
            steps(add, tf.Variable(tf.zeros([size], dtype)))
            for add, dtype in ((philox, tf.float32), (chacha, tf.float32), (secure, tf.float64))
        ]
        for function in functions:
            function()
        repeats = max(1, 1_000_000 // size)
        times = [[seconds(function, repeats) for function in functions] for _ in range(turns)]
        medians = [f"{1e3 * statistics.median(column):.2f}" for column in zip(*times, strict=True)]
        ratio = statistics.median(new / old for _, old, new in times)
        print(f"| {size:,} | {' | '.join(medians)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
