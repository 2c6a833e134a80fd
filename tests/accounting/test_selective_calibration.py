"""Calibrated selective release meets the budget, and a little less privacy would not."""

import math

import pytest

from tfdp.accounting import (
    PrivacyLedger,
    SelectiveReleaseDpEvent,
    calibrate_selective_release,
)
from tfdp.accounting.bounds import Release
from tfdp.accounting.calibration import most_steps
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY
from tfdp.accounting.selective_release import (
    acceptance_bounds,
    default_max_attempts,
    selective_truncation_probability,
)

_N, _B, _V = 60000, 2048, 256
_BUDGET = {"target_epsilon": 1.0, "delta": 1e-5}
_SIZES = {"dataset_size": _N, "expected_batch_size": _B, "validation_batch_size": _V}
_NOISES = {"noise_multiplier": 4.0, "validation_noise_multiplier": 1.3}


def _event(noise, validation_noise, threshold=-1.0):
    return SelectiveReleaseDpEvent(
        sampled_gaussian(_B / _N, noise), sampled_gaussian(_V / _N, validation_noise), threshold
    )


def _tau(validation_noise, mode):
    if mode == "per_attempt":
        return 2 * TRUNCATION_PROBABILITY
    least, _ = acceptance_bounds(validation_noise)
    return selective_truncation_probability(
        TRUNCATION_PROBABILITY, TRUNCATION_PROBABILITY, least, default_max_attempts(least)
    )


def _epsilon(updates, noise, validation_noise, mode="conditional", ledger=None):
    copy = PrivacyLedger(selective_release=mode)
    for release in () if ledger is None else ledger.releases:
        copy.record(release.event, release.count, release.truncation_probability)
    copy.record(_event(noise, validation_noise), updates, _tau(validation_noise, mode))
    return copy.epsilon(1e-5).epsilon


@pytest.mark.parametrize("mode", ["conditional", "per_attempt"])
def test_updates_meet_the_target_and_one_more_does_not(mode):
    most = calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES, selective_release=mode)
    assert isinstance(most, int)
    assert _epsilon(most, 4.0, 1.3, mode) <= 1 < _epsilon(most + 1, 4.0, 1.3, mode)


def test_the_papers_updates_are_more_than_the_budget_allows():
    # Theorem 5.6 would allow 651: tests/experiments/dpsur/test_tables.py.
    assert 380 <= calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES) <= 395


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["conditional", "per_attempt"])
def test_noise_meets_the_target_and_less_does_not(mode):
    sigma = calibrate_selective_release(
        **_BUDGET, **_SIZES, updates=300, validation_noise_multiplier=1.3, selective_release=mode
    )
    assert _epsilon(300, sigma, 1.3, mode) <= 1 < _epsilon(300, 0.999 * sigma, 1.3, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["conditional", "per_attempt"])
def test_validation_noise_meets_the_target_and_less_does_not(mode):
    sigma = calibrate_selective_release(
        **_BUDGET, **_SIZES, updates=300, noise_multiplier=4.0, selective_release=mode
    )
    assert _epsilon(300, 4.0, sigma, mode) <= 1 < _epsilon(300, 4.0, 0.999 * sigma, mode)


def test_what_was_spent_before_counts():
    ledger = PrivacyLedger()
    ledger.record(sampled_gaussian(0.02, 3.0), 500)
    most = calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES, prior=ledger)
    assert _epsilon(most, 4.0, 1.3, ledger=ledger) <= 1
    assert _epsilon(most + 1, 4.0, 1.3, ledger=ledger) > 1
    assert most < calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES)


def test_agrees_with_most_steps():
    tau = _tau(1.3, "conditional")
    most = calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES)

    def releases(count):
        return [Release(_event(4.0, 1.3), count, tau)]

    assert most_steps(releases, PrivacyLedger(), 1.0, 1e-5) == most
    ledger = PrivacyLedger()
    ledger.record(_event(4.0, 1.3), 100, tau)
    assert most_steps(releases, ledger, 1.0, 1e-5) == most - 100


def test_sampling_may_be_given_either_way():
    expected = calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES)
    for sampling in (
        {"sampling_probability": _B / _N, "validation_sampling_probability": _V / _N},
        {
            "dataset_size": _N,
            "expected_batch_size": _B,
            "validation_sampling_probability": _V / _N,
        },
        {"dataset_size": _N, "sampling_probability": _B / _N, "validation_batch_size": _V},
    ):
        assert calibrate_selective_release(**_BUDGET, **sampling, **_NOISES) == expected


def test_truncation_and_the_cap_are_part_of_the_budget():
    most = calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES)
    for change in ({"truncation_probability": 1e-10}, {"max_attempts": 60}):
        assert 0 < calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES, **change) < most
    assert calibrate_selective_release(**_BUDGET, **_SIZES, **_NOISES, max_attempts=5) == 0


@pytest.mark.slow
def test_a_spent_or_impossible_budget():
    ledger = PrivacyLedger()
    ledger.record(sampled_gaussian(0.1, 0.7), 1000)
    spent = {**_BUDGET, **_SIZES, "prior": ledger}
    assert calibrate_selective_release(**spent, **_NOISES) == 0
    with pytest.raises(ValueError, match="above what `prior` has spent"):
        calibrate_selective_release(**spent, updates=1, noise_multiplier=4.0)
    with pytest.raises(ValueError, match="no noise is enough"):
        calibrate_selective_release(**_BUDGET, **_SIZES, updates=10**5, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="no noise is enough"):
        calibrate_selective_release(
            **_BUDGET, **_SIZES, updates=1, validation_noise_multiplier=0.01
        )


_GOOD = {**_BUDGET, **_SIZES, **_NOISES}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"validation_noise_multiplier": math.nan}, "validation_noise_multiplier"),
        ({"updates": 0, "noise_multiplier": None}, "updates"),
        ({"updates": 5}, "updates`, `noise_multiplier"),
        ({"noise_multiplier": None}, "updates`, `noise_multiplier"),
        ({"sampling_probability": 0.1}, "sampling_probability"),
        ({"validation_sampling_probability": 0.1}, "validation_sampling_probability"),
        ({"validation_batch_size": None}, "validation_sampling_probability"),
        ({"validation_batch_size": _N + 1}, "validation_batch_size"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"threshold": math.inf}, "threshold"),
        ({"truncation_probability": 1.0}, "truncation_probability"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"selective_release": "hidden"}, "selective_release"),
        ({"prior": PrivacyLedger(selective_release="per_attempt")}, "selective_release"),
        ({"prior": {}}, "prior"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, name):
    with pytest.raises(ValueError, match=f"rguments? `{name}`"):
        calibrate_selective_release(**{**_GOOD, **change})
