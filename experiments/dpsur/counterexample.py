"""A neighboring pair for which DPSUR's published epsilon is too small, computed and simulated.

    python -m experiments.dpsur.counterexample
    python -m experiments.dpsur.counterexample --plot=docs/selective_release.png
    python -m experiments.dpsur.counterexample --batch_size=60000 --noise_multiplier=1 \
        --validation_noise_multiplier=0.8 --cut=1.8 --updates=1 --plot=

One parameter. On D an update is w, drawn from N(0, sigma_t^2) in units of the sensitivity; an added
example moves it by 1 if it is in the batch, and changes nothing in the test. The loss falls if
|w| > cut * sigma_t and rises otherwise, by more than the test's clip: w is accepted with
probability B outside, A inside. docs/selective_release.md says why this matters.

Prints Markdown tables: the Renyi divergence of one update, epsilon after several, and what a
simulation of DPSUR's Algorithm 2 on such data gives. What is called "true, at least" is a strict
lower bound, from the distributions in experiments/dpsur/distributions.py.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
import scipy.stats
from absl import flags
from matplotlib.figure import Figure

from experiments import cli
from experiments.accounting import published as published_accounting
from experiments.dpsur.distributions import Instance, least_epsilon, renyi, renyi_of_test
from experiments.output import markdown, save, versions
from tfdp.accounting import PldAccountant, RdpAccountant

ORDERS = (2.0, 4.0, 8.0, 16.0)

# Ratio of the learning rates of two simulated updates: the earlier moved nothing in comparison.
_GROWTH = 1e12


@dataclasses.dataclass(frozen=True)
class Costs:
    """Epsilons after some accepted updates; see the module's docstring.

    Attributes:
      updates: Accepted updates, T.
      published: DPSUR's Theorem 5.6: not an upper bound.
      true_at_least: Lower bound of this instance.
      conditional: tfdp's bound by each accountant that has one, if attempts are not observed.
      attempts: Attempts expected on D, T / Z.
      per_attempt: tfdp's bound for so many attempts, if all of them are observed.
    """

    updates: int
    published: float
    true_at_least: float
    conditional: dict[str, float]
    attempts: int
    per_attempt: float


def costs(instance: Instance, updates: int, delta: float) -> Costs:
    """Computes the cost of `updates` accepted updates, by different accountings."""
    attempts = math.ceil(updates / instance.acceptance(False))
    conditional = {"RDP": _epsilon(RdpAccountant, instance, updates, delta, "conditional")}
    with contextlib.suppress(dp_accounting.UnsupportedEventError):  # An older tfdp has none.
        conditional["PLD"] = _epsilon(PldAccountant, instance, updates, delta, "conditional")
    return Costs(
        updates,
        published_accounting.epsilon(instance.event, updates, delta),
        least_epsilon(instance, updates, delta),
        conditional,
        attempts,
        _epsilon(PldAccountant, instance, attempts, delta, "per_attempt"),
    )


def _epsilon(accountant: Any, instance: Instance, count: int, delta: float, mode: str) -> float:
    return accountant(selective_release=mode).compose(instance.event, count).get_epsilon(delta)


def simulate(
    instance: Instance, example: bool, updates: int, runs: int, seed: int
) -> tuple[np.ndarray, float]:
    """Runs Algorithm 2 on D, or on D' (`example`), from theta = 0, many times.

    The loss of an ordinary example is piecewise constant in theta (`_common_loss`), so that it has
    no gradient. That of x is the same minus the fractional part of theta: it has the gradient -1,
    of the norm to which gradients are clipped. The learning rate is batch_size * 1e12^t, so that
    every update meets the same loss. Sums are divided by the expected batch size.

    Args:
      instance: The data sets and the mechanism.
      example: Whether x is there.
      updates: Accepted updates per run, T.
      runs: Number of runs.
      seed: Seed of NumPy's generator.

    Returns:
      Accepted updates w `[runs, updates]`; the mean number of attempts per accepted update.
    """
    rng = np.random.default_rng(seed)
    theta = np.zeros(runs)
    accepted = np.zeros((runs, updates))
    attempts = 0
    for t in range(updates):
        pending = np.arange(runs)
        while len(pending):
            attempts += len(pending)
            old = theta[pending]
            in_batch = (rng.random(len(pending)) < instance.q) & example
            noisy_sum = -1.0 * in_batch + rng.normal(0, instance.noise_multiplier, len(pending))
            new = old - _GROWTH**t * noisy_sum
            kept = _test(instance, example, old, new, rng)
            theta[pending[kept]] = new[kept]
            accepted[pending[kept], t] = (new - old)[kept] / _GROWTH**t
            pending = pending[~kept]
    return accepted, attempts / (runs * updates)


def _test(
    instance: Instance, example: bool, old: np.ndarray, new: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Lines 9 to 18: which updates to keep, each tested on a batch of its own, C_v = 0.001."""
    edge, clip = instance.cut * instance.noise_multiplier, 0.001
    others = rng.binomial(instance.dataset_size, instance.validation_q, len(new))
    in_batch = (rng.random(len(new)) < instance.validation_q) & example
    common_change = _common_loss(new, edge) - _common_loss(old, edge)
    own_change = common_change - (new % 1 - old % 1)
    total = others * common_change + in_batch * own_change
    change = np.clip(total / np.maximum(others + in_batch, 1), -clip, clip)
    noise = rng.normal(0, 2 * clip * instance.validation_noise_multiplier, len(new))
    return change + noise < instance.threshold * clip


