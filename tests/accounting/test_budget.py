"""What both calibrations share."""

import math

import pytest

from tfdp.accounting import PrivacyLedger
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget, sampling_probability
from tfdp.accounting.event_codec import sampled_gaussian

_STEP = sampled_gaussian(0.01, 1.0)


def test_takes_past_and_observability_from_the_ledger():
    ledger = PrivacyLedger(selective_release="per_attempt")
    ledger.record(_STEP, 3)
    budget = Budget.check(1.0, 1e-5, ledger)
    assert budget == Budget(1.0, 1e-5, ledger.releases, "per_attempt")
    assert budget.epsilon() == ledger.epsilon(1e-5).epsilon
    assert Budget.check(1.0, 1e-5, None) == Budget(1.0, 1e-5, (), "conditional")
    with pytest.raises(ValueError, match="Argument `prior` must be a PrivacyLedger"):
        Budget.check(1.0, 1e-5, {})


def test_most_and_least_are_at_the_edge():
    budget = Budget.check(1.0, 1e-5, None)
    most = budget.most(lambda n: Release(_STEP, n))
    assert budget.epsilon(Release(_STEP, most)) <= 1 < budget.epsilon(Release(_STEP, most + 1))
    sigma = budget.least_noise(lambda x: Release(sampled_gaussian(0.01, x), 100))
    assert budget.epsilon(Release(sampled_gaussian(0.01, sigma), 100)) <= 1
    assert budget.epsilon(Release(sampled_gaussian(0.01, 0.999 * sigma), 100)) > 1


def test_sampling_probability_of_either_description():
    names = ("probability", "batch")
    assert sampling_probability(0.1, None, None, names) == 0.1
    assert sampling_probability(None, 1000, 100, names) == 0.1
    for arguments, name in (
        ((0.1, 1000, 100), "probability"),
        ((0.1, 1000, None), "probability"),
        ((math.nan, None, None), "probability"),
        ((None, 1000, None), "probability"),
        ((None, 0, 1), "dataset_size"),
        ((None, 10, 11), "batch"),
    ):
        with pytest.raises(ValueError, match=f"Argument `{name}`"):
            sampling_probability(*arguments, names)
