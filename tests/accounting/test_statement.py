"""The statement says what the ledger says, and what it does not cover."""

import json
import math
import re

import dp_accounting
import pytest

from tfdp.accounting import PrivacyLedger, SelectiveReleaseDpEvent, privacy_statement
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.statement import statement_of

_NUMBER = r"(inf|\d[\d.]*(?:e[+-]?\d+)?)"


def _ledger(q=256 / 60000, sigma=1.1, steps=3500, tau=0.0):
    ledger = PrivacyLedger()
    ledger.record(sampled_gaussian(q, sigma), steps, truncation_probability=tau)
    return ledger


def _text(*args, **kwargs):
    return " ".join(privacy_statement(*args, **kwargs).split())


def _find(pattern, text):
    return [float(number) for number in re.search(pattern, text).groups()]


def _assert_rounded_up(printed, exact):
    assert exact <= printed <= exact * (1 + 1e-5)


@pytest.mark.parametrize(("sigma", "steps"), [(1.1, 3500), (0.7, 100), (30.0, 1)])
def test_numbers_are_those_of_the_ledger(sigma, steps):
    ledger = _ledger(sigma=sigma, steps=steps)
    bound, text = ledger.epsilon(1e-5), _text(ledger, 1e-5)
    printed, delta = _find(rf"epsilon = {_NUMBER} at delta = {_NUMBER}\. ", text)
    _assert_rounded_up(printed, bound.epsilon)
    assert delta == 1e-5
    rdp, pld = _find(rf"epsilon is {_NUMBER} by RDP and {_NUMBER} by PLD accounting", text)
    _assert_rounded_up(rdp, bound.by_accountant["RDP"])
    _assert_rounded_up(pld, bound.by_accountant["PLD"])
    assert f"{bound.accountant}'s is reported" in text
    assert _find(rf"Released: {_NUMBER} steps? of", text) == [steps]
    assert _find(rf"noise multiplier {_NUMBER},", text) == [sigma]
    assert _find(rf"probability q = {_NUMBER}\.", text) == [float(f"{256 / 60000:.6g}")]


def test_says_relation_unit_and_limits():
    text = _text(_ledger(), 1e-5)
    for phrase in (
        "Neighboring relation: zero-out",
        "Unit of privacy: one training example",
        "Poisson-sampled",
        "hyperparameters",
        "metrics",
        "preprocessing",
        "floating-point",
    ):
        assert phrase in text


def test_lines_are_short_and_numbers_whole():
    statement = privacy_statement(_ledger(), 1e-5, dataset_size=60000)
    assert max(map(len, statement.splitlines())) <= 88
    assert not re.search(r"\de-\n", statement)


def test_dataset_size_adds_batch_size_and_a_check_of_delta():
    text = _text(_ledger(), 1e-5, dataset_size=60000)
    assert _find(rf"of {_NUMBER} examples, {_NUMBER} expected per batch", text) == [60000, 256]
    assert "Warning" not in text
    assert "Warning: delta = 0.001 is not below 1 / 60000" in _text(
        _ledger(), 1e-3, dataset_size=60000
    )


def test_notes_and_truncation_are_printed():
    ledger = _ledger(tau=1e-17)
    ledger.add_note("fixed noise seed: for tests only")
    text = _text(ledger, 1e-5)
    assert "Notes: - fixed noise seed: for tests only" in text
    assert _find(rf"at most {_NUMBER} over all steps", text) == [3.5e-14]
    assert "Notes:" not in _text(_ledger(), 1e-5)


def test_other_terms_are_those_of_the_ledger():
    ledger, text = _ledger(tau=1e-17), _text(_ledger(tau=1e-17), 1e-5)
    curve = ledger.trade_off()
    pattern = rf"other deltas: {_NUMBER} at 0.001, {_NUMBER} at 1e-07, {_NUMBER} at 1e-09\."
    for printed, delta in zip(_find(pattern, text), (1e-3, 1e-7, 1e-9), strict=True):
        _assert_rounded_up(printed, ledger.epsilon(delta).epsilon)
    _assert_rounded_up(
        *_find(rf"mu = {_NUMBER} up to delta = 1e-05:", text), curve.gaussian_dp(1e-5).mu
    )
    (percent,) = _find(rf"advantage over the false positive rate: at most {_NUMBER}%\.", text)
    assert 100 * curve.advantage <= percent <= 100 * curve.advantage + 0.01
    facts = statement_of(ledger, 1e-5).to_dict()
    assert json.loads(json.dumps(facts)) == facts and facts["group_size"] == 1
    for rate, most in facts["attack_true_positive_rates"].items():
        _assert_rounded_up(most, curve.true_positive_rate(float(rate)))


