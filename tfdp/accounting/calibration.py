"""The least noise, or the most steps, for a privacy budget."""

import dp_accounting

from tfdp import _validation
from tfdp.accounting import budget, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers
from tfdp.accounting.sampling import UNPADDED_TRUNCATION_PROBABILITY


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = UNPADDED_TRUNCATION_PROBABILITY,
    prior: Ledgers | None = None,
) -> float:
    """Returns the smallest noise multiplier with which training stays within a privacy budget.

    Guarantees: a ledger with these steps (after the releases of `prior`) reports an epsilon of
    at most `target_epsilon`. The result is within 0.1% of the smallest such noise multiplier, but
    never below 0.01.

    Args:
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one neighbours.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this or both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: An upper bound on the probability that a batch is cut off. The default
        holds for `tfdp.data.poisson_batches` without padding; with padding, and an epsilon above
        30, give `batches.sampling.truncation_probability`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several.

    Raises:
      ValueError: An argument is out of its range, or the budget is spent.

    Example:
      >>> sigma = calibrate_noise_multiplier(
      ...     target_epsilon=2.0, delta=1e-5, steps=1000, sampling_probability=0.01)
      >>> round(sigma, 2)
      0.96
    """
    left = Budget.check(target_epsilon, delta, prior, dataset_size=dataset_size)
    q = budget.sampling_probability(sampling_probability, dataset_size, expected_batch_size)
    tau = _validation.small_probability("truncation_probability", truncation_probability)
    steps = _validation.positive_integer("steps", steps)
    return left.least_noise(
        lambda noise: Release(event_codec.sampled_gaussian(q, noise), steps, tau)
    )


def calibrate_steps(
    *,
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = UNPADDED_TRUNCATION_PROBABILITY,
    prior: Ledgers | None = None,
) -> int:
    """Returns the most steps that a privacy budget allows.

    Guarantees: a ledger with these steps (after the releases of `prior`) reports an epsilon of at
    most `target_epsilon`. With one more step, it reports a larger one.

    Args:
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one neighbours.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      noise_multiplier: Standard deviation of the noise over the sensitivity of the sum.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Give either
        this or both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: An upper bound on the probability that a batch is cut off. The default
        holds for `tfdp.data.poisson_batches` without padding; with padding, and an epsilon above
        30, give `batches.sampling.truncation_probability`.
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
    tau = _validation.small_probability("truncation_probability", truncation_probability)
    noise = _validation.non_negative("noise_multiplier", noise_multiplier)
    event = event_codec.sampled_gaussian(q, noise)
    return left.most(lambda steps: Release(event, steps, tau))


def most_releases(
    event: dp_accounting.DpEvent,
    truncation_probability: float,
    prior: Ledgers | None,
    target_epsilon: float,
    delta: float,
) -> int:
    """Returns the most releases of `event` that a privacy budget allows after those of `prior`.

    Guarantees: as `calibrate_steps`, for any event that an accountant supports.

    Args:
      event: Event of one release.
      truncation_probability: An upper bound on the probability that a release differs from `event`.
      prior: Earlier releases, and the observable part of selective ones.
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one neighbours.
      delta: The delta of the guarantee, in (0, 1).

    Returns:
      The number of further releases, from 0 to 100 million.

    Raises:
      ValueError: An argument is out of its range.
      dp_accounting.UnsupportedEventError: No accountant supports all events.

    Example:
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
      >>> most_releases(step, 0.0, prior=None, target_epsilon=2.0, delta=1e-5)
      1202
    """
    left = Budget.check(target_epsilon, delta, prior)
    tau = _validation.small_probability("truncation_probability", truncation_probability)
    event = event_codec.freeze(event)
    return left.most(lambda count: Release(event, count, tau))
