"""Compares epsilon by tfdp with epsilon by other libraries, and their CPU times.

    python -m benchmarks.accounting_peers --peer_python peers/bin/python

The peers live in an environment of their own: `python3.11 -m venv peers && peers/bin/pip install
dp-accounting==0.6.0 jax-privacy==2.0.0 opacus==1.6.0 torch==2.13.0`. Each library is asked for
each setting in a process of its own, as its users ask by default. Imports and a first small call do
not count. The relation is add or remove one example, which costs what zero-out does on samples.

Prints a Markdown table. "at least" and "at most" are tfdp's certified bounds. An epsilon below "at
least" is marked: no such guarantee holds.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

Phases = list[tuple[float, float, int]]  # Sampling probability, noise multiplier, steps.


@dataclasses.dataclass(frozen=True)
class Setting:
    """Releases of Poisson-sampled Gaussian mechanisms, and a delta."""

    title: str
    phases: Phases
    delta: float


SETTINGS = (
    Setting("1 step, all examples", [(1.0, 0.5, 1)], 1e-5),
    Setting("400 steps, all examples", [(1.0, 20.0, 400)], 1e-5),
    Setting("10 steps, every other example", [(0.5, 2.0, 10)], 1e-5),
    Setting("1,000 steps", [(0.01, 1.0, 1000)], 1e-5),
    Setting("MNIST, 60 epochs of 256", [(256 / 60_000, 1.1, 14_063)], 1e-5),
    Setting("MNIST, little noise", [(256 / 60_000, 0.52, 10_000)], 1e-5),
    Setting("CIFAR-10, 2,000 steps of 16,384", [(16_384 / 50_000, 9.4, 2000)], 1e-5),
    Setting("language model, 1,000 steps", [(0.001, 0.6, 1000)], 1e-6),
    Setting("epsilon in the hundreds", [(0.1, 0.3, 1000)], 1e-5),
    Setting("much noise, many steps", [(0.01, 100.0, 100_000)], 1e-5),
    Setting("10 million steps", [(1e-4, 2.0, 10_000_000)], 1e-6),
    Setting("1 rare step, little noise", [(0.001, 0.3, 1)], 1e-5),
    Setting("small delta", [(8.4e-4, 2.44, 11_485)], 2.7e-12),
    Setting("small delta, 100,000 steps", [(0.002, 0.8, 100_000)], 1e-12),
    Setting("rare, a million steps", [(1e-6, 1.0, 1_000_000)], 1e-7),
    Setting("rare, small delta", [(1.92e-6, 0.605, 309_852)], 1.6e-12),
    Setting("delta above 1 - (1 - q)^T", [(1e-6, 1.0, 10)], 1e-4),
    Setting("4 noise multipliers", [(0.01, s, 500) for s in (1.5, 1.2, 1.0, 0.8)], 1e-5),
    Setting(
        "4 kinds of steps",
        [(1e-5, 0.3, 10), (0.004, 0.7, 2000), (0.02, 2.0, 300), (1.0, 20.0, 3)],
        1e-6,
    ),
    Setting("150 noise multipliers", [(0.01, 1 + i / 150, 10) for i in range(150)], 1e-5),
)
SMALL = Setting("", [(0.5, 2.0, 1)], 1e-5)


def of_tfdp(setting: Setting) -> float:
    """Returns the smallest epsilon that tfdp certifies."""
    from tfdp.accounting.bounds import tightest_epsilon

    return tightest_epsilon(_releases(setting), setting.delta).epsilon


def of_dp_accounting_pld(setting: Setting) -> float:
    """Returns epsilon by the PLD accountant of dp_accounting, with its default grid."""
    import dp_accounting

    return _composed(dp_accounting.pld.PLDAccountant(), setting)


def of_dp_accounting_rdp(setting: Setting) -> float:
    """Returns epsilon by the RDP accountant of dp_accounting, with its default orders."""
    import dp_accounting

    return _composed(dp_accounting.rdp.RdpAccountant(), setting)


def of_jax_privacy(setting: Setting) -> float:
    """Returns epsilon by the accountant that JAX-Privacy's `keras_api` uses.

    It takes numbers of examples: q is the nearest fraction with a denominator up to a million.
    """
    from jax_privacy.accounting import accountants, analysis

    starts = [sum(steps for *_, steps in setting.phases[:i]) for i in range(len(setting.phases))]
    examples = math.lcm(
        *(Fraction(q).limit_denominator(10**6).denominator for q, *_ in setting.phases)
    )
    sizes = [round(q * examples) for q, *_ in setting.phases]
    changes = {
        starts[i]: sizes[i] / sizes[i - 1] for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]
    }
    parameters = analysis.DpParams(
        noise_multipliers=[(t, s) for t, (_, s, _) in zip(starts, setting.phases, strict=True)],
        num_samples=examples,
        delta=setting.delta,
        batch_size=sizes[0],
        batch_size_scale_schedule=changes or None,
    )
    accountant = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
    return accountant.compute_epsilon(sum(steps for *_, steps in setting.phases), parameters)


def of_opacus(setting: Setting) -> float:
    """Returns epsilon by the accountant that Opacus's `PrivacyEngine` uses."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps) for q, sigma, steps in setting.phases]
    return accountant.get_epsilon(setting.delta)


