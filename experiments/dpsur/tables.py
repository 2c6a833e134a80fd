"""Effects of the bound on selective release: the paper's settings, and its test's cost.

    python -m experiments.dpsur.tables
    python -m experiments.dpsur.tables --plot=docs/dpsur_acceptance.png

Prints Markdown tables. The first has, for each data set and claimed epsilon of DPSUR's table 2, the
accepted updates T that Theorem 5.6 allows, the epsilon of so many by tfdp's bound ("conditional":
attempts are not observed), and how many this bound allows. The second has the noise that an
update needs, for different tests. The picture has the paper's figure 6, and what a test costs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.optimize
from absl import flags
from matplotlib.figure import Figure
from scipy import special

from experiments import cli
from experiments.accounting import published
from experiments.accounting.events import sampled_gaussian
from experiments.output import markdown, save, versions
from tfdp.accounting import (
    PrivacyLedger,
    RdpAccountant,
    SelectiveReleaseDpEvent,
    acceptance_bounds,
    calibrate_selective_release,
)

DELTA = 1e-5
# Orders of a selected update are computed one by one; these take less than 1% of the noise.
_FEW_ORDERS = (1.35, 1.5, 1.75, 2.1, 2.6, 3.35, 4.4, 6.0, 8.4, 12.0, 17.0, 24.0, 35.0, 51.0, 74.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A data set of the paper, and how it is trained for a claimed epsilon.

    Attributes:
      name: Name of the data set.
      dataset_size: N.
      batch_size: Expected batch size of an update.
      validation_batch_size: Expected batch size of a test.
      claimed: Epsilon that the paper claims.
      noise_multiplier: sigma_t, of the authors' code.
      validation_noise_multiplier: sigma_v: the paper's table 1.
    """

    name: str
    dataset_size: int
    batch_size: int
    validation_batch_size: int
    claimed: float
    noise_multiplier: float
    validation_noise_multiplier: float

    @property
    def event(self) -> SelectiveReleaseDpEvent:
        """One accepted update, beta = -1."""
        return SelectiveReleaseDpEvent(
            sampled_gaussian(self.batch_size / self.dataset_size, self.noise_multiplier),
            sampled_gaussian(
                self.validation_batch_size / self.dataset_size, self.validation_noise_multiplier
            ),
        )


def _settings() -> tuple[Setting, ...]:
    rows = (
        (("MNIST", 60000, 1024, 256), (2.0, 1.3), (1.5, 1.0), (1.35, 0.9), (1.35, 0.8)),
        (("Fashion-MNIST", 60000, 2048, 256), (4.0, 1.3), (2.15, 1.3), (2.15, 0.8), (2.15, 0.8)),
        (("CIFAR-10", 50000, 8192, 256), (11.0, 1.3), (9.0, 1.3), (5.67, 1.1), (5.67, 1.1)),
        (("IMDB", 25000, 1024, 128), (2.0, 1.3), (1.8, 1.2), (1.35, 1.0), (1.23, 0.9)),
    )
    return tuple(
        Setting(*data, float(i), *noises) for data, *row in rows for i, noises in enumerate(row, 1)
    )


SETTINGS = _settings()


def published_updates(setting: Setting) -> int:
    """Returns the most accepted updates for which Theorem 5.6 says at most the claimed epsilon."""

    def epsilon(updates: int) -> float:
        orders = published.PUBLISHED_ORDERS
        return published.epsilon(setting.event, updates, DELTA, orders)

    low, high = 0, 1
    while epsilon(high) <= setting.claimed:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(middle) <= setting.claimed else (low, middle)
    return low


def conditional_epsilons(setting: Setting, updates: int) -> dict[str, float]:
    """Computes the cost of a number of updates by tfdp's bound, by accountant."""
    ledger = PrivacyLedger()
    ledger.record(setting.event, updates)
    return dict(ledger.epsilon(DELTA).by_accountant)


def allowed_updates(setting: Setting) -> int:
    """Returns the most accepted updates for which tfdp's bound is at most the claimed epsilon."""
    return calibrate_selective_release(
        target_epsilon=setting.claimed,
        delta=DELTA,
        noise_multiplier=setting.noise_multiplier,
        validation_noise_multiplier=setting.validation_noise_multiplier,
        dataset_size=setting.dataset_size,
        expected_batch_size=setting.batch_size,
        validation_batch_size=setting.validation_batch_size,
    )


