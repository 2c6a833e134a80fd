"""The trade-off curve: what any attack can reach after what was released.

The attack tells, from all that was released, whether an example was trained on. Its false positive
rate is the probability that it says so of an example that contributed nothing, its true positive
rate that it says so of one that was there. Whatever the attacker knows besides, both rates obey
every guarantee (epsilon, delta) of the training. A guarantee is a line above the curve; many lines
are a polygon.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from tfdp.accounting import bounds
from tfdp.accounting.bounds import Release
from tfdp.accounting.composition import PrivacyProfile
from tfdp.accounting.rounding import rounded_up
from tfdp.accounting.sampling import EXAMPLE
from tfdp.base import validation

# Error rates of which attacks are usually stated.
FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
# Error of the corners of the polygon, at most.
_ROUNDING = 1e-12
# A mu of more regret does not describe the curve (Gomez et al. 2025).
_LARGE_REGRET = 0.01
# The exponential of larger epsilons is too large.
_MOST_EPSILON = 700.0
# Points at which regret is looked for, in standard deviations.
_POINTS = np.linspace(-8, 8, 321)
_BISECTIONS = 30


@dataclasses.dataclass(frozen=True)
class GaussianDP:
    """Guarantee of Gaussian differential privacy, up to a delta.

    Attributes:
      mu: At a false positive rate a, the true positive rate of any attack is at most
        Phi(Phi^-1(a) + mu) + delta, with Phi the normal distribution function. No attack tells more
        than one that tells N(mu, 1) from N(0, 1), except with probability delta. The same holds
        with both data sets exchanged. `math.inf` if no mu is known.
      delta: The delta.
      regret: How far this guarantee is above the trade-off curve: the largest difference of the
        error rates, about. 0 says that mu alone describes the curve. It is an estimate, not a
        bound.
    """

    mu: float
    delta: float
    regret: float

    def __str__(self) -> str:
        if math.isinf(self.mu):
            return f"Gaussian differential privacy: no mu is known up to delta = {self.delta!r}."
        text = (
            f"Gaussian differential privacy: mu = {rounded_up(self.mu):g} up to delta = "
            f"{self.delta!r}: at a false positive rate a, the true positive rate of any attack is "
            "at most Phi(Phi^-1(a) + mu) + delta."
        )
        fit = "mu stands for the whole trade-off curve"
        if self.regret > _LARGE_REGRET:
            fit = "mu is an upper bound alone, and the trade-off curve is well below it"
        return f"{text} Regret about {self.regret:.2g}: {fit}."


@dataclasses.dataclass(frozen=True, eq=False)
class TradeOff:
    """Upper bounds on what any attack on one unit of privacy, or a group, can reach.

    The trade-off function, of the false negative rate, is 1 - `true_positive_rate`.

    Guarantees: every number but `GaussianDP.regret` is an upper bound.

    Attributes:
      false_positive_rates: Corners of the curve, which is a polygon; from 0 to 1 [corners].
      true_positive_rates: The largest true positive rate at each [corners].
      unit: The unit of privacy, "example" or "user".
      group_size: Number of units of privacy that the attack tells together.

    Example:
      >>> import dp_accounting
      >>> from tfdp.accounting import PrivacyLedger
      >>> ledger = PrivacyLedger()
      >>> ledger.record(
      ...     dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)
      >>> curve = ledger.trade_off()
      >>> round(curve.advantage, 3), round(curve.true_positive_rate(0.01), 3)
      (0.161, 0.029)
      >>> gaussian = curve.gaussian_dp(delta=1e-5)
      >>> round(gaussian.mu, 2), round(gaussian.regret, 3)
      (0.45, 0.009)
    """

    false_positive_rates: np.ndarray
    true_positive_rates: np.ndarray
    unit: str = EXAMPLE
    group_size: int = 1

    def true_positive_rate(self, false_positive_rate: Any) -> Any:
        """Returns the largest true positive rates.

        Args:
          false_positive_rate: A number in [0, 1], or an array of them, of any shape.

        Raises:
          ValueError: It is not.

        Source: Kairouz, Oh, Viswanath 2015, "The Composition Theorem for Differential Privacy",
        Theorem 2.1: FPR + e^epsilon FNR >= 1 - delta, and the same with both rates exchanged.
        """
        try:
            given = np.asarray(false_positive_rate)
        except ValueError:  # Of several lengths.
            given = np.asarray(None)
        if given.dtype.kind not in "fiu" or not np.all((given >= 0) & (given <= 1)):
            raise validation.error(
                "false_positive_rate", "a number in [0, 1], or an array", false_positive_rate
            )
        # It may be below the chance by rounding.
        found = np.maximum(self._highest(given.astype(float)), given)
        return float(found) if found.ndim == 0 else found

    @property
    def at_usual_rates(self) -> dict[float, float]:
        """The largest true positive rates at false positive rates of 10%, 1% and 0.1%."""
        return {rate: self.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES}

    @property
    def advantage(self) -> float:
        """The largest true positive rate minus false positive rate: the total variation."""
        return float(np.max(self.true_positive_rates - self.false_positive_rates))

    @property
    def accuracy(self) -> float:
        """The share of right answers if the example was there with probability 1/2."""
        return (1 + self.advantage) / 2

    def gaussian_dp(self, delta: float) -> GaussianDP:
        """Returns the smallest mu of Gaussian differential privacy that the curve proves.

        A normal trade-off curve is concave in terms of power: where it is above all corners of the
        polygon, it is above the polygon. Without a delta no useful mu exists for sampled
        mechanisms: T steps may all have drawn the example, which costs mu = sqrt(T) / sigma.

        Args:
          delta: The delta that is left out, in (0, 1): see `GaussianDP`. That of the epsilon makes
            sense.

        Raises:
          ValueError: `delta` is not in (0, 1).

        Source: Dong, Roth, Su 2022, "Gaussian Differential Privacy"; Gomez et al. 2025, "Gaussian
        DP for Reporting Differential Privacy Guarantees in Machine Learning",
        https://arxiv.org/abs/2503.10945, which define the regret.
        """
        delta = validation.between_zero_and_one("delta", delta)
        rates, most = self.false_positive_rates, self.true_positive_rates
        # From the smaller tail: most - delta, and 1 - most + delta.
        missed = np.maximum(1 - most - _ROUNDING, 0.0) + delta
        reached = np.where(most < 0.5, special.ndtri(most - delta), -special.ndtri(missed))
        matter = (most > delta) & (rates < 1)
        mu = float(np.max(reached[matter] - special.ndtri(rates[matter]), initial=0.0))
        if mu > 0:
            mu += 1e-9 * (1 + mu)
        return GaussianDP(mu, delta, self._regret(mu))

    def _regret(self, mu: float) -> float:
        """Least k so that the normal curve, moved by k to more of both errors, is below this."""
        rates, reached = special.ndtr(_POINTS), special.ndtr(_POINTS + mu)
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if np.all(reached - middle <= self._highest(np.minimum(rates + middle, 1.0))):
                high = middle
            else:
                low = middle
        return high

    def _highest(self, rates: np.ndarray) -> np.ndarray:
        return np.interp(rates, self.false_positive_rates, self.true_positive_rates)

    @property
    def sentence(self) -> str:
        """The accuracy in words."""
        what = f"one {self.unit} was"
        if self.group_size > 1:
            what = f"the {self.group_size} {self.unit}s of a group were"
        return (
            "An attacker who knows all else, and guesses from what was released whether "
            f"{what} there, is right at most {percent(self.accuracy)} of the time (chance "
            "is 50%)."
        )

    def __str__(self) -> str:
        rates = ", ".join(
            f"{percent(most)} at {'a false positive rate of ' * (not number)}{percent(rate)}"
            for number, (rate, most) in enumerate(self.at_usual_rates.items())
        )
        sentence = self.sentence[0].lower() + self.sentence[1:]
        return (
            f"Attacks: {sentence} True positive rate, at most: {rates}. Its advantage over the "
            f"false positive rate: at most {percent(self.advantage)}."
        )


def trade_off_of(
    releases: Sequence[Release], selective_release: str, unit: str = EXAMPLE, group_size: int = 1
) -> TradeOff:
    """Returns the trade-off curve of releases.

    Args:
      releases: The releases, for the group.
      selective_release: The observable part of SelectiveReleaseDpEvents; see `RdpAccountant`.
      unit: The unit of privacy.
      group_size: Number of units of privacy in the group.

    Raises:
      dp_accounting.UnsupportedEventError: No accountant supports what was released.
    """
    profile = bounds.privacy_profile(releases, selective_release)
    rates, most = (np.array([0.0, 1.0]), np.ones(2)) if profile is None else _corners(profile)
    return TradeOff(rates, most, unit, group_size)


def _corners(profile: PrivacyProfile) -> tuple[np.ndarray, np.ndarray]:
    """Returns the polygon below all guarantees of a profile."""
    lines = _lines(profile)
    hull: list[tuple[float, float]] = []
    for line in lines:
        # A line goes that is above the last one from 0 on, or where its neighbors meet.
        while hull and line[1] <= hull[-1][1]:
            hull.pop()
        while len(hull) > 1 and _meet(hull[-1], line) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    rates = np.array([0.0, *map(_meet, hull[:-1], hull[1:]), 1.0])
    rates = np.clip(rates, 0.0, 1.0)
    slopes, intercepts = np.array(hull).T
    most = (np.multiply.outer(rates, slopes) + intercepts).min(axis=1)
    return rates, np.minimum(most * (1 + _ROUNDING), 1.0)


def _lines(profile: PrivacyProfile) -> list[tuple[float, float]]:
    """Returns slopes, decreasing, and intercepts of lines that no attack is above."""
    known = profile.epsilons < _MOST_EPSILON
    epsilons, add, remove = (x[known] for x in (profile.epsilons, profile.add, profile.remove))
    # TPR <= e^epsilon FPR + delta, and 1 - FPR <= e^epsilon (1 - TPR) + delta.
    ratios = np.exp(-epsilons)
    slopes = np.concatenate([np.exp(epsilons), ratios, [0.0]])
    intercepts = np.concatenate([remove, -np.expm1(-epsilons) + ratios * add, [1.0]])
    least: dict[float, float] = {}
    for slope, intercept in zip(slopes.tolist(), intercepts.tolist(), strict=True):
        least[slope] = min(intercept, least.get(slope, math.inf))
    return sorted(least.items(), reverse=True)


def _meet(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Returns the false positive rate where two lines meet."""
    return (other[1] - one[1]) / (one[0] - other[0])


def percent(rate: float) -> str:
    """Formats a rate in percent with three digits, rounded up."""
    return f"{math.ceil(rate * 1e4 - 1e-7) / 100:.4g}%"
