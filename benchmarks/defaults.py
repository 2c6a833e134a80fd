"""Compares the defaults of `make_private` with the best of a grid of settings, on small tasks.

    python -m benchmarks.defaults --data_dir=... --record=defaults.jsonl

Each task of `benchmarks.default_tasks` is trained with nothing but a budget given, with three
seeds; with every setting of a grid and one seed; and without privacy. Epochs are the same. The best
setting is chosen on one half of the test examples, and every score is measured on the other. Each
run that ended is a line of the record, and is not done again: several processes may share a record
(`--tasks`, `--seeds`). `--settings` takes those of the grid whose names match, such as
"adam.*linear". With `--in_epochs`, the defaults also train in epochs by random allocation. With
`--tuned`, `tfdp.tune` chooses a rate at the same epsilon, too, and scores runs on a tenth of the
training examples. The table is printed at the end; `--only_table` prints it alone.
"""

import argparse
import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

import tfdp.keras3
from benchmarks.default_tasks import EXPLAINED, TASKS, Split, Task
from experiments import records
from tfdp.accounting.planning import planned_batch_size, steps_of

DEFAULT, PLAIN, TUNED, IN_EPOCHS = "default", "not private", "tuned", "default, in epochs"
FIXED = "batches of 256, rate 0.005"  # Or of a tenth of the examples, if that is less; clip 1.
CONSTANT, LINEAR = "constant", "linear"
_STEPS = (150, 500, 1500)  # About, for the batch sizes of the grid, which are powers of two.
_RATES = {"adam": (0.002, 0.005, 0.01, 0.02, 0.04), "sgd": (0.1, 0.3, 1.0)}
_TUNED_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
_GOAL, _LEAST = 1.0, 2.5  # Points below the grid's best.


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of `make_private` beside the budget. The clip is 1.

    Attributes:
      optimizer: "adam", or "sgd" with momentum 0.9.
      batch_size: Expected batch size.
      learning_rate: The rate at the beginning.
      schedule: "constant", or "linear" to fall to zero.
      title: A name of its own.
    """

    optimizer: str
    batch_size: int
    learning_rate: float
    schedule: str
    title: str = ""

    @property
    def name(self) -> str:
        """The name in records and tables."""
        if self.title:
            return self.title
        return f"{self.optimizer}, {self.batch_size}, {self.learning_rate:g}, {self.schedule}"

    def arguments(self, size: int, epochs: int) -> dict[str, Any]:
        """Returns the arguments of `make_private` for `size` examples."""
        rate: Any = self.learning_rate
        if self.schedule == LINEAR:
            steps = epochs * max(1, round(size / self.batch_size))
            rate = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
        momentum = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        given = {"optimizer": self.optimizer, "batch_size": self.batch_size, "l2_norm_clip": 1.0}
        return {**given, "learning_rate": rate, **momentum}


def grid(size: int, epochs: int) -> list[Setting]:
    """Returns 40 settings for `size` training examples: three batch sizes, rates, schedules.

    The first is the same for all tasks.
    """
    batches = [2 ** round(math.log2(size * epochs / steps)) for steps in _STEPS]
    return [Setting("adam", min(256, size // 10), 0.005, CONSTANT, FIXED)] + [
        Setting(optimizer, batch, rate, schedule)
        for optimizer, rates in _RATES.items()
        for batch in batches
        for rate in rates
        for schedule in ((LINEAR, CONSTANT) if optimizer == "adam" else (LINEAR,))
    ]


def train(
    task: Task,
    data: Split,
    epsilon: float | None,
    setting: Setting | None,
    seed: int,
    **others: Any,
) -> dict[str, Any]:
    """Trains once.

    Args:
      task: The task.
      data: What its `load` returns.
      epsilon: The budget; None: without privacy.
      setting: What is given beside the budget; None: the defaults.
      seed: Of the weights. Batches and noise are random.
      **others: Further arguments of `make_private`.

    Returns:
      A line of the record: score on each half of the test examples, in percent.
    """
    x, y, test_x, test_y = data
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model, start = task.build(), time.perf_counter()
    line = {"task": task.name, "epsilon": epsilon, "seed": seed}
    if epsilon is None:
        model.compile("adam", task.loss)
        model.fit(x, y, batch_size=64, epochs=task.epochs, verbose=0)
        line["setting"] = PLAIN
    else:
        given = {} if setting is None else setting.arguments(len(x), task.epochs)
        model, batches, budget = tfdp.keras3.make_private(
            model,
            (x, y),
            epochs=task.epochs,
            target_epsilon=epsilon,
            loss=task.loss,
            verbose=False,
            **given,
            **others,
        )
        model.fit(batches, epochs=task.epochs, callbacks=[budget], verbose=0)
        optimizer = model.optimizer
        line |= {
            "setting": DEFAULT if setting is None else setting.name,
            "batch_size": optimizer.sampling.expected_batch_size,
            "noise_multiplier": optimizer.noise_multiplier,
        }
    seconds = time.perf_counter() - start
    predicted = model.predict(test_x, batch_size=1000, verbose=0)
    return {**line, **_scores(task, test_y, predicted), "seconds": round(seconds, 1)}


def tuned(task: Task, data: Split, epsilon: float, seed: int) -> dict[str, Any]:
    """Has `tfdp.tune` choose the learning rate; see `train`."""
    x, y, test_x, test_y = data
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    held_out = np.random.default_rng(seed).permutation(len(y)) % 10 == 0
    train_x, train_y = x[~held_out], y[~held_out]
    batch = planned_batch_size(len(train_y), task.epochs)
    steps, start = steps_of(len(train_y), batch, task.epochs), time.perf_counter()
    falling = keras.optimizers.schedules.PolynomialDecay

    def closeness(model: keras.Model, examples: tuple) -> np.ndarray:
        predicted = model.predict(examples[0], batch_size=1000, verbose=0)
        errors = (predicted.reshape(examples[1].shape) - examples[1]) ** 2
        return np.exp(-errors.reshape(len(errors), -1).mean(axis=1))

    found = tfdp.tune(
        task.build,
        (train_x, train_y),
        {"learning_rate": [falling(rate, steps, 0.0) for rate in _TUNED_RATES]},
        epochs=task.epochs,
        target_epsilon=epsilon,
        validation_data=(x[held_out], y[held_out]),
        score=closeness if task.score == EXPLAINED else "accuracy",
        loss=task.loss,
        optimizer="adam",
        verbose=0,
    )
    rate = found.settings["learning_rate"].initial_learning_rate
    line = {"task": task.name, "epsilon": epsilon, "seed": seed, "setting": TUNED, "rate": rate}
    seconds = time.perf_counter() - start
    predicted = found.model.predict(test_x, batch_size=1000, verbose=0)
    return {**line, **_scores(task, test_y, predicted), "seconds": round(seconds, 1)}


def trained_in_epochs(task: Task, data: Split, epsilon: float, seed: int) -> dict[str, Any]:
    """Trains with the defaults in epochs by random allocation; see `train`."""
    return {**train(task, data, epsilon, None, seed, sampling="epochs"), "setting": IN_EPOCHS}


def _scores(task: Task, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Returns the scores on each half of the test examples, in percent."""
    half = np.random.default_rng(3).permutation(len(labels)) % 2 == 0
    return {
        name: round(task.measure(labels[rows], predicted[rows]), 2)
        for name, rows in (("choice", half), ("score", ~half))
    }