def paper_table(settings: Sequence[Setting]) -> str:
    """Makes the table of what changes for the paper's rows."""
    rows, accountants = [], ["RDP"]
    for s in settings:
        updates = published_updates(s)
        epsilons = conditional_epsilons(s, updates)
        accountants = list(epsilons)
        rows.append(
            [
                s.name,
                f"{s.claimed:g}",
                f"{s.noise_multiplier:g}",
                f"{s.validation_noise_multiplier:g}",
                str(updates),
                *(rounded_up(epsilons[name], 2) for name in accountants),
                str(allowed_updates(s)),
            ]
        )
    titles = ["data", "claimed ε", "sigma_t", "sigma_v", "T as published"]
    titles += [f"ε of that T ({name})" for name in accountants]
    return markdown([*titles, "T that the bound allows"], rows)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Goal of a calibration: `updates` updates within `epsilon`, by RDP."""

    epsilon: float = 1.0
    updates: int = 500
    dataset_size: int = 50000
    batch_size: int = 2048

    def noise(self, validation_batch_size: int, ratio: float) -> float:
        """Finds the noise of accepted updates, for a test with B / A = `ratio`; 1: no test."""
        q, test_q = (n / self.dataset_size for n in (self.batch_size, validation_batch_size))

        def gap(log_noise: float) -> float:
            event = sampled_gaussian(q, math.exp(log_noise))
            if ratio > 1:
                test = sampled_gaussian(test_q, same_cost(ratio, 0.0))
                event = SelectiveReleaseDpEvent(event, test, 0.0)
            accountant = RdpAccountant(_FEW_ORDERS).compose(event, self.updates)
            return accountant.get_epsilon(DELTA) - self.epsilon

        return math.exp(scipy.optimize.brentq(gap, 0.0, 4.0, xtol=1e-3))


def same_cost(ratio: float, threshold: float) -> float:
    """Finds the sigma_v with which B / A is `ratio`, for a threshold below 1, at equal cost.

    Raises:
      ValueError: There is none.
    """

    def gap(log_noise: float) -> float:
        noise = 2 * math.exp(log_noise)
        low, high = (special.log_ndtr((threshold + x) / noise) for x in (-1, 1))
        return float(high - low) - math.log(ratio)

    if not (ratio > 1 and threshold < 1):
        raise ValueError(f"Received: {ratio=}, {threshold=}; must be above 1 and below 1.")
    return math.exp(scipy.optimize.brentq(gap, -7, 12))


def best_threshold(validation_noise: float) -> float:
    """Returns the threshold at which B - A is largest."""
    found = scipy.optimize.minimize_scalar(
        lambda beta: -np.subtract(*acceptance_bounds(validation_noise, beta)[::-1]),
        bounds=(-3.5, 3.5),
        method="bounded",
    )
    return float(found.x)


def same_cost_table(ratio: float, thresholds: Sequence[float]) -> str:
    """Tests that cost the same, and how many attempts they take."""
    rows = []
    for beta in thresholds:
        sigma = same_cost(ratio, beta)
        low, high = acceptance_bounds(sigma, beta)
        event = SelectiveReleaseDpEvent(
            sampled_gaussian(0.04, 4.0),
            sampled_gaussian(0.005, sigma),
            beta,
        )
        cost = RdpAccountant((8.0,)).compose(event).rdp[0]
        cells = [f"{beta:g}", f"{sigma:.3f}", f"{low:.3f}", f"{high:.3f}", f"{1 / high:.2f}"]
        rows.append([*cells, f"{1 / low:.2f}", f"{cost:.6e}"])
    titles = ["beta", "sigma_v", "A", "B", "attempts, good: 1/B", "bad: 1/A", "R(8) of an update"]
    return markdown(titles, rows)


def noise_table(noises: dict[int, list[float]], ratios: Sequence[float]) -> str:
    """Returns the noise that an update needs, for tests of different B / A and B_v."""
    rows = [
        ["1 (no test)" if ratio == 1 else f"{ratio:.3g}", *(f"{n[i]:.2f}" for n in noises.values())]
        for i, ratio in enumerate(ratios)
    ]
    return markdown(["B / A", *(f"B_v = {size}" for size in noises)], rows)


def rounded_up(value: float, digits: int) -> str:
    """Returns a number with so many digits after the point, not below it."""
    scale = 10.0**digits
    return f"{math.ceil(scale * value - 1e-9) / scale:.{digits}f}"


def draw(ratio: float, noises: dict[int, list[float]], ratios: Sequence[float]) -> Figure:
    """Returns the paper's figure 6; the attempts that a test takes at equal cost; and that cost."""
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    _draw_acceptance(panels[0])
    _draw_attempts(panels[1], ratio)
    _draw_noises(panels[2], noises, ratios)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_acceptance(panel: Any) -> None:
    beta = np.linspace(-3.5, 2, 441)
    for sigma, color in zip((0.8, 1.0, 1.3), ("tab:blue", "tab:green", "tab:orange"), strict=True):
        low, high = np.transpose([acceptance_bounds(sigma, float(b)) for b in beta])
        panel.plot(beta, high, color=color, label=f"σ_v = {sigma:g}")
        panel.plot(beta, low, "--", color=color)
    for x, text, side in ((-1, "the paper's β", "right"), (0, "B − A is largest", "left")):
        panel.axvline(x, color="0.4", linewidth=1, linestyle=":")
        _label(panel, text, (x, 1.02), (4 if side == "left" else -4, 0), "0.4", ha=side)
    panel.set_title("accepted of good updates, B (—), and of bad, A (- -)", fontsize=10)
    panel.set_xlabel("threshold β")
    panel.set_ylabel("probability")
    panel.set_ylim(0, 1.1)
    panel.legend(frameon=False, loc="center left")


