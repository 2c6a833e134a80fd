"""Tests of the price of signs: never below what some signs cost, and less than the Gaussian's."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, special

from experiments.accounting import sign_certificate
from experiments.accounting import signs as signs_experiment
from tfdp.accounting import (
    PrivacyLedger,
    RdpFilter,
    SelectiveReleaseDpEvent,
    bounds,
    event_codec,
    privacy_statement,
    signed_gaussian,
)
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS, PldAccountant, RdpAccountant
from tfdp.accounting.calibration import calibrate_noise_multiplier, calibrate_steps
from tfdp.accounting.signed_gaussian import SignedGaussianDpEvent, rdp

_EXACT = 1 - 1e-12
_CACHED = signed_gaussian._rdp_of_signs, signed_gaussian._integer_moment


def _sampled(q, noise):
    return event_codec.sampled_gaussian(q, noise, releases_signs=True)


def _outcomes(m, d):
    """Probabilities of all vectors of signs, without the example and with it, as logarithms."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(m))))
    return special.log_ndtr(signs * m).sum(1), special.log_ndtr(signs * (m + d)).sum(1)


def _equal_coordinates(count, m, d):
    """The same of `count` equal coordinates: of the number of positive signs."""
    ones = np.arange(count + 1)
    choose = special.gammaln(count + 1) - special.gammaln(ones + 1)
    choose = choose - special.gammaln(count - ones + 1)
    return tuple(
        choose + ones * special.log_ndtr(x) + (count - ones) * special.log_ndtr(-x)
        for x in (m, m + d)
    )


def _divergences(without, with_it, q, order):
    """Renyi divergences of the mixture from `without`, and the other way round."""
    if q < 1:
        with_it = np.logaddexp(np.log1p(-q) + without, np.log(q) + with_it)
    return [
        special.logsumexp(order * upper + (1 - order) * lower) / (order - 1)
        for upper, lower in ((with_it, without), (without, with_it))
    ]


