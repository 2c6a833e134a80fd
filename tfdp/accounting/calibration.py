"""The least noise, or the most steps, for a privacy budget."""

import math
from collections.abc import Callable, Sequence

import dp_accounting
import scipy.optimize

from tfdp.accounting import _validation, bounds, event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.ledger import PrivacyLedger
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY

# Relative. The result is at most twice this above the smallest noise multiplier.
_TOLERANCE = 2.5e-4
# Below, a single step costs an epsilon of thousands: no guarantee that a number could improve.
_LEAST_NOISE = 0.01
_MOST_NOISE = 2.0**40
_MOST_STEPS = 10**8

_Bound = Callable[[Sequence[Release], float], float]


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = TRUNCATION_PROBABILITY,
    ledger: PrivacyLedger | None = None,
) -> float:
    """The smallest noise multiplier with which training stays within a privacy budget.

    Guarantees: a ledger with these steps (after the releases of `ledger`) reports an epsilon of
    at most `target_epsilon`. The result is within 0.1% of the smallest such noise multiplier, but
    never below 0.01.

    Args:
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one neighbours.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      steps: Number of steps that will be taken.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Either this or
        both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: Probability, at most, that a batch does not fit into its fixed size.
        The default holds for `tfdp.data.poisson_batches`.
      ledger: What was released before, on the same data.

    Raises:
      ValueError: An argument is out of its range, or nothing of the budget is left.

    Example:
      >>> sigma = calibrate_noise_multiplier(
      ...     target_epsilon=2.0, delta=1e-5, steps=1000, sampling_probability=0.01)
      >>> round(sigma, 2)
      0.96
    """
    target, delta, q, tau, past = _check_budget(
        target_epsilon,
        delta,
        sampling_probability,
        dataset_size,
        expected_batch_size,
        truncation_probability,
        ledger,
    )
    steps = _validation.positive_integer("steps", steps)
    spent = _tightest(past, delta)
    if spent >= target:
        raise _validation.error(
            "target_epsilon", f"above what the ledger has spent, {spent!r}", target_epsilon
        )

    def gap(bound: _Bound) -> Callable[[float], float]:
        def of_log_noise(log_noise: float) -> float:
            event = event_codec.sampled_gaussian(q, math.exp(log_noise))
            epsilon = bound([*past, Release(event, steps, tau)], delta)
            return min(epsilon, 2 * target) - target  # Finite, for the root finder.

        return of_log_noise

    # RDP is quick and somewhat too large: it brackets, and the tightest bound refines.
    rough, tight = gap(_quick), gap(_tightest)
    high = 1.0
    while rough(math.log(high)) > 0:
        high *= 2
        if high > _MOST_NOISE:
            raise _validation.error(
                "target_epsilon",
                f"larger: no noise is enough for {steps} steps with truncation probability {tau!r}",
                target_epsilon,
            )
    low = high / 2
    while low > _LEAST_NOISE and rough(math.log(low)) <= 0:
        low, high = low / 2, low
    if low > _LEAST_NOISE:
        high = _root(rough, low, high, 20 * _TOLERANCE)
    low = high
    while tight(math.log(low)) <= 0:
        if low <= _LEAST_NOISE:
            return _LEAST_NOISE
        low, high = max(0.85 * low, _LEAST_NOISE), low
    return _root(tight, low, high, _TOLERANCE)


