"""Plan of a private selection: its noise, what it costs, and which runs may be part of it."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tfdp.accounting import calibration, run_selection
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers, PrivacyLedger, as_ledgers, compose_ledgers
from tfdp.accounting.planning import steps_of
from tfdp.accounting.relation import RELATION
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import validation
from tfdp.step.record import record_ledger
from tfdp.step.record.tuned_rows import RunSelection
from tfdp.training.private_training import PrivateTraining
from tfdp.training.tuning.candidates import Runs


class Plan(NamedTuple):
    """Plan of a private selection: what all of its runs have in common.

    Attributes:
      selection: The selection.
      target_epsilon: Epsilon that it may cost.
      delta: The delta of the guarantee.
      noise_multiplier: Noise of the steps.
      steps: Steps of a run; epochs of it, where each is one release (by random allocation).
      sampling: Sampling of their batches.
      prior: What was released before.
      cost: What the model that `build` returns has cost.
      candidates: The settings of each candidate.
    """

    selection: RunSelection
    target_epsilon: float
    delta: float
    noise_multiplier: float
    steps: int
    sampling: PoissonSampling
    prior: list[PrivacyLedger]
    cost: PrivacyLedger | None
    candidates: list[dict[str, Any]]

    @classmethod
    def found(
        cls,
        runs: Runs,
        first: PrivateTraining,
        selection: RunSelection,
        target_epsilon: float,
        prior: Ledgers | None,
    ) -> "Plan":
        """Returns the plan of runs like the first, with the least noise that meets the budget."""
        sampling, delta = first.batches.sampling, first.budget.delta
        steps = steps_of(sampling.dataset_size, sampling.expected_batch_size, runs.epochs)
        if sampling.redraws_sets:
            steps = runs.epochs
        cost = record_ledger.ledger_of_model(first.model)
        spent = [*as_ledgers(prior)]
        before = [*spent, *([] if cost is None else [cost])]
        left = Budget.check(target_epsilon, delta, before, dataset_size=sampling.dataset_size)
        noise = run_selection.least_noise(
            left,
            lambda noise: selection.release(_step(sampling, noise), steps),
            selection.repetitions,
            {"score": selection.score},
        )
        return cls(
            selection,
            target_epsilon,
            delta,
            noise,
            steps,
            sampling,
            spent,
            cost,
            runs.candidates,
        )

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
                "one with variables that another run has trained",
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
            "cycle_length": self.sampling.cycle_length,
            "repetitions": [runs.distribution, float(runs.mean), float(runs.eta)],
            "score_noise_multiplier": self.selection.score_noise_multiplier,
            "held_out": self.selection.held_out,
            "candidates": _plain(self.candidates),
        }

    def epsilon_of_all(self) -> float:
        """Returns the epsilon of a run of each candidate, all of them published."""
        step, score = self._step(), self.selection.score
        steps = dataclasses.replace(step, count=self.steps * len(self.candidates))
        scores = [] if score is None else [Release(score, len(self.candidates))]
        # Of held-out examples the steps tell nothing, and of the others the scores do not.
        parts = [[steps], scores] if self.selection.held_out else [[steps, *scores]]
        return max(map(self._epsilon_after, parts))

    def _epsilon_after(self, releases: list[Release]) -> float:
        """Returns the epsilon of what was released before, and of some releases."""
        ledger = compose_ledgers([*self.prior, *([] if self.cost is None else [self.cost])])
        for release in releases:
            ledger.record(**vars(release))
        return ledger.epsilon(self.delta).epsilon

    def text(self) -> str:
        """Returns what was decided, in a line for each."""
        runs, sampling = self.selection.repetitions, self.sampling
        steps = f"{self.steps} steps"
        if sampling.redraws_sets:
            steps = f"{self.steps} epochs of {sampling.cycle_length} steps"
        one = PrivacyLedger()
        one.record(**{**vars(self._step()), "count": self.steps})
        return (
            f"Privacy: epsilon <= {self.target_epsilon:g} at delta = {self.delta:g} for the whole "
            f"selection, for {RELATION} of one of {sampling.dataset_size} {sampling.unit}s. To "
            f"publish a run of each of the {len(self.candidates)} candidates would cost "
            f"{self.epsilon_of_all():.4g}.\n"
            f"Runs: {runs.mean:g} expected ({runs.distribution}), each with settings drawn at "
            f"random; {steps} with batches of {sampling.expected_batch_size}, noise "
            f"multiplier {self.noise_multiplier:.4g}; one alone costs "
            f"{one.epsilon(self.delta).epsilon:.4g}."
        )

    def _step(self) -> Release:
        return _step(self.sampling, self.noise_multiplier)


def _step(sampling: PoissonSampling, noise: float) -> Release:
    """Returns what one step (or one epoch) of a run releases."""
    return calibration.cycles_of(sampling, noise, steps=1)


def _price(sampling: PoissonSampling) -> tuple:
    """Returns what the cost of a step depends on."""
    probability = sampling.truncation_probability
    sizes = sampling.dataset_size, sampling.expected_batch_size, sampling.cycle_length
    return *sizes, sampling.redraws_sets, probability, sampling.unit


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; of an object its class, and its config if it has one."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    config = value.get_config() if hasattr(type(value), "get_config") else {}
    return [getattr(value, "__qualname__", type(value).__qualname__), _plain(config)]
