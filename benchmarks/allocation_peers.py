"""Compares epsilon of random allocation by tfdp with Monte Carlo by JAX-Privacy.

    python -m benchmarks.allocation_peers --peer_python peers/bin/python

The peer lives in an environment of its own: `python3.11 -m venv peers && peers/bin/pip install
jax-privacy==2.0.0`. It samples privacy losses of balls-in-bins sampling
(`jax_privacy.experimental.monte_carlo`), and has two epsilons of them:

- estimate: the least at which the mean of its samples is at most delta, in both directions;
- verified: the least at which it is at most `get_base_delta`. Its pipeline, which may fail, is then
  (epsilon, delta)-DP.

Where sets are drawn anew for each epoch, the losses of as many samples are added up.

Prints a Markdown table, with CPU times: "at least" and "at most" are tfdp's certified bounds, and
"tfdp, estimate" is that of `experiments.accounting.balls_in_bins`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence

DELTA = 1e-3  # With a smaller one, Monte Carlo verification takes more samples.
SEED = 1
_CHUNK = 5000
_NOTHING = "–"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Passes over the data by random allocation.

    Attributes:
      steps: Steps of a pass.
      passes: Passes.
      anew: Whether each pass draws new sets.
      noise: Noise multiplier.
      bands: Bands of the correlated noise; 1: independent.
    """

    steps: int
    passes: int
    anew: bool
    noise: float
    bands: int = 1


SETTINGS = (
    Setting(16, 1, False, 1.0),
    Setting(100, 1, False, 1.0),
    Setting(16, 4, False, 2.0),
    Setting(16, 4, True, 1.0),
    Setting(100, 1, False, 1.0, 8),
    Setting(50, 4, False, 2.0, 8),
)


def coefficients(setting: Setting) -> list[float]:
    """Returns the first column of C."""
    import tfdp

    steps = setting.steps * setting.passes
    return list(tfdp.BandedNoise.optimal(bands=setting.bands, steps=steps).coefficients)


def bounds(setting: Setting) -> tuple[float | None, float]:
    """Returns tfdp's certified bounds; no lower one for correlated noise."""
    from experiments.accounting.secret_sets import secret_sets
    from tfdp.accounting import RandomAllocationDpEvent
    from tfdp.accounting.bounds import Release, epsilon_interval

    releases = secret_sets(setting.bands, setting.steps, setting.passes, setting.noise)
    if setting.anew:
        event = RandomAllocationDpEvent(setting.noise, setting.steps)
        releases = [Release(event, setting.passes)]
    found = epsilon_interval(releases, DELTA)
    return found.lower if setting.bands == 1 else None, found.upper


def estimate(setting: Setting, samples: int) -> float | None:
    """Returns tfdp's estimate; None where sets are drawn anew."""
    import tfdp
    from experiments.accounting import balls_in_bins

    if setting.anew:
        return None
    noise = tfdp.BandedNoise(coefficients(setting))
    means = balls_in_bins.means(noise, setting.steps, setting.passes)
    return balls_in_bins.estimate_epsilon(means, setting.noise, DELTA, samples, SEED)


def of_jax_privacy(
    setting: Setting, column: Sequence[float], samples: int
) -> tuple[float, float | None, float]:
    """Returns the epsilon that JAX-Privacy estimates, the one that it verifies, and CPU seconds.

    None: too few samples to verify one.
    """
    import numpy as np
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    before = time.process_time()
    draws, passes = (setting.passes, 1) if setting.anew else (1, setting.passes)
    strategy = batch_selection.BallsInBinsSampling(setting.steps * passes, setting.steps)
    rng = np.random.default_rng(SEED)

    def losses(with_it: bool, count: int) -> np.ndarray:
        """Returns losses of one draw."""
        found, _ = sample_generation.get_privacy_loss_sample(
            strategy, setting.noise, np.array(column), rng, with_it, count
        )
        return found

    drawn = [
        np.concatenate(
            [
                sum(losses(with_it, min(_CHUNK, samples - start)) for _ in range(draws))
                for start in range(0, samples, _CHUNK)
            ]
        )
        for with_it in (True, False)
    ]

    def least(delta: float) -> float:
        low, high = 0.0, 100.0
        while high - low > 1e-5:
            middle = (low + high) / 2
            at = [delta_calculation.delta_from_epsilon_and_samples(middle, one) for one in drawn]
            low, high = (low, middle) if max(at) <= delta else (middle, high)
        return high

    try:
        verified = least(delta_calculation.get_base_delta(samples, DELTA))
    except ValueError:
        verified = None
    return least(DELTA), verified, time.process_time() - before


def serve(samples: int) -> None:
    """Answers a setting on standard input, in JSON."""
    asked = json.load(sys.stdin)
    found = of_jax_privacy(Setting(**asked["setting"]), asked["column"], samples)
    print(json.dumps({"found": found, "version": importlib.metadata.version("jax-privacy")}))


def row(setting: Setting, options: argparse.Namespace, versions: set[str]) -> list[str]:
    """Returns the cells of a setting's row, and notes the version of the peer."""
    times = [time.process_time()]
    least, most = bounds(setting)
    times.append(time.process_time())
    own = estimate(setting, options.own_samples)
    times.append(time.process_time())
    sets = "drawn anew" if setting.anew else "drawn once"
    cells = [str(setting.steps), str(setting.passes), sets, str(setting.bands)]
    cells += [f"{setting.noise:g}", _NOTHING if least is None else f"{least:.4f}"]
    cells.append(f"{most:.4f} ({times[1] - times[0]:.1f} s)")
    cells.append(_NOTHING if own is None else f"{own:.4f} ({times[2] - times[1]:.1f} s)")
    if options.peer_python:
        command = [options.peer_python, "-m", "benchmarks.allocation_peers", "--serve"]
        asked = {"setting": dataclasses.asdict(setting), "column": coefficients(setting)}
        done = subprocess.run(
            [*command, "--samples", str(options.samples)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        versions.add(f"JAX-Privacy {found['version']}")
        estimated, verified, seconds = found["found"]
        cells.append(f"{estimated:.4f} ({seconds:.1f} s)")
        cells.append(_NOTHING if verified is None else f"{verified:.4f}")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer_python", help="a Python with the peer; none: tfdp alone")
    parser.add_argument("--samples", type=int, default=50_000, help="of the peer, each direction")
    parser.add_argument("--own_samples", type=int, default=20_000, help="of each mixture of tfdp")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.samples)
        return
    from benchmarks import report
    from experiments.output import versions

    peers = ["JAX-Privacy, estimate", "JAX-Privacy, verified"] if options.peer_python else []
    titles = ["t", "passes", "sets", "bands", "sigma", "at least", "at most", "tfdp, estimate"]
    print(f"| {' | '.join([*titles, *peers])} |\n|{'---|' * len(titles + peers)}", flush=True)
    found: set[str] = set()
    bounds(SETTINGS[0])  # Imports do not count.
    estimate(SETTINGS[0], 10)
    for setting in SETTINGS:
        print(f"| {' | '.join(row(setting, options, found))} |", flush=True)
    print(f"\ntfdp with {versions()}; {report.machine()}. Peers: {', '.join(found) or 'none'}.")


if __name__ == "__main__":
    main()
