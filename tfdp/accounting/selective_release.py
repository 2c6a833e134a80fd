"""Selective release: updates that are kept only if a noisy test on private data accepts them.

DPSUR (Fu et al. 2023) takes a private step, measures how much it lowers the loss on a Poisson batch
of the training set, adds noise, and rolls back if that is not enough. An update is released only if
it passed the test: this is selection, not post-processing. The cost depends on what else can be
observed, so every cost here is for one of `observability.OBSERVABILITY`.
"""

import math

import attr
import dp_accounting
import numpy as np
from scipy import special

from tfdp.accounting import (
    dominating_pairs,
    mechanisms,
    selected_gaussian,
    selected_gaussian_pld,
)
from tfdp.accounting.accountants import sampled_rdp
from tfdp.accounting.observability import CONDITIONAL, AttemptsDpEvent
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY
from tfdp.base import validation


@attr.s(frozen=True, auto_attribs=True)
class SelectiveReleaseDpEvent(AttemptsDpEvent):
    """One update that passed a noisy test on private data.

    The update is a Gaussian mechanism on a Poisson batch. On another Poisson batch, drawn
    independently, a number in [-1, 1] (the clipped change of the loss, over its bound) gets
    Gaussian noise of standard deviation 2 * noise multiplier; the update is accepted if the result
    is below the threshold, else a new attempt starts from the same state.

    If rejected attempts cannot be observed ("conditional"), one event stands for one accepted
    update and the rejected attempts before it. If everything is observed ("per_attempt"), it stands
    for one attempt, accepted or not.

    Attributes:
      update: `PoissonSampledDpEvent(q, GaussianDpEvent(noise multiplier))`, or a GaussianDpEvent
        for q = 1.
      selection: The same for the test's batch and noise.
      threshold: beta: the test's threshold, over the clipping bound of the change of the loss.

    Example:
      >>> import dp_accounting
      >>> from tfdp.accounting import RdpAccountant
      >>> update = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))
      >>> test = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.3))
      >>> event = SelectiveReleaseDpEvent(update, selection=test)
      >>> round(RdpAccountant().compose(event, 500).get_epsilon(1e-5), 2)
      1.22
    """

    update: dp_accounting.DpEvent
    selection: dp_accounting.DpEvent
    threshold: float = -1.0

    def releases_of_attempt(self) -> list[dp_accounting.DpEvent]:
        """Returns the releases of an attempt's update and of its test."""
        return [self.update, self.selection]


def acceptance_bounds(
    validation_noise_multiplier: float, threshold: float = -1.0
) -> tuple[float, float]:
    """Returns the least and the largest probability with which the test accepts, on any data.

    Args:
      validation_noise_multiplier: sigma_v > 0. The number in [-1, 1] gets noise of 2 * sigma_v.
      threshold: beta.

    Returns:
      A = Phi((beta - 1) / (2 sigma_v)) and B = Phi((beta + 1) / (2 sigma_v)).

    Example:
      >>> A, B = acceptance_bounds(1.3, threshold=-1.0)
      >>> round(A, 3), B
      (0.221, 0.5)
    """
    low, high = _quantiles(validation_noise_multiplier, threshold)
    return float(special.ndtr(low)), float(special.ndtr(high))


def parameters_for_acceptance(least: float, largest: float) -> tuple[float, float]:
    """Returns the test that accepts with a probability between `least` and `largest`, on any data.

    The conditional bound depends only on their ratio. Among tests with the same ratio, the one with
    the largest probabilities needs the fewest attempts for the same distribution of accepted
    updates.

    Args:
      least: A, in (0, 1): how often a useless update may still be accepted.
      largest: B, in (A, 1).

    Returns:
      The `validation_noise_multiplier` and the `threshold` whose `acceptance_bounds` these are.

    Example:
      >>> noise_multiplier, threshold = parameters_for_acceptance(0.5, 0.95)
      >>> round(noise_multiplier, 3), round(threshold, 3)
      (0.608, 1.0)
    """
    least = validation.between_zero_and_one("least", least)
    largest = validation.between_zero_and_one("largest", largest)
    if least >= largest:
        raise validation.error("least", f"below largest={largest}", least)
    low, high = special.ndtri(least), special.ndtri(largest)
    return float(1 / (high - low)), float((high + low) / (high - low))


def default_max_attempts(least_acceptance: float) -> int:
    """Returns the cap on attempts that is reached with probability at most 1e-30, on any data.

    Args:
      least_acceptance: A of `acceptance_bounds`.

    Returns:
      The smallest m with (1 - A)^m <= `TRUNCATION_PROBABILITY`.

    Example:
      >>> default_max_attempts(0.25)
      241
    """
    least_acceptance = validation.positive_probability("least_acceptance", least_acceptance)
    if least_acceptance == 1:
        return 1
    return math.ceil(math.log(TRUNCATION_PROBABILITY) / math.log1p(-least_acceptance))