def runs(
    size: int,
    epochs: int,
    epsilons: Sequence[float],
    seeds: Sequence[int],
    settings: str = "",
) -> Iterator[tuple[float | None, Setting | None, int]]:
    """Yields the budget, setting and seed of each run of a task of `size` training examples.

    Settings are those of the grid that match a regular expression.
    """
    for seed in seeds:
        for epsilon in epsilons:
            yield epsilon, None, seed
    yield None, None, seeds[0]
    for setting in grid(size, epochs):
        if re.search(settings, setting.name):
            for epsilon in epsilons:
                yield epsilon, setting, seeds[0]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of the tasks and budgets of a record, and what share met the goal.

    Cells whose grid is not complete have the best of what was run; their number of settings shows.
    """
    rows = [
        f"| task | epsilon | {FIXED} | default | in epochs | `tfdp.tune` | best of grid | gap "
        "| its setting | tried | not private |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for task in TASKS.values():
        mine = [line for line in lines if line["task"] == task.name]
        for epsilon in sorted({line["epsilon"] for line in mine if line["epsilon"] is not None}):
            cell = [line for line in mine if line["epsilon"] in (epsilon, None)]
            cells, gap = _cells(cell)
            if gap is not None:
                gaps[task.fitted].append(gap)
            if gap is not None or cells[2]:
                name = f"{task.name}{'*' if task.fitted else ''}"
                rows.append(f"| {' | '.join([name, f'{epsilon:g}', *cells])} |")
    for fitted, title in ((True, "Tasks that rules were fitted on (*)"), (False, "Other tasks")):
        if found := gaps[fitted]:
            met = sum(gap <= _GOAL for gap in found)
            beyond = sum(gap > _LEAST for gap in found)
            rows.append(
                f"\n{title}: within {_GOAL:g} point in {met} of {len(found)} cells; the largest "
                f"gap is {max(found):.1f}, and {beyond} are above {_LEAST:g}."
            )
    return "\n".join(rows)


def _cells(lines: Sequence[dict[str, Any]]) -> tuple[list[str], float | None]:
    """Returns the cells of a task and budget, and by how much the default is below the best."""

    def mean(setting: str) -> str:
        found = [line["score"] for line in lines if line["setting"] == setting]
        return f"{statistics.mean(found):.1f}" if found else ""

    others = (DEFAULT, TUNED, IN_EPOCHS, PLAIN)
    tried = [line for line in lines if line["setting"] not in others]
    default = [line["score"] for line in lines if line["setting"] == DEFAULT]
    best, gap, of_grid = max(tried, key=lambda line: line["choice"], default=None), None, [""] * 4
    if best is not None and default:
        gap = best["score"] - statistics.mean(default)
        of_grid = [f"{best['score']:.1f}", f"{gap:.1f}", best["setting"], str(len(tried))]
    return [*map(mean, (FIXED, DEFAULT, IN_EPOCHS, TUNED)), *of_grid, mean(PLAIN)], gap


def main(arguments: list[str] | None = None) -> None:
    """Makes the runs that the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", help="folder of TensorFlow Datasets")
    parser.add_argument("--record", default="defaults.jsonl")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--epsilons", default="1,2,8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--settings", default="", help="regular expression of settings' names")
    parser.add_argument("--tuned", action="store_true", help="run tfdp.tune, too")
    parser.add_argument("--in_epochs", action="store_true", help="train in epochs, too")
    parser.add_argument("--only_table", action="store_true")
    options = parser.parse_args(arguments)
    epsilons = [float(value) for value in options.epsilons.split(",")]
    seeds = [int(value) for value in options.seeds.split(",")]
    if not options.only_table:
        for name in options.tasks.split(","):
            task, data = TASKS[name], TASKS[name].load(options.data_dir)
            planned = runs(len(data[0]), task.epochs, epsilons, seeds, options.settings)
            others = {TUNED: tuned} if options.tuned else {}
            others |= {IN_EPOCHS: trained_in_epochs} if options.in_epochs else {}
            _run(task, data, options.record, planned, others)
    print(table(records.read(options.record)))


def _run(
    task: Task,
    data: Split,
    record: str,
    planned: Iterable[tuple],
    others: dict[str, Callable[[Task, Split, float, int], dict[str, Any]]],
) -> None:
    """Makes the runs of a task that the record lacks; others beside each run of the defaults."""

    def key(line: dict[str, Any]) -> tuple:
        return tuple(line[name] for name in ("task", "epsilon", "setting", "seed"))

    done = {key(line) for line in records.read(record)}
    for epsilon, setting, seed in planned:
        name = PLAIN if epsilon is None else DEFAULT if setting is None else setting.name
        make = {name: functools.partial(train, task, data, epsilon, setting, seed)}
        if name == DEFAULT:
            given = task, data, epsilon, seed
            make |= {title: functools.partial(run, *given) for title, run in others.items()}
        for title, run in make.items():
            if (task.name, epsilon, title, seed) not in done:
                line = run()
                records.append(record, line)
                print(line, flush=True)


if __name__ == "__main__":
    main()
