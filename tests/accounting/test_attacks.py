"""Bounds on attacks: they hold for the best attack on a mechanism, and are near it."""

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tfdp.accounting import PrivacyLedger, attacks, event_codec
from tfdp.accounting.attacks import attack_rates
from tfdp.accounting.bounds import Release

STEP = event_codec.sampled_gaussian(0.01, 1.0)


def gaussian(noise, steps=1):
    """The ledger of a Gaussian mechanism, whose best attack is a threshold."""
    ledger = PrivacyLedger()
    ledger.record(event_codec.sampled_gaussian(1.0, noise), steps)
    return ledger


def reached(mu, rate):
    return stats.norm.cdf(stats.norm.ppf(rate) + mu)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_the_best_attack_on_gaussian_noise(mu):
    rates = attack_rates(gaussian(1 / mu))
    best = 2 * stats.norm.cdf(mu / 2) - 1
    assert best * (1 - 1e-6) <= rates.advantage <= best * 1.001
    for rate, most in rates.true_positive_rates.items():
        assert reached(mu, rate) <= most <= 1.15 * reached(mu, rate)


def holds(mu=1.0):
    rates = attack_rates(gaussian(1 / mu))
    held = [reached(mu, rate) <= most for rate, most in rates.true_positive_rates.items()]
    return all(held) and rates.advantage >= 2 * stats.norm.cdf(mu / 2) - 1


@pytest.mark.parametrize(
    ("name", "mutant"),
    {
        "_advantage": lambda epsilon, delta: np.tanh(epsilon / 2),
        "_true_positive_rate": lambda rate, epsilon, delta: np.exp(epsilon) * rate,
    }.items(),
)
def test_mutants_without_delta_are_caught(name, mutant, monkeypatch):
    assert holds()
    monkeypatch.setattr(attacks, name, mutant)
    assert not holds()


def test_nothing_released_and_no_noise():
    nothing = attack_rates(PrivacyLedger())
    assert nothing.advantage == 0 and nothing.accuracy == 0.5
    assert all(rate == most for rate, most in nothing.true_positive_rates.items())
    ledger = PrivacyLedger()
    ledger.record(dp_accounting.NonPrivateDpEvent())
    everything = attack_rates(ledger)
    assert everything.advantage == 1 and set(everything.true_positive_rates.values()) == {1.0}


def test_what_has_no_dominating_pair_is_bounded_by_its_epsilon(monkeypatch):
    def unsupported(*_):
        raise dp_accounting.UnsupportedEventError("No dominating pair is known.")

    monkeypatch.setattr(attacks.bounds, "pld_delta", unsupported)
    assert holds()
    selected = [Release(dp_accounting.dp_event.RepeatAndSelectDpEvent(STEP, 10, 1), 1)]
    monkeypatch.undo()
    with pytest.raises(dp_accounting.UnsupportedEventError, match="No dominating pair is known"):
        attacks.bounds.pld_delta(selected, 1.0)


def test_truncation_counts():
    ledger = PrivacyLedger()
    ledger.record(STEP, 10, truncation_probability=1e-4)
    plain = PrivacyLedger()
    plain.record(STEP, 10)
    assert attack_rates(ledger).advantage >= attack_rates(plain).advantage + 1e-3


def test_in_words():
    text = str(attacks.AttackRates(0.11309, {0.1: 0.5, 0.001: 0.002601}, "user"))
    assert "whether one user was there, is right at most 55.66% of the time" in text
    assert text.endswith("at most: 50% at a false positive rate of 10%, 0.27% at 0.1%.")
