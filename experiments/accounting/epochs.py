"""Noise for an epsilon: Poisson batches, and epochs that see each example once.

    python -m experiments.accounting.epochs --picture=docs/random_allocation.png

Each row takes the noise multiplier with which training has the stated epsilon at delta 1e-5, of t
steps an epoch: with Poisson batches of rate 1 / t; with epochs by random allocation, whose sets are
drawn anew; with sets that are drawn once (E epochs are then one, with noise smaller by sqrt(E));
and with sets that are not secret, where each epoch is one Gaussian mechanism. "Renyi" is random
allocation by RDP accounting alone.
"""

from collections.abc import Callable, Sequence

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments import cli, output
from tfdp.accounting import RandomAllocationDpEvent, event_codec
from tfdp.accounting.bounds import Release, rdp_epsilon, tightest_epsilon
from tfdp.accounting.budget import Budget

_PICTURE = flags.DEFINE_string("picture", None, "Path of the picture to draw.")
DELTA = 1e-5
# Steps of an epoch, epochs, epsilon.
SETTINGS = (
    *((234, 20, epsilon) for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)),
    *((16, 4, epsilon) for epsilon in (1.0, 4.0, 16.0)),
    *((100, epochs, 2.0) for epochs in (1, 3, 10, 100)),
    (10, 10, 2.0),
    (2000, 3, 1.0),
)

Releases = Callable[[float], list[Release]]


def ways(steps: int, epochs: int) -> dict[str, Releases]:
    """Returns the releases of a training by noise multiplier, for each way to sample."""
    return {
        "Poisson": lambda noise: [
            Release(event_codec.sampled_gaussian(1 / steps, noise), steps * epochs)
        ],
        "epochs": lambda noise: [Release(RandomAllocationDpEvent(noise, steps), epochs)],
        "sets drawn once": lambda noise: [
            Release(RandomAllocationDpEvent(noise / epochs**0.5, steps), 1)
        ],
        "known sets": lambda noise: [Release(event_codec.sampled_gaussian(1.0, noise), epochs)],
    }


def _row(setting: tuple[int, int, float]) -> list[str]:
    steps, epochs, target = setting
    budget = Budget.check(target, DELTA, None)
    noise = {name: budget.least_noise(of) for name, of in ways(steps, epochs).items()}
    found = ways(steps, epochs)["epochs"](noise["Poisson"])
    epsilon = tightest_epsilon(found, DELTA).epsilon
    cells = [f"{steps}", f"{epochs}", f"{target:g}", *(f"{x:.3f}" for x in noise.values())]
    return [*cells, f"{epsilon:.3f}", f"{rdp_epsilon(found, DELTA):.3f}"]


def _draw(path: str) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    epochs = np.unique(np.round(np.geomspace(1, 100, 13)).astype(int))
    for steps, noise, color in ((16, 1.0, "C3"), (234, 0.8, "C0"), (234, 1.5, "C2")):
        lines = {"Poisson": "--", "epochs": "-", "sets drawn once": ":"}
        for name, line in lines.items():
            found = [
                tightest_epsilon(ways(steps, int(n))[name](noise), DELTA).epsilon for n in epochs
            ]
            label = f"{name}, t = {steps}, noise {noise:g}"
            axes.plot(epochs, found, line, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="epochs", ylabel=f"epsilon at delta = {DELTA:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=6)
    output.save(figure, path)


def main(arguments: Sequence[str]) -> None:
    """Prints the table, and draws the picture."""
    with cli.refusing("epochs", arguments):
        titles = ["t", "epochs", "epsilon", *(f"noise, {name}" for name in ways(1, 1))]
        titles += ["epsilon of epochs with Poisson's noise", "the same, Renyi"]
        print(f"{output.versions()}\n")
        print(output.markdown(titles, [_row(setting) for setting in SETTINGS]))
        if _PICTURE.value:
            _draw(_PICTURE.value)


if __name__ == "__main__":
    cli.run(main)
