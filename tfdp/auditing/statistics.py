"""Attack scores turned into statements: bounds on epsilon, and an attack's success.

NumPy and SciPy alone. A score is high where the attacker believes that an example was trained on.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from tfdp.auditing import one_run
from tfdp.base.validation import (
    array,
    between_zero_and_one,
    error,
    is_number,
    one_of,
    small_probability,
)

METHODS = ("clopper_pearson", "gaussian", "one_run", "one_run_f_dp")
# False positive (or negative) rates near which thresholds lie. For a Gaussian trade-off curve any
# place is as good as another but for its statistics: these suit mu from 0 to 4.
_GAUSSIAN_RATES = (0.45, 0.25, 0.08)
# Neighboring thresholds of Clopper-Pearson bounds have ranks with this ratio.
_RANK_RATIO = 1.5
LARGEST_EPSILON = 50.0


def epsilon_lower_bound(
    in_scores: Any,
    out_scores: Any,
    delta: float,
    significance: float = 0.05,
    method: str = "clopper_pearson",
) -> float:
    """Computes a lower confidence bound on epsilon from the scores of an attack.

    Whatever the scores are, a mechanism that is (epsilon, delta)-DP gets a bound above epsilon with
    probability at most `significance`, under the assumption of the method:

    - "clopper_pearson": the scores are independent, as those of separate trainings. (Those of one
      training are, if its mechanism acts on the canaries independently.) All error rates are
      bounded, at thresholds of fixed ranks, with a correction for their number.
    - "gaussian": the scores are independent, and the mechanism's trade-off curve is that of a
      Gaussian mechanism, so that errors that can be counted tell of those that are too rare. Of
      another mechanism, such as one with subsampling, it is an extrapolation.
    - "one_run": each canary of one training was in by a fair coin of its own. Nothing is assumed of
      the mechanism.
    - "one_run_f_dp": the coins of "one_run", and the Gaussian trade-off curve of "gaussian".

    Equal scores are taken to the attacker's disadvantage. An order of scores has no influence.

    Args:
      in_scores: Scores of the canaries that were trained on, `[n]`; infinite ones are allowed.
      out_scores: Scores of those that were not, `[m]`.
      delta: The delta of the guarantee, in [0, 1).
      significance: Probability that the bound may be wrong, in (0, 1).
      method: One of the four.

    Returns:
      The bound; 0 where the scores show nothing, as without canaries of one of the kinds; at most
      50.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import numpy as np
      >>> random = np.random.default_rng(0)
      >>> seen, unseen = random.normal(2.0, 1.0, 500), random.normal(0.0, 1.0, 500)
      >>> round(epsilon_lower_bound(seen, unseen, 1e-5, method="gaussian"), 1)
      9.1

    References:
      - Nasr et al., 2023, Tight Auditing of Differentially Private Machine Learning ("gaussian").
      - Steinke, Nasr, Jagielski, 2023, Privacy Auditing with One (1) Training Run, Theorem 5.2.
      - Mahloujifar, Melis, Chaudhuri, 2024, Auditing f-Differential Privacy in One Run.
    """
    seen, unseen = checked_scores(in_scores, out_scores)
    delta = small_probability("delta", delta)
    significance = between_zero_and_one("significance", significance)
    one_of("method", method, METHODS)
    if not (seen.size and unseen.size):
        return 0.0
    if method == "clopper_pearson":
        rates = _error_rates(seen, unseen, significance, _geometric_ranks)
        found = max(_epsilon_of_rates(rate, delta) for rate in rates)
    elif method == "gaussian":
        rates = _error_rates(seen, unseen, significance, _central_ranks)
        found = epsilon_of_mu(max(_mu_of_rates(rate) for rate in rates), delta)
    else:
        bound = one_run.pure_bound if method == "one_run" else one_run.gaussian_bound
        found = 0.0
        guesses = one_run.guess_counts(seen.size + unseen.size, method)
        for count in guesses:
            correct = one_run.correct_guesses(seen, unseen, count)
            level = significance / len(guesses)
            value = bound(seen.size + unseen.size, count, correct, delta, level)
            found = max(found, value if method == "one_run" else epsilon_of_mu(value, delta))
    return float(min(max(found, 0.0), LARGEST_EPSILON))


def checked_scores(in_scores: Any, out_scores: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores as arrays in float64, sorted.

    Raises:
      ValueError: They are not one-dimensional, hold NaN, or there are none at all.
    """
    found = []
    for name, given in (("in_scores", in_scores), ("out_scores", out_scores)):
        values = array(name, given, requirement := "an array `[n]` of numbers without NaN", 1)
        if np.isnan(values).any():
            raise error(name, requirement, given)
        found.append(np.sort(values))
    if not (found[0].size or found[1].size):
        raise error("in_scores", "not empty, or `out_scores` must not be", in_scores)
    return found[0], found[1]


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Upper confidence bounds on the error rates at one threshold."""

    false_positive: float
    false_negative: float


def _error_rates(
    seen: np.ndarray,
    unseen: np.ndarray,
    significance: float,
    ranks: Callable[[int], Sequence[int]],
) -> list[_Rates]:
    """Bounds the error rates at several thresholds, all of them together at `significance`.

    A threshold is the k-th score of one kind, with k fixed. The share of that kind beyond it then
    has a beta distribution (or less, where scores are equal), and the scores of the other kind are
    independent of the threshold, so that the number of them beyond it is binomial.

    Args:
      seen: Scores of canaries that were in, sorted.
      unseen: Those of canaries that were out, sorted.
      significance: Probability that any of the bounds may be wrong.
      ranks: Function of a number of scores: the ranks k to use, from 1 for the outermost.
    """
    # By the mirror image, with signs changed, "out" is what is found and "in" what is not.
    mirrored = (-unseen[::-1], -seen[::-1])
    pairs = [((seen, unseen), ranks(unseen.size)), (mirrored, ranks(seen.size))]
    level = significance / (2 * sum(len(chosen) for _, chosen in pairs))
    found = []
    for index, ((inside, outside), chosen) in enumerate(pairs):
        k = np.asarray(chosen)
        thresholds = outside[outside.size - k]
        positive = stats.beta.ppf(1 - level, k, outside.size - k + 1)
        missed = np.searchsorted(inside, thresholds, side="right")
        negative = np.where(
            missed == inside.size,
            1.0,
            stats.beta.ppf(1 - level, missed + 1, np.maximum(inside.size - missed, 1)),
        )
        for a, b in zip(positive, negative, strict=True):
            found.append(_Rates(a, b) if index == 0 else _Rates(b, a))
    return found


def _geometric_ranks(count: int) -> list[int]:
    ranks, last = [1], 1
    while (last := max(last + 1, round(last * _RANK_RATIO))) <= count:
        ranks.append(last)
    return ranks


def _central_ranks(count: int) -> list[int]:
    return sorted({min(count, max(1, round(rate * count))) for rate in _GAUSSIAN_RATES})


def _epsilon_of_rates(rates: _Rates, delta: float) -> float:
    """Returns the least epsilon with which error rates so small are possible."""
    best = 0.0
    for a, b in (
        (rates.false_positive, rates.false_negative),
        (rates.false_negative, rates.false_positive),
    ):
        gain = 1 - b - delta
        if gain > 0:
            best = max(best, math.log(gain / a) if a > 0 else math.inf)
    return best


def _mu_of_rates(rates: _Rates) -> float:
    found = -special.ndtri(rates.false_positive) - special.ndtri(rates.false_negative)
    return float(found) if found > 0 else 0.0  # NaN of opposite infinities: nothing is known.


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns the epsilon at `delta` of a Gaussian mechanism with sensitivity over noise `mu`.

    Args:
      mu: Sensitivity over standard deviation, not negative.
      delta: In [0, 1).

    Raises:
      ValueError: `mu` is negative or NaN, or `delta` is not in [0, 1).

    Example:
      >>> round(epsilon_of_mu(1.0, 1e-5), 2)
      4.38

    References:
      - Dong, Roth, Su, 2022, Gaussian Differential Privacy, Corollary 1.
    """
    if not (is_number(mu) and mu >= 0):
        raise error("mu", "a number >= 0", mu)
    return _epsilon_of_mu(float(mu), small_probability("delta", delta))


