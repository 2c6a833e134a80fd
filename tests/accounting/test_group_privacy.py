"""Groups of examples: pairs and epsilons against integrals, and what has no price."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from tests.accounting import reference
from tfdp.accounting import PrivacyLedger, composition, epsilon_interval, privacy_statement
from tfdp.accounting import group_privacy as module
from tfdp.accounting.dominating_pairs import sampled_gaussian
from tfdp.accounting.event_codec import allocated_gaussian
from tfdp.accounting.event_codec import sampled_gaussian as step

CASES = [(0.01, 1.0, 3), (0.3, 0.7, 5), (1e-3, 0.5, 12), (0.9, 4.0, 8)]


def ledger_of(q, sigma, steps=1, **others):
    ledger = PrivacyLedger()
    ledger.record(step(q, sigma), steps, **others)
    return ledger


def log_densities(z, q, sigma, size):
    """Log densities of N(Binomial(size, q), sigma^2) and N(0, sigma^2)."""
    counts = np.arange(size + 1)
    weights = stats.binom.logpmf(counts, size, q)
    normal = stats.norm.logpdf(np.asarray(z)[..., np.newaxis], counts, sigma)
    return special.logsumexp(weights + normal, axis=-1), normal[..., 0]


def hockey_sticks(q, sigma, size, epsilon):
    """Both hockey-stick divergences of one step, with the group as upper first: exact.

    The ratio of the densities rises with z, so that a threshold is the best test.
    """

    def excess(z):
        mixture, plain = log_densities(z, q, sigma, size)
        return mixture - plain - epsilon

    ends = -40 * sigma, size + 40 * sigma + sigma**2 * (epsilon + 100)
    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, q)
    found = []
    for sign in (1, -1):
        margin = (lambda z: excess(z)) if sign > 0 else (lambda z: excess(z) + 2 * epsilon)
        if margin(ends[0]) >= 0:
            found.append(0.0)  # No outcome is so unlikely with the group.
            continue
        z = optimize.brentq(margin, *ends, xtol=1e-13)
        group = weights @ special.ndtr(-sign * (z - counts) / sigma)
        without = special.ndtr(-sign * z / sigma)
        upper, lower = (group, without) if sign > 0 else (without, group)
        found.append(upper - math.exp(epsilon) * lower)
    return found


def test_thresholds_are_the_integrals():
    q, sigma, size, epsilon = 0.3, 0.7, 5, 0.4
    z = np.linspace(-9, 14, 200_001)
    mixture, plain = log_densities(z, q, sigma, size)
    integrals = [
        integrate.simpson(np.maximum(np.exp(a) - np.exp(epsilon + b), 0.0), x=z)
        for a, b in ((mixture, plain), (plain, mixture))
    ]
    assert hockey_sticks(q, sigma, size, epsilon) == pytest.approx(integrals, rel=1e-6)


@pytest.mark.parametrize(("q", "sigma", "size"), CASES)
def test_one_step_is_enclosed(q, sigma, size):
    pair = module.pair(sigma, q, size)
    for epsilon in (0.0, 0.05, 1.0, 4.0):
        for direction, exact in zip(
            (pair.remove, pair.add), hockey_sticks(q, sigma, size, epsilon), strict=True
        ):
            with composition._overflows_allowed():
                most = composition._delta([(direction, 1)], epsilon)[0]
            assert exact * (1 - 1e-9) <= most <= 1.01 * exact + 1e-10
    least, exact, most = bounds_and_exact(q, sigma, size)
    assert least <= exact * (1 + 1e-9) + 1e-9
    assert exact * (1 - 1e-9) - 1e-9 <= most <= 1.002 * exact + 1e-5
    assert least >= 0.99 * exact - 1e-4


def bounds_and_exact(q, sigma, size, delta=1e-5):
    def excess(epsilon):
        return max(hockey_sticks(q, sigma, size, epsilon)) - delta

    found = epsilon_interval(ledger_of(q, sigma), delta, group_size=size)
    exact = optimize.brentq(excess, 0.0, 200.0, xtol=1e-10)
    return found.lower, exact, found.upper


class ComposedGroup(reference.ComposedGaussian):
    """The inversion integral of `reference`, of a group."""

    def __init__(self, q, sigma, size, steps, delta, remove):
        self.steps, self.log_delta = steps, math.log(delta)
        z = np.arange(-9 * sigma, size + 9 * sigma, sigma**2 / 12)
        mixture, plain = log_densities(z, q, sigma, size)
        self.log_p = (mixture if remove else plain) + math.log(z[1] - z[0])
        self.loss = (mixture - plain) * (1 if remove else -1)


@pytest.mark.parametrize(
    ("q", "sigma", "size", "steps"), [(0.01, 2.0, 3, 500), (0.05, 3.0, 6, 100)]
)
def test_composed_steps_are_enclosed(q, sigma, size, steps):
    exact = max(
        ComposedGroup(q, sigma, size, steps, 1e-5, remove).epsilon() for remove in (True, False)
    )
    found = epsilon_interval(ledger_of(q, sigma, steps), 1e-5, group_size=size)
    assert found.lower <= exact * (1 + 1e-6) and exact * (1 - 1e-6) <= found.upper
    assert found.lower > 0.999 * exact and found.upper < 1.001 * exact


@pytest.mark.parametrize("q", [1e-6, 0.02, 0.7])
def test_a_group_of_one_is_one_example(q):
    losses = np.concatenate([-np.geomspace(1e-9, 3, 40)[::-1], np.geomspace(1e-9, 3, 40)])
    group, one = module.pair(0.9, q, 1), sampled_gaussian(q, 0.9)
    for a, b in ((group.add, one.add), (group.remove, one.remove)):
        found, expected = a.masses(losses), b.masses(losses)
        for name in ("upper", "lower"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-14)


def test_edges_have_the_losses_that_were_asked_for():
    for q, sigma, size in [*CASES, (0.5, 0.3, 200), (1e-7, 1.0, 1000)]:
        direction = module.pair(sigma, q, size).remove
        low, high = direction.range(1e-20)
        losses = np.linspace(low, high, 500)[1:]
        z = direction._edges(losses)
        mixture, plain = log_densities(z[np.isfinite(z)], q, sigma, size)
        rounding = 1e-12 * (1 + size**2 / sigma**2)
        assert mixture - plain == pytest.approx(losses[np.isfinite(z)], rel=1e-9, abs=rounding)


def test_larger_groups_cost_more_and_full_batches_in_proportion():
    epsilons = [ledger_of(0.05, 2.0, 50).epsilon(1e-5, group_size=k).epsilon for k in (1, 2, 5)]
    assert epsilons == sorted(epsilons) and epsilons[1] > epsilons[0]
    full, third = ledger_of(1.0, 30.0, 9), ledger_of(1.0, 10.0, 9)
    expected = pytest.approx(third.epsilon(1e-5).epsilon, rel=1e-9)
    assert full.epsilon(1e-5, group_size=3).epsilon == expected
    # Never above what follows from one example: (k epsilon, (e^(k epsilon) - 1) / (...) delta).
    one = ledger_of(0.05, 2.0, 50).epsilon(1e-8).epsilon
    delta = 1e-8 * math.expm1(2 * one) / math.expm1(one)
    assert ledger_of(0.05, 2.0, 50).epsilon(delta, group_size=2).epsilon <= 2 * one


def test_other_events_compose():
    ledger = ledger_of(0.01, 1.0, 20, truncation_probability=1e-12)
    ledger.record(dp_accounting.GaussianDpEvent(20.0), 4)
    ledger.record(dp_accounting.SelfComposedDpEvent(step(0.02, 3.0), 5))
    ledger.record(dp_accounting.NoOpDpEvent())
    expected = PrivacyLedger()
    expected.record(module.SampledGroupDpEvent(1.0, 0.01, 4), 20, truncation_probability=1e-12)
    expected.record(dp_accounting.GaussianDpEvent(5.0), 4)
    expected.record(module.SampledGroupDpEvent(3.0, 0.02, 4), 5)
    bound = ledger.epsilon(1e-5, group_size=4)
    assert bound.epsilon == pytest.approx(expected.epsilon(1e-5).epsilon, rel=1e-9)
    assert bound.accountant == "PLD"
    ledger.record(step(0.01, 0.0))
    assert ledger.epsilon(1e-5, group_size=4).epsilon == math.inf


@pytest.mark.parametrize(
    "event",
    [
        step(0.01, 1.0, releases_signs=True),
        allocated_gaussian(1.0, 1.0, 10),
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(1.0)),
        dp_accounting.dp_event.RepeatAndSelectDpEvent(step(0.01, 1.0), 10, 1),
    ],
)
def test_what_has_no_price_for_groups_is_refused(event):
    ledger = PrivacyLedger()
    ledger.record(event)
    assert module.group_releases(ledger.releases, 1) == ledger.releases
    with pytest.raises(dp_accounting.UnsupportedEventError, match="Groups of several examples"):
        ledger.epsilon(1e-5, group_size=2)
    with pytest.raises(dp_accounting.UnsupportedEventError, match="Groups of several examples"):
        ledger.trade_off(group_size=2)


def test_cycles_and_bad_sizes_are_refused():
    with pytest.raises(dp_accounting.UnsupportedEventError, match="cyclic sampling"):
        ledger_of(0.01, 1.0, cycle_length=4).epsilon(1e-5, group_size=2)
    for bad in (0, -1, 1.5, True, None, 1001, "2"):
        for call in (
            lambda k: ledger_of(0.01, 1.0).epsilon(1e-5, group_size=k),
            lambda k: ledger_of(0.01, 1.0).trade_off(group_size=k),
            lambda k: epsilon_interval(ledger_of(0.01, 1.0), 1e-5, group_size=k),
        ):
            with pytest.raises(ValueError, match="Argument `group_size` must be"):
                call(bad)


def test_statement_names_the_group():
    ledger = ledger_of(0.01, 2.0, 100)
    text = " ".join(privacy_statement(ledger, 1e-5, group_size=4).split())
    epsilon = ledger.epsilon(1e-5, group_size=4).epsilon
    assert float(text.split("epsilon = ")[1].split(" ")[0]) == pytest.approx(epsilon, rel=1e-5)
    assert "Unit of privacy: a group of up to 4 training examples" in text
    assert "one training example" not in text and "whether the 4 examples of a group were" in text
    assert "100 steps of the Gaussian mechanism with noise multiplier 2" in text


# Mutants: each is below the integral.


def too_low():
    _, exact, most = bounds_and_exact(0.3, 1.5, 3)
    return most < exact


def test_mutants_are_caught(monkeypatch):
    assert not too_low()
    weights = module._weights

    def one_example(q, size):
        found = np.zeros(size + 1)
        found[:2] = 1 - q, q
        return found

    def one_less(q, size):
        return np.append(weights(q, size - 1), 0.0)

    for mutant in (one_example, one_less):
        module.pair.cache_clear()
        module.pair_below.cache_clear()
        clear_caches()
        monkeypatch.setattr(module, "_weights", mutant)
        assert too_low()
    monkeypatch.undo()
    module.pair.cache_clear()
    module.pair_below.cache_clear()
    clear_caches()
    assert not too_low()


def clear_caches():
    from tfdp.accounting import accountants, bounds

    for cached in (bounds._pld_epsilon, accountants._upper_pairs, accountants._attained_pairs):
        cached.cache_clear()
