"""The trade-off curve: above the best attack on a mechanism, and near it."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from tests.accounting import reference
from tfdp.accounting import PrivacyLedger, composition, event_codec, trade_off
from tfdp.accounting import bounds as bounds_module

STEP = event_codec.sampled_gaussian(0.01, 1.0)
RATES = np.concatenate([np.geomspace(1e-9, 0.5, 60), 1 - np.geomspace(1e-9, 0.5, 60)])


def ledger_of(q, noise, steps=1):
    ledger = PrivacyLedger()
    ledger.record(event_codec.sampled_gaussian(q, noise), steps)
    return ledger


def reached(mu, rate):
    """The true positive rate of the best attack on a Gaussian mechanism: a threshold."""
    return special.ndtr(special.ndtri(rate) + mu)


def sampled_attacks(q, sigma):
    """The exact curve of one sampled Gaussian: thresholds on the noisy sum."""
    z = np.linspace(-8, 8, 20_001) * sigma
    false = special.ndtr(-z / sigma)
    return false, (1 - q) * false + q * special.ndtr((1 - z) / sigma)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_the_best_attack_on_gaussian_noise(mu):
    curve = ledger_of(1.0, 1 / mu).trade_off()
    best = 2 * stats.norm.cdf(mu / 2) - 1
    assert best <= curve.advantage <= best * (1 + 1e-4)
    exact, most = reached(mu, RATES), curve.true_positive_rate(RATES)
    assert np.all(exact <= most)
    usual = RATES > 1e-6
    assert np.all(most[usual] <= 1.002 * exact[usual])
    for delta in (1e-3, 1e-6, 1e-10):
        found = curve.gaussian_dp(delta)
        # The guarantee that mu states, and that it is nearly the exact mu.
        assert np.all(exact <= reached(found.mu, RATES) + delta)
        assert (1 - 3 * delta) * mu - 3 * delta <= found.mu <= 1.001 * mu
        assert found.regret < 1e-3


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.6), (0.9, 2.0)])
def test_one_sampled_step(q, sigma):
    curve = ledger_of(q, sigma).trade_off()
    false, true = sampled_attacks(q, sigma)
    most = curve.true_positive_rate(false)
    assert np.all(true <= most * (1 + 1e-12)) and np.all(most <= 1.004 * true + 1e-10)
    assert curve.advantage == pytest.approx(reference.hockey_stick(q, sigma, 0.0), rel=1e-3)
    for delta in (1e-3, 1e-6):
        mu = curve.gaussian_dp(delta).mu
        assert np.all(true <= reached(mu, false) + delta)
        # No smaller mu holds for attacks on whichever data set comes first.
        assert np.any(true > reached(0.995 * mu, false) + delta) or np.any(
            1 - false > reached(0.995 * mu, 1 - true) + delta
        )


def test_composition_against_simulated_attacks():
    """The likelihood ratio of 200 steps, an attack that can really be run."""
    q, sigma, steps, runs = 0.05, 1.0, 200, 4000
    rng = np.random.default_rng(0)

    def losses(with_it):
        shift = (rng.random([runs, steps]) < q) * float(with_it)
        z = rng.normal(size=[runs, steps]) * sigma + shift
        return np.log1p(q * np.expm1((2 * z - 1) / (2 * sigma**2))).sum(axis=1)

    out, found = np.sort(losses(False)), losses(True)
    curve = ledger_of(q, sigma, steps).trade_off()
    for rate in (0.01, 0.1, 0.4):
        true = np.mean(found > np.quantile(out, 1 - rate))
        deviation = 6.5 * (math.sqrt(true / runs) + math.sqrt(rate / runs) * 10)
        most = curve.true_positive_rate(rate)
        assert true - deviation <= most <= true + deviation


def test_the_published_mu_of_a_training():
    """Noise 9.4, q 0.328, 2000 steps: mu 1.5686 and regret 0.0010 by the package `gdpnum`."""
    found = ledger_of(0.328, 9.4, 2000).trade_off().gaussian_dp(1e-9)
    assert found.mu == pytest.approx(1.5686, rel=1e-3)
    assert found.regret == pytest.approx(0.0010, abs=2e-4)


def test_mu_is_not_known_below_the_delta_of_the_curve():
    ledger = PrivacyLedger()
    ledger.record(STEP, 10, truncation_probability=1e-8)
    assert math.isinf(ledger.trade_off().gaussian_dp(1e-8).mu)
    assert "no mu is known up to delta = 1e-08" in str(ledger.trade_off().gaussian_dp(1e-8))
    assert math.isfinite(ledger.trade_off().gaussian_dp(1e-5).mu)


def test_few_likely_losses_have_a_large_regret():
    found = ledger_of(1e-3, 0.3).trade_off().gaussian_dp(1e-6)
    assert found.regret > 0.01 and "the trade-off curve is well below it" in str(found)
    close = ledger_of(1.0, 1.0).trade_off().gaussian_dp(1e-6)
    assert "mu = 1.0" in str(close) and "mu stands for the whole trade-off curve" in str(close)


# Mutants.


def holds(mu=1.0):
    curve = ledger_of(1.0, 1 / mu).trade_off()
    best = 2 * stats.norm.cdf(mu / 2) - 1
    return np.all(reached(mu, RATES) <= curve.true_positive_rate(RATES)) and (
        curve.advantage >= best
    )


def test_mutants_of_the_lines_are_caught(monkeypatch):
    assert holds()
    whole = trade_off._lines

    def without_delta(profile):
        nothing = np.zeros_like(profile.add)
        return whole(composition.PrivacyProfile(profile.epsilons, nothing, nothing))

    def half_delta(profile):
        add, remove = profile.add / 2, profile.remove / 2
        return whole(composition.PrivacyProfile(profile.epsilons, add, remove))

    for mutant in (without_delta, half_delta):
        monkeypatch.setattr(trade_off, "_lines", mutant)
        assert not holds()


def test_mutant_with_the_directions_exchanged_is_caught(monkeypatch):
    whole = trade_off._lines
    monkeypatch.setattr(
        trade_off,
        "_lines",
        lambda p: whole(composition.PrivacyProfile(p.epsilons, p.remove, p.add)),
    )
    with pytest.raises(AssertionError):
        test_one_sampled_step(0.01, 1.0)


def test_mutant_whose_mu_takes_delta_twice_is_caught(monkeypatch):
    whole = trade_off.TradeOff.gaussian_dp
    monkeypatch.setattr(
        trade_off.TradeOff, "gaussian_dp", lambda curve, delta: whole(curve, 2 * delta)
    )
    with pytest.raises(AssertionError):
        test_one_sampled_step(0.3, 0.6)


def test_mutant_profile_of_deltas_at_larger_epsilons_is_caught(monkeypatch):
    """The sum's deltas are taken a grid point too far."""
    deltas = composition._deltas
    monkeypatch.setattr(composition, "_deltas", lambda *given: np.append(deltas(*given)[1:], 0.0))
    assert not holds()


