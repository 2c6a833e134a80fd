"""The most updates, or the least noise, of selective release for a privacy budget."""

import dataclasses
import math
from typing import Any

from tfdp.accounting import budget, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget
from tfdp.accounting.ledger import Ledgers
from tfdp.accounting.observability import CONDITIONAL, PER_ATTEMPT
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY
from tfdp.accounting.selective_release import (
    SelectiveReleaseDpEvent,
    acceptance_bounds,
    selective_truncation_probability,
)
from tfdp.base import validation

_ARGUMENTS = ("updates", "noise_multiplier", "validation_noise_multiplier")


def calibrate_selective_release(
    *,
    target_epsilon: float,
    delta: float,
    updates: int | None = None,
    noise_multiplier: float | None = None,
    validation_noise_multiplier: float | None = None,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    validation_sampling_probability: float | None = None,
    validation_batch_size: float | None = None,
    threshold: float = -1.0,
    selective_release: str = CONDITIONAL,
    truncation_probability: float = TRUNCATION_PROBABILITY,
    max_attempts: int | None = None,
    prior: Ledgers | None = None,
) -> float:
    """Finds the most updates, or the least noise, of selective release within a budget.

    Guarantees: a ledger with these updates (after the releases of `prior`) reports an epsilon of at
    most `target_epsilon`. With one more update, it reports a larger one. Noise is within 0.1% of
    the least, but never below 0.01. Less noise in the test costs more if `threshold` <= 1.

    Args:
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      updates: Number of accepted updates; of attempts if `selective_release` is "per_attempt".
        Exactly one of this and the next two must be None: it is the one to find.
      noise_multiplier: Standard deviation of the update's noise over the sensitivity of the sum.
      validation_noise_multiplier: Standard deviation of the test's noise over 2 * the clipping
        bound.
      sampling_probability: Probability, in (0, 1], that an example is in the batch of an update.
        Either this or both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in the batch of an update, B <= N.
      validation_sampling_probability: Probability, in (0, 1], that an example is in the batch of a
        test. Either this or both of `dataset_size` and the next.
      validation_batch_size: Expected number of examples in the batch of a test.
      threshold: The test's threshold, over the clipping bound of the change of the loss.
      selective_release: The observable part; see `PrivacyLedger`.
      truncation_probability: Probability, at most, that a batch does not fit into its fixed size.
        The default holds for `tfdp.data.poisson_batches`.
      max_attempts: Cap on the attempts of one update. Default: `default_max_attempts`.
      prior: Earlier releases on the same data: a `PrivacyLedger`, or several. It must
        assume the same observability.

    Returns:
      The updates (an int, 0 to 100 million) or the noise multiplier (a float).

    Raises:
      ValueError: An argument is out of its range, or the budget is spent.

    Example:
      >>> calibrate_selective_release(
      ...     target_epsilon=1.0, delta=1e-5, noise_multiplier=4.0,
      ...     validation_noise_multiplier=1.3, dataset_size=60000, expected_batch_size=2048,
      ...     validation_batch_size=256)
      389
    """
    left = Budget.check(target_epsilon, delta, prior, dataset_size=dataset_size)
    if prior is not None and selective_release != left.selective_release:
        raise validation.error(
            "selective_release", f"that of `prior`, {left.selective_release!r}", selective_release
        )
    left = dataclasses.replace(left, selective_release=selective_release)
    # One of both may be given as a probability although the other needs the number of examples.
    mixed = (sampling_probability is None) != (validation_sampling_probability is None)
    template = _Template(
        budget.sampling_probability(
            sampling_probability,
            None if mixed and sampling_probability is not None else dataset_size,
            expected_batch_size,
        ),
        budget.sampling_probability(
            validation_sampling_probability,
            None if mixed and validation_sampling_probability is not None else dataset_size,
            validation_batch_size,
            ("validation_sampling_probability", "validation_batch_size"),
        ),
        threshold,
        validation.small_probability("truncation_probability", truncation_probability),
        validation.integer("max_attempts", max_attempts, 1, 2**63, optional=True),
        selective_release == PER_ATTEMPT,
    )
    values = (updates, noise_multiplier, validation_noise_multiplier)
    asked = _asked_for(dict(zip(_ARGUMENTS, values, strict=True)))
    if updates is not None:
        updates = validation.positive_integer("updates", updates)
    noise, validation_noise = (
        None if value is None else validation.non_negative(name, value)
        for name, value in zip(_ARGUMENTS[1:], values[1:], strict=True)
    )
    # The one that is None never reaches the release.
    if asked == "updates":
        return left.most(lambda count: [template.release(count, noise, validation_noise)])
    if asked == "noise_multiplier":
        return left.least_noise(lambda x: [template.release(updates, x, validation_noise)])
    return left.least_noise(lambda x: [template.release(updates, noise, x)])


def _asked_for(values: dict[str, Any]) -> str:
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 1:
        return missing[0]
    received = ", ".join(f"{name}={value!r}" for name, value in values.items())
    names = ", ".join(f"`{name}`" for name in values)
    raise ValueError(f"Exactly one of the arguments {names} must be None. Received: {received}.")


@dataclasses.dataclass(frozen=True)
class _Template:
    """Parameters of a calibration that do not depend on what is asked for."""

    q: float
    validation_q: float
    threshold: float
    truncation_probability: float
    max_attempts: int | None
    per_attempt: bool

    def release(self, count: Any, noise: Any, validation_noise: Any) -> Release:
        event = SelectiveReleaseDpEvent(
            event_codec.sampled_gaussian(self.q, noise),
            event_codec.sampled_gaussian(self.validation_q, validation_noise),
            self.threshold,
        )
        return Release(event, count, self._truncation(validation_noise))

    def _truncation(self, validation_noise: float) -> float:
        tau = self.truncation_probability
        if self.per_attempt:
            return 2 * tau
        least, _ = acceptance_bounds(validation_noise, self.threshold)
        if least == 0:
            return math.inf
        return selective_truncation_probability(tau, tau, least, self.max_attempts)
