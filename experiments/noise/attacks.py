"""Attacks that read the exact bits of noisy sums, on noise as floats have it and on secure noise.

    python -m experiments.noise.attacks

Prints how often each attack tells two neighbors apart, and how far a reordered sum moves, as
Markdown tables; `--plot=docs/noise_attacks.png` draws them.

The attackers know the sum without an example, which is zero, as for rare words, and the example's
gradient, of norm 1. They see the noisy sum of one of the two neighbors. The standard deviation is
4: no test of the ideal mechanism is right with a probability above Phi(1/8) = 0.550.

Unlike the other experiments, this one imports internals of tfdp: it attacks them one by one.
"""

from collections.abc import Callable

import numpy as np
import scipy.stats
import tensorflow as tf
from absl import flags
from matplotlib.figure import Figure

from experiments import cli
from experiments.output import markdown, save
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping import OnePassEngine
from tfdp.step.noise import add_gaussian_noise
from tfdp.step.secure_noise import add_secure_noise

_TRIALS = flags.DEFINE_integer("trials", 4000, "Noisy sums of each neighbour.", lower_bound=100)
_PLOT = flags.DEFINE_string("plot", None, "Picture to write.")

_BITS = 23  # Bits of the uniform numbers from which TensorFlow makes float32 normal numbers.
_NEAR = range(-2, 3)
_STDDEV = np.float32(4)  # A power of two: scaling by it is exact.
_ROWS = (256, 512, 1024, 2048, 4096)


