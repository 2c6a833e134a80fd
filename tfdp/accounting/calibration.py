"""The least noise, or the most steps, for a privacy budget."""

import functools
from collections.abc import Callable, Sequence

from tfdp import schedules
from tfdp.accounting import budget, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers
from tfdp.accounting.sampling import UNPADDED_TRUNCATION_PROBABILITY, PoissonSampling
from tfdp.base import validation


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float | None = None,
    releases_signs: bool = False,
    prior: Ledgers | None = None,
    sampling: PoissonSampling | None = None,
) -> float:
    """Returns the smallest noise multiplier with which training stays within a privacy budget.

    Guarantees: a ledger with these steps (after the releases of `prior`) reports an epsilon of
    at most `target_epsilon`. The result is within 0.1% of the smallest such noise multiplier, but
    never below 0.01. It has six significant digits, so that it is the same on every machine, and a
    training may resume on another one.

    Args:
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this, or both of the next two, or `sampling`.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: An upper bound on the probability that a batch is cut off. None: that
        of `tfdp.data.poisson_batches` without padding, 1e-80; with padding, give `sampling`.
      releases_signs: Whether only the signs of the noisy sums are released, which cost less:
        `optimizer.releases_signs`, as of `tfdp.DPSignAdam`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.
      sampling: `batches.sampling`, in place of the four arguments on sampling: also of batches with
        `cycle_length`. The steps then begin a cycle.

    Raises:
      ValueError: An argument is out of its range, or the budget is spent.

    Example:
      >>> sigma = calibrate_noise_multiplier(
      ...     target_epsilon=2.0, delta=1e-5, steps=1000, sampling_probability=0.01)
      >>> round(sigma, 2)
      0.96
    """
    validation.boolean("releases_signs", releases_signs)
    given = sampling_probability, dataset_size, expected_batch_size, truncation_probability
    steps_with = release_of_steps(*given, sampling)
    size = dataset_size if sampling is None else sampling.dataset_size
    left = Budget.check(target_epsilon, delta, prior, dataset_size=size)
    steps = validation.positive_integer("steps", steps)
    return left.least_noise(lambda noise: [steps_with(noise, steps, releases_signs)])


def release_of_steps(
    sampling_probability: float | None,
    dataset_size: int | None,
    expected_batch_size: float | None,
    truncation_probability: float | None,
    sampling: PoissonSampling | None,
) -> Callable[..., Release]:
    """Returns a function of noise and number of steps that returns what the steps release.

    Args:
      sampling_probability: See `calibrate_noise_multiplier`, as for the others.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch.
      truncation_probability: Probability, at most, that a batch is cut off.
      sampling: In place of the others.

    Raises:
      ValueError: An argument is out of its range.
    """
    if sampling is not None:
        given = sampling_probability, dataset_size, expected_batch_size, truncation_probability
        if any(value is not None for value in given) or not isinstance(sampling, PoissonSampling):
            raise validation.error(
                "sampling", "a PoissonSampling without other arguments on sampling", sampling
            )
        return functools.partial(cycles_of, sampling)
    q = budget.sampling_probability(sampling_probability, dataset_size, expected_batch_size)
    if truncation_probability is None:
        truncation_probability = UNPADDED_TRUNCATION_PROBABILITY
    tau = validation.small_probability("truncation_probability", truncation_probability)

    def release(noise: float, steps: int, releases_signs: bool = False) -> Release:
        return Release(event_codec.sampled_gaussian(q, noise, releases_signs), steps, tau)

    return release


def calibrate_noise_schedule(
    schedule: schedules.NoiseSchedule,
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = UNPADDED_TRUNCATION_PROBABILITY,
    releases_signs: bool = False,
    prior: Ledgers | None = None,
) -> schedules.NoiseSchedule:
    """Scales a schedule of the noise multiplier so that training stays within a privacy budget.

    Guarantees: a ledger with the first `steps` steps of the result (after the releases of `prior`)
    reports an epsilon of at most `target_epsilon`. The factor is within 0.1% of the smallest, but
    no step has a noise multiplier below 0.01.

    Args:
      schedule: A schedule of `tfdp.schedules`, of which the proportions count.
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken, from the first of the schedule.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this or both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: See `calibrate_noise_multiplier`.
      releases_signs: Whether only the signs of the noisy sums are released, which cost less:
        `optimizer.releases_signs`, as of `tfdp.DPSignAdam`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.

    Raises:
      ValueError: An argument is out of its range, or the budget is spent.

    Example:
      >>> from tfdp.schedules import PiecewiseConstantNoise
      >>> scaled = calibrate_noise_schedule(
      ...     PiecewiseConstantNoise([500], [2.0, 1.0]),
      ...     target_epsilon=2.0, delta=1e-5, steps=1000, sampling_probability=0.01)
      >>> round(scaled(0), 2), round(scaled(500), 2)
      (1.73, 0.86)
    """
    if not isinstance(schedules.get(schedule), schedules.NoiseSchedule):
        raise validation.error("schedule", "a schedule of `tfdp.schedules`", schedule)
    left = Budget.check(target_epsilon, delta, prior, dataset_size=dataset_size)
    q = budget.sampling_probability(sampling_probability, dataset_size, expected_batch_size)
    tau = validation.small_probability("truncation_probability", truncation_probability)
    steps = validation.positive_integer("steps", steps)
    validation.boolean("releases_signs", releases_signs)
    least = min(noise for noise, _ in schedule.stages().groups(0, steps))
    noise = left.least_noise(
        lambda x: _scheduled_releases(
            schedule.scaled(x / least).stages(), steps, q, tau, releases_signs
        )
    )
    return schedule.scaled(noise / least)