@functools.lru_cache(maxsize=65536)
def _epsilon_of_mu(mu: float, delta: float) -> float:
    if mu == 0:
        return 0.0
    if delta == 0 or math.isinf(mu):
        return math.inf

    def excess(epsilon: float) -> float:
        first = special.ndtr(mu / 2 - epsilon / mu)
        return first - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)) - delta

    low, high = 0.0, mu * (mu / 2 - float(special.ndtri(delta))) + 1
    if math.isinf(high):
        return math.inf
    if excess(low) <= 0:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def roc_curve(in_scores: Any, out_scores: Any) -> tuple[np.ndarray, np.ndarray]:
    """Computes the rates of an attack at every threshold that makes a difference.

    Args:
      in_scores: Scores of examples that were trained on, `[n]`.
      out_scores: Scores of others, `[m]`.

    Returns:
      False positive rates and true positive rates, ascending from 0 to 1.

    Raises:
      ValueError: An argument is no array of numbers, or is empty.

    Example:
      >>> roc_curve([2.0, 3.0], [1.0, 2.0])
      (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]))
    """
    seen, unseen = checked_scores(in_scores, out_scores)
    for name, values in (("in_scores", seen), ("out_scores", unseen)):
        if not values.size:
            raise error(name, "not empty", values)
    thresholds = np.unique(np.concatenate([seen, unseen]))[::-1]
    rates = [
        1 - np.searchsorted(values, thresholds, side="left") / values.size
        for values in (unseen, seen)
    ]
    false, true = (np.concatenate([[0.0], rate]) for rate in rates)
    return false, true


