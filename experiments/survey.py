"""Compares systems of a survey with DP-SGD: accuracy on digits at two epsilons.

    python -m experiments.survey
    python -m experiments.survey --systems="DP-SGD,TopK (0.1) with memory" --epsilons=2

Each row is a system that tfdp has. For each epsilon, a network is trained with each of four
learning rates (a factor of two apart) on a part of the training set; that with the best accuracy on
the other part is then trained on the whole training set, with each seed, and measured on the test
set. All rows get the same number of runs, steps and examples in a batch. PATE's queries are one
half of the images that measure, without their labels, and the other half measures.

A run that ended is a line of the record, and is not done again.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure
from sklearn.neighbors import KNeighborsClassifier

import tfdp
from experiments import cli, datasets, networks, tuned_runs
from experiments.output import markdown, save
from experiments.settings import DEFAULTS, RefusedError, positive_numbers
from tfdp.contrib import PerturbedClipping, RandomMask, TopK, pate
from tfdp.schedules import PiecewiseConstantNoise

_DATASET = "digits"
_CLIP = 1.0
_MOMENTUM = 0.9
_FACTORS = (0.5, 1.0, 2.0, 4.0)  # Multiples of a system's learning rate.
_IMAGES_OF_USER = 4
_TEST_NOISE = 2.0  # Noise of DPSUR's test of updates.
_TEACHERS, _QUERIES, _STUDENT_STEPS = 100, 100, 500


@dataclasses.dataclass(frozen=True)
class System:
    """A row of the table.

    Attributes:
      learning_rate: Rate of which multiples are tried.
      optimizer: Name of the optimizer.
      arguments: Further arguments of the optimizer.
      activation: Arguments of `networks.make_activation`.
      kind: What differs from DP-SGD besides: "", "schedule", "correlated", "users", "average",
        "selective" or "pate".
      unit: Unit of privacy.
    """

    learning_rate: float
    optimizer: str = "DPSGD"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    activation: tuple = ("tanh",)
    kind: str = ""
    unit: str = "example"


def _compressed(compression: Any) -> System:
    return System(0.15, arguments={"compression": compression})


SYSTEMS = {
    "DP-SGD": System(0.15),
    "DP-SGD with relu": System(0.15, activation=("relu",)),
    "tempered sigmoid": System(0.15, activation=("tempered_sigmoid", 1.58, 3.0, 0.71)),
    "DP-Adam": System(0.01, "DPAdam"),
    "DP-AdamBC": System(0.01, "DPAdamBC"),
    "DP-SignSGD": System(0.0025, "DPSignSGD"),
    "noise schedule": System(0.15, kind="schedule"),
    "correlated noise": System(0.15, kind="correlated"),
    "noise before the clip": System(0.15, arguments={"clipping_rule": PerturbedClipping(0.01)}),
    "random layers (half)": _compressed(RandomMask(0.5)),
    "random coordinates (0.3)": _compressed(RandomMask(0.3, "coordinate")),
    "frozen coordinates (0.7)": _compressed(RandomMask(0.3, "coordinate", redraw=False)),
    "TopK (0.1) with memory": _compressed(TopK(0.1)),
    "averaged weights": System(0.15, kind="average"),
    "DPSUR": System(0.15, "DPSURSGD", kind="selective"),
    "users of 4 images": System(0.0375, kind="users", unit="user"),
    "PATE": System(0.0025, kind="pate"),
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_list("systems", [], "Rows, by name; all unless given.", flag_values=values)
    flags.DEFINE_list("epsilons", ["1", "4"], "Budgets.", flag_values=values)
    tuned_runs.define_flags(values, "results/survey.jsonl", seeds=3)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One training, by all that decides it."""

    system: str
    epsilon: float
    delta: float


@functools.cache
def _data(split: str, held_out: int) -> datasets.Data:
    return datasets.load(_DATASET, eval_split=split, validation_examples=held_out)