def calibrate_steps(
    *,
    target_epsilon: float,
    delta: float,
    noise_multiplier: schedules.NoiseMultiplier,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = UNPADDED_TRUNCATION_PROBABILITY,
    releases_signs: bool = False,
    prior: Ledgers | None = None,
) -> int:
    """Returns the most steps that a privacy budget allows.

    Guarantees: a ledger with these steps (after the releases of `prior`) reports an epsilon of at
    most `target_epsilon`. With one more step, it reports a larger one; above 10,000 steps, with
    0.02% more.

    Args:
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      noise_multiplier: Standard deviation of the noise over the sensitivity of the sum, or a
        schedule of `tfdp.schedules`.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this or both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: An upper bound on the probability that a batch is cut off. The default
        holds for `tfdp.data.poisson_batches` without padding; with padding, give
        `batches.sampling.truncation_probability`.
      releases_signs: Whether only the signs of the noisy sums are released, which cost less:
        `optimizer.releases_signs`, as of `tfdp.DPSignAdam`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.

    Returns:
      The number of steps, from 0 to 100 million.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> calibrate_steps(
      ...     target_epsilon=2.0, delta=1e-5, noise_multiplier=1.0, sampling_probability=0.01)
      1202
    """
    left = Budget.check(target_epsilon, delta, prior, dataset_size=dataset_size)
    q = budget.sampling_probability(sampling_probability, dataset_size, expected_batch_size)
    tau = validation.small_probability("truncation_probability", truncation_probability)
    validation.boolean("releases_signs", releases_signs)
    stages = schedules.stages_of(schedules.get(noise_multiplier))
    return left.most(lambda steps: _scheduled_releases(stages, steps, q, tau, releases_signs))


def most_steps(
    releases: Callable[[int], Sequence[Release]],
    prior: Ledgers | None,
    target_epsilon: float,
    delta: float,
) -> int:
    """Returns the most steps that a privacy budget allows after the releases of `prior`.

    Guarantees: as `calibrate_steps`, for any events that an accountant supports.

    Args:
      releases: The releases of a number of steps, at least 1; they cost more for more steps.
      prior: Earlier releases, and the observable part of selective ones.
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1).

    Returns:
      The number of further steps, from 0 to 100 million.

    Raises:
      ValueError: An argument is out of its range.
      dp_accounting.UnsupportedEventError: No accountant supports all events.

    Example:
      >>> step = event_codec.sampled_gaussian(0.01, 1.0)
      >>> most_steps(lambda n: [Release(step, n)], prior=None, target_epsilon=2.0, delta=1e-5)
      1202
    """
    return Budget.check(target_epsilon, delta, prior).most(releases)


def cycles_of(
    sampling: PoissonSampling, noise: float, steps: int, releases_signs: bool = False
) -> Release:
    """Returns the releases of the cycles that steps from the first of one begin.

    Without cycles, each step is one.
    """
    q, cycle = sampling.sampling_probability, sampling.cycle_length
    if sampling.redraws_sets:
        event = event_codec.allocated_gaussian(q, noise, cycle)
    else:
        event = event_codec.sampled_gaussian(q, noise, releases_signs)
    tau = cycle * sampling.truncation_probability
    return Release(event, -(-steps // cycle), tau, cycle)


def _scheduled_releases(
    stages: schedules.Stages,
    steps: int,
    q: float,
    truncation_probability: float,
    releases_signs: bool,
) -> list[Release]:
    """Returns the releases of the first steps of a schedule, one for each stage."""
    return [
        Release(
            event_codec.sampled_gaussian(q, noise, releases_signs), count, truncation_probability
        )
        for noise, count in stages.groups(0, steps)
    ]
