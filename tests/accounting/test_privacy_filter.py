"""A budget at one Renyi order: closed forms, and that it is never overspent or given back."""

import copy
import json
import math
import os
import pickle

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from tfdp.accounting import (
    BoundedRangeDpEvent,
    BudgetExceededError,
    PrivacyParametersChangedError,
    RdpAccountant,
    RdpFilter,
    SelectiveReleaseDpEvent,
    event_codec,
    privacy_filter,
)
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY

DELTA = 1e-5
GAUSSIAN = dp_accounting.GaussianDpEvent(7.0)
STEP = sampled_gaussian(0.03, 2.0)


def sampled_choice(q, width):
    return dp_accounting.PoissonSampledDpEvent(q, BoundedRangeDpEvent(width))


# The budget.


@pytest.mark.parametrize("order", [3.0, 4.0, 17.0, 200.0])
def test_the_budget_is_what_converts_to_the_target(order):
    """A total of exactly the budget has epsilon = target at the delta that is left."""
    budget = RdpFilter(8.0, DELTA, order)
    noise = math.sqrt(order / (2 * budget.budget))
    accountant = dp_accounting.rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.GaussianDpEvent(noise))
    epsilon = accountant.get_epsilon((1 - 1e-3) * DELTA)
    assert epsilon == pytest.approx(8.0, rel=1e-9)
    assert accountant.get_epsilon(DELTA) <= 8.0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_it_is_the_filter_of_zcdp_for_gaussians(epsilon):
    """The default order allows as much rho = 1 / (2 sigma^2) as the best conversion of zCDP."""
    budget = RdpFilter(epsilon, DELTA)
    assert budget.cost(GAUSSIAN) == pytest.approx(budget.order / (2 * 7.0**2), rel=1e-12)
    allowed = budget.budget / budget.order

    def epsilon_of(rho):
        best = optimize.minimize_scalar(
            lambda log: _converted(rho, 1 + math.exp(log)), bounds=(-3, 9), method="bounded"
        )
        return best.fun

    best = optimize.brentq(lambda rho: epsilon_of(rho) - epsilon, 1e-6, 10)
    assert 0.99 * best < allowed < best


def _converted(rho, order):
    return rho * order + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)


def test_the_order_fits_what_is_expected():
    """The number of expected events is that of an accountant, which takes the best order after."""
    budget = RdpFilter(2.0, DELTA, expected_event=STEP)
    n = int(budget.budget / budget.cost(STEP))
    assert budget.can_afford(STEP, n) and not budget.can_afford(STEP, n + 1)
    after = RdpAccountant().compose(STEP, n).get_epsilon(DELTA)
    assert 2.0 * 0.99 < after <= 2.0
    others = [RdpFilter(2.0, DELTA, order) for order in (7.0, 64.0)]
    assert all(not other.can_afford(STEP, n) for other in others)


def test_what_is_fixed_beforehand_is_worth_what_was_spent():
    budget = RdpFilter(2.0, DELTA, expected_event=STEP)
    assert budget.spent_epsilon() == 0.0
    budget.spend(STEP, 100)
    reference = RdpAccountant([budget.order]).compose(STEP, 100).get_epsilon((1 - 1e-3) * DELTA)
    assert budget.spent_epsilon() == pytest.approx(reference, rel=1e-9)
    assert budget.guarantee.epsilon == 2.0 and budget.guarantee.delta == DELTA
    assert budget.remaining == pytest.approx(budget.budget - 100 * budget.cost(STEP))


def test_mutant_that_minimises_over_orders_after_the_fact_is_caught():
    """It would admit sequences that the fixed order refuses."""
    budget = RdpFilter(1.0, DELTA, order=40.0)
    accountant = RdpAccountant()
    while budget.can_afford(STEP):
        budget.spend(STEP)
        accountant.compose(STEP)
    assert accountant.compose(STEP).get_epsilon(DELTA) < 1.0


