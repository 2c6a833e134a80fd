"""The statement says what the ledger says, and what it does not cover."""

import math
import re

import dp_accounting
import pytest

from tfdp.accounting import PrivacyLedger, privacy_statement
from tfdp.accounting.event_codec import sampled_gaussian

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
    assert _find(rf"probability q = {_NUMBER}\.", text) == [256 / 60000]


def test_says_relation_unit_and_limits():
    text = _text(_ledger(), 1e-5)
    for phrase in (
        "Neighbouring relation: add or remove one",
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
