"""Noise for passes over the data whose sets are drawn once and stay secret.

    python -m experiments.accounting.secret_sets
    python -m experiments.accounting.secret_sets --epsilons=2 --passes=3 --pass_steps=100

Each row takes the noise multiplier with which passes over the data have the stated epsilon at delta
1e-5, and how far the noise then moves a weight:

- "known sets": a Gaussian mechanism a pass, which is what a ledger counts.
- "at most": a bound on secret sets, with a proof (docs/correlated_noise.md).
- "estimate": of secret sets, by Monte Carlo. No ledger counts it.
- "cyclic Poisson": Poisson batches in cycles of as many steps as there are bands.
"""

import functools
from collections.abc import Callable, Sequence

from absl import flags

import tfdp
from experiments import cli, output
from experiments.accounting import balls_in_bins
from experiments.settings import RefusedError, positive_numbers
from tfdp.accounting import RandomAllocationDpEvent, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.correlated_noise import MOST_BANDS, CorrelatedNoise

DELTA = 1e-5
_BUFFERS = 4
_MOST_STEPS = 10**4
_TITLES = ("known sets", "secret sets, at most", "secret sets, estimate", "cyclic Poisson")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_list("epsilons", ["1", "8"], "Budgets.", flag_values=values)
    flags.DEFINE_list("passes", ["1", "4", "10"], "Numbers of passes.", flag_values=values)
    text = "Numbers of bands, of which those above --pass_steps are left out; 1: independent noise."
    flags.DEFINE_list("bands", ["1", "8", "64"], text, flag_values=values)
    text = "Steps of a pass."
    flags.DEFINE_integer("pass_steps", 234, text, 2, MOST_BANDS, flag_values=values)
    text = "Samples of each mixture, for the estimates."
    flags.DEFINE_integer("samples", 4000, text, 100, 10**7, flag_values=values)
    flags.DEFINE_integer("seed", 1, "Seed of the estimates.", 0, flag_values=values)


def known_sets(passes: int, noise_multiplier: float) -> list[Release]:
    """Returns what passes cost whose sets are known."""
    return [Release(event_codec.sampled_gaussian(1.0, noise_multiplier), passes)]


def secret_sets(bands: int, pass_steps: int, passes: int, noise_multiplier: float) -> list[Release]:
    """Returns what passes cost at most whose sets are drawn once, in secret.

    Args:
      bands: Bands of the correlated noise, at most `pass_steps`; 1: independent noise.
      pass_steps: Steps of a pass.
      passes: Number of passes.
      noise_multiplier: Standard deviation of the noise over the sensitivity.
    """
    noise = noise_multiplier / passes**0.5
    return [Release(RandomAllocationDpEvent(noise, pass_steps // bands), 1)]


def cyclic_poisson(
    bands: int, pass_steps: int, passes: int, noise_multiplier: float
) -> list[Release]:
    """Returns what as many steps of Poisson batches cost, in cycles of as many steps as bands."""
    cycles = -(-pass_steps * passes // bands)
    return [Release(event_codec.sampled_gaussian(bands / pass_steps, noise_multiplier), cycles)]


def noises(bands: Sequence[int], pass_steps: int, passes: int) -> dict[str, CorrelatedNoise]:
    """Returns the kinds of noise that are compared."""
    found: dict[str, CorrelatedNoise] = {
        f"{size} bands" if size > 1 else "independent": tfdp.BandedNoise.optimal(
            bands=size, steps=pass_steps * passes
        )
        for size in bands
        if size <= pass_steps
    }
    buffered = tfdp.BufferedNoise.optimal(cycle_length=pass_steps, cycles=passes, buffers=_BUFFERS)
    return {**found, f"{_BUFFERS} buffers": buffered}


def multipliers(
    noise: CorrelatedNoise, pass_steps: int, passes: int, epsilon: float, samples: int, seed: int
) -> list[float | None]:
    """Returns the least noise multiplier for an epsilon, by each of the ways to count."""
    budget = Budget.check(epsilon, DELTA, None)
    found: list[float | None] = [budget.least_noise(functools.partial(known_sets, passes))]
    ways: Sequence[Callable[..., list[Release]]] = (secret_sets, cyclic_poisson)
    if isinstance(noise, tfdp.BandedNoise):
        sizes = (noise.bands, pass_steps, passes)
        found += [budget.least_noise(functools.partial(way, *sizes)) for way in ways]
    else:
        found += [None, None]
    most = min(multiplier for multiplier in found[:2] if multiplier is not None)
    means = balls_in_bins.means(noise, pass_steps, passes)
    found.insert(2, balls_in_bins.estimate_noise(means, epsilon, DELTA, samples, seed, most))
    return found


def _row(
    name: str, noise: CorrelatedNoise, epsilon: float, passes: int, values: flags.FlagValues
) -> list[str]:
    found = multipliers(noise, values.pass_steps, passes, epsilon, values.samples, values.seed)
    error = noise.standard_error(values.pass_steps * passes)
    cells = [f"{epsilon:g}", f"{passes}", name]
    cells += ["" if one is None else f"{one:.3g}" for one in found]
    return cells + ["" if one is None else f"{one * error:.3g}" for one in found]


def _integers(name: str, given: Sequence[str], most: int) -> list[int]:
    """Returns the integers that a list flag was given, from 1 to `most`."""
    if not given or not all(one.isdecimal() and 1 <= int(one) <= most for one in given):
        raise RefusedError(
            f"--{name} must be integers from 1 to {most}. Received: --{name}={','.join(given)}."
        )
    return [int(one) for one in given]


def table(values: flags.FlagValues) -> str:
    """Returns the rows as a Markdown table."""
    bands = _integers("bands", values.bands, MOST_BANDS)
    passes = _integers("passes", values.passes, _MOST_STEPS // values.pass_steps)
    rows = [
        _row(name, noise, epsilon, count, values)
        for epsilon in positive_numbers("epsilons", values.epsilons)
        for count in passes
        for name, noise in noises(bands, values.pass_steps, count).items()
    ]
    titles = ["epsilon", "passes", "noise", *(f"multiplier, {title}" for title in _TITLES)]
    return output.markdown([*titles, *(f"error, {title}" for title in _TITLES)], rows)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("secret_sets", argv, RefusedError):
        print(f"{output.versions()}\n")
        print(table(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    cli.run(main)
