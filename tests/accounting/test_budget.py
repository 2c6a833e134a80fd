"""What both calibrations share."""

import math

import dp_accounting
import numpy as np
import pytest

from tfdp.accounting import PrivacyLedger, SelectiveReleaseDpEvent, bounds
from tfdp.accounting import budget as budget_module
from tfdp.accounting.bounds import Release
from tfdp.accounting.budget import Budget, default_delta, sampling_probability
from tfdp.accounting.event_codec import sampled_gaussian

_STEP = sampled_gaussian(0.01, 1.0)


def test_takes_past_and_observability_from_the_ledger():
    ledger = PrivacyLedger(selective_release="per_attempt")
    ledger.record(_STEP, 3)
    budget = Budget.check(1.0, 1e-5, ledger)
    assert budget == Budget(1.0, 1e-5, ledger.releases, "per_attempt")
    assert budget.epsilon() == pytest.approx(ledger.epsilon(1e-5).epsilon, rel=1e-12)
    assert Budget.check(1.0, 1e-5, None) == Budget(1.0, 1e-5, (), "conditional")
    with pytest.raises(ValueError, match="Argument `prior` must be a PrivacyLedger"):
        Budget.check(1.0, 1e-5, {})


def test_most_and_least_are_at_the_edge():
    budget = Budget.check(1.0, 1e-5, None)
    most = budget.most(lambda n: [Release(_STEP, n)])
    assert budget.epsilon(Release(_STEP, most)) <= 1 < budget.epsilon(Release(_STEP, most + 1))
    sigma = budget.least_noise(lambda x: [Release(sampled_gaussian(0.01, x), 100)])
    assert budget.epsilon(Release(sampled_gaussian(0.01, sigma), 100)) <= 1
    assert budget.epsilon(Release(sampled_gaussian(0.01, 0.999 * sigma), 100)) > 1


def _selective(noise):
    q = 256 / 60000
    event = SelectiveReleaseDpEvent(sampled_gaussian(q, noise), sampled_gaussian(q, 1.3), -1.0)
    return Release(event, 1000)


def _check_least(budget, release, sigma):
    assert budget.epsilon(release(sigma)) <= budget.target < budget.epsilon(release(0.999 * sigma))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mode", "accountant"),
    [
        (0.48, "conditional", "RDP"),
        (0.5, "conditional", "RDP"),
        (0.1, "per_attempt", None),
        (0.5, "per_attempt", "PLD"),
    ],
)
def test_least_noise_is_that_of_the_better_accountant(target, mode, accountant):
    budget = Budget.check(target, 1e-5, PrivacyLedger(selective_release=mode))
    if accountant is None:
        with pytest.raises(ValueError, match="no noise is enough"):
            budget.least_noise(lambda x: [_selective(x)])
        return
    sigma = budget.least_noise(lambda x: [_selective(x)])
    _check_least(budget, _selective, sigma)
    bound = bounds.tightest_epsilon([_selective(sigma)], 1e-5, mode)
    assert bound.accountant == accountant
    if target == 0.48:  # By PLD accounting alone, no noise would be enough.
        assert bounds.pld_epsilon([_selective(2.0**31)], 1e-5, mode) > target


@pytest.mark.parametrize("pld", [1.3, math.inf])
def test_a_search_that_is_misled_does_not_change_the_result(pld, monkeypatch):
    budget = Budget.check(0.5, 1e-5, None)
    right = bounds.rdp_epsilon_at
    monkeypatch.setattr(bounds, "rdp_epsilon_at", lambda *a: 0.9 * right(*a))
    # RDP accounting decides.
    monkeypatch.setattr(bounds, "pld_epsilon", lambda *a: pld * (1e-9 + bounds.rdp_epsilon(*a)))

    def release(noise):
        return Release(sampled_gaussian(0.01, noise), 1000)

    _check_least(budget, release, budget.least_noise(lambda x: [release(x)]))


@pytest.mark.parametrize("supported", ["PLD", "RDP"])
def test_least_noise_after_events_of_one_accountant(supported):
    # Selections of selections, and Laplace noise.
    some = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(20.0))
    if supported == "RDP":
        some = dp_accounting.dp_event.RepeatAndSelectDpEvent(sampled_gaussian(0.01, 4.0), 2.0, 1.0)
        some = dp_accounting.dp_event.RepeatAndSelectDpEvent(some, 2.0, 1.0)
    ledger = PrivacyLedger()
    ledger.record(some, 2)
    budget = Budget.check(1.0, 1e-5, ledger)

    def release(noise):
        return Release(sampled_gaussian(0.01, noise), 100)

    _check_least(budget, release, budget.least_noise(lambda x: [release(x)]))