# Spending.

EVENTS = st.one_of(
    st.floats(0.5, 20).map(dp_accounting.GaussianDpEvent),
    st.tuples(st.sampled_from([0.01, 0.3, 1.0]), st.floats(0.01, 3)).map(
        lambda a: sampled_choice(*a)
    ),
    st.floats(0.01, 3).map(BoundedRangeDpEvent),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(1, 4)), max_size=12), st.sampled_from([0.5, 3.0]))
def test_it_is_never_overspent(wishes, epsilon):
    budget = RdpFilter(epsilon, DELTA)
    total = 0.0
    for event, count in wishes:
        before = budget.spent
        if budget.can_afford(event, count):
            budget.spend(event, count)
            total += count * budget.cost(event)
        else:
            with pytest.raises(BudgetExceededError, match="Argument `event` must cost at most"):
                budget.spend(event, count)
            assert budget.spent == before
            assert before + count * budget.cost(event) > budget.budget
        assert budget.spent == pytest.approx(total)
        assert budget.spent <= budget.budget
        assert budget.spent_epsilon() <= epsilon
    assert RdpFilter.from_dict(json.loads(json.dumps(budget.to_dict()))).spent == budget.spent


def test_compositions_cost_the_sum():
    budget = RdpFilter(1.0, DELTA)
    both = dp_accounting.ComposedDpEvent([STEP, sampled_choice(0.1, 0.5)])
    expected = budget.cost(STEP) + budget.cost(sampled_choice(0.1, 0.5))
    assert budget.cost(both) == pytest.approx(expected)
    assert budget.cost(dp_accounting.SelfComposedDpEvent(both, 3)) == pytest.approx(3 * expected)
    assert budget.cost(dp_accounting.NoOpDpEvent()) == 0


def test_the_cost_of_other_events_is_the_accountants():
    budget = RdpFilter(4.0, DELTA, order=6.5)
    for event in (STEP, SelectiveReleaseDpEvent(STEP, sampled_gaussian(0.005, 1.3))):
        expected = RdpAccountant([6.5]).compose(event).rdp[0]
        assert budget.cost(event) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(dp_accounting.UnsupportedEventError):
        budget.cost(dp_accounting.UnsupportedDpEvent())
    assert not budget.can_afford(dp_accounting.NonPrivateDpEvent())
    assert not budget.can_afford(dp_accounting.GaussianDpEvent(0.0))


def test_truncation_is_within_its_share_of_delta():
    budget = RdpFilter(4.0, DELTA)
    cheap = dp_accounting.GaussianDpEvent(1e6)
    most = 1e-3 * DELTA / (1 + math.exp(4.0))
    assert budget.can_afford(cheap, truncation_probability=0.999 * most)
    assert not budget.can_afford(cheap, truncation_probability=1.001 * most)
    budget.spend(cheap, 3, truncation_probability=most / 4)
    assert not budget.can_afford(cheap, 2, truncation_probability=most / 4)
    assert budget.can_afford(cheap, 2)
    assert budget.can_afford(cheap, 10**5, truncation_probability=TRUNCATION_PROBABILITY)


# State and arguments.


def test_it_resumes_from_what_was_saved():
    budget = RdpFilter(2.0, DELTA, expected_event=STEP)
    budget.spend(STEP, 5, truncation_probability=1e-16)
    saved = json.loads(json.dumps(budget.to_dict()))
    other = RdpFilter(2.0, DELTA, expected_event=STEP)
    other.resume(saved)
    assert other.to_dict() == budget.to_dict()
    other.spend(sampled_choice(0.1, 0.5))
    spent = other.spent
    other.resume(saved)
    assert other.spent == spent > budget.spent


def as_json(budget):
    return json.loads(json.dumps(budget.to_dict()))