def calibrate_steps(
    *,
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_probability: float | None = None,
    dataset_size: int | None = None,
    expected_batch_size: float | None = None,
    truncation_probability: float = TRUNCATION_PROBABILITY,
    ledger: PrivacyLedger | None = None,
) -> int:
    """The most steps that a privacy budget allows.

    Guarantees: a ledger with these steps (after the releases of `ledger`) reports an epsilon of
    at most `target_epsilon`, and with one step more a larger one.

    Args:
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one neighbours.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      noise_multiplier: Standard deviation of the noise over the sensitivity of the sum.
      sampling_probability: Probability q, in (0, 1], that an example is in a batch. Either this or
        both of the next two.
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N; q = B / N.
      truncation_probability: Probability, at most, that a batch does not fit into its fixed size.
        The default holds for `tfdp.data.poisson_batches`.
      ledger: What was released before, on the same data.

    Returns:
      The number of steps: 0 if not one is left, and at most 100 million.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> calibrate_steps(
      ...     target_epsilon=2.0, delta=1e-5, noise_multiplier=1.0, sampling_probability=0.01)
      1202
    """
    target, delta, q, tau, past = _check_budget(
        target_epsilon,
        delta,
        sampling_probability,
        dataset_size,
        expected_batch_size,
        truncation_probability,
        ledger,
    )
    if not (_validation.is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise _validation.error(
            "noise_multiplier", "a non-negative finite number", noise_multiplier
        )
    event = event_codec.sampled_gaussian(q, float(noise_multiplier))

    def affordable(bound: _Bound) -> Callable[[int], bool]:
        def steps_are(steps: int) -> bool:
            new = [Release(event, steps, tau)] if steps else []
            return bound([*past, *new], delta) <= target

        return steps_are

    if not affordable(_tightest)(0):
        return 0
    # RDP is quick and somewhat too large: it gives a number to start from.
    start = _most(affordable(_quick), 0, 1) if affordable(_quick)(0) else 0
    if start == _MOST_STEPS:
        return start
    return _most(affordable(_tightest), start, max(1, start // 8))


def _most(affordable: Callable[[int], bool], low: int, stride: int) -> int:
    """The largest n >= `low`, which is affordable, with n affordable and n + 1 not."""
    high = low + stride
    while affordable(high):
        if high >= _MOST_STEPS:
            return _MOST_STEPS
        low, high = high, min(high + 2 * (high - low), _MOST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low


def _root(gap: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """The root of `gap(log x)`, up to `tolerance`, on the side where the gap is not positive."""
    x = math.exp(scipy.optimize.brentq(gap, math.log(low), math.log(high), xtol=tolerance))
    while x < high and gap(math.log(x)) > 0:
        x *= 1 + tolerance
    return float(min(x, high))


def _tightest(releases: Sequence[Release], delta: float) -> float:
    return bounds.tightest_epsilon(releases, delta).epsilon


def _quick(releases: Sequence[Release], delta: float) -> float:
    try:
        return bounds.rdp_epsilon(releases, delta)
    except dp_accounting.UnsupportedEventError:  # An event of `ledger` that only PLD supports.
        return _tightest(releases, delta)


def _check_budget(
    target_epsilon: float,
    delta: float,
    sampling_probability: float | None,
    dataset_size: int | None,
    expected_batch_size: float | None,
    truncation_probability: float,
    ledger: PrivacyLedger | None,
) -> tuple[float, float, float, float, tuple[Release, ...]]:
    """Returns the arguments that both calibrations share, checked: target, delta, q, tau, past."""
    if ledger is not None and not isinstance(ledger, PrivacyLedger):
        raise _validation.error("ledger", "a PrivacyLedger or None", ledger)
    return (
        _validation.positive("target_epsilon", target_epsilon),
        _validation.between_zero_and_one("delta", delta),
        _sampling_probability(sampling_probability, dataset_size, expected_batch_size),
        _validation.small_probability("truncation_probability", truncation_probability),
        () if ledger is None else ledger.releases,
    )


def _sampling_probability(
    sampling_probability: float | None,
    dataset_size: int | None,
    expected_batch_size: float | None,
) -> float:
    if sampling_probability is not None:
        if dataset_size is not None or expected_batch_size is not None:
            raise _validation.error(
                "sampling_probability",
                "None when `dataset_size` or `expected_batch_size` is given",
                sampling_probability,
            )
        return _validation.positive_probability("sampling_probability", sampling_probability)
    if dataset_size is None or expected_batch_size is None:
        raise ValueError(
            "Argument `sampling_probability`, or both `dataset_size` and `expected_batch_size`, "
            f"must be given. Received: {sampling_probability=}, {dataset_size=}, "
            f"{expected_batch_size=}."
        )
    size = _validation.positive_integer("dataset_size", dataset_size)
    batch = _validation.positive("expected_batch_size", expected_batch_size)
    if batch > size:
        raise _validation.error(
            "expected_batch_size", f"at most dataset_size={size}", expected_batch_size
        )
    return batch / size
