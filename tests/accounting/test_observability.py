"""What can be observed of selective release is one of two words, wherever it is an argument."""

import contextlib
import importlib
import inspect
import pkgutil

import dp_accounting
import pytest

import tfdp
from tests.front_ends import needs_keras_3
from tfdp.accounting import (
    PldAccountant,
    PrivacyLedger,
    RdpAccountant,
    bounds,
    calibrate_selective_release,
    ledger,
    observability,
    trade_off,
)
from tfdp.accounting.budget import Budget
from tfdp.training.selective.progress import Progress

EVENT = dp_accounting.GaussianDpEvent(1.0)


def _optimizer(make, value):
    return make(
        1.0,
        1.0,
        sampling={"dataset_size": 64, "expected_batch_size": 16},
        validation_batch_size=8,
        validation_noise_multiplier=1.3,
        selective_release=value,
    )


def _calibrate(value):
    return calibrate_selective_release(
        target_epsilon=1.0,
        delta=1e-5,
        updates=10,
        noise_multiplier=4.0,
        sampling_probability=0.1,
        validation_sampling_probability=0.1,
        selective_release=value,
    )


# All that takes a word for what can be observed, called with it.
_TAKERS = {
    "tfdp.accounting.accountants.RdpAccountant": lambda v: RdpAccountant(selective_release=v),
    "tfdp.accounting.accountants.PldAccountant": lambda v: PldAccountant(selective_release=v),
    "tfdp.accounting.bounds.tightest_epsilon": lambda v: bounds.tightest_epsilon([], 0.1, v),
    "tfdp.accounting.bounds.epsilon_interval": lambda v: bounds.epsilon_interval([], 0.1, v),
    "tfdp.accounting.bounds.rdp_epsilon": lambda v: bounds.rdp_epsilon([], 0.1, v),
    "tfdp.accounting.bounds.rdp_epsilon_at": lambda v: bounds.rdp_epsilon_at(2.0, [], 0.1, v),
    "tfdp.accounting.bounds.rdp_order": lambda v: bounds.rdp_order([], 0.1, v),
    "tfdp.accounting.bounds.pld_epsilon": lambda v: bounds.pld_epsilon([], 0.1, v),
    "tfdp.accounting.bounds.privacy_profile": lambda v: bounds.privacy_profile([], v),
    "tfdp.accounting.budget.Budget": lambda v: Budget(1.0, 0.1, (), v),
    "tfdp.accounting.ledger.PrivacyLedger": lambda v: PrivacyLedger(selective_release=v),
    "tfdp.accounting.ledger.as_seen": lambda v: ledger.as_seen(EVENT, v, PrivacyLedger()),
    "tfdp.accounting.ledger.compose_ledgers": lambda v: ledger.compose_ledgers([], v),
    "tfdp.accounting.selective_calibration.calibrate_selective_release": _calibrate,
    "tfdp.accounting.trade_off.trade_off_of": lambda v: trade_off.trade_off_of([], v),
    "tfdp.training.selective.progress.Progress": lambda v: Progress(1, 1, v),
    "tfdp.keras3.dpsur.DPSURSGD": lambda v: _optimizer(tfdp.keras3.DPSURSGD, v),
    "tfdp.keras3.dpsur.DPSURAdam": lambda v: _optimizer(tfdp.keras3.DPSURAdam, v),
    "tfdp.keras3.dpsur.DPSURSignSGD": lambda v: _optimizer(tfdp.keras3.DPSURSignSGD, v),
    "tfdp.keras3.dpsur.DPSURSignAdam": lambda v: _optimizer(tfdp.keras3.DPSURSignAdam, v),
    "tfdp.keras2.dpsur.DPSURSGD": lambda v: _optimizer(tfdp.DPSURSGD, v),
    "tfdp.keras2.dpsur.DPSURAdam": lambda v: _optimizer(tfdp.DPSURAdam, v),
    "tfdp.keras2.dpsur.DPSURSignSGD": lambda v: _optimizer(tfdp.DPSURSignSGD, v),
    "tfdp.keras2.dpsur.DPSURSignAdam": lambda v: _optimizer(tfdp.DPSURSignAdam, v),
    "tfdp.step.selective.SelectiveUpdateMixin": lambda v: _optimizer(tfdp.DPSURSGD, v),
}
_NAMES = [
    pytest.param(name, marks=needs_keras_3) if name.startswith("tfdp.keras3.") else name
    for name in _TAKERS
]


def _own(owner, module):
    """Public functions and classes that a module, or public methods that a class, defines."""
    for name, member in vars(owner).items():
        own = getattr(member, "__module__", None) == module
        if own and callable(member) and not name.startswith("_"):
            yield f"{owner.__name__}.{name}", member


@needs_keras_3
def test_every_argument_for_what_can_be_observed_is_called_here():
    found = set()
    for info in pkgutil.walk_packages(tfdp.__path__, "tfdp."):
        for name, member in _own(importlib.import_module(info.name), info.name):
            functions = [(name, member)]
            if inspect.isclass(member):
                functions = [(name, member.__init__), *_own(member, info.name)]
            found |= {n for n, f in functions if "selective_release" in _parameters(f)}
    assert found == set(_TAKERS)


def _parameters(function):
    with contextlib.suppress(TypeError, ValueError):  # Not of Python.
        return inspect.signature(function).parameters
    return ()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", _NAMES)
def test_no_argument_accepts_the_published_cost(name):
    _TAKERS[name]("conditional")
    with pytest.raises(ValueError, match=r"'per_attempt'\. Received: .*='published'"):
        _TAKERS[name]("published")


@pytest.mark.slow
@pytest.mark.parametrize("name", _TAKERS)
def test_mutant_that_accepts_the_published_cost_is_caught(name, monkeypatch):
    modes = (*observability.OBSERVABILITY, "published")
    monkeypatch.setattr(observability, "OBSERVABILITY", modes)
    monkeypatch.setattr("tfdp.step.selective.OBSERVABILITY", modes)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_no_argument_accepts_the_published_cost(name)


def test_the_refusal_says_why_and_what_to_do():
    with pytest.raises(ValueError, match=r"not an upper bound on epsilon\. Replace it by 'cond"):
        observability.check_observability("published")
    with pytest.raises(ValueError) as refused:
        observability.check_observability("hidden")
    assert "upper bound" not in str(refused.value)
