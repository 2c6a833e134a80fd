"""The random number of runs of a private selection, and the privacy of the best of them."""

import dataclasses
import decimal
import math
import os
from collections.abc import Callable

import dp_accounting
import numpy as np
import scipy.optimize
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp.base import validation

DISTRIBUTIONS = ("logarithmic", "geometric", "negative_binomial", "poisson")

_MOST_MEAN = 1e6
_MOST_RUNS = 10**6  # Of which the probability is computed, one after the other.
# A draw differs from the stated distribution with a probability far below any delta.
_UNIFORM_BYTES = 25
_DIGITS = 80
# Relative rounding of the rate: down for what is drawn, and up for what is accounted for.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Repetitions:
    """Distribution of the number of runs of which a private selection returns the best.

    With the same mean, "logarithmic" costs the least privacy and has the heaviest tail: it often
    makes one or two runs, and sometimes very many. "poisson" is the most concentrated, and costs
    the most when its mean is large; it makes no run with probability exp(-mean).

    Attributes:
      distribution: "logarithmic", "geometric", "negative_binomial" (truncated: at least one run),
        or "poisson".
      mean: Mean number of runs, in [1, 10^6].
      shape: The parameter eta of "negative_binomial", in [0.001, 1000], and of no other. Shape 1 is
        the geometric distribution; towards 0 it becomes the logarithmic one.

    Raises:
      ValueError: An argument is out of its range.

    Source: Papernot and Steinke 2022, "Hyperparameter Tuning with Renyi Differential Privacy",
    Definition 1 and Section 3.3.

    Example:
      >>> repetitions = Repetitions("geometric", mean=10)
      >>> round(repetitions.probability(1), 6), repetitions.draw() >= 1
      (0.1, True)
    """

    distribution: str
    mean: float
    shape: float | None = None

    def __post_init__(self) -> None:
        validation.one_of("distribution", self.distribution, DISTRIBUTIONS)
        if not (validation.is_number(self.mean) and 1 <= self.mean <= _MOST_MEAN):
            raise validation.error("mean", f"a number in [1, {_MOST_MEAN:g}]", self.mean)
        if self.distribution != "negative_binomial":
            if self.shape is not None:
                raise validation.error("shape", "None without 'negative_binomial'", self.shape)
        elif not (validation.is_number(self.shape) and 1e-3 <= (self.shape or 0) <= 1e3):
            raise validation.error("shape", "a number in [0.001, 1000]", self.shape)

    @classmethod
    def of_event(cls, event: RepeatAndSelectDpEvent) -> "Repetitions":
        """Returns the distribution that an event is of.

        Raises:
          ValueError: Its mean or its shape is out of range.
        """
        return cls.of_shape(event.mean, event.shape)

    @classmethod
    def of_shape(cls, mean: float, eta: float) -> "Repetitions":
        """Returns the distribution with this mean whose `eta` is this number.

        Raises:
          ValueError: The mean or the number is out of range.
        """
        named = {0.0: "logarithmic", 1.0: "geometric", math.inf: "poisson"}.get(eta)
        if named is not None:
            return cls(named, mean)
        return cls("negative_binomial", mean, eta)

    def event(self, run: dp_accounting.DpEvent) -> RepeatAndSelectDpEvent:
        """Returns the event of a selection.

        Args:
          run: Event of one run, its private score included.
        """
        validation.instance("run", run, dp_accounting.DpEvent, "a dp_accounting.DpEvent")
        return RepeatAndSelectDpEvent(run, float(self.mean), self.eta)

    def draw(self) -> int:
        """Draws the number of runs from the operating system's entropy.

        The number is secret: nobody may see it, nor the time or the computation that it costs.
        What is drawn has the distribution stated up to a probability of 1e-50.
        """
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            uniform = int.from_bytes(os.urandom(_UNIFORM_BYTES), "little")
            left = decimal.Decimal(uniform) / 256**_UNIFORM_BYTES
            k, probability = self._first()
            ratio = self._ratio()
            while left >= probability:
                left -= probability
                probability *= ratio(k)
                k += 1
            return k

    def probability(self, runs: int) -> float:
        """Returns the probability of a number of runs.

        Args:
          runs: The number, from 0 to a million.

        Raises:
          ValueError: It is no such integer, or above a million.
        """
        runs = validation.integer("runs", runs, 0, _MOST_RUNS)
        with decimal.localcontext() as context:
            context.prec = _DIGITS
            k, probability = self._first()
            ratio = self._ratio()
            if runs < k:
                return 0.0
            while k < runs:
                probability *= ratio(k)
                k += 1
            return float(probability)

    def rdp(self, orders: np.ndarray, run_rdp: np.ndarray) -> np.ndarray:
        """Returns the Renyi-DP of the best run, from that of one run.

        Args:
          orders: Increasing Renyi orders, each > 1 [orders].
          run_rdp: RDP of one run at `orders`, upper bounds for both directions [orders].

        Source: Papernot and Steinke 2022, Theorem 2 (negative binomial) and Theorem 6 (Poisson,
        with the delta of Canonne, Kamath, Steinke 2020, Proposition 12).
        """
        if self.distribution == "poisson":
            shift = self.mean * _least_delta(orders, run_rdp, np.log1p(1 / (orders - 1)))
        else:
            rate = self._rate * (1 + 2 * _ROUNDING)
            shift = (self.eta + 1) * np.min((1 - 1 / orders) * run_rdp + rate / orders)
        best = run_rdp + shift + math.log(self.mean) / (orders - 1)
        return np.minimum.accumulate(best[::-1])[::-1]  # It does not decrease with the order.

    def profile_epsilon(
        self,
        epsilon_at: Callable[[float], float],
        delta_at: Callable[[float], float],
        delta: float,
    ) -> float:
        """Returns an epsilon of the best run, from the privacy profile of one run.

        Let q and q' be the distributions of a run's output on neighbors, F(y) and F'(y) the
        probabilities of an output worse than y, and f the generating function of the number of
        runs. The best run is y with density f'(F(y)) q(y). If f'(F(y)) <= r f'(F'(y)) for all y,
        then delta(epsilon) <= f'(1) delta_run(epsilon - log r), and f'(1) is the mean.

        - Negative binomial: f'(x) is proportional to (1 - (1 - gamma) x)^-(eta + 1). With
          1 - F' <= e^a (1 - F) + delta_run(a), log r = (eta + 1) a at the least a for which
          delta_run(a) <= (e^a - 1) gamma / (1 - gamma).
        - Poisson: f'(x) = mean * exp(mean * (x - 1)), and log r = mean * delta_run(0), because
          delta_run(0) is the total variation distance.

        Args:
          epsilon_at: Epsilon of one run at a delta, an upper bound for both directions.
          delta_at: Delta of one run at an epsilon >= 0, an upper bound for both directions.
          delta: The delta of the selection.

        Source: Koskela, Redberg, Wang 2024, "Privacy Profiles for Private Selection".
        """
        within = epsilon_at(delta / self.mean)
        if self.distribution == "poisson":
            return self.mean * delta_at(0.0) + within
        if self._rate == 0 or math.isinf(within):
            return within
        odds = 1 / math.expm1(self._rate * (1 + 2 * _ROUNDING))
        return (self.eta + 1) * _least_shift(delta_at, odds) + within

    @property
    def eta(self) -> float:
        """The shape; 0 for the logarithmic, infinity for the Poisson distribution."""
        named = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
        return named[self.distribution] if self.shape is None else float(self.shape)

    @property
    def _rate(self) -> float:
        """-log(gamma), rounded down: then mean and cost of what is drawn are no larger."""
        eta = self.eta

        def excess(log_rate: float) -> float:
            t = math.exp(log_rate)
            truncation = t if eta == 0 else -math.expm1(-eta * t) / eta
            return math.expm1(t) / truncation - self.mean

        low, high = math.log(1e-15), math.log(40.0)
        if excess(low) >= 0:
            return 0.0
        root = scipy.optimize.brentq(excess, low, high, xtol=1e-15, rtol=1e-14)
        return math.exp(root) * (1 - _ROUNDING)

    def _first(self) -> tuple[int, decimal.Decimal]:
        """Returns the least number of runs, and its probability."""
        if self.distribution == "poisson":
            return 0, (-decimal.Decimal(self.mean)).exp()
        rate = decimal.Decimal(self._rate)
        if rate == 0:
            return 1, decimal.Decimal(1)
        if self.eta == 0:
            return 1, (1 - (-rate).exp()) / rate
        eta = decimal.Decimal(self.eta)
        return 1, eta * (1 - (-rate).exp()) / ((rate * eta).exp() - 1)

    def _ratio(self) -> Callable[[int], decimal.Decimal]:
        """Returns the ratio of the probabilities of k + 1 and of k runs, as a function of k."""
        if self.distribution == "poisson":
            mean = decimal.Decimal(self.mean)
            return lambda k: mean / (k + 1)
        eta, heads = decimal.Decimal(self.eta), 1 - (-decimal.Decimal(self._rate)).exp()
        return lambda k: heads * (k + eta) / (k + 1)


def _least_delta(orders: np.ndarray, rdp: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Returns deltas at `epsilons` of what has this RDP."""
    distance = math.sqrt(-math.expm1(-float(rdp[0])))  # The bound of Bretagnolle and Huber.
    stable = orders > 1.01
    a, r = orders[stable], rdp[stable]
    logs = (a - 1) * (r + np.log1p(-1 / a) - epsilons[:, np.newaxis]) - np.log(a)
    return np.minimum(np.exp(np.minimum(logs.min(axis=1, initial=0.0), 0.0)), distance)


def _least_shift(delta_at: Callable[[float], float], odds: float) -> float:
    """Returns an a, near the least, for which delta_at(a) <= odds * (e^a - 1)."""

    def gap(a: float) -> float:
        return delta_at(a) - odds * math.expm1(a)

    high = 1.0
    while gap(high) > 0:
        high *= 2
        if high > 500:
            return math.inf
    low = high / 2
    while gap(low) <= 0:
        low, high = low / 2, low
        if low < 1e-9:
            return high
    root = float(scipy.optimize.brentq(gap, low, high, rtol=1e-4))
    while gap(root) > 0:
        root *= 1 + 2e-4
    return root