def _common_loss(theta: np.ndarray, edge: float) -> np.ndarray:
    """t + 1 if |theta| is of the order 1e12^t and below edge * 1e12^t, -(t + 1) if above; l(0) = 0.

    An update that is 1e12 times the one before it raises or lowers the loss by at least 1.
    """
    size = np.maximum(np.abs(theta), 1e-9)
    t = np.floor(np.log(size) / math.log(_GROWTH) + 0.5)
    level = np.where(size < edge * _GROWTH**t, t + 1, -(t + 1))
    return np.where(theta == 0, 0.0, level)


def check_simulation(instance: Instance, updates: int, runs: int, seed: int) -> list[list[str]]:
    """Rows of a table: Kolmogorov-Smirnov distances of what was simulated from p a / Z and p."""
    rows = []
    for example in (False, True):
        w, attempts = simulate(instance, example, updates, runs, seed + example)
        for t in range(updates):
            distances = [
                scipy.stats.kstest(w[:, t], f, args=(example,)).statistic
                for f in (instance.cdf, instance.unselected_cdf)
            ]
            rows.append(
                [
                    "D + {x}" if example else "D",
                    str(t + 1),
                    *(f"{d:.4f}" for d in distances),
                    f"{attempts:.3f}",
                    f"{1 / instance.acceptance(example):.3f}",
                ]
            )
    return rows


def renyi_table(instance: Instance) -> str:
    """Renyi divergences of one update, and of what its test saw."""
    event = instance.event
    published = published_accounting.renyi(event, ORDERS)
    of_test = published_accounting.renyi_of_test(event, ORDERS)
    bound = RdpAccountant(ORDERS).compose(event).rdp
    rows = [
        [
            f"{order:g}",
            f"{published[i]:.3e}",
            f"{renyi(instance, order):.3e}",
            f"{bound[i]:.3e}",
            f"{of_test[i]:.3e}",
            f"{renyi_of_test(instance, order):.3e}",
        ]
        for i, order in enumerate(ORDERS)
    ]
    titles = ["order", "update: published", "true, at least", "conditional, at most"]
    return markdown([*titles, "number of the test: published", "true, at least"], rows)


def epsilon_table(all_costs: Sequence[Costs]) -> str:
    """Epsilons after T updates."""
    accountants = list(all_costs[0].conditional)
    titles = ["accepted updates", "published, not an upper bound", "true, at least"]
    titles += [f"conditional, at most ({name})" for name in accountants]
    titles += ["attempts expected on D", "per attempt, at most"]
    rows = [
        [
            str(p.updates),
            f"{p.published:.3f}",
            _rounded_down(p.true_at_least),
            *(f"{p.conditional[name]:.3f}" for name in accountants),
            str(p.attempts),
            f"{p.per_attempt:.3f}",
        ]
        for p in all_costs
    ]
    return markdown(titles, rows)


