"""A budget at one Renyi order: closed forms, exact divergences, and that it is never overspent."""

import itertools
import json
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from tfdp.accounting import (
    BoundedRangeDpEvent,
    BudgetExceededError,
    PrivacyParametersChangedError,
    RdpAccountant,
    RdpFilter,
    SelectiveReleaseDpEvent,
    event_codec,
)
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.privacy_filter import bounded_range_rdp
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
        assert budget.cost(event) == RdpAccountant([6.5]).compose(event).rdp[0]
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


# The cost of report-noisy-min.

ORDERS = [1.1, 2.0, 7.3, 40.0]


def divergence(log_p, log_q, order):
    return special.logsumexp(order * log_p + (1 - order) * log_q) / (order - 1)


def log_choice(scores, width):
    """Log probabilities of the exponential mechanism for sums of losses in [0, 1]."""
    return special.log_softmax(-width * scores)


def worst(scores, added, q, width, order):
    """The larger divergence between the choices with and without an example."""
    without, whole = log_choice(scores, width), log_choice(scores + added, width)
    sampled = whole if q == 1 else np.logaddexp(math.log1p(-q) + without, math.log(q) + whole)
    return max(divergence(sampled, without, order), divergence(without, sampled, order))


@pytest.mark.quick_cases(19)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("q", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("width", [0.1, 1.0, 4.0])
def test_the_cost_holds_and_is_attained(order, q, width):
    """Two candidates, of which the example prefers one: the best odds come close to the cost."""
    cost = bounded_range_rdp(width, q, order)
    odds = np.linspace(-5 * width - 5, 5 * width + 5, 301)
    found = max(
        worst(np.array([0.0, s / width]), np.array([0.0, 1.0]), q, width, order) for s in odds
    )
    assert 0.99 * cost - 1e-11 / (order - 1) < found <= cost


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    q=st.sampled_from([0.05, 0.5, 1.0]),
    width=st.floats(0.05, 5),
    order=st.sampled_from(ORDERS),
)
def test_no_neighbours_exceed_the_cost(seed, q, width, order):
    """Sums of losses in [0, 1] of any candidates, with an example more."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, 8)
    scores = rng.normal(size=k) * rng.choice([0.1, 1, 10])
    added = rng.integers(0, 2, k) if rng.random() < 0.5 else rng.random(k)
    assert worst(scores, added, q, width, order) <= bounded_range_rdp(width, q, order)


def test_no_poisson_samples_of_neighbours_exceed_the_cost():
    """The whole mechanism: every sample of four others, each with another split of the range."""
    rng = np.random.default_rng(1)
    for q, width in itertools.product([0.1, 0.6], [0.5, 3.0]):
        losses = rng.random((5, 3)).round(1)
        outputs = [np.zeros(3), np.zeros(3)]
        for members in itertools.product([0, 1], repeat=5):
            chosen = np.exp(log_choice(losses.T @ np.array(members), width))
            chance = math.prod(q if m else 1 - q for m in members)
            outputs[1] += chance * chosen
            if not members[0]:
                outputs[0] += chance / (1 - q) * chosen
        assert np.allclose(np.sum(outputs, axis=1), 1)
        first, second = np.log(outputs)
        for order in ORDERS:
            cost = bounded_range_rdp(width, q, order)
            assert divergence(first, second, order) <= cost
            assert divergence(second, first, order) <= cost


@pytest.mark.parametrize("width", [0.05, 1.0, 6.0])
def test_closed_forms(width):
    """Order 2; eta^2/8-zCDP; randomised response; and the largest loss under sampling."""
    for q in (0.01, 0.5, 1.0):
        exact = math.log1p(q**2 * math.sinh(width / 2) ** 2)
        assert exact <= bounded_range_rdp(width, q, 2.0) < 1.002 * exact + 2e-12
    for order in ORDERS:
        rdp = bounded_range_rdp(width, 1.0, order)
        assert rdp <= 1.001 * order * width**2 / 8 + 1e-10
        p = 1 / (1 + math.exp(-width))
        pure = divergence(np.log([p, 1 - p]), np.log([1 - p, p]), order)
        assert rdp < pure
        for q in (0.01, 0.5):
            assert bounded_range_rdp(width, q, order) < math.log1p(q * math.expm1(width))
            assert bounded_range_rdp(width, q, order) < rdp


def test_large_ranges_and_orders_do_not_overflow():
    assert 99 < bounded_range_rdp(100.0, 1.0, 1000.0) < 101
    assert bounded_range_rdp(0.0, 1.0, 2.0) == bounded_range_rdp(1.0, 0.0, 2.0) == 0
    assert 0 < bounded_range_rdp(1e-6, 0.01, 2.0) < 1e-11


def test_mutant_of_half_the_range_is_caught():
    """That of utilities that one example moves both ways (losses in [-1, 1])."""
    found = worst(np.array([0.0, 0.3]), np.array([-1.0, 1.0]), 1.0, 1.0, 7.3)
    assert bounded_range_rdp(1.0, 1.0, 7.3) < found <= bounded_range_rdp(2.0, 1.0, 7.3)


def test_mutant_that_forgets_one_end_of_the_range_is_caught():
    """With s = 0 or s = eta only, nothing would be spent at all."""
    cost = bounded_range_rdp(1.0, 0.4, 2.0)
    ends = [worst(np.array([0.0, s]), np.array([0.0, 1.0]), 0.4, 1.0, 2.0) for s in (-40.0, 40.0)]
    assert max(ends) < 1e-9 < cost


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


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("target_epsilon", RdpFilter(3.0, DELTA, 9.0)),
        ("delta", RdpFilter(2.0, 1e-6, 9.0)),
        ("order", RdpFilter(2.0, DELTA, 10.0)),
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
