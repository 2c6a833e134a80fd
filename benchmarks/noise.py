"""Times the Gaussian noise of tfdp beside TensorFlow's, Opacus's and JAX-Privacy's.

    python -m benchmarks.noise --peer_python peers/bin/python

Prints a Markdown table: sums of so many parameters to which noise is added, with normal numbers of
`tf.random.stateless_normal` (Philox), with those of tfdp (ChaCha20, 64 bits each), both in
float32, and with secure noise, of a float64 sum. Then those of other libraries, which run in
`--peer_python`, each in a process of its own: Opacus with `secure_mode`, and JAX-Privacy, whose
noise is `jax.random.normal`. All take turns. For whole steps see `benchmarks.step`, contestants
`tfdp_philox`, `tfdp_one_pass` and `tfdp_secure`.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import tensorflow as tf

from benchmarks.turns import ROOT
from tfdp.base.random.key_streams import KeyStream
from tfdp.step.noise import add_gaussian_noise
from tfdp.step.secure_noise import add_secure_noise

SIZES = (26_010, 550_570, 2_000_000, 10_000_000)
OWN = ("Philox", "ChaCha20", "secure")
PEERS = {"opacus": "Opacus secure_mode", "jax_privacy": "JAX-Privacy"}


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


class Peer:
    """The process of another library.

    Args:
      name: One of `PEERS`.
      size: Number of parameters.
      python: Python that has the library.

    Attributes:
      reason: Why it cannot be timed, or None.
      version: Version of the library.
    """

    def __init__(self, name: str, size: int, python: str):
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.noise_peers", name, str(size)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        ready = self._answer()
        self.reason, self.version = ready.get("reason"), ready.get("version")

    def seconds(self, repeats: int) -> float:
        """Returns the seconds of one addition."""
        print(repeats, file=self._process.stdin, flush=True)
        return self._answer()["seconds"] / repeats

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict:
        line = self._process.stdout.readline() if self._process.stdout else ""
        return json.loads(line) if line else {"reason": "failed: the process died"}


def measure(size: int, turns: int, python: str) -> tuple[list[list[float | None]], dict[str, str]]:
    """Times all of them in turns.

    Args:
      size: Number of parameters.
      turns: Turns of each.
      python: Python of the peers.

    Returns:
      Seconds of one addition of noise, a row of `OWN` and `PEERS` for each turn, with None for
      peers that cannot be timed; and what is to be said of each peer.
    """
    functions = [
        steps(add, tf.Variable(tf.zeros([size], dtype)))
        for add, dtype in ((philox, tf.float32), (chacha, tf.float32), (secure, tf.float64))
    ]
    for function in functions:
        function()
    repeats = max(1, min(100, 1_000_000 // size))
    with contextlib.ExitStack() as stack:
        peers = {name: Peer(name, size, python) for name in PEERS}
        for peer in peers.values():
            stack.callback(peer.close)
        rows = []
        for _ in range(turns):
            own: list[float | None] = [seconds(function, repeats) for function in functions]
            rows.append(own + [None if p.reason else p.seconds(repeats) for p in peers.values()])
        said = {name: peer.reason or f"version {peer.version}" for name, peer in peers.items()}
    return rows, said


def line(size: int, rows: list[list[float | None]]) -> str:
    """Returns a line of the table: medians, and the ratio of secure noise to the default's."""
    medians = [
        "–" if column[0] is None else f"{1e3 * statistics.median(column):.2f}"
        for column in zip(*rows, strict=True)
    ]
    ratio = statistics.median(row[2] / row[1] for row in rows)
    return f"| {size:,} | {' | '.join(medians)} | {ratio:.2f} |"


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="parameters")
    parser.add_argument(
        "--peer_python", default=sys.executable, help="Python that has Opacus and JAX-Privacy"
    )
    options = parser.parse_args(arguments)
    columns = [f"{name}, ms" for name in (*OWN, *PEERS.values())]
    print(f"| parameters | {' | '.join(columns)} | secure / ChaCha20 |")
    print("|---" * (len(columns) + 2) + "|")
    for size in options.sizes:
        rows, said = measure(size, options.turns, options.peer_python)
        print(line(size, rows), flush=True)
    for name, title in PEERS.items():
        print(f"{title}: {said[name]}")


if __name__ == "__main__":
    main()
