"""The price of choosing the best of several private runs."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import dp_accounting

from tfdp.accounting import budget, calibration, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers, PrivacyLedger, as_ledgers, compose_ledgers
from tfdp.accounting.parallel_composition import ParallelDpEvent
from tfdp.accounting.repetitions import Repetitions
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import validation


def private_selection(
    run: PrivacyLedger | dp_accounting.DpEvent,
    repetitions: Repetitions,
    *,
    held_out_score: dp_accounting.DpEvent | None = None,
) -> PrivacyLedger:
    """Returns the ledger of a selection: the best of a random number of private runs.

    Guarantees: if the number of runs is drawn by `repetitions.draw()`, `epsilon(delta)` of the
    ledger bounds what the output of the best run tells, under zero-out, provided that:

    - Runs are independent, and each satisfies what `run` states. Hyperparameters that differ
      between runs are drawn anew for each run, from a fixed distribution.
    - Runs are ranked by their outputs alone. A score that reads private data is part of the
      output: it is computed with noise, and its event is in `run`, or `held_out_score`. A score on
      public data is free.
    - No example (or user) that a `held_out_score` reads has to do with anything in `run`, and which
      examples it reads does not depend on the data. It is computed from what the run releases, and
      from these examples.
    - Of equal scores any rule decides that does not read the data, such as the first.
    - A run that fails or diverges counts, with the lowest score. It is not repeated, and is
      returned if no other run is better.
    - Nothing else is released: not the other runs, their number, the position of the best, or the
      time or memory that they took. With "poisson" there may be no run, and then no output.

    The cost does not depend on the number of candidate settings. Whether the best one is among the
    runs is left to chance, because settings are drawn, not tried in turn.

    Args:
      run: All releases of one run, its score included. Of runs that cost differently, one that has
        no smaller epsilon at any delta.
      repetitions: Distribution of the number of runs.
      held_out_score: Release of a run's score on private examples that are in nothing else of the
        run. It is not in `run`: by parallel composition, the selection costs the larger price of
        that of `run` and that of the scores, and not their sum.

    Raises:
      ValueError: `run` is neither a PrivacyLedger nor a DpEvent, or has released nothing; or
        `held_out_score` is no DpEvent.

    Source: Liu and Talwar 2019, "Private Selection from Private Candidates"; Papernot and Steinke
    2022; Koskela, Redberg, Wang 2024.

    Example:
      >>> from tfdp.accounting import PrivacyLedger
      >>> run = PrivacyLedger()
      >>> run.record(event_codec.sampled_gaussian(0.01, 1.0), count=1000)
      >>> tuned = private_selection(run, Repetitions("geometric", mean=10))
      >>> round(run.epsilon(1e-5).epsilon, 2), round(tuned.epsilon(1e-5).epsilon, 2)
      (1.83, 2.87)
    """
    if isinstance(run, dp_accounting.DpEvent):
        event, run = run, PrivacyLedger()
        run.record(event)
    if not (isinstance(run, PrivacyLedger) and run.steps):
        raise validation.error("run", "a PrivacyLedger with releases, or a DpEvent", run)
    truncation = _truncation(run)
    ledger = PrivacyLedger(run.notes, run.selective_release, run.unit)
    release = release_of(run.event, repetitions, truncation, _held_out(held_out_score))
    ledger.record(release.event, 1, release.truncation_probability)
    return compose_ledgers([ledger], dataset_sizes=run.dataset_sizes)


def calibrate_private_selection(
    repetitions: Repetitions,
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float | None = None,
    score: PrivacyLedger | dp_accounting.DpEvent | None = None,
    held_out_score: dp_accounting.DpEvent | None = None,
    prior: Ledgers | None = None,
    sampling: PoissonSampling | None = None,
) -> float:
    """Returns the smallest noise multiplier of each run with which a selection meets a budget.

    Guarantees: `private_selection` of runs with these steps, `score` and `held_out_score` (after
    the releases of `prior`) has an epsilon of at most `target_epsilon`. The result is within 0.1%
    of the smallest such noise multiplier, but never below 0.01.

    Args:
      repetitions: Distribution of the number of runs.
      target_epsilon: Epsilon that the selection may cost, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps of each run.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this, or both of the next two, or `sampling`.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: See `calibrate_noise_multiplier`.
      score: Release of the private score of each run, on any examples; None if it reads no private
        data.
      held_out_score: Release of a score of each run on private examples that are in nothing else of
        the run: see `private_selection`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.
      sampling: `batches.sampling`, in place of the four arguments on sampling: also of batches with
        `cycle_length`, as of epochs by random allocation. The steps of a run then begin a cycle.

    Raises:
      ValueError: An argument is out of its range, or nothing of the budget is left.

    Example:
      >>> sigma = calibrate_private_selection(
      ...     Repetitions("geometric", mean=10),
      ...     target_epsilon=2.0, delta=1e-5, steps=1000, sampling_probability=0.01)
      >>> round(sigma, 2)
      1.23
    """
    given = sampling_probability, dataset_size, expected_batch_size, truncation_probability
    steps_with = calibration.release_of_steps(*given, sampling)
    size = dataset_size if sampling is None else sampling.dataset_size
    left = Budget.check(target_epsilon, delta, prior, dataset_size=size)
    steps = validation.integer("steps", steps, 1, budget.MOST_RELEASES)
    scores, held_out = _as_events(score), _held_out(held_out_score)
    cut_off = _truncation(score) if isinstance(score, PrivacyLedger) else 0.0

    def release(noise: float) -> Release:
        one = steps_with(noise, steps)
        training = dp_accounting.SelfComposedDpEvent(one.event, one.count)
        run = dp_accounting.ComposedDpEvent((training, *scores))
        truncation = cut_off + one.count * one.truncation_probability
        return release_of(run, repetitions, truncation, held_out)

    both = {"score": dp_accounting.ComposedDpEvent(scores) if scores else None}
    return least_noise(left, release, repetitions, {**both, "held_out_score": held_out})


def least_noise(
    left: Budget,
    release: Callable[[float], Release],
    repetitions: Repetitions,
    scores: Mapping[str, dp_accounting.DpEvent | None],
) -> float:
    """Returns the least noise multiplier of each run with which a selection meets a budget.

    Args:
      left: The budget.
      release: Returns the release of the selection with a noise multiplier.
      repetitions: Distribution of the number of runs.
      scores: The scores of a run, by the user's names.

    Raises:
      ValueError: A score costs more than the budget, or nothing of it is left.
    """
    for name, score in scores.items():
        cost = 0.0 if score is None else left.epsilon(release_of(score, repetitions, 0.0))
        if score is not None and cost >= left.target:
            requirement = f"cheaper than `target_epsilon`: the best one alone costs {cost:.4g}"
            raise validation.error(name, requirement, score)
    return left.least_noise(lambda noise: [release(noise)])


def release_of(
    run: dp_accounting.DpEvent,
    repetitions: Any,
    truncation_probability: float,
    held_out_score: dp_accounting.DpEvent | None = None,
) -> Release:
    """Returns the release of a selection.

    Args:
      run: Event of one run.
      repetitions: Distribution of the number of runs.
      truncation_probability: Probability, at most, that one run differs from its event.
      held_out_score: Event of a run for the examples that its score alone reads; None if there are
        none.
    """
    if not isinstance(repetitions, Repetitions):
        raise validation.error("repetitions", "a tfdp.accounting.Repetitions", repetitions)
    # By the union bound, over the number of runs, which does not depend on the data.
    some = min(repetitions.mean * truncation_probability, 1 - 1e-9)
    event: dp_accounting.DpEvent = repetitions.event(run)
    if held_out_score is not None:
        event = ParallelDpEvent([event, repetitions.event(held_out_score)])
    return Release(event_codec.freeze(event), 1, some)


def _as_events(score: Any) -> tuple[dp_accounting.DpEvent, ...]:
    if isinstance(score, dp_accounting.DpEvent):
        return (score,)
    if score is None or isinstance(score, PrivacyLedger):
        return tuple(ledger.event for ledger in as_ledgers(score))
    raise validation.error("score", "a PrivacyLedger, a DpEvent, or None", score)


def _truncation(ledger: PrivacyLedger) -> float:
    """Returns the probability, at most, that what was released differs from its events."""
    return math.fsum(r.count * r.truncation_probability for r in ledger.releases)


def _held_out(score: Any) -> dp_accounting.DpEvent | None:
    if score is None or isinstance(score, dp_accounting.DpEvent):
        return score
    raise validation.error("held_out_score", "a DpEvent or None", score)