def selective_truncation_probability(
    update_truncation: float,
    validation_truncation: float,
    least_acceptance: float,
    max_attempts: int | None = None,
) -> float:
    """Returns the probability, at most, that an accepted update was not made as accounted for.

    The number of attempts is at most geometric, of success probability A, and whether an attempt is
    made does not depend on its own batches. By Wald's identity the expected number of truncated
    batches, and so the probability of any, is at most (tau_t + tau_v) / A. The cap on attempts is
    reached with probability at most (1 - A)^max_attempts.

    Where every attempt is a release of its own ("per_attempt"), it is tau_t + tau_v, and the cap
    changes nothing that was accounted for.

    Args:
      update_truncation: tau_t: probability that an update's batch does not fit its fixed size.
      validation_truncation: tau_v: the same of a test's batch.
      least_acceptance: A of `acceptance_bounds`.
      max_attempts: Cap on the attempts of one update. Default: `default_max_attempts`.

    Example:
      >>> selective_truncation_probability(1e-16, 1e-16, 0.25, max_attempts=500)
      8e-16
    """
    tau_t = validation.small_probability("update_truncation", update_truncation)
    tau_v = validation.small_probability("validation_truncation", validation_truncation)
    if least_acceptance == 0:  # Nothing passes the threshold: every update reaches the cap.
        return math.nextafter(1.0, 0.0)
    a = validation.positive_probability("least_acceptance", least_acceptance)
    attempts = default_max_attempts(a) if max_attempts is None else max_attempts
    attempts = validation.positive_integer("max_attempts", attempts)
    capped = math.exp(attempts * math.log1p(-a)) if a < 1 else 0.0
    # A ledger takes a probability just below 1. Epsilon is infinite long before.
    return min((tau_t + tau_v) / a + capped, math.nextafter(1.0, 0.0))


def unsupported_part(event: SelectiveReleaseDpEvent) -> dp_accounting.DpEvent | None:
    """Returns the part of `event` that is not a (Poisson-sampled) Gaussian, or None.

    The cost of such a part is not known.
    """
    for part in (event.update, event.selection):
        whole = part.event if isinstance(part, dp_accounting.PoissonSampledDpEvent) else part
        if not isinstance(whole, dp_accounting.GaussianDpEvent):
            return part
    return None


def as_sampled(part: dp_accounting.DpEvent) -> dp_accounting.PoissonSampledDpEvent:
    """Returns `update` or `selection` of a supported event; a plain Gaussian as q = 1."""
    if isinstance(part, dp_accounting.PoissonSampledDpEvent):
        return part
    return dp_accounting.PoissonSampledDpEvent(1.0, part)