def test_nothing_released():
    text = _text(PrivacyLedger(), 1e-5)
    assert "epsilon = 0 at delta = 1e-05" in text
    assert "nothing yet, in 0 steps" in text


def test_no_guarantee():
    text = _text(_ledger(sigma=0.0), 1e-5)
    assert text.startswith("No differential privacy: epsilon = inf")
    assert "epsilon is inf by RDP and inf by PLD" in text


def test_several_releases_and_other_events():
    ledger = _ledger(steps=5)
    ledger.record(dp_accounting.GaussianDpEvent(8.0))
    ledger.record(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(9.0)))
    text = _text(ledger, 1e-5)
    assert "1 step of GaussianDpEvent(noise_multiplier=8.0)" in text
    assert "1 step of LaplaceDpEvent(noise_multiplier=9.0), on Poisson-sampled" in text
    assert re.search(rf"epsilon is {_NUMBER} by PLD accounting", text)


class _Optimizer:
    @property
    def ledger(self):
        return _ledger()


class _Model:
    optimizer = _Optimizer()


class _Unready:
    @property
    def ledger(self):
        raise ValueError("Argument `dataset_size` must be given.")


def test_takes_optimizers_and_models():
    expected = privacy_statement(_ledger(), 1e-5)
    assert privacy_statement(_Optimizer(), 1e-5) == expected
    assert privacy_statement(_Model(), 1e-5) == expected


def test_refuses_other_arguments():
    for other in (None, 3, dp_accounting.rdp.RdpAccountant()):
        with pytest.raises(TypeError, match="Argument `ledger` must be a PrivacyLedger"):
            privacy_statement(other, 1e-5)
    with pytest.raises(ValueError, match="Argument `dataset_size` must be given"):
        privacy_statement(_Unready(), 1e-5)
    with pytest.raises(ValueError, match="Argument `delta`"):
        privacy_statement(_ledger(), math.nan)
    with pytest.raises(ValueError, match="Argument `dataset_size` must be a positive integer"):
        privacy_statement(_ledger(), 1e-5, dataset_size=0)


def test_unsupported_releases_raise():
    ledger = PrivacyLedger()
    ledger.record(dp_accounting.UnsupportedDpEvent())
    with pytest.raises(dp_accounting.UnsupportedEventError):
        privacy_statement(ledger, 1e-5)


# Selective release.


def _selective(mode, tau=0.0, count=300):
    ledger = PrivacyLedger(selective_release=mode)
    event = SelectiveReleaseDpEvent(
        sampled_gaussian(2048 / 60000, 4.0), sampled_gaussian(256 / 60000, 1.3), -1.0
    )
    ledger.record(event, count, truncation_probability=tau)
    return ledger


def test_describes_selective_release_and_what_is_assumed():
    ledger = _selective("conditional", tau=1e-15)
    text = _text(ledger, 1e-5, dataset_size=60000)
    assert _find(rf"epsilon = {_NUMBER} at delta", text)[0] >= ledger.epsilon(1e-5).epsilon
    assert "300 accepted updates of selective release" in text
    assert _find(rf"noise multiplier {_NUMBER},", text) == [4.0]
    assert _find(rf"{_NUMBER} expected per batch", text) == [2048]
    assert _find(rf"sampled with q = {_NUMBER}, plus noise of multiplier {_NUMBER},", text) == [
        float(f"{256 / 60000:.6g}"),
        1.3,
    ]
    assert "is below -1 times the clipping bound" in text
    assert (
        "only accepted updates are observable: rejected attempts, their number and the time they "
        "took are not released" in text
    )
    assert _find(rf"or that the cap on attempts was reached, at most {_NUMBER} over", text) == [
        3e-13
    ]


def test_counts_attempts_where_everything_is_observable():
    text = _text(_selective("per_attempt", tau=1e-15, count=1), 1e-5)
    assert "1 attempt of selective release" in text
    assert "rejected attempts, their number and the time they took may be released" in text
    assert "cap on attempts" not in text and "cut to its fixed size, at most" in text


def test_observability_is_not_mentioned_without_selective_release():
    assert "selective" not in _text(_ledger(tau=1e-17), 1e-5)
    assert "attempts" not in _text(_ledger(tau=1e-17), 1e-5)
