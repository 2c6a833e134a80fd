"""Releases on separate parts of the data cost the price of one part, and never less."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize, stats

from tfdp.accounting import (
    ParallelDpEvent,
    PldAccountant,
    PrivacyLedger,
    RdpAccountant,
    RdpFilter,
    Repetitions,
    calibrate_private_selection,
    epsilon_interval,
    privacy_statement,
    private_selection,
)
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.ledger import compose_ledgers

_DELTA = 1e-4
_RUNS = Repetitions("geometric", 4)
_Gaussian = dp_accounting.GaussianDpEvent


def _ledger(*events):
    ledger = PrivacyLedger()
    for event in events:
        ledger.record(event)
    return ledger


def _epsilon(*events, delta=_DELTA):
    return _ledger(*events).epsilon(delta).epsilon


# Selections whose scores are of held-out examples, against their exact distributions.


def _run(sigma, noise, trained, held_out):
    """Probabilities of a run's model and score on a grid, `[scores, models]`.

    The model is one number, and the held-out example is scored right where it is positive.
    """
    model = np.linspace(-9 * sigma, 9 * sigma + 1, 801)
    score = np.linspace(-9 * noise, 9 * noise + 1, 1601)
    of_model = stats.norm.pdf(model, trained, sigma)
    right = held_out * (model > 0.5)
    joint = stats.norm.pdf(score[:, np.newaxis], right, noise) * of_model
    return joint / joint.sum()


def _best(run):
    """Probabilities of the best of a geometric number of runs, ranked by the score."""
    of_score = run.sum(axis=1)
    better = np.cumsum(of_score[::-1])[::-1] - of_score / 2
    gamma = 1 / _RUNS.mean
    others = (gamma / (gamma + (1 - gamma) * better)) ** 2
    return _RUNS.mean * others[:, np.newaxis] * run


def _exact_epsilon(p, q):
    def log_gap(epsilon):
        delta = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))
        return math.log(max(delta, 1e-300) / _DELTA)

    return optimize.brentq(log_gap, 0, 60)


def _attacks(sigma, noise):
    """Epsilon of the selection for a trained example, and for one that is held out."""
    without = _best(_run(sigma, noise, trained=0, held_out=0))
    return (
        max(
            _exact_epsilon(_best(_run(sigma, noise, 1, h)), _best(_run(sigma, noise, 0, h)))
            for h in (0, 1)
        ),
        _exact_epsilon(_best(_run(sigma, noise, trained=0, held_out=1)), without),
    )


@pytest.mark.parametrize(("sigma", "noise"), [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0)])
def test_no_selection_is_above_its_bound_and_the_dearer_part_is_near(sigma, noise):
    run, score = _ledger(_Gaussian(sigma)), _Gaussian(noise)
    bound = private_selection(run, _RUNS, held_out_score=score).epsilon(_DELTA)
    of_trained, of_held_out = _attacks(sigma, noise)
    dearer = max(of_trained, of_held_out)
    assert all(dearer <= one for one in bound.by_accountant.values())
    assert bound.epsilon < 1.5 * dearer
    both = private_selection(_ledger(_Gaussian(sigma), score), _RUNS).epsilon(_DELTA).epsilon
    assert bound.epsilon < 0.98 * both
    # Mutants: the cheaper part, and (where the score is dearer) a score that costs nothing.
    parts = [private_selection(one, _RUNS) for one in (run, score)]
    if sigma != noise:
        assert min(part.epsilon(_DELTA).epsilon for part in parts) < dearer
    assert (parts[0].epsilon(_DELTA).epsilon < dearer) == (noise < sigma)


# The event.

_PARTS = [_Gaussian(1.0), _Gaussian(3.0)]


def test_each_price_is_the_largest_of_the_parts_whatever_their_order():
    step, orders = sampled_gaussian(0.1, 0.8), [1.5, 2.0, 8.0, 64.0]
    parts = [step, _Gaussian(2.2)]  # Neither is dearer at every order.
    alone = [np.array(RdpAccountant(orders).compose(part).rdp) for part in parts]
    assert any(alone[0] > alone[1]) and any(alone[0] < alone[1])
    for events in (parts, parts[::-1]):
        found = RdpAccountant(orders).compose(ParallelDpEvent(events)).rdp
        np.testing.assert_array_equal(found, np.maximum(*alone))
        for delta in (1e-300, 1e-30, 1e-9, 1e-4, 0.05, 0.9):
            by_pld = _ledger(ParallelDpEvent(events)).epsilon(delta).by_accountant["PLD"]
            assert by_pld == max(PldAccountant().compose(part).get_epsilon(delta) for part in parts)


def test_other_releases_add_up_for_the_examples_of_each_part():
    """An example may be in the dear part of each of several releases."""
    first, second = ParallelDpEvent(_PARTS), ParallelDpEvent(_PARTS[::-1])
    other = _Gaussian(2.0)
    bound = _ledger(first, other, second).epsilon(_DELTA)
    dearest = PldAccountant().compose(_PARTS[0], 2).compose(other).get_least_epsilon(_DELTA)
    assert all(dearest < one for one in bound.by_accountant.values())
    # A mutant that takes the first part of each for the parts of the same examples is caught.
    mutants = [_epsilon(*parts, other) for parts in (_PARTS, _PARTS[::-1])]
    assert max(mutants) < dearest
    half = (1 - 1e-12) * _DELTA / 2
    two = _ledger(first, other).epsilon(_DELTA).by_accountant["PLD"]
    alone = PldAccountant().compose(_PARTS[0]).get_epsilon(half)
    assert two == pytest.approx(alone + PldAccountant().compose(other).get_epsilon(half))
    assert _ledger(first, other).epsilon(_DELTA).epsilon >= _epsilon(_PARTS[0], other)


def test_the_lower_bound_is_that_of_the_first_part():
    interval = epsilon_interval(_ledger(ParallelDpEvent(_PARTS)), _DELTA)
    assert interval.lower == epsilon_interval(_ledger(_PARTS[0]), _DELTA).lower
    assert interval.lower <= interval.upper
    selected = private_selection(_ledger(_PARTS[0]), _RUNS, held_out_score=_PARTS[1])
    assert epsilon_interval(selected, _DELTA).lower == interval.lower
    none = private_selection(_PARTS[0], Repetitions("poisson", 3), held_out_score=_PARTS[1])
    assert epsilon_interval(none, _DELTA).lower == 0.0


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_without_a_price_has_none_together_with_others(place):
    def with_part(part):
        events = [_Gaussian(3.0)]
        events.insert(place, part)
        return ParallelDpEvent(events)

    assert _epsilon(with_part(dp_accounting.NonPrivateDpEvent())) == math.inf
    assert _epsilon(with_part(_Gaussian(0.0))) == math.inf
    with pytest.raises(dp_accounting.UnsupportedEventError):
        _epsilon(with_part(dp_accounting.UnsupportedDpEvent()))
    # Only RDP accounting has a price for a selection of selections.
    nested = RepeatAndSelectDpEvent(RepeatAndSelectDpEvent(_Gaussian(5.0), 3, 1), 3, 1)
    assert set(_ledger(with_part(nested)).epsilon(_DELTA).by_accountant) == {"RDP"}
    assert _epsilon(with_part(nested)) >= _epsilon(nested)


def test_what_contains_the_event_prices_it_or_refuses():
    event = ParallelDpEvent(_PARTS)
    with pytest.raises(dp_accounting.UnsupportedEventError):
        _epsilon(dp_accounting.PoissonSampledDpEvent(0.1, event))
    with pytest.raises(dp_accounting.UnsupportedEventError):
        _ledger(event).epsilon(_DELTA, group_size=2)
    assert _epsilon(dp_accounting.SelfComposedDpEvent(event, 2)) >= _epsilon(*[_PARTS[0]] * 2)
    assert _epsilon(RepeatAndSelectDpEvent(event, 3, 1)) >= _epsilon(
        RepeatAndSelectDpEvent(_PARTS[0], 3, 1)
    )
    assert _epsilon(ParallelDpEvent([event])) == _epsilon(event)
    budget = RdpFilter(8.0, _DELTA)
    assert budget.cost(event) == budget.cost(_PARTS[0])


def test_bad_events_are_refused():
    for events, match in (([], "`events` are not empty"), ([3], "type"), (None, "not empty")):
        with pytest.raises(ValueError, match=f"Argument `event` must be .*{match}"):
            PrivacyLedger().record(ParallelDpEvent(events))


def test_a_ledger_survives_being_written_and_states_what_is_assumed():
    run = _ledger(sampled_gaussian(0.01, 1.0))
    tuned = private_selection(run, _RUNS, held_out_score=_Gaussian(10.0))
    again = PrivacyLedger.from_dict(tuned.to_dict())
    assert again.releases == tuned.releases and again.epsilon(_DELTA) == tuned.epsilon(_DELTA)
    composed = compose_ledgers([tuned, run])
    assert composed.epsilon(_DELTA).epsilon > tuned.epsilon(_DELTA).epsilon
    text = " ".join(privacy_statement(composed, _DELTA).split())
    assert "1 release on separate parts of the data, of which each example is in one" in text
    assert "(1) 1 private selection" in text and "or (2) 1 private selection" in text
    assert "no example has to do with more than one of the parts" in text
    assert "only the best run is released" in text
    assert "separate parts" not in privacy_statement(run, _DELTA)


def test_truncations_are_charged():
    run = PrivacyLedger()
    run.record(sampled_gaussian(0.01, 1.0), 100, truncation_probability=1e-9)
    (release,) = private_selection(run, _RUNS, held_out_score=_Gaussian(10.0)).releases
    assert release.truncation_probability == pytest.approx(4 * 100 * 1e-9)


@pytest.mark.slow
def test_noise_meets_the_target_for_each_part_and_is_less_than_for_both():
    sizes = {"steps": 300, "sampling_probability": 0.02}
    budget = {"target_epsilon": 1.0, "delta": 1e-5}
    score = _Gaussian(10.0)

    def calibrated(**scores):
        return calibrate_private_selection(_RUNS, **budget, **sizes, **scores)

    noise = calibrated(held_out_score=score)
    run = PrivacyLedger()
    run.record(sampled_gaussian(0.02, noise), 300)
    tuned = private_selection(run, _RUNS, held_out_score=score)
    assert tuned.epsilon(1e-5).epsilon <= 1.0
    assert noise < 0.95 * calibrated(score=score) and noise == calibrated()
    # A score that is dearer than the budget is refused, however much noise training gets.
    with pytest.raises(ValueError, match="`held_out_score` must be cheaper than `target_epsilon`"):
        calibrated(held_out_score=_Gaussian(2.0))
    with pytest.raises(ValueError, match="`held_out_score` must be a DpEvent or None"):
        calibrated(held_out_score=run)