def in_a_fork(budget):
    """The filter, after a forked process took a step with it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            budget.spend(STEP)
            os.write(write, json.dumps(budget.to_dict()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        saved = json.load(stream)
    os.waitpid(pid, 0)
    return RdpFilter.from_dict(saved)


def after_a_step(budget):
    budget.spend(STEP)
    return budget


BRANCHES = {
    "from_dict": lambda budget: after_a_step(RdpFilter.from_dict(as_json(budget))),
    "copy": lambda budget: after_a_step(copy.copy(budget)),
    "deepcopy": lambda budget: after_a_step(copy.deepcopy(budget)),
    "pickle": lambda budget: after_a_step(pickle.loads(pickle.dumps(budget))),
    "fork": in_a_fork,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_what_two_trainings_spent_from_one_state_is_added_up(name, cls=RdpFilter):
    """Equal releases, and so equal totals: no number tells that they are others."""
    budget = cls(2.0, DELTA, 9.0)
    budget.spend(STEP, 3)
    branch = BRANCHES[name](budget)
    budget.spend(STEP)
    for first, second in ((budget, branch), (branch, budget)):
        both = cls.from_dict(as_json(first))
        for _ in range(2):  # Once more adds nothing.
            both.resume(as_json(second))
            assert both.spent == pytest.approx(5 * both.cost(STEP), rel=1e-12)
    budget.resume(as_json(branch))
    assert budget.to_dict()["releases"] and budget.spent == both.spent


def test_spendings_of_which_neither_contains_the_other_are_added_up():
    """Each alone has a smaller epsilon than both."""
    start = RdpFilter(1.0, DELTA, 20.0)
    first, second = (RdpFilter.from_dict(start.to_dict()) for _ in range(2))
    first.spend(dp_accounting.GaussianDpEvent(13.0))
    second.spend(dp_accounting.GaussianDpEvent(9.0), 2)
    whole = RdpFilter(1.0, DELTA, 20.0)
    whole.spend(dp_accounting.GaussianDpEvent(13.0))
    whole.spend(dp_accounting.GaussianDpEvent(9.0), 2)
    first.resume(second.to_dict())
    assert first.spent == pytest.approx(whole.spent, rel=1e-12)
    assert first.spent_epsilon() > second.spent_epsilon() + 0.04


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=14))
def test_any_history_of_copies_and_resumes_counts_each_release_once(history):
    """Filters beside the sets of releases that each of them knows of."""
    filters, known = [RdpFilter(9.0, DELTA, 9.0)], [set()]
    for release, (kind, i, j) in enumerate(history):
        i, j = i % len(filters), j % len(filters)
        if kind < 2:
            filters[i].spend(STEP)
            known[i].add(release)
        elif kind == 2:
            filters.append(copy.deepcopy(filters[i]))
            known.append(set(known[i]))
        else:
            filters[i].resume(as_json(filters[j]))
            known[i] |= known[j]
    for budget, releases in zip(filters, known, strict=True):
        assert budget.spent == pytest.approx(len(releases) * budget.cost(STEP))


class TakesTheLarger(RdpFilter):
    """The mutant: it keeps the larger of two spendings, whatever they are of."""

    def resume(self, data):
        saved = self.from_dict(data)
        if saved.spent > self.spent:
            self._releases = saved._releases


@pytest.mark.parametrize("name", BRANCHES)
def test_mutant_that_takes_the_larger_spending_is_caught(name):
    with pytest.raises(AssertionError):
        test_what_two_trainings_spent_from_one_state_is_added_up(name, TakesTheLarger)


@pytest.mark.parametrize("name", ["copy", "deepcopy", "pickle", "from_dict"])
def test_mutant_whose_copies_are_no_spenders_of_their_own_is_caught(name, monkeypatch):
    monkeypatch.setattr(privacy_filter, "_new_spender", lambda: "the same")
    with pytest.raises(AssertionError):
        test_what_two_trainings_spent_from_one_state_is_added_up(name)


def test_trainings_that_overspend_together_have_no_guarantee():
    budget = RdpFilter(1.0, DELTA, expected_event=STEP)
    most = int(budget.budget / budget.cost(STEP))
    branch = RdpFilter.from_dict(budget.to_dict())
    budget.spend(STEP, most)
    branch.spend(STEP, most)
    with pytest.raises(BudgetExceededError, match="resumed from one state have spent"):
        budget.resume(branch.to_dict())
    assert budget.spent == pytest.approx(2 * most * budget.cost(STEP), rel=1e-12)
    assert budget.remaining == 0 and budget.spent_epsilon() > 1 and not budget.can_afford(STEP)
    with pytest.raises(BudgetExceededError, match="No guarantee of target_epsilon"):
        budget.guarantee  # noqa: B018


def test_states_of_the_first_version_are_read_once():
    """They do not say who spent: one file is one spending, and another file another."""
    budget = RdpFilter(2.0, DELTA, 9.0)
    budget.spend(STEP, 4)
    old = {**as_json(budget), "version": 1}
    for release in old["releases"]:
        del release["spender"]
    later = json.loads(json.dumps(old))
    later["releases"][0]["count"] = 6
    resumed = RdpFilter(2.0, DELTA, 9.0)
    resumed.resume(old)
    resumed.resume(old)
    assert resumed.spent == budget.spent
    resumed.resume(later)  # It may contain the other; nothing proves it.
    assert resumed.spent == pytest.approx(10 * budget.cost(STEP), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("target_epsilon", RdpFilter(3.0, DELTA, 9.0)),
        ("delta", RdpFilter(2.0, 1e-6, 9.0)),
        ("order", RdpFilter(2.0, DELTA, 10.0)),
        ("truncation_share", RdpFilter(2.0, DELTA, 9.0, truncation_share=0.1)),
    ],
)
def test_another_budget_is_refused(name, changed):
    with pytest.raises(PrivacyParametersChangedError, match=f"Argument `{name}` must stay"):
        changed.resume(RdpFilter(2.0, DELTA, 9.0).to_dict())


def test_tampered_state_is_refused():
    budget = RdpFilter(2.0, DELTA, 9.0)
    budget.spend(GAUSSIAN)
    data = budget.to_dict()
    data["releases"][0]["count"] = 10**6
    with pytest.raises(BudgetExceededError):
        RdpFilter.from_dict(data)
    with pytest.raises(ValueError, match="Argument `data` must be"):
        RdpFilter.from_dict({})
    with pytest.raises(ValueError, match="Argument `version` must be"):
        RdpFilter.from_dict({**data, "version": 99})


BAD = [
    ({"target_epsilon": 0.0}, "target_epsilon"),
    ({"target_epsilon": 1e-4, "order": 2.0}, "target_epsilon"),
    ({"delta": 1.0}, "delta"),
    ({"order": 1.0}, "order"),
    ({"order": math.inf}, "order"),
    ({"order": 3.0, "expected_event": STEP}, "expected_event"),
    ({"truncation_share": 0.0}, "truncation_share"),
]


@pytest.mark.parametrize(("changes", "name"), BAD)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        RdpFilter(**{"target_epsilon": 1.0, "delta": DELTA, **changes})


def test_bad_releases_are_named():
    budget = RdpFilter(1.0, DELTA)
    for arguments, name in (
        ((GAUSSIAN, 0), "count"),
        ((GAUSSIAN, 1, 1.0), "truncation_probability"),
        ((dp_accounting.GaussianDpEvent(-1.0),), "event"),
        (("no event",), "event"),
    ):
        with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
            budget.spend(*arguments)
    for width in (-1.0, math.nan, 101.0, True):
        with pytest.raises(ValueError, match="Argument `range` must be"):
            BoundedRangeDpEvent(width)
    assert budget.spent == 0


def test_the_event_survives_json():
    event = sampled_choice(0.1, 0.5)
    assert event_codec.decode(json.loads(json.dumps(event_codec.encode(event)))) == event