def _settings(seed, count):
    """Random margins and shifts, of one, two, or many coordinates; q, noise and order."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        noise = 10 ** rng.uniform(math.log10(0.2), 2 if i % 2 else 0.5)
        q = 1.0 if i % 7 == 0 else 10 ** rng.uniform(-6 if i % 3 else -2, 0)
        order = float(rng.integers(2, 40) if i % 2 else rng.uniform(1.01, 80))
        if i % 5 == 4:
            n = int(rng.integers(10, 300))
            yield _equal_coordinates(n, rng.normal() * 0.3, 1 / noise / n**0.5), q, noise, order
            continue
        size = int(rng.integers(1, 7))
        d = rng.normal(size=size) * 10 ** rng.uniform(-2, 0, size)
        d *= 1 / noise / np.linalg.norm(d)
        m = rng.uniform(-1.3, 0.3) * order * d if i % 4 == 0 else rng.normal(size=size)
        yield _outcomes(m, d), q, noise, order


def _excess(seed, count):
    """The largest logarithm of a brute-force divergence over the bound."""
    worst = -math.inf
    for (without, with_it), q, noise, order in _settings(seed, count):
        bound = max(float(rdp(q, noise, (order,))[0]), 1e-300)
        for exact in _divergences(without, with_it, q, order):
            if exact > 1e-13:  # Not rounding alone.
                worst = max(worst, math.log(exact * _EXACT / bound))
    return worst


def test_no_signs_cost_more():
    assert _excess(seed=1, count=400) <= 1e-9


@pytest.mark.parametrize("mutant", ["orders", "direction", "q", "share", "norm"])
def test_mutants_cost_less_than_some_signs(monkeypatch, mutant):
    _CACHED[0].cache_clear()
    _CACHED[1].cache_clear()
    original, moment = signed_gaussian._rdp_of_signs, signed_gaussian.log_moment
    changed = {
        "orders": ("log_moment", lambda k, noise: moment(np.maximum(np.asarray(k) - 1, 1), noise)),
        "direction": ("_DIRECTIONS", (signed_gaussian._without_above_with,)),
        "q": ("_rdp_of_signs", lambda q, *rest: original(q**2, *rest)),
        "share": ("share_of_gaussian", lambda t: np.full_like(t, 2 / np.pi)),
        "norm": ("log_moment", lambda k, noise: moment(k, noise * 1.1)),
    }
    monkeypatch.setattr(signed_gaussian, *changed[mutant])
    assert _excess(seed=1, count=400) > 1e-3
    _CACHED[0].cache_clear()
    _CACHED[1].cache_clear()


def test_each_direction_is_bounded_by_itself(monkeypatch):
    """Also the one that is nearly always the smaller, which the other would hide."""
    for mutant in (False, True):
        if mutant:  # Without the rare outcomes, where the quadratic is too small.
            monkeypatch.setattr(signed_gaussian, "_largest_gap", lambda r0, s: 0.0 * r0 * s)
        below = 0
        for noise, q, order in itertools.product([0.3, 1.0, 3.0], [0.05, 0.3, 0.8], [2, 5, 20]):
            with np.errstate(all="ignore"):
                bound = signed_gaussian._without_above_with(q, noise, order)
            for m in np.linspace(-3, 3, 25):
                without, with_it = _outcomes(np.array([m]), np.array([1 / noise]))
                exact = _divergences(without, with_it, q, order)[1] * (order - 1)
                below += exact > bound * (1 + 1e-9) + 1e-14
        assert (below > 0) == mutant


@pytest.mark.parametrize("order", [2, 3, 17, 200, 1024])
def test_one_sign_by_ascent(order):
    """The largest moment that an optimizer finds is within the table, and near it."""
    for shift in (1e-3, 0.02, 0.1, 0.5, 2.0, 5.0):
        v = order * (order - 1) * shift**2 / 2
        bound = float(signed_gaussian.log_moment(order, 1 / shift))
        found = [
            -optimize.minimize_scalar(
                lambda m, s=shift: -sign_certificate.log_moment(order, m, s),
                bounds=(-start * order * shift - 1.5, 1.0),
                method="bounded",
            ).fun
            for start in (0.0, 0.7, 1.1)
        ]
        assert max(found) <= bound * (1 + 1e-9)
        assert max(found) >= 0.99 * bound or v < 1e-4


def test_the_certificate_holds_for_a_few_orders():
    assert sign_certificate.certify(np.array([2, 1024])) > 0


@pytest.mark.slow
def test_the_certificate_holds():
    assert sign_certificate.certify(np.array([2, 3, 4, 5, 9, 33, 257, 1000, 1024])) > 0


def test_the_certificate_refuses_a_smaller_table(monkeypatch):
    monkeypatch.setattr(signed_gaussian, "_SHARES", signed_gaussian._SHARES * 0.999)
    with pytest.raises(sign_certificate.NotProvenError):
        sign_certificate.certify(np.array([2]), steps=4)


@pytest.mark.slow
def test_the_table_is_what_the_command_makes():
    made = np.array(sign_certificate.made_table())
    assert np.abs(made - signed_gaussian.TABLE).max() <= 1


def test_moments_by_independent_arithmetic():
    """The table is no less than the largest moment in 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(50):
        for k, shift, m in [(2, 0.01, -0.007), (2, 1.0, -0.7), (40, 0.1, -3.4), (1000, 0.02, -19)]:
            p, r = mpmath.ncdf(m), mpmath.ncdf(mpmath.mpf(m) + shift)
            exact = float(mpmath.log(p ** (1 - k) * r**k + (1 - p) ** (1 - k) * (1 - r) ** k))
            assert exact <= float(signed_gaussian.log_moment(k, 1 / shift))
            assert exact == pytest.approx(sign_certificate.log_moment(k, m, shift), rel=1e-7)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("seed", range(25))
def test_epsilon_of_held_out_settings(seed):
    rng = np.random.default_rng([77, seed])
    q, noise = 10 ** rng.uniform(-4, -1), 10 ** rng.uniform(math.log10(0.5), 0.7)
    steps, delta = int(10 ** rng.uniform(1, 4)), 10 ** rng.uniform(-9, -4)
    signs = bounds.Release(_sampled(q, noise), steps)
    gaussian = bounds.Release(event_codec.sampled_gaussian(q, noise), steps)
    found = bounds.tightest_epsilon([signs], delta)
    whole = bounds.tightest_epsilon([gaussian], delta)
    assert found.epsilon <= whole.epsilon * (1 + 1e-9)
    assert found.by_accountant["PLD"] == pytest.approx(whole.by_accountant["PLD"], rel=1e-3)
    attacks = [signs_experiment.attack(q, noise, steps, delta, n) for n in (1, 100)]
    assert max(attacks) <= found.epsilon
    interval = bounds.epsilon_interval([signs], delta)
    assert interval.lower <= interval.upper == found.epsilon