def box_muller(radius: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Pairs of float32 normal numbers of uniform integers, as TensorFlow makes them, `[n, 2]`."""
    u = np.maximum(np.float32(radius) * np.float32(2.0**-_BITS), np.float32(1e-7))
    angle = np.float32(2 * np.pi) * (np.float32(turn) * np.float32(2.0**-_BITS))
    length = np.sqrt(np.float32(-2) * np.log(u))
    return np.stack([np.sin(angle) * length, np.cos(angle) * length], axis=1)


def naive(sums: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Adds float32 noise to float32 sums, `[n, d]`."""
    pairs = sums.size // 2
    noise = box_muller(*rng.integers(0, 2**_BITS, [2, pairs]))
    return sums + _STDDEV * noise.reshape(sums.shape)


def default(sums: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Adds the noise that tfdp adds without `secure_noise`."""
    del rng
    key = KeyStream(domain="attacks").next_key()
    return np.array(add_gaussian_noise([tf.constant(sums)], float(_STDDEV), key)[0])


def secure(sums: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Adds secure noise, for a sensitivity of 1."""
    del rng
    wide = tf.constant(sums, tf.float64)
    key = KeyStream(domain="attacks").next_key()
    noisy = add_secure_noise([wide], 1.0, float(_STDDEV), 0.0, key, [tf.float32])
    return np.array(noisy[0])


def is_made_of_uniforms(seen: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Returns whether uniform integers make the noise that the candidate lacks (Jin et al., 2021).

    Args:
      seen: Noisy sums of two coordinates, `[n, 2]`.
      candidate: The sum without noise, `[2]`.
    """
    noise = (np.float64(seen) - np.float64(candidate)) / _STDDEV
    radius = np.round(np.exp(-np.sum(np.square(noise), axis=1) / 2) * 2**_BITS)
    turn = np.round(np.arctan2(noise[:, 0], noise[:, 1]) / (2 * np.pi) * 2**_BITS)
    found = np.zeros(len(seen), bool)
    for i in _NEAR:
        for j in _NEAR:
            made = box_muller(np.maximum(radius + i, 0), (turn + j) % 2**_BITS)
            found |= np.all(candidate + _STDDEV * made == seen, axis=1)
    return found


def is_sum_of_floats(seen: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """Returns whether the candidate and float32 noise round to what is seen (Mironov, 2012)."""
    noise = seen - candidate
    near = [np.nextafter(noise, np.float32(np.inf)), np.nextafter(noise, np.float32(-np.inf))]
    return np.all(np.any([candidate + n == seen for n in (noise, *near)], axis=0), axis=1)


ATTACKS: dict[str, tuple[Callable[..., np.ndarray], int]] = {
    "uniform numbers (Jin et al., 2021), 2 coordinates": (is_made_of_uniforms, 2),
    "sums of floats (Mironov, 2012), 1,024 coordinates": (is_sum_of_floats, 1024),
}
MECHANISMS = {"TensorFlow's": naive, "tfdp's default": default, "secure": secure}


def success(attack: str, mechanism: str, trials: int, seed: int = 0) -> float:
    """Estimates how often the attack names the right neighbor, of two that are equally likely."""
    could_be, size = ATTACKS[attack]
    rng = np.random.default_rng(seed)
    gradient = rng.normal(size=size)
    gradient = np.float32(gradient / np.linalg.norm(gradient))
    candidates = [np.zeros(size, np.float32), gradient]
    right = 0.0
    for truth, own in enumerate(candidates):
        seen = MECHANISMS[mechanism](np.tile(own, [trials, 1]), rng)
        fits = [could_be(seen, candidate) for candidate in candidates]
        sure = fits[0] != fits[1]
        right += np.sum(fits[truth] & sure) + np.sum(~sure) / 2  # Else, a coin.
    return right / (2 * trials)


def distances_of_orders(wide: bool) -> list[float]:
    """Measures how far the order of rows moves their clipped sum (Casacuberta et al., 2022).

    Half of the examples have a gradient of the clip's norm, which is 1, and half of them one that
    nearly vanishes beside their sum.

    Args:
      wide: Whether the sum is in float64.

    Returns:
      The distances for each number of examples in `_ROWS`.
    """
    engine = OnePassEngine(1.0)
    engine.wide_sums = wide
    weights = tf.Variable(tf.zeros([1]))

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def clipped_sum(x: tf.Tensor) -> tf.Tensor:
        losses = tf.linalg.matvec(x, weights)
        return engine.clipped_sum(losses, [weights], tf.constant([1, 2])).gradients[0][0]

    distances = []
    for rows in _ROWS:
        large = np.ones([rows // 2, 1], np.float32)
        small = np.full_like(large, 1.3 * 2.0**-24 * rows)
        orders = np.concatenate([small, large]), np.concatenate([large, small])
        first, second = (float(clipped_sum(tf.constant(x))) for x in orders)
        distances.append(abs(first - second))
    return distances


def plot(rates: dict[str, list[float]], distances: dict[str, list[float]], path: str) -> None:
    """Draws both tables."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, values) in enumerate(rates.items()):
        left.bar(np.arange(len(values)) + 0.26 * (i - 1), values, 0.24, label=name)
    best = scipy.stats.norm.cdf(1 / (2 * _STDDEV))
    left.axhline(best, color="black", linewidth=0.8, linestyle=":", label="ideal, best test")
    names = [name.replace(" (", "\n(").replace("), ", "),\n") for name in ATTACKS]
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("right guesses")
    left.set_ylim(0, 1.5)
    left.legend(loc="upper right", fontsize=8, ncols=2)
    for name, values in distances.items():
        right.plot(_ROWS, values, marker="o", label=name)
    right.set_xscale("log", base=2)
    right.set_xlabel("examples")
    right.set_ylabel("distance of two orders, clips")
    right.legend()
    save(figure, path)


def main(argv: list[str]) -> None:
    """Prints the tables."""
    del argv
    rates = {name: [success(a, name, _TRIALS.value) for a in ATTACKS] for name in MECHANISMS}
    rows = [[a, *[f"{rates[m][i]:.3f}" for m in MECHANISMS]] for i, a in enumerate(ATTACKS)]
    print(markdown(["attack", *MECHANISMS], rows))
    distances = {
        name: distances_of_orders(wide)
        for name, wide in (("sum in float32", False), ("sum in float64", True))
    }
    rows = [[f"{n:,}", *[f"{d[i]:.2g}" for d in distances.values()]] for i, n in enumerate(_ROWS)]
    print("\n" + markdown(["examples", *distances], rows))
    if _PLOT.value is not None:
        plot(rates, distances, _PLOT.value)


if __name__ == "__main__":
    cli.run(main)
