"""Tests of the price of epochs by random allocation: never below exact values and attacks."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import special

from tfdp.accounting import (
    PrivacyLedger,
    RandomAllocationDpEvent,
    RdpFilter,
    allocation_ratio,
    bounds,
    composition,
    dominating_pairs,
    event_codec,
    privacy_statement,
    random_allocation,
)
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS, PldAccountant, RdpAccountant
from tfdp.accounting.bounds import Release

_EXACT = 1 - 1e-9


def _deltas(pair, epsilon):
    """Hockey-stick divergences of a pair of atoms, of both directions."""
    return [
        np.maximum(d.upper - math.exp(epsilon) * d.lower, 0).sum() + d.infinite
        for d in (pair.remove, pair.add)
    ]


def _call(k, sigma):
    """E[(Y - k)_+], for any k."""
    log = np.log(np.where(k > 0, k, 1.0))
    d = [(x - log) * sigma for x in (0.5 / sigma**2, -0.5 / sigma**2)]
    return np.where(k > 0, special.ndtr(d[0]) - k * special.ndtr(d[1]), 1 - k)


def _put(k, sigma):
    """E[(k - Y)_+], for any k."""
    log = np.log(np.where(k > 0, k, 1.0))
    d = [(log + x) * sigma for x in (0.5 / sigma**2, -0.5 / sigma**2)]
    return np.where(k > 0, k * special.ndtr(d[0]) - special.ndtr(d[1]), 0.0)


def _exact(steps, sigma, epsilon):
    """The same of an epoch of 2 or 3 steps, by quadrature over all but one dimension."""
    z = np.linspace(-9, 9 + 1 / sigma, 20001 if steps == 2 else 601)
    weights = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    y = np.exp(z / sigma - 0.5 / sigma**2)
    if steps == 3:
        weights, y = np.multiply.outer(weights, weights), np.add.outer(y, y)
    e = math.exp(epsilon)
    return [
        (weights * _call(steps * e - y, sigma)).sum() / steps,
        (weights * _put(steps / e - y, sigma)).sum() * e / steps,
    ]


def _excess(steps, count=12):
    """The least and the largest ratio of the pair's deltas over exact ones, of each direction."""
    rng = np.random.default_rng([5, steps])
    ratios = []
    for _ in range(count):
        sigma, epsilon = (
            10 ** rng.uniform(-0.5 if steps == 2 else 0, 1.2),
            10 ** rng.uniform(-2, 0.7),
        )
        pair = random_allocation.pair(1.0, sigma, steps)
        exact, found = _exact(steps, sigma, epsilon), _deltas(pair, epsilon)
        ratios += [(f / x if x > 1e-11 else 1.0) for f, x in zip(found, exact, strict=True)]
    return min(ratios), max(ratios)


@pytest.mark.parametrize("steps", [2, 3])
def test_pairs_are_never_below_quadrature_and_near_it(steps):
    least, most = _excess(steps)
    assert least >= 1 - 1e-6  # The error of the quadrature.
    assert most <= 1.03


def test_one_step_is_the_gaussian():
    """Checks the grid as well, which `pair` does not use for one step."""
    for sigma, epsilon in itertools.product([0.3, 1.0, 5.0], [0.0, 0.3, 2.0]):
        found = allocation_ratio.ratio(sigma, 1)
        r, e = np.exp(found.logs), math.exp(epsilon)
        exact = [_call(e, sigma), e * _put(1 / e, sigma)]
        payoffs = [np.maximum(r - e, 0), np.maximum(1 - e * r, 0)]
        for value, payoff in zip(exact, payoffs, strict=True):
            assert value * _EXACT <= found.mass @ payoff <= value * 1.01 + 1e-20
    one = bounds.tightest_epsilon([Release(RandomAllocationDpEvent(2.0, 1), 5)], 1e-5)
    gaussian = bounds.tightest_epsilon([Release(dp_accounting.GaussianDpEvent(2.0), 5)], 1e-5)
    assert one.epsilon == pytest.approx(gaussian.epsilon, rel=1e-3)


