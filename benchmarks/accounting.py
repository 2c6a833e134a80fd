"""Times calls of the accountants that are slow, or were.

    python -m benchmarks.accounting
    python -m benchmarks.accounting --only steps

Prints a Markdown table: CPU time of one call, and its result. No call uses what another computed.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import dp_accounting

from benchmarks import report
from experiments.output import versions
from tfdp.accounting import (
    PoissonSampling,
    Repetitions,
    calibrate_noise_multiplier,
    calibrate_private_selection,
    calibrate_steps,
)
from tfdp.accounting.bounds import EpsilonInterval, Release, epsilon_interval, tightest_epsilon
from tfdp.accounting.event_codec import sampled_gaussian

_BUDGET = {"target_epsilon": 1.0, "delta": 1e-5}
_RUNS = {"target_epsilon": 0.5, "delta": 1e-6, "steps": 5000, "sampling_probability": 0.004}
_EPOCHS = PoissonSampling(59_904, 256, cycle_length=234, redraws_sets=True)
_LAPLACE = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(2.0))


def _steps(noise: float, q: float, **budget: float) -> int:
    return calibrate_steps(**{**_BUDGET, **budget}, noise_multiplier=noise, sampling_probability=q)


def _noise(q: float, steps: int, **budget: float) -> float:
    return calibrate_noise_multiplier(**{**_BUDGET, **budget}, steps=steps, sampling_probability=q)


def _selection(name: str, mean: float = 100, **changes: float) -> float:
    return calibrate_private_selection(Repetitions(name, mean), **{**_RUNS, **changes})


def _releases(*steps: tuple[float, float, int]) -> list[Release]:
    return [Release(sampled_gaussian(q, noise), count) for q, noise, count in steps]


_MIXED = [*_releases((0.01, 1.0, 1000), (0.004, 0.7, 2000), (0.1, 5.0, 300)), Release(_LAPLACE, 9)]
_WITH_RARE = _releases((1e-5, 0.3, 10), (0.004, 0.7, 2000), (0.02, 2.0, 300), (1.0, 20.0, 3))
_DISTINCT = _releases(*((0.01, 1 + i / 150, 10) for i in range(150)))

CALLS: dict[str, Callable[[], Any]] = {
    "epsilon of 1,000 steps": lambda: tightest_epsilon(_MIXED[:1], 1e-5).epsilon,
    "noise for 1,000 steps": lambda: _noise(0.01, 1000),
    "noise where delta > 1 - (1 - q)^T": lambda: _noise(1e-6, 10, delta=1e-4),
    "noise where delta = 1 - (1 - q)^T, nearly": lambda: _noise(1e-3, 10, delta=9.95e-3),
    "noise, epsilon 0.001": lambda: _noise(0.01, 100_000, target_epsilon=1e-3),
    "steps with noise 1": lambda: _steps(1.0, 0.01),
    "steps with noise 100": lambda: _steps(100.0, 0.01),
    "steps with noise 1e4": lambda: _steps(1e4, 0.5),
    "steps with noise 1e6": lambda: _steps(1e6, 0.01),
    "steps where few losses decide": lambda: _steps(
        0.895, 3.14e-5, target_epsilon=1.33, delta=1.6e-11
    ),
    "selection, geometric": lambda: _selection("geometric"),
    "selection, logarithmic": lambda: _selection("logarithmic"),
    "selection, Poisson": lambda: _selection("poisson"),
    "selection of 10, without sampling": lambda: _selection(
        "geometric", 10, sampling_probability=1.0, steps=100
    ),
    "selection of 20 epochs": lambda: calibrate_private_selection(
        Repetitions("geometric", 5), **_BUDGET, steps=20 * 234, sampling=_EPOCHS
    ),
    "interval of four mixed releases": lambda: epsilon_interval(_MIXED, 1e-5),
    "interval with rare losses": lambda: epsilon_interval(_WITH_RARE, 1e-6),
    "epsilon of 150 noise multipliers": lambda: tightest_epsilon(_DISTINCT, 1e-5).epsilon,
    "interval of 150 noise multipliers": lambda: epsilon_interval(_DISTINCT, 1e-5),
}


def measure(name: str) -> tuple[float, Any]:
    """Returns the CPU time of a call, in seconds, and its result."""
    before = os.times()
    result = CALLS[name]()
    after = os.times()
    return after.user + after.system - before.user - before.system, result


def main(arguments: list[str] | None = None) -> None:
    """Measures the calls, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="measure only calls whose names contain this")
    options = parser.parse_args(arguments)
    tightest_epsilon(_releases((0.5, 2.0, 1)), 1e-5)  # Imports what it needs.
    print("| call | CPU time, s | result |\n|---|---|---|", flush=True)
    for name in (name for name in CALLS if options.only in name):
        seconds, result = measure(name)
        if isinstance(result, EpsilonInterval):
            shown = f"{result.lower:.6g} to {result.upper:.6g}"
        else:
            shown = f"{result:.6g}" if isinstance(result, float) else f"{result:,}"
        print(f"| {name} | {seconds:.2f} | {shown} |", flush=True)
    print(f"\n{versions()}; {report.machine()}")


if __name__ == "__main__":
    main()