def train(run: Run) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of the ledger."""
    system = SYSTEMS[run.system]
    data = _data(run.split, run.validation_examples)
    run.check_size(data.size)
    tf.keras.utils.set_random_seed(run.seed)
    if system.kind == "pate":
        return _pate(run, data)
    model, optimizer, batches = _private(run, system, data)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model.compile(optimizer, loss)
    average = [tfdp.ExponentialMovingAverage(0.9)] if system.kind == "average" else []
    model.fit(batches, epochs=1, verbose=0, callbacks=average)
    return tuned_runs.accuracy_of(model, data.eval_x, data.eval_y), _spent(optimizer.ledger, run)


def _private(run: Run, system: System, data: datasets.Data) -> tuple[Any, Any, Any]:
    """Returns the model, its optimizer and its batches."""
    batch, kind = run.expected_batch_size, system.kind
    steps = run.epochs * max(1, round(data.size / batch))
    sampled: dict[str, Any] = {"expected_batch_size": batch, "steps_per_epoch": steps}
    arguments = dict(system.arguments)
    if "Adam" not in system.optimizer:
        arguments["momentum"] = _MOMENTUM
    size = data.size
    if kind == "users":
        users = np.arange(size) // _IMAGES_OF_USER
        sampled |= {"privacy_unit": users, "examples_per_user": _IMAGES_OF_USER}
        batch, size = max(1, batch // _IMAGES_OF_USER), int(users[-1]) + 1
        sampled["expected_batch_size"] = batch
    if kind == "correlated":
        length, noise, arguments["noise_correlation"] = _correlated(run, size, batch, steps)
        sampled["cycle_length"] = length
    else:
        noise = _noise(kind, run.epsilon, run.delta, size, batch, steps)
    batches = tfdp.data.poisson_batches((data.train_x, data.train_y), **sampled)
    if kind == "selective":
        arguments |= _selection()
    optimizer = getattr(tfdp, system.optimizer)(
        _CLIP, noise, sampling=batches.sampling, learning_rate=run.learning_rate, **arguments
    )
    activation = networks.make_activation(*system.activation)
    model = networks.NETWORKS[_DATASET](activation)
    return tfdp.SelectiveModel(model) if kind == "selective" else model, optimizer, batches


def _selection() -> dict[str, Any]:
    """Returns the arguments of the test of updates, whose noise leaves a budget for epsilon 1."""
    names = ("validation_batch_size", "validation_clip", "threshold")
    given = {name: getattr(DEFAULTS[_DATASET], name) for name in names}
    return {**given, "validation_noise_multiplier": _TEST_NOISE}


@functools.cache
def _noise(kind: str, epsilon: float, delta: float, size: int, batch: int, steps: int) -> Any:
    """Returns the noise multiplier, or its schedule, of steps within a budget."""
    budget: dict[str, Any] = {
        "target_epsilon": epsilon,
        "delta": delta,
        "dataset_size": size,
        "expected_batch_size": batch,
    }
    if kind == "selective":
        test = {k: v for k, v in _selection().items() if k != "validation_clip"}
        return tfdp.accounting.calibrate_selective_release(**budget, updates=steps, **test)
    if kind == "schedule":
        thirds = PiecewiseConstantNoise([-(-steps // 3), -(-2 * steps // 3)], [1.5, 1.2, 1.0])
        return tfdp.calibrate_noise_schedule(thirds, **budget, steps=steps)
    return tfdp.calibrate_noise_multiplier(**budget, steps=steps)


_PLANS: dict[tuple, tuple] = {}


def _correlated(run: Run, size: int, batch: int, steps: int) -> tuple:
    """Returns the cycle length, the noise multiplier and the correlation that are best."""
    key = (run.epsilon, run.delta, size, batch, steps)
    if key not in _PLANS:
        plan = tfdp.calibrate_correlated_noise(
            target_epsilon=run.epsilon,
            delta=run.delta,
            steps=steps,
            dataset_size=size,
            expected_batch_size=batch,
            momentum=_MOMENTUM,
        )
        _PLANS[key] = (plan.cycle_length, plan.noise_multiplier, plan.noise_correlation)
    return _PLANS[key]


def _pate(run: Run, data: datasets.Data) -> tuple[float, float]:
    """Trains a student on the votes of nearest neighbors about one half of the images."""
    order = np.random.default_rng(0).permutation(len(data.eval_y))
    queries, measured = order[: min(_QUERIES, len(order) // 2)], order[len(order) // 2 :]
    multiplier = tfdp.calibrate_noise_multiplier(
        target_epsilon=run.epsilon, delta=run.delta, steps=len(queries), sampling_probability=1.0
    )
    partition = pate.random_partition(data.size, _TEACHERS)
    noise = multiplier * math.sqrt(2)
    aggregator = pate.GNMax(partition, num_classes=10, noise_stddev=noise)
    answers = aggregator.answer(_votes(partition, data, data.eval_x[queries]))
    model = networks.NETWORKS[_DATASET](networks.make_activation("relu"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(run.learning_rate), loss)
    drawn = np.random.default_rng(run.seed).integers(len(answers), size=32 * _STUDENT_STEPS)
    x = data.eval_x[queries]
    model.fit(x[drawn], answers[drawn], batch_size=32, shuffle=False, verbose=0)
    accuracy = tuned_runs.accuracy_of(model, data.eval_x[measured], data.eval_y[measured])
    return accuracy, _spent(aggregator.ledger, run)


def _votes(partition: Any, data: datasets.Data, images: np.ndarray) -> np.ndarray:
    """Returns the classes that each teacher's nearest example has, `[teachers, images]`."""
    votes, flat = [], data.train_x.reshape(data.size, -1)
    for teacher in range(partition.num_teachers):
        own = partition.indices(teacher)
        if len(own) == 0:
            votes.append(np.zeros(len(images), np.int64))
            continue
        nearest = KNeighborsClassifier(1).fit(flat[own], data.train_y[own])
        votes.append(nearest.predict(images.reshape(len(images), -1)))
    return np.stack(votes)