def draw(instance: Instance, all_costs: Sequence[Costs], delta: float) -> Figure:
    """Returns the distributions of an accepted update, and epsilon against accepted updates."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1])
    _draw_distributions(left, instance)
    _draw_epsilons(right, all_costs, delta)
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_distributions(panel: Any, instance: Instance) -> None:
    sigma = instance.noise_multiplier
    w = np.linspace(-4, 4, 2001)
    middle = (w[1:] + w[:-1]) / 2
    densities = [
        np.diff(cdf(w * sigma, False)) / np.diff(w)
        for cdf in (instance.unselected_cdf, instance.cdf)
    ]
    for density, color in zip(densities, ("0.5", "tab:red"), strict=True):
        panel.plot(middle, density, color=color)
    panel.annotate("an attempt", (0.45, 0.385), color="0.4")
    at = np.argmax(middle > instance.cut) + 5
    panel.annotate(
        "an accepted update", (middle[at], densities[1][at]), (4, 4), "data", "offset points",
        color="tab:red",
    )  # fmt: skip
    low, high = instance.acceptance_bounds
    panel.set_title(f"on D: accepted with {high:.2f} outside, {low:.2f} inside", fontsize=10)
    panel.set_xlabel("update w, in units of its noise")
    panel.set_ylabel("density")
    panel.set_ylim(0, None)


def _draw_epsilons(panel: Any, all_costs: Sequence[Costs], delta: float) -> None:
    x = [p.updates for p in all_costs]
    bounds = [min(p.conditional.values()) for p in all_costs]
    curves = [
        ("conditional, at most", bounds, "tab:blue", "-"),
        ("per attempt, at most", [p.per_attempt for p in all_costs], "tab:green", "-"),
        ("true, at least", [p.true_at_least for p in all_costs], "tab:red", "-"),
        ("published,\nnot an upper bound", [p.published for p in all_costs], "0.25", "--"),
    ]
    for label, y, color, style in curves:
        panel.plot(x, y, style, marker=".", color=color)
        place = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        panel.annotate(f"{label}: {y[-1]:.2f}", (x[-1], y[-1]), (7, 0), color=color, **place)
    panel.set_xlim(0, x[-1])
    panel.set_ylim(0, None)
    panel.set_xlabel("accepted updates")
    panel.set_ylabel("ε")
    panel.set_title(f"ε at δ = {delta:g}", fontsize=10)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    for field in dataclasses.fields(Instance):
        define = flags.DEFINE_integer if field.type is int else flags.DEFINE_float
        define(field.name, field.default, "See Instance.", flag_values=values)
        positive = field.name != "threshold"
        flags.register_validator(
            field.name,
            lambda v, positive=positive: math.isfinite(v) and (v > 0 or not positive),
            message=f"--{field.name} must be a {'positive' if positive else 'finite'} number.",
            flag_values=values,
        )
    counts = ["100", "200", "350", "500", "1000", "1500", "2000"]
    flags.DEFINE_list("updates", counts, "Numbers of accepted updates, T.", flag_values=values)
    flags.DEFINE_float("delta", 1e-5, "The delta of epsilon.", flag_values=values)
    flags.DEFINE_integer("runs", 200_000, "Simulated runs; 0: none.", flag_values=values)
    flags.DEFINE_integer("simulated_updates", 2, "Updates of a simulated run.", flag_values=values)
    flags.DEFINE_integer("seed", 1, "Of the simulation.", flag_values=values)
    flags.DEFINE_string(
        "plot", "results/dpsur/selective_release.png", "Picture; none if empty.",
        flag_values=values,
    )  # fmt: skip


def run(values: flags.FlagValues) -> None:
    """Prints the tables and draws the picture."""
    names = [field.name for field in dataclasses.fields(Instance)]
    instance = Instance(**{name: values[name].value for name in names})
    print(f"{instance}, delta = {values.delta:g}; {versions()}\n")
    print(f"Renyi divergence of one accepted update\n\n{renyi_table(instance)}\n", flush=True)
    counts = [int(count) for count in values.updates]
    all_costs = [costs(instance, count, values.delta) for count in counts]
    print(f"Epsilon\n\n{epsilon_table(all_costs)}\n", flush=True)
    if values.runs:
        titles = ["data", "update", "distance from p a / Z", "from p", "attempts", "1 / Z"]
        rows = check_simulation(instance, values.simulated_updates, values.runs, values.seed)
        print(
            f"{values.runs} runs of Algorithm 2: Kolmogorov-Smirnov distances. The first "
            f"exceeds {critical_distance(values.runs):.4f} once in a thousand by chance.\n\n"
            f"{markdown(titles, rows)}"
        )
    if values.plot:
        save(draw(instance, all_costs, values.delta), values.plot)


def main(argv: list[str]) -> None:
    """Runs what the command line asks for."""
    with cli.refusing("dpsur_counterexample", argv):
        run(flags.FLAGS)


def critical_distance(runs: int) -> float:
    """Returns the Kolmogorov-Smirnov distance that is exceeded once in a thousand."""
    return float(scipy.stats.kstwobign.isf(1e-3)) / math.sqrt(runs)


def _rounded_down(value: float) -> str:
    return f"{math.floor(1000 * value) / 1000:.3f}"


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    cli.run(main)