# Other releases.


def test_nothing_released_and_no_noise():
    nothing = PrivacyLedger().trade_off()
    assert nothing.advantage == 0 and nothing.accuracy == 0.5
    assert all(rate == most for rate, most in nothing.at_usual_rates.items())
    assert nothing.gaussian_dp(1e-5).mu == 0
    ledger = PrivacyLedger()
    ledger.record(dp_accounting.NonPrivateDpEvent())
    everything = ledger.trade_off()
    assert everything.advantage == 1 and set(everything.at_usual_rates.values()) == {1.0}
    assert math.isinf(everything.gaussian_dp(1e-5).mu)


def test_what_has_no_dominating_pair_is_bounded_by_its_epsilons(monkeypatch):
    def unsupported(*_):
        raise dp_accounting.UnsupportedEventError("No dominating pair is known.")

    monkeypatch.setattr(bounds_module, "_PROFILE_DELTAS", (1e-2, 1e-6))
    monkeypatch.setattr(bounds_module.accountants.PldAccountant, "get_profile", unsupported)
    assert holds()
    monkeypatch.undo()
    monkeypatch.setattr(bounds_module, "_PROFILE_DELTAS", (1e-2,))
    selected = PrivacyLedger()
    selected.record(dp_accounting.dp_event.RepeatAndSelectDpEvent(STEP, 10, 1))
    once = ledger_of(0.01, 1.0).trade_off()
    assert selected.trade_off().advantage > once.advantage


def test_truncation_counts():
    ledger = PrivacyLedger()
    ledger.record(STEP, 10, truncation_probability=1e-4)
    plain = ledger_of(0.01, 1.0, 10)
    assert ledger.trade_off().advantage >= plain.trade_off().advantage + 1e-3


def test_bad_rates_are_refused():
    curve = PrivacyLedger().trade_off()
    for bad in (-0.1, 1.1, math.nan, "0.1", None, [0.1, 2.0], [0.1, [0.1, 0.2]]):
        with pytest.raises(ValueError, match="Argument `false_positive_rate` must be a number in"):
            curve.true_positive_rate(bad)
    with pytest.raises(ValueError, match="Argument `delta`"):
        curve.gaussian_dp(0.0)


def test_in_words():
    curve = trade_off.TradeOff(
        np.array([0.0, 0.001, 0.1, 1.0]), np.array([0.0, 0.002601, 0.5, 1.0]), "user"
    )
    text = str(curve)
    assert "whether one user was there, is right at most 70% of the time" in text
    assert "at most: 50% at a false positive rate of 10%" in text and "0.27% at 0.1%." in text
    assert text.endswith("advantage over the false positive rate: at most 40%.")
