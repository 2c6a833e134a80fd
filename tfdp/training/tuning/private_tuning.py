"""Private training with settings that are chosen privately, in one call."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.ledger import Ledgers, PrivacyLedger, as_ledgers, compose_ledgers
from tfdp.accounting.repetitions import Repetitions
from tfdp.accounting.statement import privacy_statement
from tfdp.base import validation
from tfdp.step.record import record_ledger
from tfdp.step.record.tuned_rows import RunSelection
from tfdp.training.private_training import PrivateTraining, call_on_zeros
from tfdp.training.tuning import measure as measures
from tfdp.training.tuning.candidates import Runs
from tfdp.training.tuning.independence import independent
from tfdp.training.tuning.kept import FAILED, KeptRuns
from tfdp.training.tuning.measure import Measure
from tfdp.training.tuning.plan import Plan

_DEFAULT_RUNS = Repetitions("geometric", mean=5)
_SECRET = (
    "How many runs there are is secret, and with it how long this takes, and what verbose=2 shows."
)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Result of a private selection: all that it releases.

    Attributes:
      model: The best model, with a private optimizer that has taken no step. To train it further,
        call `make_private` with an `optimizer`: what it cost is counted.
      settings: Its settings.
      score: Mean of its scores on the validation data, with noise if the data are private.
      ledger: What the whole selection cost, and what `prior` and the model cost before.
      delta: The delta of the guarantee.
      epsilon_of_all: Epsilon of training once with each candidate, and publishing all models.
    """

    model: Any
    settings: dict[str, Any]
    score: float
    ledger: PrivacyLedger
    delta: float
    epsilon_of_all: float

    @property
    def statement(self) -> str:
        """The privacy statement of the whole selection."""
        return str(privacy_statement(self.ledger, delta=self.delta))