def conditional_rdp(event: SelectiveReleaseDpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Computes the RDP of one accepted update, if rejections and their number stay secret.

    Source: `tfdp.accounting.selected_gaussian`.

    Example:
      >>> from tfdp.accounting.event_codec import sampled_gaussian
      >>> event = SelectiveReleaseDpEvent(sampled_gaussian(0.01, 1.0), sampled_gaussian(0.01, 1.0))
      >>> conditional_rdp(event, (2.0,)).round(6)
      array([0.000566])
    """
    return selected_gaussian.rdp(*_selected_parameters(event), orders)


def conditional_pair(event: SelectiveReleaseDpEvent) -> dominating_pairs.Pair | None:
    """Returns a dominating pair of one accepted update, if attempts are not released.

    Args:
      event: Event of (Poisson-sampled) Gaussians, at least one with a positive sampling
        probability.

    Returns:
      None if all loss counts as infinite.

    Source: `tfdp.accounting.selected_gaussian_pld`.
    """
    return selected_gaussian_pld.dominating_pair(*_selected_parameters(event))


def _selected_parameters(event: SelectiveReleaseDpEvent) -> tuple[float, float, float, float]:
    """Returns q and sigma of the update, q of the test, and log(B / A)."""
    q, sigma = parameters(event.update)
    validation_q, validation_sigma = parameters(event.selection)
    low, high = _quantiles(validation_sigma, event.threshold)
    # An infinite spread, not the difference of infinities, where A is zero.
    log_spread = float(special.log_ndtr(high) - special.log_ndtr(low)) if low > -1e150 else math.inf
    return q, sigma, validation_q, max(0.0, log_spread)


def bit_rdp(event: SelectiveReleaseDpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Computes the RDP of the test's answer: accepted or not.

    It is 1 with probability p without the example and (1 - q_v) p + q_v p' with it, p and p' in
    [A, B]. The divergence is jointly convex in both distributions. So it is largest at a corner.
    """
    divergences = [np.zeros(len(orders))]
    alpha = np.array(orders)
    for with_example, without in _bit_distributions(event):
        for p, r in ((with_example, without), (without, with_example)):
            with np.errstate(invalid="ignore"):
                terms = alpha[:, np.newaxis] * p + (1 - alpha[:, np.newaxis]) * r
                rounding = 1e-15 * (1 + alpha * (np.abs(p) + np.abs(r)).max())
                log_moment = special.logsumexp(terms, axis=1) + rounding
            divergences.append(np.maximum(log_moment, 0) / (alpha - 1))
    rdp = np.max(divergences, axis=0)
    return np.where(np.isnan(rdp), np.inf, rdp)


def bit_pair(event: SelectiveReleaseDpEvent, attained: bool = False) -> dominating_pairs.Pair:
    """Returns a dominating pair of the test's answer: accepted or not.

    At every epsilon the largest hockey-stick divergence counts: the trade-off curve is the hull of
    those of both corners.

    Args:
      event: Event with positive noise and sampling probability.
      attained: Whether to return the pair of one corner, which data sets can attain.
    """
    distributions = [np.exp(distribution) for distribution in _bit_distributions(event)][
        : 1 if attained else None
    ]
    swapped = [distribution[::-1] for distribution in distributions]
    return dominating_pairs.Pair(add=_bit_atoms(swapped), remove=_bit_atoms(distributions))


def _bit_atoms(distributions: list[np.ndarray]) -> dominating_pairs.Atoms:
    """Returns the outcomes of the hull of trade-off curves of two outcomes each, [upper, lower]."""
    points = [(0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0)]
    for upper, lower in distributions:
        more = int(upper[1] * lower[0] > upper[0] * lower[1])  # The answer of the larger ratio.
        (y, x), (co_y, co_x) = ((float(lower[i]), float(upper[i])) for i in (more, 1 - more))
        points.append((y, x, co_y, co_x))
    return dominating_pairs.hull_atoms(points)


def _bit_distributions(event: SelectiveReleaseDpEvent) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns logs of (P[accepted], P[rejected]) with and without x.

    The corners are (p, p') = (A, B) and (B, A).

    At the two other corners both are the same.
    """
    q, sigma = parameters(event.selection)
    low, high = _quantiles(sigma, event.threshold)
    corners = [special.log_ndtr(np.array([x, -x])) for x in (low, high)]
    with np.errstate(divide="ignore"):
        log_rest, log_q = np.log1p(-q), np.log(q)
    return [(np.logaddexp(log_rest + p, log_q + r), p) for p, r in (corners, reversed(corners))]


def parameters(part: dp_accounting.DpEvent) -> tuple[float, float]:
    """Returns sampling probability and noise multiplier of `update` or `selection`."""
    sampled = as_sampled(part)
    return sampled.sampling_probability, sampled.event.noise_multiplier


def _quantiles(noise_multiplier: float, threshold: float) -> tuple[float, float]:
    """Returns the points where the normal distribution function is A and B.

    Without noise every value is possible.
    """
    if not (validation.is_number(noise_multiplier) and noise_multiplier >= 0):
        raise validation.error(
            "validation_noise_multiplier", "a non-negative number", noise_multiplier
        )
    if not (validation.is_number(threshold) and math.isfinite(threshold)):
        raise validation.error("threshold", "a finite number", threshold)
    if noise_multiplier == 0:
        return -math.inf, math.inf
    return (threshold - 1) / (2 * noise_multiplier), (threshold + 1) / (2 * noise_multiplier)


class _SelectiveRelease(mechanisms.PairedMechanism):
    """Prices accepted updates, or attempts."""

    parts = (
        "`update` and `selection` of a `SelectiveReleaseDpEvent` must each be a "
        "`PoissonSampledDpEvent` of a `GaussianDpEvent`"
    )

    def unsupported_part(self, event: SelectiveReleaseDpEvent) -> dp_accounting.DpEvent | None:
        return unsupported_part(event)

    def rdp(
        self, event: SelectiveReleaseDpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        if observability == CONDITIONAL:
            return conditional_rdp(event, orders)
        return sampled_rdp(as_sampled(event.update), orders) + bit_rdp(event, orders)

    def upper_pairs(
        self, event: SelectiveReleaseDpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...] | None:
        (q, noise), (test_q, test_noise) = map(parameters, (event.update, event.selection))
        if q == test_q == 0:
            return ()
        if observability == CONDITIONAL:
            pair = conditional_pair(event)
            return None if pair is None else (pair,)
        # An attempt releases its update, and whether it passed: at most both, in full.
        if (q > 0 and noise == 0) or (test_q > 0 and test_noise == 0):
            return None
        update = (dominating_pairs.sampled_gaussian(q, noise),) if q > 0 else ()
        return update + ((bit_pair(event),) if test_q > 0 else ())

    def attained_pairs(
        self, event: SelectiveReleaseDpEvent, observability: str
    ) -> tuple[dominating_pairs.Pair, ...]:
        if observability == CONDITIONAL:  # A test that accepts with a constant probability.
            q, noise = parameters(event.update)
            return (dominating_pairs.sampled_gaussian(q, noise),) if q > 0 else ()
        if parameters(event.selection)[0] == 0:
            return ()
        return (bit_pair(event, attained=True),)


mechanisms.register(SelectiveReleaseDpEvent, _SelectiveRelease())
