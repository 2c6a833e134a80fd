"""Times the Gaussian noise of tfdp beside TensorFlow's.

    python -m benchmarks.noise

Prints a Markdown table: float32 sums of so many parameters to which noise is added, with normal
numbers of `tf.random.stateless_normal` (Philox) and with those of tfdp (ChaCha20, 128 bits each).
The two take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from tfdp._streams import KeyStream
from tfdp.optimizers.noise import add_gaussian_noise

SIZES = (26_010, 550_570, 2_000_000, 10_000_000)


def philox(total: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Adds noise with TensorFlow's normal numbers."""
    return total + tf.random.stateless_normal(tf.shape(total), key, alg="philox")


def chacha(total: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Adds noise as the private optimizers do."""
    return add_gaussian_noise([total], 1.0, key)[0]


def steps(add: Callable, total: tf.Variable) -> Callable:
    """Returns a function that adds noise of a new key."""
    keys = KeyStream(domain="noise")

    @tf.function
    def step() -> None:
        total.assign(add(total, keys.next_key()))

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
    print("| parameters | Philox, ms | ChaCha20, ms | more, ns per parameter |")
    print("|---|---|---|---|")
    for size in SIZES:
        functions = [steps(add, tf.Variable(tf.zeros([size]))) for add in (philox, chacha)]
        for function in functions:
            function()
        repeats = max(1, 1_000_000 // size)
        times = [[seconds(function, repeats) for function in functions] for _ in range(turns)]
        old, new = (statistics.median(column) for column in zip(*times, strict=True))
        more = statistics.median(b - a for a, b in times)
        print(f"| {size:,} | {1e3 * old:.2f} | {1e3 * new:.2f} | {1e9 * more / size:.0f} |")


if __name__ == "__main__":
    main()
