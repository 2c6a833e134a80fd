"""Trajectories of DP-SGD and DPSUR on a linear regression, as a picture.

    python -m experiments.dpsur.trajectories

As figure 1 of the DPSUR paper, at one valid epsilon for both: two weights, learned from two
measurements of scikit-learn's diabetes patients (442 of them), from the same start, with as many
updates. The weights after every (accepted) update are drawn on the contours of the loss; all of
them are released, and covered by epsilon. The contours are not: they show the data.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import os
import sys
from typing import Any

import numpy as np
import sklearn.datasets
import tensorflow as tf
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tfdp
from experiments import cli
from tfdp.accounting import PoissonSampling

_FEATURES = ("bmi", "s5")
_START = (-1.5, 2.5)
_CLIP = 2.0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    where = {"flag_values": values}
    text = "Epsilon of each of the two trainings."
    flags.DEFINE_float("target_epsilon", 3.0, text, lower_bound=1e-3, **where)
    flags.DEFINE_float("delta", 1e-3, "Delta, below 1/442.", 0.0, 1 / 442, **where)
    flags.DEFINE_integer("updates", 30, "(Accepted) updates of each.", lower_bound=1, **where)
    flags.DEFINE_integer("expected_batch_size", 64, "Of an update.", 1, 442, **where)
    flags.DEFINE_integer("validation_batch_size", 16, "Of a test.", 1, 442, **where)
    text = "Largest and least probability of acceptance."
    flags.DEFINE_float("largest_acceptance", 0.9, text, 0.0, 1.0, **where)
    flags.DEFINE_float("least_acceptance", 0.45, text, 0.0, 1.0, **where)
    flags.DEFINE_float("learning_rate", 0.4, "Of both.", lower_bound=0.0, **where)
    flags.DEFINE_integer("repeats", 20, "Trainings of each, of which one is drawn.", 1, **where)
    path = os.path.join("results", "dpsur", "trajectories.png")
    flags.DEFINE_string("plot", path, "Picture to write.", **where)


def diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Two measurements `[442, 2]` and the progress of the disease `[442]`, on public scales."""
    data = sklearn.datasets.load_diabetes()
    columns = [data.feature_names.index(name) for name in _FEATURES]
    x = data.data[:, columns] / 0.05  # The data set's own scale is 1 / sqrt(442).
    y = (data.target - 150.0) / 80.0
    return x.astype("float32"), y.astype("float32")


def loss_of(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the mean squared error at each of `weights`, `[..., 2]`."""
    return np.mean((weights @ x.T - y) ** 2, axis=-1)


class Way(tf.keras.callbacks.Callback):
    """Keeps the weights after every update."""

    def __init__(self) -> None:
        super().__init__()
        self.points = [np.array(_START)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keeps them."""
        self.points.append(self.model.get_weights()[0][:, 0])


def train(values: flags.FlagValues, selective: bool) -> np.ndarray:
    """Returns the weights before and after each update, `[updates + 1, 2]`."""
    x, y = diabetes()
    batches = tfdp.data.poisson_batches(
        (x, y), expected_batch_size=values.expected_batch_size, steps_per_epoch=values.updates
    )
    layer = tf.keras.layers.Dense(1, use_bias=False)
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), layer])
    layer.set_weights([np.array(_START, "float32")[:, None]])
    optimizer = make_optimizer(values, selective, batches.sampling)
    model = tfdp.SelectiveModel(model) if selective else model
    model.compile(optimizer, tf.keras.losses.MeanSquaredError("none"))
    trajectory = Way()
    model.fit(batches, verbose=0, callbacks=[trajectory])
    spent = optimizer.ledger.epsilon(values.delta).epsilon
    if spent > values.target_epsilon:
        raise RuntimeError(f"epsilon = {spent} was spent, more than {values.target_epsilon}.")
    return np.array(trajectory.points)