def _spent(ledger: Any, run: Run) -> float:
    spent = ledger.epsilon(run.delta).epsilon
    if spent > run.epsilon * (1 + 1e-9):
        raise RuntimeError(f"A run has an epsilon of {spent}, above that of {run}.")
    return float(spent)


class Runs(tuned_runs.Runs):
    """Runs that ended, in memory and in the record."""

    def __init__(self, path: str):
        super().__init__(path, Run, train)


@dataclasses.dataclass(frozen=True)
class Row:
    """A system at one epsilon: its best learning rate, and its accuracies on the test set."""

    system: str
    epsilon: float
    found: tuned_runs.Tuned


def compare(values: flags.FlagValues, runs: Runs) -> list[Row]:
    """Does the runs that are left; returns a row for each system and epsilon."""
    names = values.systems or list(SYSTEMS)
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise RefusedError(f"--systems must be among {list(SYSTEMS)}. Received: {unknown}.")
    epsilons = positive_numbers("epsilons", values.epsilons)
    shared = ("delta", "epochs", "expected_batch_size", "validation_examples")
    rows = []
    for name in names:
        for epsilon in epsilons:
            begun = functools.partial(
                Run, system=name, epsilon=epsilon, **{flag: values[flag].value for flag in shared}
            )
            rows.append(_row(begun, values.seeds, runs))
    return rows


def _row(begun: Callable[..., Run], seeds: int, runs: Runs) -> Row:
    name = begun.keywords["system"]  # type: ignore[attr-defined]
    rates = [SYSTEMS[name].learning_rate * factor for factor in _FACTORS]
    found = runs.tuned(begun, rates, seeds)
    return Row(name, begun.keywords["epsilon"], found)  # type: ignore[attr-defined]


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table: a line for each system, with its accuracies by epsilon."""
    epsilons = list(dict.fromkeys(row.epsilon for row in rows))
    lines = []
    for name in dict.fromkeys(row.system for row in rows):
        own = {row.epsilon: row for row in rows if row.system == name}
        cells = [name, SYSTEMS[name].unit]
        for epsilon in epsilons:
            found = own[epsilon].found
            cells += [found.text, f"{found.learning_rate:g}"]
        lines.append(cells)
    titles = ["system", "unit"]
    for epsilon in epsilons:
        titles += [f"accuracy % at epsilon {epsilon:g}", "rate"]
    return markdown(titles, lines)


def draw(rows: Sequence[Row], path: str) -> None:
    """Draws the accuracies of all systems, a line of dots for each."""
    names = list(dict.fromkeys(row.system for row in rows))[::-1]
    figure = Figure(figsize=(7, 0.32 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    for i, epsilon in enumerate(dict.fromkeys(row.epsilon for row in rows)):
        own = [row for row in rows if row.epsilon == epsilon]
        places = [names.index(row.system) for row in own]
        for place, row in zip(places, own, strict=True):
            accuracies = row.found.accuracies
            axes.plot(accuracies, [place] * len(accuracies), f"C{i}.", alpha=0.4)
        label = f"epsilon = {epsilon:g}"
        axes.plot([row.found.mean for row in own], places, f"C{i}|", markersize=12, label=label)
        for row in own:
            if row.system == "DP-SGD":
                axes.axvline(row.found.mean, color=f"C{i}", alpha=0.3, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="test accuracy %")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("survey", argv, RefusedError, datasets.DataError):
        rows = compare(flags.FLAGS, Runs(flags.FLAGS.record))
        print(table(rows))
        if flags.FLAGS.plot:
            draw(rows, flags.FLAGS.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
