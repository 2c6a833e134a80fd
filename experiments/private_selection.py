"""Chooses hyperparameters with differential privacy, and pays for it.

    python -m experiments.tune --private_selection
    python -m experiments.tune --private_selection --dataset=mnist --data_dir=... \
        --target_epsilon=2 --repetitions=geometric --mean_repetitions=10 \
        --grid=learning_rate=1,2,4 --grid=l2_norm_clip=0.1,0.3

Draws a number of runs, and trains each with settings drawn uniformly from the grid. A run's score
is the number of held-out training examples that it classifies correctly, plus Gaussian noise. The
best run alone is released, with one epsilon for all of it: the noise of the runs is calibrated so
that it is --target_epsilon. The test set measures the model that was chosen, and chooses nothing.

Nothing of the other runs is printed or kept. How long the command takes tells their number, which
is secret: the guarantee is towards those who do not see that. An interrupted selection begins anew.
"""

import dataclasses
import itertools
import json
import math
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf
from absl import flags

import tfdp
from experiments import datasets
from experiments.report import RunFolder
from experiments.settings import RefusedError, Settings, resolve
from experiments.training import Training
from tfdp.accounting import (
    PrivacyLedger,
    Repetitions,
    event_codec,
    private_selection,
    repetitions,
)

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
    flags.DEFINE_enum(
        "repetitions", "logarithmic", repetitions.DISTRIBUTIONS, text, flag_values=values
    )
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Release of one run.

    Attributes:
      settings: Its settings.
      score: Noisy number of held-out examples that it classifies correctly; -infinity if it failed.
      model: The trained model; None if it failed.
    """

    settings: Settings
    score: float
    model: Any


class _Run(Training):
    """A run whose noise was calibrated for the selection that it is part of."""

    def __init__(self, *args: Any, noise_multiplier: float, **kwargs: Any):
        self._noise = noise_multiplier
        super().__init__(*args, **kwargs)

    def _calibrate(self) -> float:
        return self._noise


class Selection:
    """A private selection among runs of one privacy guarantee.

    Args:
      grid: The settings of which each run draws one, uniformly; equal in all that costs privacy.
      data: Training examples, and the held-out ones that scores are computed on: both private.
      runs: Distribution of the number of runs.
      score_noise_multiplier: Standard deviation of the noise on a score.

    Raises:
      RefusedError: The budget cannot be met, or settings do not fit the data.
    """

    def __init__(
        self,
        grid: list[Settings],
        data: datasets.Data,
        runs: Repetitions,
        score_noise_multiplier: float,
    ):
        for settings in grid:
            settings.check_size(data.size)
        self.grid, self.data, self.runs = grid, data, runs
        self._score_noise = score_noise_multiplier
        # One held-out example changes the number by one.
        self._score_event = dp_accounting.GaussianDpEvent(score_noise_multiplier)
        settings = grid[0]
        steps = settings.epochs * settings.steps_per_epoch(data.size)
        sizes = {"dataset_size": data.size, "expected_batch_size": settings.expected_batch_size}
        try:
            self.noise_multiplier = tfdp.accounting.calibrate_private_selection(
                runs,
                target_epsilon=settings.target_epsilon,
                delta=settings.delta,
                steps=steps,
                score=self._score_event,
                **sizes,
            )
        except ValueError as error:
            raise RefusedError(
                f"--target_epsilon={settings.target_epsilon:g} cannot be reached. {error}"
            ) from error

    def run(self) -> tuple[Outcome | None, PrivacyLedger]:
        """Trains the runs, and returns the best and what the selection costs.

        The ledger does not depend on the number of runs, nor on which of them was best. The best is
        None if there was no run ("poisson").
        """
        best = None
        for _ in range(self.runs.draw()):
            outcome = self._outcome(random.SystemRandom().choice(self.grid))
            if best is None or outcome.score > best.score:
                best = outcome
        return best, private_selection(self._ledger(), self.runs)

    def _ledger(self) -> PrivacyLedger:
        """Returns what one run releases, whatever its settings."""
        settings = self.grid[0]
        sampling = tfdp.data.poisson_batches(
            (self.data.train_x, self.data.train_y),
            expected_batch_size=settings.expected_batch_size,
        ).sampling
        steps = settings.epochs * settings.steps_per_epoch(self.data.size)
        ledger = PrivacyLedger()
        ledger.record(
            event_codec.sampled_gaussian(sampling.sampling_probability, self.noise_multiplier),
            steps,
            sampling.truncation_probability,
        )
        ledger.record(self._score_event)
        return ledger

    def _outcome(self, settings: Settings) -> Outcome:
        """Trains one run. One that fails is an outcome, too: to repeat it would cost privacy."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                training = _Run(
                    settings,
                    self.data,
                    RunFolder(folder),
                    noise_multiplier=self.noise_multiplier,
                    progress=False,
                    every_epoch=False,
                )
                training.run()
            score = self._score(training.model)
        except Exception:  # Its message may tell about the data.
            return Outcome(settings, -math.inf, None)
        if training.model.optimizer.ledger.releases != self._ledger().releases[:1]:
            raise RuntimeError("The runs did not release what the selection accounts for.")
        return Outcome(settings, score, training.model)

    def _score(self, model: Any) -> float:
        logits = model.predict(self.data.eval_x, batch_size=1000, verbose=0)
        right = int((logits.argmax(axis=-1) == self.data.eval_y).sum())
        rng = np.random.default_rng(int.from_bytes(os.urandom(32), "little"))
        return float(right + rng.normal(0.0, self._score_noise))


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
    selection = Selection(grid, private, runs, values.score_noise_multiplier)
    best, ledger = selection.run()
    statement = tfdp.privacy_statement(ledger, settings.delta)
    folder = Path(values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "privacy.txt").write_text(statement)
    (folder / "ledger.json").write_text(json.dumps(ledger.to_dict(), indent=2))
    print(statement)
    if best is None or best.model is None:
        print("There was no run." if best is None else "The best run failed.")
        return
    # Without the optimizer, whose ledger is that of one run: ledger.json is that of the selection.
    released = tf.keras.models.clone_model(best.model)
    released.set_weights(best.model.get_weights())
    released.save(folder / "model.keras")
    test = datasets.load(settings.dataset, **load)
    logits = best.model.predict(test.eval_x, batch_size=1000, verbose=0)
    chosen = {name: getattr(best.settings, name) for name in GRID}
    print(
        f"Chosen out of {len(grid)} settings: {', '.join(f'{k}={v}' for k, v in chosen.items())}.\n"
        f"{best.score:.1f} of {len(private.eval_y)} held-out examples are classified correctly, "
        f"with noise of standard deviation {values.score_noise_multiplier:g}; "
        f"{np.mean(logits.argmax(axis=-1) == test.eval_y):.2%} of the test set.\n"
        f"model.keras, privacy.txt, ledger.json: {folder}"
    )