def make_optimizer(values: flags.FlagValues, selective: bool, sampling: PoissonSampling) -> Any:
    """DP-SGD or DPSUR on it, with noise for the target epsilon."""
    budget = {
        "target_epsilon": values.target_epsilon,
        "delta": values.delta,
        "dataset_size": sampling.dataset_size,
        "expected_batch_size": sampling.expected_batch_size,
    }
    own = {"l2_norm_clip": _CLIP, "learning_rate": values.learning_rate, "sampling": sampling}
    if not selective:
        noise = tfdp.calibrate_noise_multiplier(steps=values.updates, **budget)
        return tfdp.DPSGD(noise_multiplier=noise, **own)
    test_noise, threshold = tfdp.accounting.parameters_for_acceptance(
        values.least_acceptance, values.largest_acceptance
    )
    test = {
        "validation_batch_size": values.validation_batch_size,
        "validation_noise_multiplier": test_noise,
        "threshold": threshold,
    }
    noise = tfdp.accounting.calibrate_selective_release(updates=values.updates, **test, **budget)
    return tfdp.DPSURSGD(noise_multiplier=noise, **test, **own)


def draw(trajectories: dict[str, list[np.ndarray]], values: flags.FlagValues) -> Figure:
    """Draws the first trajectory of each method, on the contours of the loss."""
    x, y = diabetes()
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    points = np.concatenate([trajectory[0] for trajectory in trajectories.values()])
    low, high = points.min(axis=0) - 0.4, points.max(axis=0) + 0.4
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    low, high = np.minimum(low, best - 0.4), np.maximum(high, best + 0.4)
    grid = np.stack(np.meshgrid(*np.linspace(low, high, 120).T), axis=-1)
    heights = loss_of(x, y, grid)
    for panel, (name, runs) in zip(axes, trajectories.items(), strict=True):
        draw_trajectory(panel, grid, heights, best, runs[0])
        last = [loss_of(x, y, trajectory[-1]) - loss_of(x, y, best) for trajectory in runs]
        panel.set_title(
            f"{name}: excess loss at the end {np.mean(last):.3f} ± {np.std(last):.3f} "
            f"({len(runs)} runs)",
            fontsize=10,
        )
    figure.suptitle(
        f"{values.updates} updates at true ε = {values.target_epsilon:g}, δ = {values.delta:g}"
    )
    return figure


def draw_trajectory(
    panel: Axes, grid: np.ndarray, heights: np.ndarray, best: np.ndarray, trajectory: np.ndarray
) -> None:
    """Draws one trajectory on the contours of the loss."""
    levels = np.quantile(heights, np.linspace(0, 1, 14))
    panel.contour(grid[..., 0], grid[..., 1], heights, levels=levels, colors="0.8", linewidths=0.8)
    panel.plot(trajectory[:, 0], trajectory[:, 1], marker=".", linewidth=1, color="tab:blue")
    for point, text, marker in ((trajectory[0], "start", "s"), (trajectory[-1], "end", "D")):
        panel.plot(*point, marker=marker, color="tab:blue")
        panel.annotate(text, point, xytext=(7, 5), textcoords="offset points", color="tab:blue")
    panel.plot(*best, marker="*", markersize=12, color="tab:orange")
    place = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center"}
    panel.annotate("optimum", best, color="tab:orange", **place)
    panel.set_xlabel(f"weight of {_FEATURES[0]}")
    panel.set_ylabel(f"weight of {_FEATURES[1]}")
    panel.spines[["top", "right"]].set_visible(False)


def run(values: flags.FlagValues) -> dict[str, list[np.ndarray]]:
    """Trains, draws, and says what came out; returns the trajectories of each method."""
    trajectories = {
        name: [train(values, selective) for _ in range(values.repeats)]
        for name, selective in (("DP-SGD", False), ("DPSUR", True))
    }
    x, y = diabetes()
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    for name, runs in trajectories.items():
        excess = [loss_of(x, y, trajectory[-1]) - loss_of(x, y, best) for trajectory in runs]
        print(
            f"{name}: excess loss {np.mean(excess):.4f} ± {np.std(excess):.4f} (sd of {len(runs)})"
        )
    os.makedirs(os.path.dirname(values.plot) or ".", exist_ok=True)
    draw(trajectories, values).savefig(values.plot, dpi=120)
    print(values.plot)
    return trajectories


def main(argv: list[str]) -> None:
    """Runs what the command line asks for."""
    if len(argv) > 1:
        sys.exit(f"Every argument must be a flag, --name=value. Received: {argv[1]}")
    try:
        run(flags.FLAGS)
    except ValueError as error:  # No noise is enough, or no test accepts like that.
        sys.exit(f"dpsur_trajectories: {error}")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    cli.run(main)
