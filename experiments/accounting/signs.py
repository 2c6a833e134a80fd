"""Epsilon of sign descent: priced as Gaussians, as signs, and what attacks reach.

    python -m experiments.accounting.signs --picture=docs/sign_accounting.png

Each row takes the noise with which Gaussian mechanisms (privacy losses, PLD) have the stated
epsilon. The attacks are lower bounds: an example whose gradient has 1 (or 1,000) equal coordinates
to which nothing else contributes, told from nothing by all signs. "noise" is the noise multiplier
that signs need for the same epsilon as the Gaussian mechanisms, over theirs.
"""

from collections.abc import Sequence

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from scipy import special, stats

from experiments import cli, output
from tfdp.accounting import calibrate_noise_multiplier, composition, dominating_pairs, event_codec
from tfdp.accounting.bounds import Release, tightest_epsilon

_PICTURE = flags.DEFINE_string("picture", None, "Path of the picture to draw.")
DELTA = 1e-5
# Sampling probability, steps, epsilon as Gaussian mechanisms.
SETTINGS = (
    *((256 / 60000, 4688, epsilon) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)),
    *((2048 / 60000, 600, epsilon) for epsilon in (1.0, 3.0, 8.0)),
    (0.001, 20000, 1.0),
    (1.0, 100, 1.0),
    (1.0, 100, 5.0),
)


def attack(q: float, noise: float, steps: int, delta: float, coordinates: int) -> float:
    """Returns a certified lower bound on epsilon of signs.

    Args:
      q: Sampling probability.
      noise: Noise multiplier.
      steps: Number of steps.
      delta: The delta.
      coordinates: Number of equal coordinates of the example's gradient, which are 0 without it.
    """
    count = np.arange(coordinates + 1)
    positive = special.ndtr(1 / noise / coordinates**0.5)
    without = stats.binom.pmf(count, coordinates, 0.5)
    with_it = (1 - q) * without + q * stats.binom.pmf(count, coordinates, positive)
    keep = (without > 1e-18) & (with_it > 1e-18)
    without, with_it = without[keep], with_it[keep]
    errors = (1e-12 * without, 1e-12 * with_it)
    pair = dominating_pairs.Pair(
        add=dominating_pairs.Atoms(without, with_it, *errors),
        remove=dominating_pairs.Atoms(with_it, without, *errors[::-1]),
    )
    return composition.least_epsilon([(pair, steps)], delta)


def epsilons(q: float, noise: float, steps: int, delta: float = DELTA) -> tuple[float, float]:
    """Returns epsilon as Gaussian mechanisms, and as signs."""
    events = [event_codec.sampled_gaussian(q, noise, signs) for signs in (False, True)]
    gaussian, signs = (tightest_epsilon([Release(e, steps)], delta).epsilon for e in events)
    return gaussian, signs


def _row(setting: tuple[float, int, float]) -> list[str]:
    q, steps, target = setting
    known = {"delta": DELTA, "steps": steps, "sampling_probability": q}
    noise = calibrate_noise_multiplier(target_epsilon=target, **known)
    less = calibrate_noise_multiplier(target_epsilon=target, releases_signs=True, **known)
    gaussian, signs = epsilons(q, noise, steps)
    attacks = [attack(q, noise, steps, DELTA, n) for n in (1, 1000)]
    numbers = [gaussian, signs, *attacks, less / noise]
    return [f"{q:.4g}", f"{steps}", f"{noise:.4f}", *(f"{x:.3f}" for x in numbers)]


def _draw(path: str) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = np.unique(np.round(np.geomspace(30, 30000, 25)).astype(int))
    for noise, color in ((0.7, "C3"), (1.0, "C0"), (2.0, "C2")):
        found = np.array([epsilons(256 / 60000, noise, int(n)) for n in steps])
        axes.plot(steps, found[:, 0], "--", color=color, label=f"Gaussian, noise {noise:g}")
        axes.plot(steps, found[:, 1], color=color, label=f"signs, noise {noise:g}")
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel=f"epsilon at delta = {DELTA:g}")
    axes.set_title("Batches of 256 of 60,000 examples", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    output.save(figure, path)


def main(arguments: Sequence[str]) -> None:
    """Prints the table, and draws the picture."""
    with cli.refusing("signs", arguments):
        titles = ["q", "steps", "sigma", "Gaussian (PLD)", "signs", "attack, 1 coordinate"]
        titles += ["attack, 1,000", "noise"]
        print(f"{output.versions()}\n")
        print(output.markdown(titles, [_row(setting) for setting in SETTINGS]))
        if _PICTURE.value:
            _draw(_PICTURE.value)


if __name__ == "__main__":
    cli.run(main)