def tune(
    build: Callable[..., Any],
    data: Any,
    candidates: Mapping[str, Sequence] | Sequence[Mapping[str, Any]],
    *,
    epochs: int,
    target_epsilon: float,
    validation_data: Any,
    score: str | Callable[[Any, Any], Any] = "accuracy",
    public_validation: bool = False,
    held_out: bool = False,
    score_noise_multiplier: float | None = None,
    repetitions: Repetitions = _DEFAULT_RUNS,
    delta: float | None = None,
    prior: Ledgers | None = None,
    folder: str | os.PathLike | None = None,
    verbose: int = 1,
    **arguments: Any,
) -> Tuned:
    """Trains with settings drawn at random, and returns the best model, at one epsilon for all.

    A secret, random number of runs is made. Each draws its settings uniformly from `candidates`,
    trains a new model privately, and gets a score on the validation data, with noise. The model
    with the highest score is released, and nothing of the other runs. This costs far less than to
    publish all models, and its cost does not depend on the number of candidates: it follows from
    `repetitions`, for which each run gets more noise.

    Guarantees: the returned model, its settings and its score cost at most (`target_epsilon`,
    `delta`), under zero-out of one example, of the training data or of private validation data.
    The ledger of the model, and of its files, is that of the whole selection. The guarantee is
    towards those who see neither the time that the call takes, nor what it shows or keeps before it
    returns, as these tell the number of runs.

    Args:
      build: Called with settings by their names, returns a new model, compiled with any optimizer
        that `make_private` takes. It must read no private data. It draws initial weights by fresh
        seeds in each run, whatever seed was set: runs are independent.
      data: The training data, as `make_private` takes it: `(x, y)`, or a dataset of examples.
      candidates: Values of each setting, `{"units": [16, 64], "learning_rate": [0.01, 0.02]}`, of
        which all combinations are candidates; or a list of such combinations, as dicts. Names that
        `build` takes are given to it; the others to `make_private`: `learning_rate`,
        `l2_norm_clip`, `optimizer`, `loss`, and arguments of the optimizer that change no cost.
        List only what you would accept alone: there may be a single run.
      epochs: Epochs of each run.
      target_epsilon: Epsilon of the whole selection, under zero-out.
      validation_data: `(x, y)`, arrays or structures of arrays; or a finite `tf.data.Dataset` of
        single `(x, y)`; or what `score` takes. Best no training examples: a model does well on
        those that it knows, and see `held_out`.
      score: "accuracy", for models with a loss of crossentropy; or a function of the model and
        `validation_data` that returns a number in [0, 1] for each validation example, which
        depends on the model and that example alone: `[examples]`. Higher is better. Numbers are
        clipped to [0, 1], and NaN counts as 0.
      public_validation: Whether the validation data are public. Scores then get no noise.
      held_out: Whether no example is in both `data` and `validation_data`. You promise that it is
        so: examples were split by their number or at random, not by what they are, nobody has one
        in each part, and `score` reads no training data. Each example then pays for training or for
        scores, not for both, and training gets less noise. Arrays that share memory are refused; a
        copy is not noticed. False: each pays for both. Not with `privacy_unit`, whose users may
        have examples in both.
      score_noise_multiplier: Standard deviation of the noise on the sum of the scores. None: 10, or
        a third of the root of the number of validation examples if that is more.
      repetitions: Distribution of the number of runs; not "poisson", which may make none. See
        `tfdp.accounting.Repetitions`, and docs/private_selection.md for what each costs.
      delta: The delta of the guarantee, in (0, 1). None: N^-1.1 for N training examples.
      prior: Other releases about the same data: a `PrivacyLedger`, or several.
      folder: Folder that keeps the runs that are done, so that a call that was interrupted goes on
        with the same arguments. What it keeps is secret until the call returns, and what was
        returned after that. None: an interrupted selection begins anew.
      verbose: 0 prints nothing; 1 prints what was decided, and at the end what was found; 2 also
        shows each run, and with it how many there are: for those who may see the data.
      **arguments: Other arguments of `make_private`, the same for all runs, such as `batch_size`.

    Returns:
      The model, its settings, its score, and what all of it cost.

    Raises:
      ValueError: An argument is out of its range, candidates would cost different amounts, the
        budget cannot be met, or `folder` is of a selection with other arguments.
      RuntimeError: Each run failed. What the first raised is the cause, and may tell of the data.

    Source: Liu and Talwar 2019; Papernot and Steinke 2022; Koskela, Redberg, Wang 2024.

    Example:
      >>> import keras, numpy as np, tfdp
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(2000, 4)).astype("float32")
      >>> y = (x[:, 0] > 0).astype("int32")
      >>> def build(units):
      ...     model = keras.Sequential(
      ...         [keras.Input([4]), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
      ...     model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
      ...     return model
      >>> tuned = tfdp.tune(
      ...     build, (x[:1500], y[:1500]), {"units": [4, 16], "learning_rate": [0.01, 0.03]},
      ...     epochs=2, target_epsilon=4.0, validation_data=(x[1500:], y[1500:]), verbose=0)
      >>> tuned.settings["units"] in (4, 16), tuned.ledger.epsilon(tuned.delta).epsilon <= 4.0
      (True, True)
    """
    validation.positive_integer("epochs", epochs)
    runs = Runs(build, data, candidates, epochs, arguments)
    if folder is not None:
        validation.path("folder", folder)
    validation.integer("verbose", verbose, 0, 2)
    public_validation = validation.boolean("public_validation", public_validation)
    if not isinstance(repetitions, Repetitions) or repetitions.distribution == "poisson":
        requirement = "a `tfdp.accounting.Repetitions`, of another distribution than 'poisson'"
        raise validation.error("repetitions", requirement, repetitions)
    if not (isinstance(score, str) and score == "accuracy") and not callable(score):
        raise validation.error("score", "'accuracy' or a function", score)
    if score == "accuracy" and not public_validation and "privacy_unit" in arguments:
        raise validation.error(
            "score",
            "a function that returns a number for each user, with `privacy_unit`: a user may have "
            "several validation examples",
            score,
        )
    if public_validation and score_noise_multiplier is not None:
        raise validation.error(
            "score_noise_multiplier", "None with `public_validation`", score_noise_multiplier
        )
    held_out = validation.boolean("held_out", held_out)
    if held_out:
        _check_held_out(data, validation_data, public_validation, "privacy_unit" in arguments)
    measure = Measure(score, validation_data, public_validation, score_noise_multiplier)
    first = runs.prepared(0, noise_multiplier=1.0, delta=delta)
    if score == "accuracy":
        measures.check_is_known(first.model)
    selection = RunSelection(repetitions, measure.noise, held_out)
    plan = Plan.found(runs, first, selection, target_epsilon, prior)
    _try(first, measure)
    if verbose:
        print(f"{plan.text()}\nScore: {measure}\n{_SECRET}")
    with tempfile.TemporaryDirectory() as temporary:
        kept = KeptRuns(
            Path(temporary if folder is None else folder),
            plan.values(),
            len(runs.candidates),
            repetitions,
        )
        finished = False
        try:
            error = _run_all(runs, plan, measure, kept, verbose > 1)
            if kept.best is None or kept.score == FAILED:
                raise RuntimeError("Each run of the selection failed.") from error
            best = kept.best
            with independent():
                model = runs.prepared(best, plan.noise_multiplier, plan.delta).model
                if not model.built:
                    call_on_zeros(model, first.batches.input_spec)
            kept.load_best(model)
            finished = True
        finally:
            kept.close(finished)
    spent = record_ledger.ledger_of_model(model)
    ledger = compose_ledgers([*as_ledgers(prior), *([] if spent is None else [spent])])
    settings = dict(runs.candidates[best])
    tuned = Tuned(model, settings, kept.score, ledger, plan.delta, plan.epsilon_of_all())
    if verbose:
        print(
            f"Chosen: {runs.shown(best)}; score {kept.score:.4f}. Epsilon of all of it: "
            f"{ledger.epsilon(plan.delta).epsilon:.4g} at delta = {plan.delta:g}."
        )
    return tuned