def test_extreme_parameters():
    for q, noise in itertools.product(
        [0.0, 1e-9, 1e-6, 0.5, 1 - 1e-12, 1.0], [1e-3, 0.2, 100, 1e9]
    ):
        found = rdp(q, noise, DEFAULT_RDP_ORDERS)
        gaussian = RdpAccountant().compose(event_codec.sampled_gaussian(q, noise)).rdp
        assert not np.isnan(found).any()
        assert (found >= 0).all()
        assert (found <= np.asarray(gaussian) * (1 + 1e-12)).all()
    assert np.isinf(rdp(0.5, 0.0, (2.0, 3.0))).all()
    assert (
        rdp(0.01, 1.0, (2000.0,))
        == RdpAccountant([2000.0]).compose(event_codec.sampled_gaussian(0.01, 1.0)).rdp
    )


def test_signs_are_cheaper():
    """The numbers of docs/sign_accounting.md."""
    for q, steps, target, most in [(256 / 60000, 4688, 1.0, 0.832), (2048 / 60000, 600, 3.0, 2.46)]:
        noise = calibrate_noise_multiplier(
            target_epsilon=target, delta=1e-5, steps=steps, sampling_probability=q
        )
        found = bounds.tightest_epsilon([bounds.Release(_sampled(q, noise), steps)], 1e-5)
        assert found.accountant == "RDP"
        assert found.epsilon <= most


def test_without_sampling():
    """One event, a plain one, and one sampled with q = 1 are the same."""
    plain = RdpAccountant().compose(SignedGaussianDpEvent(2.0), 10)
    sampled = RdpAccountant().compose(_sampled(1.0, 2.0), 10)
    np.testing.assert_allclose(plain.rdp, sampled.rdp)
    gaussian = RdpAccountant().compose(dp_accounting.GaussianDpEvent(2.0), 10)
    assert plain.get_epsilon(1e-5) < 0.85 * gaussian.get_epsilon(1e-5)
    pld = PldAccountant().compose(SignedGaussianDpEvent(2.0), 10)
    expected = PldAccountant().compose(dp_accounting.GaussianDpEvent(2.0), 10)
    assert pld.get_epsilon(1e-5) == pytest.approx(expected.get_epsilon(1e-5), rel=1e-3)
    assert PldAccountant().compose(SignedGaussianDpEvent(0.0)).get_epsilon(1e-5) == math.inf
    assert RdpAccountant().compose(SignedGaussianDpEvent(0.0)).get_epsilon(1e-5) == math.inf


def test_calibration_inverts():
    arguments = {"target_epsilon": 2.0, "delta": 1e-5, "sampling_probability": 0.01}
    noise = calibrate_noise_multiplier(steps=5000, releases_signs=True, **arguments)
    gaussian = calibrate_noise_multiplier(steps=5000, **arguments)
    assert noise < 0.97 * gaussian
    epsilon = bounds.tightest_epsilon([bounds.Release(_sampled(0.01, noise), 5000)], 1e-5).epsilon
    assert 0.995 * 2 <= epsilon <= 2
    steps = calibrate_steps(noise_multiplier=noise, releases_signs=True, **arguments)
    assert 5000 <= steps <= 5025


def test_ledger_round_trip_and_composition():
    ledger = PrivacyLedger()
    ledger.record(_sampled(0.01, 1.0), count=500)
    ledger.record(event_codec.sampled_gaussian(0.01, 1.0), count=500)
    assert len(ledger.releases) == 2
    read = PrivacyLedger.from_dict(ledger.to_dict())
    assert read.releases == ledger.releases
    assert type(read.releases[0].event.event) is SignedGaussianDpEvent
    alone = [
        bounds.Release(_sampled(0.01, 1.0), 1000),
        bounds.Release(event_codec.sampled_gaussian(0.01, 1.0), 1000),
    ]
    low, high = (bounds.rdp_epsilon([release], 1e-5) for release in alone)
    mixed = bounds.rdp_epsilon(ledger.releases, 1e-5)
    assert low < mixed < high
    text = privacy_statement(ledger, 1e-5)
    assert "500 steps of the signs of the Gaussian mechanism" in " ".join(text.split())
    assert "500 steps of the Gaussian mechanism" in " ".join(text.split())


def test_what_has_no_price_for_signs_takes_them_for_numbers():
    """The test of selective release, and private selection, price what they know."""
    test = event_codec.sampled_gaussian(0.01, 1.3)
    signs, numbers = (
        SelectiveReleaseDpEvent(event_codec.sampled_gaussian(0.01, 2.0, signs), selection=test)
        for signs in (True, False)
    )
    for mode in ("conditional", "per_attempt"):
        found, expected = (
            RdpAccountant(selective_release=mode).compose(event, 100).rdp
            for event in (signs, numbers)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)  # BLAS rounds by alignment.
    budget = RdpFilter(2.0, 1e-5)
    assert (
        0 < budget.cost(_sampled(0.01, 1.0)) <= budget.cost(event_codec.sampled_gaussian(0.01, 1.0))
    )
