"""Trains on labels that were randomized for label privacy, with and without the correction.

    python -m experiments.label_privacy
    python -m experiments.label_privacy --epsilons=2 --seeds=10

Labels of digits are randomized once for each run, and a network is trained on them by plain Adam,
with the corrected and with the usual cross entropy. For each way and epsilon, a network is trained
with each learning rate on a part of the training set; that with the best accuracy on the other part
is then trained on the whole training set, with each seed, and measured on the test set. The other
part has its original labels, and so its use is not in epsilon.

A run that ended is a line of the record, and is not done again.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure

import tfdp
from experiments import cli, datasets, networks, tuned_runs
from experiments.output import markdown, save
from experiments.settings import RefusedError, positive_numbers

_DATASET, _CLASSES = "digits", 10
_CORRECTED, _USUAL = LOSSES = ("corrected", "usual")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Epsilons of the labels."
    flags.DEFINE_list("epsilons", ["1", "4"], text, flag_values=values)
    text = "Learning rates that are tried."
    rates = ["0.002", "0.004"]
    flags.DEFINE_list("learning_rates", rates, text, flag_values=values)
    tuned_runs.define_flags(values, "results/label_privacy.jsonl", seeds=3)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One training, by all that decides it."""

    loss: str
    epsilon: float


@functools.cache
def _data(split: str, held_out: int) -> datasets.Data:
    return datasets.load(_DATASET, eval_split=split, validation_examples=held_out)


def train(run: Run) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of the labels."""
    data = _data(run.split, run.validation_examples)
    try:
        released = tfdp.data.randomized_response_labels(
            data.train_y, num_classes=_CLASSES, epsilon=run.epsilon
        )
    except ValueError as refusal:
        raise RefusedError(f"--epsilons: {refusal}") from refusal
    tf.keras.utils.set_random_seed(run.seed)
    model = networks.NETWORKS[_DATASET](networks.make_activation("relu"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if run.loss == _CORRECTED:
        loss = released.crossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(run.learning_rate), loss)
    model.fit(data.train_x, released.labels, run.expected_batch_size, epochs=run.epochs, verbose=0)
    return tuned_runs.accuracy_of(model, data.eval_x, data.eval_y), released.epsilon


def compare(values: flags.FlagValues) -> dict[tuple[str, float], tuned_runs.Tuned]:
    """Does the runs that are left; returns what was found, by loss and epsilon."""
    epsilons = positive_numbers("epsilons", values.epsilons)
    rates = positive_numbers("learning_rates", values.learning_rates)
    runs = tuned_runs.Runs(values.record, Run, train)
    given = {
        flag: values[flag].value
        for flag in ("epochs", "expected_batch_size", "validation_examples")
    }
    found = {}
    for loss in LOSSES:
        for epsilon in epsilons:
            begun = functools.partial(Run, loss=loss, epsilon=epsilon, **given)
            found[loss, epsilon] = runs.tuned(begun, rates, values.seeds)
    return found


def table(found: dict[tuple[str, float], tuned_runs.Tuned]) -> str:
    """Returns a Markdown table: a line for each epsilon."""
    lines = []
    for epsilon in dict.fromkeys(epsilon for _, epsilon in found):
        cells = [f"{epsilon:g}"]
        for loss in LOSSES:
            own = found[loss, epsilon]
            cells += [own.text, f"{own.learning_rate:g}"]
        lines.append(cells)
    titles = ["epsilon of a label"]
    for loss in LOSSES:
        titles += [f"accuracy %, {loss} loss", "rate"]
    return markdown(titles, lines)


def draw(found: dict[tuple[str, float], tuned_runs.Tuned], path: str) -> None:
    """Draws the accuracies against epsilon, a line for each loss."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    epsilons = sorted({epsilon for _, epsilon in found})
    for i, loss in enumerate(LOSSES):
        for epsilon in epsilons:
            accuracies = found[loss, epsilon].accuracies
            axes.plot([epsilon] * len(accuracies), accuracies, f"C{i}.", alpha=0.4)
        means = [found[loss, epsilon].mean for epsilon in epsilons]
        axes.plot(epsilons, means, f"C{i}o-", label=f"{loss} cross entropy")
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.set(xlabel="epsilon of a label", ylabel="test accuracy %")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("label_privacy", argv, RefusedError, datasets.DataError):
        found = compare(flags.FLAGS)
        print(table(found))
        if flags.FLAGS.plot:
            draw(found, flags.FLAGS.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