def test_rounding_of_the_inverse_does_not_matter():
    high = 93.0
    assert 1 / (1 / high) < high
    least = Budget.check(0.5, 1e-5, None)._root(lambda x: 0.5 * high / x, high / 2, high)
    assert least == high


@pytest.mark.parametrize("floor", [0.0, 0.4999, 0.5])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 20.0, 1e4, 1e7])
@pytest.mark.parametrize("start", [1.0, 2.0**40])
def test_few_costs_are_asked_for(floor, scale, start):
    asked = []

    def cost(noise):
        asked.append(noise)
        x = scale / noise
        return floor + x + math.expm1(min(x * x, 700.0))

    least = Budget.check(0.5, 1e-5, None)._least(cost, start)
    assert len(set(asked)) <= (21 if start == 1 else 71)
    if floor == 0.5:
        assert least == math.inf
    elif least > 0.01:
        assert cost(least) <= 0.5 < cost(least * 0.9994)
    else:
        assert cost(0.01) <= 0.5


def test_a_limit_that_exceeds_the_target_is_refused_soon(monkeypatch):
    asked = []
    monkeypatch.setattr(bounds, "pld_epsilon", lambda *a: asked.append(a) or 1.0)
    monkeypatch.setattr(bounds, "rdp_epsilon", lambda *a: asked.append(a) or 1.0)
    monkeypatch.setattr(Budget, "epsilon", lambda self: 0.0)
    with pytest.raises(ValueError, match="no noise is enough for 1 steps"):
        Budget.check(0.5, 1e-5, None).least_noise(lambda x: [Release(sampled_gaussian(0.1, x), 1)])
    assert len(asked) <= 10


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


@pytest.mark.parametrize("size", [1, 2, 9, 10, 11, 1000, 60_000, 100_000, 10**7])
def test_default_delta(size):
    delta = default_delta(size)
    assert 0 < delta < 1 / size
    assert np.isclose(delta, max(2, size) ** -1.1, rtol=0.1)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("most", [1, 17, 12_345, 99_999_999])
def test_few_numbers_of_releases_are_asked_for(power, most):
    asked = []

    def cost(n):
        asked.append(n)
        return (n / (most + 0.5)) ** power

    found = budget_module._most(cost, 1.0, most // 2, max(1, most // 8))
    assert found <= most < found + max(1, found // 5_000)
    assert len(asked) <= 12
    # From the first on, too; and where a prior costs nearly all of the target.
    asked.clear()
    assert budget_module._most(cost, 1.0, 0, 1) == pytest.approx(found, rel=2e-4)
    assert len(asked) <= 12
    asked.clear()
    after = budget_module._most(lambda n: 0.9 + 0.1 * cost(n), 1.0, 0, 1)
    assert after <= most < after + max(1, after // 5_000)
    assert len(asked) <= 36


@pytest.mark.parametrize("seed", range(20))
def test_what_is_returned_was_found_affordable_whatever_the_costs(seed):
    """Also costs that are no power, jump, or fall a little: no guess is taken for a cost."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(1, 10**8, size=6))
    costs = np.cumsum(rng.exponential(0.4, size=7))
    asked = {0: 0.0}

    def cost(n):
        wiggle = 1 + 1e-3 * math.sin(n)
        asked[n] = costs[np.searchsorted(ends, n)] * wiggle * (1 if seed % 3 else n / 10**8)
        return asked[n]

    found = budget_module._most(cost, 1.0, 0, 1)
    assert asked[found] <= 1.0
    over = [n for n in asked if n > found and asked[n] > 1.0]
    assert min(over, default=10**8 + 1) <= found + max(1, found // 5_000) or found == 10**8


def test_a_cost_with_steps_is_searched_to_its_edge():
    cost = lambda n: math.inf if n > 5_000_000 else 0.0  # noqa: E731
    assert 4_999_000 < budget_module._most(cost, 1.0, 0, 1) <= 5_000_000
    cost = lambda n: math.inf if n > 5_000 else 0.0  # noqa: E731
    assert budget_module._most(cost, 1.0, 0, 1) == 5_000
    assert budget_module._most(lambda n: 0.0, 1.0, 0, 1) == 10**8
