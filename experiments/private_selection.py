"""Chooses hyperparameters with differential privacy, and pays for it.

    python -m experiments.tune --private_selection
    python -m experiments.tune --private_selection --dataset=mnist --data_dir=... \
        --target_epsilon=2 --repetitions=geometric --mean_repetitions=10 \
        --grid=learning_rate=1,2,4 --grid=l2_norm_clip=0.1,0.3

It calls `tfdp.tune` with the settings of the grid. The test set measures the model that was chosen,
and chooses nothing. How long the command takes tells the number of runs, which is secret: the
guarantee is towards those who do not see that, nor the folder of a selection that is not finished.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import tfdp
from experiments import datasets
from experiments.schedules import make_schedule
from experiments.settings import RefusedError, Settings, make_network, resolve
from experiments.training import PRIVATE_OPTIMIZERS
from tfdp.accounting import Repetitions, repetitions
from tfdp.base.whole_files import whole_file, write_text

# Settings that do not change what a run costs, so that all runs have one privacy guarantee.
GRID = ("learning_rate", "learning_rate_schedule", "momentum", "l2_norm_clip", "activation")
_METHODS = ("dpsgd", "dpadam", "dpsignsgd", "dpsignadam")
# Times the data set's default.
_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Chooses the settings of one model privately, instead of searching for the tables."
    flags.DEFINE_bool("private_selection", False, text, flag_values=values)
    only = "With --private_selection."
    text = f"What to learn. {only}"
    flags.DEFINE_enum("dataset", "digits", datasets.DATASETS, text, flag_values=values)
    text = f"Optimizer. {only}"
    flags.DEFINE_enum("method", "dpsgd", _METHODS, text, flag_values=values)
    text = f"Epsilon of the whole selection. {only} Default: that of a run of the data set."
    flags.DEFINE_float("target_epsilon", None, text, lower_bound=1e-3, flag_values=values)
    text = f"Distribution of the number of runs. {only}"
    distributions = [name for name in repetitions.DISTRIBUTIONS if name != "poisson"]
    flags.DEFINE_enum("repetitions", "logarithmic", distributions, text, flag_values=values)
    text = f"Mean number of runs. {only}"
    flags.DEFINE_float("mean_repetitions", 5.0, text, lower_bound=1.0, flag_values=values)
    text = f"Shape of the negative_binomial distribution. {only}"
    flags.DEFINE_float("shape", None, text, flag_values=values)
    text = f"Noise on the number of held-out examples that are classified correctly. {only}"
    flags.DEFINE_float("score_noise_multiplier", 10.0, text, lower_bound=0.1, flag_values=values)
    text = f"Epochs of a run. {only} Default: those of the data set."
    flags.DEFINE_integer("epochs", None, text, lower_bound=1, flag_values=values)
    text = f"NAME=VALUE,VALUE,...: values of {', '.join(GRID)}; once for each setting. {only}"
    flags.DEFINE_multi_string("grid", [], text, flag_values=values)
    text = f"Folder of the model that is chosen. {only}"
    flags.DEFINE_string("output_dir", "results/private_selection", text, flag_values=values)


def parse_grid(given: list[str], settings: Settings) -> list[Settings]:
    """Returns all combinations of the values that --grid lists.

    Raises:
      RefusedError: A setting may not differ between runs, or a value is none of its values.
    """
    values: dict[str, list[Any]] = {}
    for text in given or [
        f"learning_rate={','.join(str(r * settings.learning_rate) for r in _RATES)}"
    ]:
        name, _, listed = text.partition("=")
        if name not in GRID or not listed or name in values:
            raise RefusedError(
                f"--grid must be NAME=VALUE,... of one of {', '.join(GRID)}, once for each. "
                f"Received: --grid={text}."
            )
        kind = type(getattr(settings, name))
        try:
            values[name] = [kind(value) for value in listed.split(",")]
        except ValueError as error:
            raise RefusedError(f"--grid={text}: {error}.") from error
    return [
        dataclasses.replace(settings, **dict(zip(values, combination, strict=True)))
        for combination in itertools.product(*values.values())
    ]


def run(values: flags.FlagValues) -> None:
    """Does what the parsed flags ask for, and prints and writes what is released.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    names = ("dataset", "method", "target_epsilon", "epochs")
    given = {name: values[name].value for name in names}
    settings = resolve({**given, "eval_split": "validation"})
    try:
        runs = Repetitions(values.repetitions, values.mean_repetitions, values["shape"].value)
    except ValueError as error:
        raise RefusedError(f"--repetitions, --mean_repetitions or --shape: {error}") from error
    load = {"data_dir": values.data_dir}
    private = datasets.load(
        settings.dataset,
        eval_split="validation",
        validation_examples=settings.validation_examples or 0,
        **load,
    )
    grid = parse_grid(values.grid, settings)
    folder = Path(values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tuned = select(grid, private, runs, values.score_noise_multiplier, folder / "selection")
    with whole_file(folder / "model.keras") as unfinished:
        tuned.model.save(unfinished)
    write_text(folder / "privacy.txt", tuned.statement)
    write_text(folder / "ledger.json", json.dumps(tuned.ledger.to_dict(), indent=2))
    print(tuned.statement)
    test = datasets.load(settings.dataset, **load)
    logits = tuned.model.predict(test.eval_x, batch_size=1000, verbose=0)
    print(
        f"{tuned.score:.2%} of {len(private.eval_y)} held-out examples are classified correctly, "
        f"with noise of standard deviation {values.score_noise_multiplier:g} on their number; "
        f"{np.mean(logits.argmax(axis=-1) == test.eval_y):.2%} of the test set.\n"
        f"model.keras, privacy.txt, ledger.json: {folder}"
    )


def select(
    grid: list[Settings],
    data: datasets.Data,
    runs: Repetitions,
    score_noise_multiplier: float,
    folder: Path,
) -> Any:
    """Returns what `tfdp.tune` chooses of a grid.

    Args:
      grid: The settings of which each run draws one, uniformly; equal in all that costs privacy.
      data: Training examples, and the held-out ones that scores are computed on: both private.
      runs: Distribution of the number of runs.
      score_noise_multiplier: Standard deviation of the noise on a score.
      folder: Folder in which an interrupted selection is found again.

    Raises:
      RefusedError: The budget cannot be met, or settings do not fit the data.
    """
    for settings in grid:
        settings.check_size(data.size)
    one = grid[0]
    front_end = one.front_end
    keras = front_end.keras
    momentum = "beta_1" if "adam" in one.method else "momentum"
    steps = one.epochs * one.steps_per_epoch(data.size)

    def build(activation: str) -> Any:
        model = make_network(dataclasses.replace(one, activation=activation))
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    candidates = [
        {
            "activation": settings.activation,
            "learning_rate": make_schedule(
                settings.learning_rate_schedule, settings.learning_rate, steps, keras
            ),
            "l2_norm_clip": settings.l2_norm_clip,
            momentum: settings.momentum,
        }
        for settings in grid
    ]
    try:
        return tfdp.tune(
            build,
            (data.train_x, data.train_y),
            candidates,
            epochs=one.epochs,
            target_epsilon=one.target_epsilon,
            delta=one.delta,
            validation_data=(data.eval_x, data.eval_y),
            held_out=True,
            score_noise_multiplier=score_noise_multiplier,
            repetitions=runs,
            optimizer=getattr(front_end.private, PRIVATE_OPTIMIZERS[one.method]),
            batch_size=one.expected_batch_size,
            num_microbatches=one.num_microbatches,
            weight_decay=one.weight_decay,
            folder=folder,
        )
    except ValueError as error:
        raise RefusedError(
            f"--target_epsilon={one.target_epsilon:g} cannot be reached. {error}"
        ) from error
