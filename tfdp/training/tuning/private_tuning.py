"""Private training with settings that are chosen privately, in one call."""

import dataclasses
import inspect
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import MOST_RELEASES
from tfdp.accounting.found_ledger import is_model
from tfdp.accounting.ledger import Ledgers, PrivacyLedger, as_ledgers, compose_ledgers
from tfdp.accounting.planning import steps_of
from tfdp.accounting.relation import RELATION
from tfdp.accounting.repetitions import Repetitions
from tfdp.accounting.run_selection import calibrate_private_selection
from tfdp.accounting.sampling import PoissonSampling
from tfdp.accounting.statement import privacy_statement
from tfdp.base import front_ends, validation
from tfdp.step.record import record_ledger
from tfdp.step.record.tuned_rows import RunSelection
from tfdp.training.private_training import PrivateTraining
from tfdp.training.tuning import measure as measures
from tfdp.training.tuning.independence import independent
from tfdp.training.tuning.kept import FAILED, KeptRuns
from tfdp.training.tuning.measure import Measure

_DEFAULT_RUNS = Repetitions("geometric", mean=5)
# Arguments of `make_private` that may differ between runs: no run costs more for them.
_TUNED = ("learning_rate", "l2_norm_clip", "loss", "optimizer")
# Those that `tune` gives itself, or that would make runs cost what the selection does not count.
_OWN = ("model", "data", "noise_multiplier", "noise_schedule", "optimizer_arguments")
_SECRET = (
    "How many runs there are is secret, and with it how long this takes, and what verbose=2 shows."
)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a private selection releases.

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
        those that it knows.
      score: "accuracy", for models with a loss of crossentropy; or a function of the model and
        `validation_data` that returns a number in [0, 1] for each validation example, which
        depends on the model and that example alone: `[examples]`. Higher is better. Numbers are
        clipped to [0, 1], and NaN counts as 0.
      public_validation: Whether the validation data are public. Scores then get no noise.
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
    runs = _Runs(build, data, _listed(candidates), validation.positive_integer("epochs", epochs))
    runs.take(arguments)
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
    measure = Measure(score, validation_data, public_validation, score_noise_multiplier)
    first = runs.prepared(0, noise_multiplier=1.0, delta=delta)
    if score == "accuracy":
        measures.check_is_known(first.model)
    selection = RunSelection(repetitions, measure.noise)
    plan = _Plan.found(runs, first, selection, target_epsilon, prior)
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
            settings = runs.candidates[kept.best]
            with independent():
                model = runs.prepared(kept.best, plan.noise_multiplier, plan.delta).model
                _build(model, first.batches.input_spec)
            kept.load_best(model)
            finished = True
        finally:
            kept.close(finished)
    spent = record_ledger.ledger_of_model(model)
    ledger = compose_ledgers([*as_ledgers(prior), *([] if spent is None else [spent])])
    tuned = Tuned(model, dict(settings), kept.score, ledger, plan.delta, plan.epsilon_of_all())
    if verbose:
        print(
            f"Chosen: {_shown(settings)}; score {kept.score:.4f}. Epsilon of all of it: "
            f"{ledger.epsilon(plan.delta).epsilon:.4g} at delta = {plan.delta:g}."
        )
    return tuned


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
    runs: "_Runs", plan: "_Plan", measure: Measure, kept: KeptRuns, show: bool
) -> Exception | None:
    """Makes the runs that are left, and returns the first error of one."""
    first = None
    while (candidate := kept.next_candidate()) is not None:
        if show:
            settings = _shown(runs.candidates[candidate])
            print(f"Run {kept.done + 1} of {len(kept.drawn)}: {settings}")
        with independent():
            first = _run(runs, plan, measure, kept, candidate, show) or first
    return first


