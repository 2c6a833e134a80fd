"""Bounds on the attacks that are possible after what was released.

The attack tells, from all that was released, whether an example was trained on. Its false positive
rate is the probability that it says so of an example that contributed nothing, its true positive
rate that it says so of one that was there. Whatever the attacker knows besides, both rates obey
every guarantee (epsilon, delta) of the training.
"""

import dataclasses
import math
from collections.abc import Sequence

import dp_accounting

from tfdp.accounting import bounds
from tfdp.accounting.ledger import PrivacyLedger
from tfdp.accounting.sampling import EXAMPLE

# Error rates of which attacks are usually stated.
FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
# Guarantees are taken at parts of the epsilon at this delta. Any guarantee gives a bound.
_DELTA = 1e-5
_PARTS = 6
_DELTAS = (0.1, 0.01, 1e-3)


@dataclasses.dataclass(frozen=True)
class AttackRates:
    """Upper bounds on what any attack on one unit of privacy can reach.

    Attributes:
      advantage: True positive rate minus false positive rate.
      true_positive_rates: By false positive rate.
      unit: The unit of privacy, "example" or "user".
    """

    advantage: float
    true_positive_rates: dict[float, float]
    unit: str = EXAMPLE

    @property
    def accuracy(self) -> float:
        """The share of right answers if the example was there with probability 1/2."""
        return (1 + self.advantage) / 2

    @property
    def sentence(self) -> str:
        """The accuracy in words."""
        return (
            "An attacker who knows all else, and guesses from what was released whether one "
            f"{self.unit} was there, is right at most {percent(self.accuracy)} of the time (chance "
            "is 50%)."
        )

    def __str__(self) -> str:
        rates = ", ".join(
            f"{percent(most)} at {'a false positive rate of ' * (not number)}{percent(rate)}"
            for number, (rate, most) in enumerate(self.true_positive_rates.items())
        )
        sentence = self.sentence[0].lower() + self.sentence[1:]
        return f"Attacks: {sentence} True positive rate, at most: {rates}."


def attack_rates(ledger: PrivacyLedger) -> AttackRates:
    """Returns upper bounds on the rates of any attack on one unit of privacy.

    Guarantees: the bounds hold for every attack, under the assumptions of the ledger's epsilon.

    Args:
      ledger: What has been released.

    Raises:
      dp_accounting.UnsupportedEventError: No accountant supports what was released.

    Source: Kairouz, Oh, Viswanath 2015, "The Composition Theorem for Differential Privacy",
    Theorem 2.1: FPR + e^epsilon FNR >= 1 - delta, and the same with both rates exchanged.

    Example:
      >>> ledger = PrivacyLedger()
      >>> ledger.record(
      ...     dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)
      >>> rates = attack_rates(ledger)
      >>> round(rates.advantage, 3), round(rates.true_positive_rates[0.01], 3)
      (0.161, 0.029)
    """
    guarantees = _guarantees(ledger)
    return AttackRates(
        min(_advantage(*one) for one in guarantees),
        {
            rate: min(_true_positive_rate(rate, *one) for one in guarantees)
            for rate in FALSE_POSITIVE_RATES
        },
        ledger.unit,
    )


def _guarantees(ledger: PrivacyLedger) -> Sequence[tuple[float, float]]:
    """Returns pairs (epsilon, delta) that all hold."""
    releases, mode = ledger.releases, ledger.selective_release
    near = ledger.epsilon(_DELTA).epsilon
    if math.isinf(near):
        return [(math.inf, 0.0)]
    try:
        parts = [near * part / _PARTS for part in range(_PARTS)]
        found = [(epsilon, bounds.pld_delta(releases, epsilon, mode)) for epsilon in parts]
    except dp_accounting.UnsupportedEventError:
        found = [(ledger.epsilon(delta).epsilon, delta) for delta in _DELTAS]
    return [*found, (near, _DELTA)]


def _advantage(epsilon: float, delta: float) -> float:
    # Both inequalities added up; tanh(epsilon / 2) = (e^epsilon - 1) / (e^epsilon + 1).
    ratio = math.exp(-epsilon)
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta * ratio / (1 + ratio))


def _true_positive_rate(rate: float, epsilon: float, delta: float) -> float:
    if epsilon == math.inf:
        return 1.0
    most = math.exp(min(epsilon, 700.0)) * rate + delta
    most = min(1.0, most, 1 - math.exp(-epsilon) * max(0.0, 1 - rate - delta))
    return max(rate, most)  # It may be below by rounding.


def percent(rate: float) -> str:
    """Formats a rate in percent with three digits, rounded up."""
    return f"{math.ceil(rate * 1e4 - 1e-7) / 100:.4g}%"