def _mutant(monkeypatch, name):
    """Breaks the sums, or the pair, in one line."""
    original, whole = allocation_ratio._offsets, allocation_ratio.ratio
    if name == "spread":  # To the nearest value.

        def nearest(*args):
            place, down, up = original(*args)
            return place, 1.0 * (down >= up), 1.0 * (down < up)

        monkeypatch.setattr(allocation_ratio, "_offsets", nearest)
    elif name == "down":  # To the value below.

        def below(*args):
            place, down, up = original(*args)
            return place, down + up, 0 * up

        monkeypatch.setattr(allocation_ratio, "_offsets", below)
    elif name == "steps":
        monkeypatch.setattr(allocation_ratio, "ratio", lambda s, t: whole(s, t + 1))
    elif name == "noise":
        monkeypatch.setattr(allocation_ratio, "ratio", lambda s, t: whole(1.05 * s, t))


@pytest.mark.parametrize("mutant", ["spread", "down", "steps", "noise"])
def test_mutants_are_below_quadrature(monkeypatch, mutant):
    caches = allocation_ratio.ratio, random_allocation.pair
    for cached in caches:
        cached.cache_clear()
    _mutant(monkeypatch, mutant)
    assert _excess(2)[0] < 1 - 1e-4
    for cached in caches:
        cached.cache_clear()


def _attack(sigma, steps, epochs, epsilon, samples, seed):
    """Upper and lower 6-sigma limits of delta by Monte Carlo, for both directions."""
    rng = np.random.default_rng(seed)
    losses = np.zeros((2, samples))
    for _, with_it in itertools.product(range(epochs), (0, 1)):
        x = rng.standard_normal((samples, steps), dtype=np.float32)
        x[:, 0] += with_it / sigma  # Which step it is does not matter.
        mean = np.exp(x / sigma - 0.5 / sigma**2).mean(axis=1, dtype=np.float64)
        losses[1 - with_it] += (2 * with_it - 1) * np.log(mean)
    values = np.maximum(-np.expm1(epsilon - losses), 0)
    error = 6 * values.std(axis=1) / math.sqrt(samples)
    return values.mean(axis=1) - error, values.mean(axis=1) + error


@pytest.mark.parametrize(
    "sigma, steps, epochs", [(1.0, 37, 1), (0.6, 64, 2), (2.0, 100, 3), (0.4, 11, 1), (4.0, 5, 8)]
)
def test_many_steps_against_attacks(sigma, steps, epochs):
    """The two directions apart: the smaller one would hide behind the other."""
    pair = random_allocation.pair(1.0, sigma, steps)
    for epsilon in (0.05, 0.5):
        low, high = _attack(sigma, steps, epochs, epsilon, 20000, 1)
        for direction, least, most in zip((pair.remove, pair.add), low, high, strict=True):
            one = dominating_pairs.Pair(direction, direction)
            found = composition.delta([(one, epochs)], epsilon)
            assert least <= found <= most * 1.05 + 1e-4


def _attack_on_subsets(sigma, steps, parts, epsilon, samples=200_000):
    """6-sigma lower limits of delta where an example is in a random subset of the steps."""
    rng = np.random.default_rng(2)
    losses = []
    for with_it in (0, 1):
        x = rng.standard_normal((samples, steps))
        x[:, :parts] += with_it / sigma  # Which steps they are does not matter.
        y = np.exp(x / sigma - 0.5 / sigma**2)
        subsets = itertools.combinations(range(steps), parts)
        ratio = np.mean([y[:, subset].prod(axis=1) for subset in map(list, subsets)], axis=0)
        losses.insert(0, (2 * with_it - 1) * np.log(ratio))
    values = np.maximum(-np.expm1(epsilon - np.array(losses)), 0)
    return values.mean(axis=1) - 6 * values.std(axis=1) / math.sqrt(samples)