def _run(
    runs: "_Runs", plan: "_Plan", measure: Measure, kept: KeptRuns, candidate: int, show: bool
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


class _Runs:
    """The candidates, and what a run of each is made of.

    Args:
      build: See `tune`.
      data: See `tune`.
      candidates: The settings of each candidate.
      epochs: See `tune`.
    """

    def __init__(
        self, build: Callable[..., Any], data: Any, candidates: list[dict[str, Any]], epochs: int
    ):
        try:
            parameters = inspect.signature(build).parameters.values()
        except (TypeError, ValueError):
            requirement = "a function that returns a compiled model, whose arguments can be known"
            raise validation.error("build", requirement, build) from None
        self._build, self._data, self.candidates, self.epochs = build, data, candidates, epochs
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._takes = {one.name for one in parameters}
        self._arguments: dict[str, Any] = {}

    def take(self, arguments: dict[str, Any]) -> None:
        """Takes over the arguments of `make_private` that all runs share.

        Raises:
          TypeError: One of them is given by `tune` itself.
          ValueError: A setting of a candidate is none that may differ between runs.
        """
        if own := [name for name in arguments if name in _OWN]:
            raise TypeError(f"tune() takes no argument `{own[0]}`, which it finds itself.")
        self._arguments = arguments
        known = inspect.signature(front_ends.attribute("make_private")).parameters
        for name in dict.fromkeys(name for one in self.candidates for name in one):
            if name in self._takes or (self._takes_all and name not in known):
                continue
            if name in arguments:
                raise validation.error(
                    "candidates", f"without `{name}`, which is given for all runs", name
                )
            if name in known and name not in _TUNED:
                raise validation.error(
                    "candidates",
                    f"of arguments of `build`, of {', '.join(_TUNED)}, and of arguments of the "
                    "optimizer: all runs must cost the same",
                    name,
                )

    def prepared(
        self, candidate: int, noise_multiplier: float, delta: float | None
    ) -> PrivateTraining:
        """Returns a new model that is ready for a run of a candidate."""
        settings = self.candidates[candidate]
        others = {name: value for name, value in settings.items() if not self._is_of_build(name)}
        return front_ends.attribute("make_private")(
            self._model(candidate),
            self._data,
            epochs=self.epochs,
            noise_multiplier=noise_multiplier,
            delta=delta,
            verbose=False,
            **{**self._arguments, **others},
        )

    def _model(self, candidate: int) -> Any:
        settings = self.candidates[candidate]
        model = self._build(**{k: v for k, v in settings.items() if self._is_of_build(k)})
        if not is_model(model):
            raise validation.error("build", "a function that returns a model of Keras", model)
        return model

    def _is_of_build(self, name: str) -> bool:
        if name in self._takes or not self._takes_all:
            return name in self._takes
        return name not in inspect.signature(front_ends.attribute("make_private")).parameters


class _Plan(NamedTuple):
    """What all runs of a selection are alike in.

    Attributes:
      selection: The selection.
      target_epsilon: Epsilon that it may cost.
      delta: The delta of the guarantee.
      noise_multiplier: Noise of the steps.
      steps: Steps of a run.
      sampling: Sampling of their batches.
      prior: What was released before.
      cost: What the model that `build` returns has cost.
      candidates: Number of candidates.
    """

    selection: RunSelection
    target_epsilon: float
    delta: float
    noise_multiplier: float
    steps: int
    sampling: PoissonSampling
    prior: list[PrivacyLedger]
    cost: PrivacyLedger | None
    candidates: int

    @classmethod
    def found(
        cls,
        runs: _Runs,
        first: PrivateTraining,
        selection: RunSelection,
        target_epsilon: float,
        prior: Ledgers | None,
    ) -> "_Plan":
        """Returns the plan of runs like the first, with the least noise that meets the budget."""
        sampling, delta = first.batches.sampling, first.budget.delta
        if sampling.cycle_length > 1:
            raise validation.error("sampling", "'poisson' in a selection", "epochs")
        steps = steps_of(sampling.dataset_size, sampling.expected_batch_size, runs.epochs)
        if steps > MOST_RELEASES:
            requirement = f"so few that there are at most {MOST_RELEASES} steps, not {steps}"
            raise validation.error("epochs", requirement, runs.epochs)
        cost = record_ledger.ledger_of_model(first.model)
        spent = [*as_ledgers(prior)]
        noise = calibrate_private_selection(
            selection.repetitions,
            target_epsilon=target_epsilon,
            delta=delta,
            steps=steps,
            dataset_size=sampling.dataset_size,
            expected_batch_size=sampling.expected_batch_size,
            truncation_probability=sampling.truncation_probability,
            score=selection.score,
            prior=[*spent, *([] if cost is None else [cost])],
        )
        size = len(runs.candidates)
        return cls(selection, target_epsilon, delta, noise, steps, sampling, spent, cost, size)

    def check(self, model: Any) -> None:
        """Checks that a run of a model that was not trained yet would cost what is planned.

        Raises:
          ValueError: It would cost something else.
        """
        optimizer, cost = model.optimizer, record_ledger.ledger_of_model(model)
        if optimizer.noise_multiplier != self.noise_multiplier or (
            _price(optimizer.sampling) != _price(self.sampling)
        ):
            raise validation.error(
                "candidates",
                "of one cost: the first is trained with "
                f"{self.sampling} and the noise multiplier {self.noise_multiplier:g}",
                f"one with {optimizer.sampling} and {optimizer.noise_multiplier}",
            )
        if (cost and cost.releases) != (self.cost and self.cost.releases):
            raise validation.error(
                "build",
                "a function that returns a new model each time, with variables of its own",
                self.candidates,
            )

    def values(self) -> dict[str, Any]:
        """Returns what tells this selection from others, as plain values."""
        runs = self.selection.repetitions
        return {
            "target_epsilon": float(self.target_epsilon),
            "delta": float(self.delta),
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "dataset_size": self.sampling.dataset_size,
            "batch_size": self.sampling.expected_batch_size,
            "repetitions": [runs.distribution, float(runs.mean), float(runs.eta)],
            "score_noise_multiplier": self.selection.score_noise_multiplier,
            "candidates": self.candidates,
        }

    def epsilon_of_all(self) -> float:
        """Returns the epsilon of a run of each candidate, all of them published."""
        ledger = compose_ledgers([*self.prior, *([] if self.cost is None else [self.cost])])
        step, score = self._step(), self.selection.score
        count = self.steps * self.candidates
        ledger.record(step.event, count, step.truncation_probability)
        if score is not None:
            ledger.record(score, self.candidates)
        return ledger.epsilon(self.delta).epsilon

    def text(self) -> str:
        """Returns what was decided, in a line for each."""
        runs, sampling = self.selection.repetitions, self.sampling
        one = PrivacyLedger()
        one.record(self._step().event, self.steps, self._step().truncation_probability)
        return (
            f"Privacy: epsilon <= {self.target_epsilon:g} at delta = {self.delta:g} for the whole "
            f"selection, for {RELATION} of one of {sampling.dataset_size} {sampling.unit}s. To "
            f"publish a run of each of the {self.candidates} candidates would cost "
            f"{self.epsilon_of_all():.4g}.\n"
            f"Runs: {runs.mean:g} expected ({runs.distribution}), each with settings drawn at "
            f"random; {self.steps} steps with batches of {sampling.expected_batch_size}, noise "
            f"multiplier {self.noise_multiplier:.4g}; one alone costs "
            f"{one.epsilon(self.delta).epsilon:.4g}."
        )

    def _step(self) -> Release:
        q, noise = self.sampling.sampling_probability, self.noise_multiplier
        return Release(
            event_codec.sampled_gaussian(q, noise), 1, self.sampling.truncation_probability
        )


def _build(model: Any, spec: Any) -> None:
    """Has a model make its weights, if it has not.

    Args:
      model: The model.
      spec: Types and shapes of its inputs.
    """
    if not model.built:
        model(tf.nest.map_structure(lambda one: tf.zeros([1, *one.shape[1:]], one.dtype), spec))


def _price(sampling: PoissonSampling) -> tuple:
    """Returns what the cost of a step depends on."""
    probability = sampling.truncation_probability
    return sampling.dataset_size, sampling.expected_batch_size, probability, sampling.unit


def _listed(candidates: Any) -> list[dict[str, Any]]:
    """Returns the candidates, each as a dict of its settings."""
    if isinstance(candidates, Mapping) and candidates:
        values = [
            list(one) if isinstance(one, Sequence) and not isinstance(one, str) else []
            for one in candidates.values()
        ]
        found = [dict(zip(candidates, one, strict=True)) for one in itertools.product(*values)]
    elif isinstance(candidates, Sequence) and not isinstance(candidates, str):
        found = [dict(one) if isinstance(one, Mapping) else {} for one in candidates]
    else:
        found = []
    names = [name for one in found for name in one]
    if not found or not all(found) or not all(isinstance(name, str) for name in names):
        raise validation.error(
            "candidates",
            "a dict of names of settings and non-empty lists of their values, or a list of dicts "
            "of names and values",
            candidates,
        )
    return found


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={validation.shown(value)}" for name, value in settings.items())
