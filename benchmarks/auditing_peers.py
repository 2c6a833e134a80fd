"""Computes lower bounds on epsilon with tfdp and with JAX-Privacy, of the same scores.

`python -m benchmarks.auditing_peers --peer_python peers/bin/python`. The scores are ideal ones:
those of canaries that were in are normal around mu, and others around 0, where mu is that of a
Gaussian mechanism of the stated epsilon. At confidence 95%, a valid bound is above epsilon in at
most 5% of the simulations.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np

DELTA, SIGNIFICANCE = 1e-5, 0.05
SETTINGS = ((1.0, 5000), (4.0, 1000), (8.0, 1000))  # Epsilon and canaries.
METHODS = {
    "clopper_pearson": "epsilon_clopper_pearson",
    "gaussian": "epsilon_from_gdp",
    "one_run": "epsilon_one_run",
    "one_run_f_dp": "epsilon_one_run_fdp",
}
Scores = list[tuple[np.ndarray, np.ndarray]]
Bound = Callable[[np.ndarray, np.ndarray, str], float]


def mu_of(epsilon: float) -> float:
    """Returns the mu of the Gaussian mechanism that has this epsilon at `DELTA`."""
    import scipy.optimize

    from tfdp.auditing import epsilon_of_mu

    return float(scipy.optimize.brentq(lambda mu: epsilon_of_mu(mu, DELTA) - epsilon, 1e-3, 20))


def simulated(epsilon: float, canaries: int, simulations: int) -> Scores:
    """Returns scores of canaries that were in, by a fair coin each, and of others."""
    random, mu = np.random.default_rng(0), mu_of(epsilon)
    found = []
    for _ in range(simulations):
        seen = random.random(canaries) < 0.5
        scores = random.normal(size=canaries) + mu * seen
        found.append((scores[seen], scores[~seen]))
    return found


def of_tfdp(seen: np.ndarray, unseen: np.ndarray, method: str) -> float:
    """Returns tfdp's bound."""
    from tfdp.auditing import epsilon_lower_bound

    return epsilon_lower_bound(seen, unseen, DELTA, SIGNIFICANCE, method)


def of_jax_privacy(seen: np.ndarray, unseen: np.ndarray, method: str) -> float:
    """Returns JAX-Privacy's bound."""
    from jax_privacy import auditing

    auditor = auditing.CanaryScoreAuditor(seen, unseen)
    return float(getattr(auditor, METHODS[method])(significance=SIGNIFICANCE, delta=DELTA))


def bounds(bound: Bound, scores: Scores) -> dict[str, list[float]]:
    """Returns the bounds of all simulations, by method."""
    return {m: [bound(seen, unseen, m) for seen, unseen in scores] for m in METHODS}


def of_peer(python: str, scores: Scores) -> dict[str, list[float]]:
    """Returns JAX-Privacy's bounds, from a process of a Python that has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "scores.npz")
        flat = [half for pair in scores for half in pair]
        np.savez(path, *flat)
        command = [python, "-m", "benchmarks.auditing_peers", "--scores", path]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def cell(values: list[float], epsilon: float) -> str:
    """Returns the mean of bounds, and how many are above epsilon."""
    return f"{np.mean(values):.2f} ({100 * np.mean(np.array(values) > epsilon):.0f}%)"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer_python", help="a Python with jax_privacy; none: tfdp alone")
    parser.add_argument("--simulations", type=int, default=200, help="of each setting")
    parser.add_argument("--scores", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    options = parse(arguments)
    if options.scores:
        with np.load(options.scores) as file:
            flat = [file[name] for name in file.files]
        print(json.dumps(bounds(of_jax_privacy, list(zip(flat[::2], flat[1::2], strict=True)))))
        return
    print("| epsilon | canaries | method | tfdp | JAX-Privacy |\n|---|---|---|---|---|")
    for epsilon, canaries in SETTINGS:
        scores = simulated(epsilon, canaries, options.simulations)
        own = bounds(of_tfdp, scores)
        peer = of_peer(options.peer_python, scores) if options.peer_python else {}
        for method in METHODS:
            other = cell(peer[method], epsilon) if peer else "–"
            mine = cell(own[method], epsilon)
            print(f"| {epsilon:g} | {canaries:,} | `{method}` | {mine} | {other} |", flush=True)
    print(f"\nMean bound, and share of the {options.simulations} bounds that are above epsilon.")
    print(f"NumPy {importlib.metadata.version('numpy')}, Python {sys.version.split()[0]}.")


if __name__ == "__main__":
    main()