@pytest.mark.parametrize("steps, parts", [(4, 2), (5, 2), (6, 3), (7, 5)])
def test_several_steps_of_an_epoch_cost_their_parts(steps, parts):
    """Attacks on random subsets are below the parts, and near enough to find one part too few."""
    sigma, epsilon = 1.0, 0.5
    sizes = [steps // parts + (part < steps % parts) for part in range(parts)]
    pairs = [(random_allocation.pair(1.0, sigma, size), 1) for size in sizes]
    low = _attack_on_subsets(sigma, steps, parts, epsilon)
    for i, name in enumerate(("remove", "add")):
        directions = [getattr(pair, name) for pair, _ in pairs]
        composed = [(dominating_pairs.Pair(d, d), 1) for d in directions]
        assert low[i] <= composition.delta(composed, epsilon)
        assert composition.delta(composed[1:], epsilon) < low[i]


def test_a_direction_left_out_is_found(monkeypatch):
    """Attacks reach more than a price of the other direction alone."""
    pair = random_allocation.pair(1.0, 0.6, 64)
    mutant = dominating_pairs.Pair(pair.add, pair.add)
    low, _ = _attack(0.6, 64, 2, 0.5, 20000, 1)
    assert composition.delta([(mutant, 2)], 0.5) < low.max()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("seed", range(25))
def test_held_out_settings(seed):
    """Below a Gaussian an epoch, RDP above PLD, below Poisson batches, near what is attained."""
    rng = np.random.default_rng([78, seed])
    sigma, steps = 10 ** rng.uniform(-0.3, 0.7), int(10 ** rng.uniform(0.3, 2.3))
    epochs, delta = int(10 ** rng.uniform(0, 1.7)), 10 ** rng.uniform(-9, -4)
    release = Release(RandomAllocationDpEvent(sigma, steps), epochs)
    found = bounds.tightest_epsilon([release], delta)
    gaussians = Release(dp_accounting.GaussianDpEvent(sigma), epochs)
    assert found.by_accountant["PLD"] <= found.by_accountant["RDP"] * (1 + 1e-6)
    assert found.epsilon <= bounds.tightest_epsilon([gaussians], delta).epsilon
    poisson = Release(event_codec.sampled_gaussian(1 / steps, sigma), steps * epochs)
    assert found.epsilon <= 1.001 * bounds.tightest_epsilon([poisson], delta).epsilon
    interval = bounds.epsilon_interval([release], delta)
    assert 0.98 * found.epsilon <= interval.lower <= interval.upper == found.epsilon
    fewer = Release(RandomAllocationDpEvent(sigma, max(1, steps // 2)), epochs)
    assert found.epsilon <= bounds.tightest_epsilon([fewer], delta).epsilon * 1.002


def _partitions(total, most):
    """Yields the integer partitions of `total` with at most `most` parts."""

    def parts(left, largest, count):
        if left == 0:
            yield ()
        elif count > 0:
            for first in range(min(left, largest), 0, -1):
                for rest in parts(left - first, first, count - 1):
                    yield (first, *rest)

    yield from parts(total, total, most)


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_integer_moments_by_partitions(steps):
    sigma = 1.3
    for order in (2, 3, 6, 9):
        total = 0.0
        for partition in _partitions(order, steps):
            counts = [partition.count(k) for k in set(partition)]
            arrangements = math.perm(steps, len(partition)) / math.prod(map(math.factorial, counts))
            splits = math.factorial(order) / math.prod(map(math.factorial, partition))
            exponent = sum(k * (k - 1) for k in partition) / 2 / sigma**2
            total += arrangements * splits * math.exp(exponent)
        exact = math.log(total / steps**order)
        found = random_allocation._log_moments(1.0, sigma, steps)[order]
        assert exact * _EXACT <= found == pytest.approx(exact, rel=1e-9)


def test_reverse_moments_against_samples():
    rng = np.random.default_rng(3)
    powers = np.array([0.5, 1.0, 3.0, 8.0])
    for sigma, steps, q in [(1.0, 20, 1.0), (2.0, 5, 1.0), (0.5, 100, 1.0), (1.0, 20, 0.7)]:
        x = rng.standard_normal((40000, steps)) / sigma - 0.5 / sigma**2
        r = 1 - q + q * np.exp(x).mean(axis=1)
        exact = np.array([(r**-b).mean() for b in powers])
        error = np.array([(r**-b).std() for b in powers]) / 200
        found = np.exp(random_allocation._reverse_log_moments(q, sigma, steps, powers))
        assert (exact - 5 * error <= found).all()
        assert (found <= 1.01 * exact + 5 * error).all()


def test_a_sample_of_an_epoch():
    """With probability 1 - q an example is in no step: the ratio is 1 - q + q R."""
    sampled = dp_accounting.PoissonSampledDpEvent(0.6, RandomAllocationDpEvent(1.0, 2))
    pair = random_allocation.pair(0.6, 1.0, 2)
    z = np.linspace(-9, 10, 20001)
    weights = np.exp(-z * z / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    y = np.exp(z - 0.5)
    for epsilon in (0.1, 0.8):
        e = math.exp(epsilon)
        exact = [
            0.3 * (weights * _call((e - 0.4) / 0.3 - y, 1.0)).sum(),
            0.3 * e * (weights * _put((1 / e - 0.4) / 0.3 - y, 1.0)).sum(),
        ]
        for value, found in zip(exact, _deltas(pair, epsilon), strict=True):
            assert value * _EXACT <= found <= value * 1.01
    both = [bounds.tightest_epsilon([Release(e, 3)], 1e-5) for e in (sampled, sampled.event)]
    for name in ("RDP", "PLD"):
        assert both[0].by_accountant[name] < both[1].by_accountant[name]


def test_extreme_parameters(monkeypatch):
    monkeypatch.setattr(random_allocation, "_MOST_STEPS", 40)  # More are slow.
    for sigma, steps in itertools.product([1e-3, 0.09, 0.1, 100.0, 1e9], [1, 10**9]):
        event = RandomAllocationDpEvent(sigma, steps)
        rdp = np.asarray(RdpAccountant().compose(event).rdp)
        assert not np.isnan(rdp).any()
        assert (rdp >= 0).all()
        most = np.asarray(RdpAccountant().compose(dp_accounting.GaussianDpEvent(sigma)).rdp)
        assert (rdp <= most * (1 + 1e-9)).all()
        epsilon = PldAccountant().compose(event).get_epsilon(1e-5)
        largest = PldAccountant().compose(dp_accounting.GaussianDpEvent(sigma)).get_epsilon(1e-5)
        assert 0 <= epsilon <= largest * 1.01
    for accountant in (RdpAccountant(), PldAccountant()):
        assert accountant.compose(RandomAllocationDpEvent(0.0, 10)).get_epsilon(1e-5) == math.inf
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="steps"):
            PrivacyLedger().record(RandomAllocationDpEvent(1.0, steps))


def test_ledger_round_trip_and_composition():
    ledger = PrivacyLedger()
    ledger.record(RandomAllocationDpEvent(1.0, 50), count=4)
    ledger.record(dp_accounting.PoissonSampledDpEvent(0.9, RandomAllocationDpEvent(1.0, 50)))
    ledger.record(event_codec.sampled_gaussian(0.02, 1.0), count=200)
    read = PrivacyLedger.from_dict(ledger.to_dict())
    assert read.releases == ledger.releases
    alone = bounds.tightest_epsilon(ledger.releases[:1], 1e-5).epsilon
    found = ledger.epsilon(1e-5)
    assert alone < found.epsilon < found.by_accountant["RDP"]
    text = " ".join(privacy_statement(ledger, 1e-5, dataset_size=500).split())
    assert "4 epochs of 50 steps each" in text
    assert "with probability q = 0.9, or else of none (of 500 examples, 9 expected" in text
    assert RdpFilter(2.0, 1e-5).cost(RandomAllocationDpEvent(2.0, 50)) < RdpFilter(2.0, 1e-5).cost(
        dp_accounting.GaussianDpEvent(2.0)
    )


def test_what_has_no_price_for_epochs_takes_one_gaussian():
    assert len(DEFAULT_RDP_ORDERS) == len(RdpAccountant().compose(RandomAllocationDpEvent(1.0)).rdp)
    np.testing.assert_allclose(
        RdpAccountant().compose(RandomAllocationDpEvent(1.0, 1)).rdp,
        RdpAccountant().compose(dp_accounting.GaussianDpEvent(1.0)).rdp,
    )