def _check_held_out(data: Any, validation_data: Any, is_public: bool, has_users: bool) -> None:
    """Raises a ValueError if `held_out` is known to be wrong, or has no effect."""
    if is_public:
        raise validation.error("held_out", "False with `public_validation`, which is free", True)
    if has_users:
        requirement = "False with `privacy_unit`: a user may have examples in both parts"
        raise validation.error("held_out", requirement, True)
    trained, scored = map(_arrays, (data, validation_data))
    if data is validation_data or any(_share(a, b) for a in trained for b in scored):
        requirement = "False where `validation_data` share memory with `data`"
        raise validation.error("held_out", requirement, True)


def _arrays(data: Any) -> list[Any]:
    """Returns the arrays and tensors in data, without single texts and numbers in lists."""
    return [leaf for leaf in tf.nest.flatten(data) if hasattr(leaf, "shape")]


def _share(one: Any, other: Any) -> bool:
    """Returns whether two arrays share memory, or are one object."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    return one is other


def _try(first: PrivateTraining, measure: Measure) -> None:
    """Takes some steps and scores the model, so that what cannot work fails here and not in a run.

    Nothing of it is used. In a run, an error is an outcome, which is not shown.
    """
    spec = first.batches.element_spec
    with validation.using("data", spec, "examples that the model can be trained on"):
        steps = min(3, int(first.batches.cardinality()))  # A batch of two rows may fit by chance.
        first.model.fit(first.batches, epochs=1, steps_per_epoch=steps, verbose=0)
    measure.check(first.model)


def _run_all(
    runs: Runs, plan: Plan, measure: Measure, kept: KeptRuns, show: bool
) -> Exception | None:
    """Makes the runs that are left, and returns the first error of one."""
    first = None
    while (candidate := kept.next_candidate()) is not None:
        if show:
            print(f"Run {kept.done + 1} of {len(kept.drawn)}: {runs.shown(candidate)}")
        with independent():
            first = _run(runs, plan, measure, kept, candidate, show) or first
    return first


def _run(
    runs: Runs, plan: Plan, measure: Measure, kept: KeptRuns, candidate: int, show: bool
) -> Exception | None:
    """Makes a run, and returns its error, if it fails."""
    model, batches, _ = runs.prepared(candidate, plan.noise_multiplier, plan.delta)
    plan.check(model)
    model.optimizer.count_as_run_of(plan.selection)
    try:
        model.fit(batches, epochs=runs.epochs, verbose=int(show))
        values = measure.values(model)
    except Exception as error:  # A run that fails is an outcome, too.
        kept.finish(model, FAILED)
        return error
    if model.optimizer.own_steps() != plan.steps:
        raise RuntimeError(
            f"A run must take the {plan.steps} steps that the selection accounts for. It took "
            f"{model.optimizer.own_steps()}."
        )
    kept.finish(model, measure.noisy(values))
    return None