OWN = "tfdp"
CONTESTANTS: dict[str, tuple[Callable[[Setting], float], str]] = {
    OWN: (of_tfdp, "tfdp"),
    "dp_accounting PLD": (of_dp_accounting_pld, "dp-accounting"),
    "dp_accounting RDP": (of_dp_accounting_rdp, "dp-accounting"),
    "JAX-Privacy PLD": (of_jax_privacy, "jax-privacy"),
    "Opacus PRV": (of_opacus, "opacus"),
}


def _releases(setting: Setting) -> list:
    from tfdp.accounting.bounds import Release
    from tfdp.accounting.event_codec import sampled_gaussian

    return [Release(sampled_gaussian(q, sigma), steps) for q, sigma, steps in setting.phases]


def _composed(accountant, setting: Setting) -> float:  # type: ignore[no-untyped-def]
    import dp_accounting

    for q, sigma, steps in setting.phases:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), steps)
    return float(accountant.get_epsilon(setting.delta))


def at_least(setting: Setting) -> float:
    """Returns tfdp's certified lower bound: some data sets have no smaller epsilon."""
    from tfdp.accounting.bounds import epsilon_interval

    return epsilon_interval(_releases(setting), setting.delta).lower


def serve(name: str, gibibytes: int) -> None:
    """Answers a setting on standard input with epsilon and the CPU time it took, in JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (gibibytes * 2**30,) * 2)
    setting = Setting(**json.load(sys.stdin))
    ask, package = CONTESTANTS[name]
    ask(SMALL)
    before = time.process_time()
    epsilon = ask(setting)
    seconds = time.process_time() - before
    # A package of its own, or of this checkout.
    version = None if name == OWN else importlib.metadata.version(package)
    print(json.dumps({"epsilon": epsilon, "seconds": seconds, "version": version}))


def answer(python: str, name: str, setting: Setting, options: argparse.Namespace) -> dict:
    """Returns what a library says of a setting, or under "reason" why it says nothing."""
    command = [python, "-m", "benchmarks.accounting_peers", "--name", name]
    command += ["--gibibytes", str(options.gibibytes)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(dataclasses.asdict(setting)),
            capture_output=True,
            text=True,
            timeout=options.seconds,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"over {options.seconds} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"reason": lines[-1].partition(":")[0].rpartition(".")[2] if lines else "killed"}
    return json.loads(done.stdout.splitlines()[-1])


def cell(found: dict, least: float, most: float) -> str:
    """Returns what a library says: epsilon, seconds, and what is wrong with it."""
    if "reason" in found:
        return found["reason"]
    epsilon, seconds = found["epsilon"], f"({found['seconds']:.2f} s)"
    if epsilon < least:
        return f"**{epsilon:.5g}, too low** {seconds}"
    if epsilon > 1.005 * most:
        more = f"{epsilon / most:.2f}×" if most > 0 else "above 0"
        return f"{epsilon:.5g}, {more} {seconds}"
    return f"{epsilon:.5g} {seconds}"


def row(setting: Setting, options: argparse.Namespace, versions: dict[str, str]) -> list[str]:
    """Returns the cells of a setting's row, and notes the versions of libraries."""
    own = answer(sys.executable, OWN, setting, options)
    if "reason" in own:
        raise RuntimeError(f"tfdp has no epsilon of {setting}: {own['reason']}.")
    least, most = at_least(setting), own["epsilon"]
    (q, sigma, steps), *others = setting.phases
    cells = [setting.title, *(["", "", ""] if others else [f"{q:.3g}", f"{sigma:g}", f"{steps:,}"])]
    cells += [f"{setting.delta:g}", f"{least:.5g}", f"{most:.5g} ({own['seconds']:.2f} s)"]
    for name, (_, package) in CONTESTANTS.items():
        if name != OWN and options.peer_python:
            found = answer(options.peer_python, name, setting, options)
            versions.update({package: found["version"]} if "version" in found else {})
            cells.append(cell(found, least, most))
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer_python", help="a Python with the peers; none: tfdp alone")
    parser.add_argument("--only", default="", help="settings whose titles contain this")
    parser.add_argument("--seconds", type=int, default=300, help="each library has per setting")
    parser.add_argument("--gibibytes", type=int, default=8, help="of memory each library has")
    parser.add_argument("--name", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.name:
        serve(options.name, options.gibibytes)
        return
    from benchmarks import report
    from experiments.output import versions

    peers = [name for name in CONTESTANTS if name != OWN and options.peer_python]
    titles = ["setting", "q", "sigma", "steps", "delta", "at least", "at most (tfdp)", *peers]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    found: dict[str, str] = {}
    for setting in SETTINGS:
        if options.only in setting.title:
            print(f"| {' | '.join(row(setting, options, found))} |", flush=True)
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"\ntfdp with {versions()}; {report.machine()}. Peers: {listed or 'none'}.")


if __name__ == "__main__":
    main()