def _draw_attempts(panel: Any, ratio: float) -> None:
    beta = np.linspace(-2, 0.95, 60)
    bounds = [acceptance_bounds(same_cost(ratio, float(b)), float(b)) for b in beta]
    at = int(np.argmin(np.abs(beta + 0.4)))
    for i, text, color in (
        (0, "if all are bad, 1/A", "tab:red"),
        (1, "if all are good, 1/B", "tab:blue"),
    ):
        attempts = [1 / bound[i] for bound in bounds]
        panel.plot(beta, attempts, color=color)
        _label(panel, text, (beta[at], attempts[at]), (2, 6), color)
    panel.axvline(-1, color="0.4", linewidth=1, linestyle=":")
    _label(panel, "the paper's β", (-1, 6.5), (4, 0), "0.4")
    panel.set_title(f"attempts per accepted update at equal cost, B / A = {ratio:.2f}", fontsize=10)
    panel.set_xlabel("threshold β (with the σ_v that makes B / A so)")
    panel.set_ylabel("attempts")
    panel.set_ylim(0, 7)


def _draw_noises(panel: Any, noises: dict[int, list[float]], ratios: Sequence[float]) -> None:
    colors = ("tab:blue", "tab:green", "tab:red", "tab:purple", "tab:brown")
    for (size, values), color in zip(noises.items(), colors, strict=False):
        panel.plot(ratios, values, marker=".", color=color)
        _label(panel, f"B_v = {size}", (ratios[-1], values[-1]), (6, 0), color, va="center")
    _label(panel, "no test", (1, noises[next(iter(noises))][0]), (6, -6), "0.4")
    panel.set_title("noise of an update that the same ε needs", fontsize=10)
    panel.set_xlabel("B / A of the test")
    panel.set_ylabel("σ_t")


def _label(panel: Any, text: str, at: tuple, offset: tuple, color: str, **place: Any) -> None:
    panel.annotate(
        text, at, offset, "data", "offset points", color=color, annotation_clip=False, **place
    )


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    names = list(dict.fromkeys(setting.name for setting in SETTINGS))
    flags.DEFINE_list("data", names, "Data sets of the first table.", flag_values=values)
    flags.register_validator(
        "data",
        lambda chosen: set(chosen) <= set(names),
        message=f"--data must be out of {', '.join(names)}.",
        flag_values=values,
    )
    sizes = ["16", "64", "256"]
    flags.DEFINE_list("validation_batch_sizes", sizes, "Of the noise table.", flag_values=values)
    flags.DEFINE_string(
        "plot", "results/dpsur/acceptance.png", "Picture; none if empty.", flag_values=values
    )


def run(values: flags.FlagValues) -> None:
    """Prints the tables and draws the picture."""
    low, high = acceptance_bounds(1.3, -1.0)
    print(f"delta = {DELTA:g}; {versions()}\n", flush=True)
    chosen = [setting for setting in SETTINGS if setting.name in values.data]
    print(f"The paper's settings\n\n{paper_table(chosen)}\n", flush=True)
    print(f"Thresholds of equal cost\n\n{same_cost_table(high / low, (-2, -1, 0, 0.5, 0.9))}\n")
    for sigma in (0.8, 1.0, 1.3):
        print(f"B - A is largest at beta = {abs(best_threshold(sigma)):.3f} for sigma_v = {sigma}")
    plan = TrainingPlan()
    ratios = (1.0, 1.25, 1.5, 2.0, high / low, 2.7, 3.15)
    sizes = [int(size) for size in values.validation_batch_sizes]
    noises = {size: [plan.noise(size, ratio) for ratio in ratios] for size in sizes}
    print(f"\nsigma_t that {plan} needs\n\n{noise_table(noises, ratios)}\n", flush=True)
    if values.plot:
        save(draw(high / low, noises, ratios), values.plot)


def main(argv: list[str]) -> None:
    """Runs what the command line asks for."""
    with cli.refusing("dpsur_tables", argv):
        run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    cli.run(main)
