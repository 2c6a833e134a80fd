"""Epsilon by tfdp beside that of dp_accounting, and their times, on settings drawn at random.

    python -m experiments.accounting.table
    python -m experiments.accounting.table --rare --draws=40 --worst=1

Prints a Markdown table of the settings with the widest bounds, of many that are drawn over the
whole range; with `--rare`, where few large losses decide: with small sampling probabilities and
little noise, and six such settings. "at least" and "at most" are tfdp's certified bounds.
`benchmarks.accounting_peers` compares more libraries.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import dp_accounting
import numpy as np
from absl import flags

from experiments import cli
from experiments.accounting.events import sampled_gaussian
from experiments.output import markdown, versions
from tfdp.accounting import PldAccountant

Setting = tuple[float, float, int, float]
# Sampling probability, noise multiplier, steps, delta: where few large losses decide.
RARE: tuple[Setting, ...] = (
    (1.92e-6, 0.605, 309_852, 1.6e-12),
    (1.56e-6, 0.43, 5_331_719, 6.8e-10),
    (1.28e-5, 0.906, 8, 4.9e-15),
    (1.45e-5, 0.601, 213_642, 3.9e-7),
    (4.11e-5, 0.626, 25_099, 2.7e-9),
    (1.41e-5, 1.02, 539_651, 3.8e-13),
)


def drawn(seed: int, rare: bool = False) -> Iterator[Setting]:
    """Yields settings drawn over the whole range: delta from 1e-15 to 0.1, up to 10^7 steps.

    Args:
      seed: Seed of the random numbers.
      rare: Whether q is at most 5e-5 and sigma at most 1.26, where few large losses decide.
    """
    rng = np.random.default_rng(seed)
    largest_q, largest_sigma = (math.log10(5e-5), 0.1) if rare else (0, 2)
    while True:
        q, delta = 10 ** rng.uniform(-6, largest_q), 10 ** rng.uniform(-15, -1)
        sigma = 10 ** rng.uniform(math.log10(0.4), largest_sigma)
        steps = int(10 ** rng.uniform(0, 7))
        yield q, sigma, steps, delta


def bounds(setting: Setting) -> tuple[float, float]:
    """Returns tfdp's lower and upper bound on epsilon."""
    accountant = _composed(PldAccountant(), setting)
    return accountant.get_least_epsilon(setting[3]), accountant.get_epsilon(setting[3])


def worst(seed: int, draws: int, count: int, rare: bool = False) -> list[Setting]:
    """Returns the drawn settings, of epsilons from 1e-3 to 100, with the widest bounds."""
    gaps: list[tuple[float, Setting]] = []
    for setting in drawn(seed, rare):
        low, high = bounds(setting)
        if 1e-3 <= high <= 100:
            gaps.append((high / max(low, 1e-9), setting))
        if len(gaps) == draws:
            break
    return [setting for _, setting in sorted(gaps, reverse=True)[:count]]


def _composed(accountant, setting):  # type: ignore[no-untyped-def]
    q, sigma, steps, _ = setting
    return accountant.compose(sampled_gaussian(q, sigma), steps)


def _timed(ask: Callable[[], float]) -> str:
    begin = time.perf_counter()
    epsilon = ask()
    return f"{epsilon:.5g} ({time.perf_counter() - begin:.2f} s)"


def row(setting: Setting) -> list[str]:
    """Returns the cells of a setting's row."""
    q, sigma, steps, delta = setting
    low, high = bounds(setting)
    event = sampled_gaussian(q, sigma)
    theirs = [dp_accounting.pld.PLDAccountant, dp_accounting.rdp.RdpAccountant]
    cells = [f"{q:.3g}", f"{sigma:.3g}", f"{steps}", f"{delta:.2g}", f"{low:.5g}"]
    cells.append(_timed(lambda: _composed(PldAccountant(), setting).get_epsilon(delta)))
    cells.append(f"{high / low - 1:.1e}" if low else "-")
    for accountant in theirs:
        cells.append(_timed(lambda a=accountant: a().compose(event, steps).get_epsilon(delta)))
    return cells


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    del argv
    given, rare = flags.FLAGS, flags.FLAGS.rare
    settings = [*(RARE if rare else ()), *worst(given.seed, given.draws, given.worst, rare)]
    header = ["q", "sigma", "steps", "delta", "at least", "at most", "gap"]
    header += ["dp_accounting PLD", "dp_accounting RDP"]
    print(f"{versions()}\n")
    print(markdown(header, [row(setting) for setting in settings]))


if __name__ == "__main__":
    flags.DEFINE_integer("seed", 14, "Of the drawn settings.")
    flags.DEFINE_integer("draws", 100, "Number of drawn settings.", lower_bound=1)
    flags.DEFINE_integer("worst", 8, "Number of drawn settings to show.", lower_bound=0)
    flags.DEFINE_bool("rare", False, "Settings where few large losses decide.")
    cli.run(main)
