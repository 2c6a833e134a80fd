"""Compares schedules of the noise with constant noise, at equal epsilon, on digits.

    python -m experiments.noise_schedules
    python -m experiments.noise_schedules --ratios=2,1,0.5 --epsilons=2 --seeds=10

The noise multiplier falls, or grows, in six steps of equal length and equal ratio over the
training; a ratio of 2 begins with twice the noise of the end, and 1 is constant noise. Each
schedule is scaled to the same epsilon. For each ratio and epsilon, a network is trained with each
learning rate on a part of the training set; that with the best accuracy on the other part is then
trained on the whole training set, with each seed, and measured on the test set.

A run that ended is a line of the record, and is not done again.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure

import tfdp
from experiments import cli, datasets, networks, tuned_runs
from experiments.output import markdown, save
from experiments.settings import RefusedError, positive_numbers
from tfdp.schedules import PiecewiseConstantNoise

_DATASET = "digits"
_CLIP, _MOMENTUM = 1.0, 0.9
_STAGES = 6


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "First noise multiplier over the last."
    ratios = ["4", "2", "1", "0.5"]
    flags.DEFINE_list("ratios", ratios, text, flag_values=values)
    flags.DEFINE_list("epsilons", ["1", "4"], "Budgets.", flag_values=values)
    text = "Learning rates that are tried."
    rates = ["0.075", "0.15", "0.3", "0.6"]
    flags.DEFINE_list("learning_rates", rates, text, flag_values=values)
    tuned_runs.define_flags(values, "results/noise_schedules.jsonl", seeds=4)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One training, by all that decides it."""

    ratio: float
    epsilon: float
    delta: float


@functools.cache
def _data(split: str, held_out: int) -> datasets.Data:
    return datasets.load(_DATASET, eval_split=split, validation_examples=held_out)


@functools.cache
def noise_of(ratio: float, epsilon: float, delta: float, size: int, batch: int, steps: int) -> Any:
    """Returns the noise multiplier or its schedule, scaled to a budget."""
    budget: dict[str, Any] = {
        "target_epsilon": epsilon,
        "delta": delta,
        "steps": steps,
        "dataset_size": size,
        "expected_batch_size": batch,
    }
    if ratio == 1:
        return tfdp.calibrate_noise_multiplier(**budget)
    stages = min(_STAGES, steps)
    values = np.geomspace(ratio, 1, stages).tolist()
    ends = [round(steps * i / stages) for i in range(1, stages)]
    return tfdp.calibrate_noise_schedule(PiecewiseConstantNoise(ends, values), **budget)


def train(run: Run) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of the ledger."""
    data, batch = _data(run.split, run.validation_examples), run.expected_batch_size
    run.check_size(data.size)
    steps = run.epochs * max(1, round(data.size / batch))
    tf.keras.utils.set_random_seed(run.seed)
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y), expected_batch_size=batch, steps_per_epoch=steps
    )
    optimizer = tfdp.DPSGD(
        _CLIP,
        noise_of(run.ratio, run.epsilon, run.delta, data.size, batch, steps),
        sampling=batches.sampling,
        learning_rate=run.learning_rate,
        momentum=_MOMENTUM,
    )
    model = networks.NETWORKS[_DATASET](networks.make_activation("tanh"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(batches, epochs=1, verbose=0)
    accuracy = tuned_runs.accuracy_of(model, data.eval_x, data.eval_y)
    return accuracy, optimizer.ledger.epsilon(run.delta).epsilon


def compare(values: flags.FlagValues) -> dict[tuple[float, float], tuned_runs.Tuned]:
    """Does the runs that are left; returns what was found, by ratio and epsilon."""
    ratios, epsilons, rates = (
        positive_numbers(name, values[name].value)
        for name in ("ratios", "epsilons", "learning_rates")
    )
    runs = tuned_runs.Runs(values.record, Run, train)
    shared = ("delta", "epochs", "expected_batch_size", "validation_examples")
    found = {}
    for epsilon in epsilons:
        for ratio in ratios:
            given = {flag: values[flag].value for flag in shared}
            begun = functools.partial(Run, ratio=ratio, epsilon=epsilon, **given)
            found[ratio, epsilon] = runs.tuned(begun, rates, values.seeds)
    return found


def table(found: dict[tuple[float, float], tuned_runs.Tuned]) -> str:
    """Returns a Markdown table: a line for each ratio, with its accuracies by epsilon."""
    ratios, epsilons = (list(dict.fromkeys(key)) for key in zip(*found, strict=True))
    titles = ["first noise / last"]
    for epsilon in epsilons:
        titles += [f"accuracy % at epsilon {epsilon:g}", "rate"]
    lines = []
    for ratio in ratios:
        cells = [f"{ratio:g}"]
        for epsilon in epsilons:
            own = found[ratio, epsilon]
            cells += [own.text, f"{own.learning_rate:g}"]
        lines.append(cells)
    return markdown(titles, lines)


def draw(found: dict[tuple[float, float], tuned_runs.Tuned], path: str) -> None:
    """Draws the accuracies against the ratio, a line for each epsilon."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, epsilon in enumerate(dict.fromkeys(epsilon for _, epsilon in found)):
        own = {ratio: found[ratio, epsilon] for ratio, e in sorted(found) if e == epsilon}
        for ratio, one in own.items():
            axes.plot([ratio] * len(one.accuracies), one.accuracies, f"C{i}.", alpha=0.4)
        means = [one.mean for one in own.values()]
        axes.plot(list(own), means, f"C{i}o-", label=f"epsilon = {epsilon:g}")
    ticks = sorted({ratio for ratio, _ in found})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="gray", linewidth=1, alpha=0.5)
    axes.set(xlabel="first noise multiplier / last", ylabel="test accuracy %")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("noise_schedules", argv, RefusedError, datasets.DataError):
        found = compare(flags.FLAGS)
        print(table(found))
        if flags.FLAGS.plot:
            draw(found, flags.FLAGS.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