def tpr_at_fpr(in_scores: Any, out_scores: Any, fpr: float) -> float:
    """Computes the largest true positive rate at a false positive rate of at most `fpr`.

    It describes the scores, without confidence: the threshold is the best for these very scores.

    Args:
      in_scores: Scores of examples that were trained on, `[n]`.
      out_scores: Scores of others, `[m]`. A rate below 1 / m is measured as 0.
      fpr: The false positive rate, in [0, 1).

    Raises:
      ValueError: An argument is out of its range, or empty.

    Example:
      >>> tpr_at_fpr([2.0, 3.0], [1.0, 2.0], 0.01)
      0.5
    """
    fpr = small_probability("fpr", fpr)
    false, true = roc_curve(in_scores, out_scores)
    return float(true[false <= fpr].max())


def auc(in_scores: Any, out_scores: Any) -> float:
    """Computes the probability that a score of "in" is above one of "out"; equal ones count half.

    Args:
      in_scores: Scores of examples that were trained on, `[n]`.
      out_scores: Scores of others, `[m]`.

    Raises:
      ValueError: An argument is no array of numbers, or is empty.

    Example:
      >>> auc([2.0, 3.0], [1.0, 2.0])
      0.875
    """
    false, true = roc_curve(in_scores, out_scores)
    return float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2))


def advantage(in_scores: Any, out_scores: Any) -> float:
    """Computes the largest difference of true and false positive rate, in [0, 1].

    Args:
      in_scores: Scores of examples that were trained on, `[n]`.
      out_scores: Scores of others, `[m]`.

    Raises:
      ValueError: An argument is no array of numbers, or is empty.

    Example:
      >>> advantage([2.0, 3.0], [1.0, 2.0])
      0.5

    References:
      - Yeom et al., 2018, Privacy Risk in Machine Learning, Definition 4.
    """
    false, true = roc_curve(in_scores, out_scores)
    return float(np.max(true - false))
