"""The price of a selection composes, is stated, and meets a budget."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize, stats

from tfdp.accounting import (
    PoissonSampling,
    PrivacyLedger,
    RdpAccountant,
    RdpFilter,
    Repetitions,
    SelectiveReleaseDpEvent,
    calibrate_noise_multiplier,
    calibrate_private_selection,
    calibrate_steps,
    epsilon_interval,
    privacy_statement,
    private_selection,
)
from tfdp.accounting.event_codec import allocated_gaussian, sampled_gaussian
from tfdp.accounting.ledger import compose_ledgers

_DELTA = 1e-5
_STEP = sampled_gaussian(0.01, 1.0)
_SCORE = dp_accounting.GaussianDpEvent(20.0)
_GEOMETRIC = Repetitions("geometric", 10)


def _run(tau=0.0):
    run = PrivacyLedger(["A note."])
    run.record(_STEP, 1000, truncation_probability=tau)
    run.record(_SCORE)
    return run


def test_a_selection_is_one_release_by_both_accountants():
    tuned = private_selection(_run(), _GEOMETRIC)
    bound = tuned.epsilon(_DELTA)
    assert tuned.steps == 1 and tuned.notes == ("A note.",)
    assert set(bound.by_accountant) == {"RDP", "PLD"}
    one, ten = _run().epsilon(_DELTA).epsilon, PrivacyLedger()
    ten.record(_run().event, 10)
    assert one < bound.epsilon < ten.epsilon(_DELTA).epsilon
    same = PrivacyLedger()
    same.record(_GEOMETRIC.event(_run().event))
    assert same.epsilon(_DELTA) == bound
    assert private_selection(_run().event, _GEOMETRIC).epsilon(_DELTA) == bound


def test_truncations_of_all_runs_are_charged():
    clean = private_selection(_run(), _GEOMETRIC).epsilon(_DELTA).epsilon
    tau = 1e-12
    tuned = private_selection(_run(tau), _GEOMETRIC)
    assert tuned.releases[0].truncation_probability == pytest.approx(10 * 1000 * tau)
    stated = tuned.epsilon(_DELTA).epsilon
    left = _DELTA - (1 + math.exp(stated)) * 10 * 1000 * tau
    needed = private_selection(_run(), _GEOMETRIC).epsilon(left).epsilon
    assert clean < needed <= stated < 1.1 * clean
    assert private_selection(_run(1e-4), _GEOMETRIC).epsilon(_DELTA).epsilon == math.inf


def test_mutant_that_charges_the_truncations_of_one_run_is_caught():
    tau = 1e-12
    mutant = PrivacyLedger()
    mutant.record(_GEOMETRIC.event(_run().event), 1, truncation_probability=1000 * tau)
    stated = mutant.epsilon(_DELTA).epsilon
    left = _DELTA - (1 + math.exp(stated)) * 10 * 1000 * tau
    assert private_selection(_run(), _GEOMETRIC).epsilon(left).epsilon > stated


def test_other_releases_are_added():
    tuned, other = private_selection(_run(), _GEOMETRIC), PrivacyLedger()
    other.record(sampled_gaussian(0.02, 3.0), 100)
    bound = compose_ledgers([tuned, other]).epsilon(_DELTA)
    accountant = RdpAccountant().compose(tuned.event).compose(other.event)
    assert bound.by_accountant["RDP"] == pytest.approx(accountant.get_epsilon(_DELTA))
    halves = [ledger.epsilon(_DELTA / 2).by_accountant["PLD"] for ledger in (tuned, other)]
    assert bound.by_accountant["PLD"] == pytest.approx(sum(halves), rel=1e-9)
    # A mutant that gives all of delta to both is caught.
    wholes = [ledger.epsilon(_DELTA).by_accountant["PLD"] for ledger in (tuned, other)]
    assert bound.by_accountant["PLD"] > 1.01 * sum(wholes)


def test_two_selections_cost_more_than_one():
    tuned = private_selection(_run(), _GEOMETRIC)
    half = tuned.epsilon(_DELTA / 2).by_accountant["PLD"]
    tuned.record(tuned.releases[0].event)
    assert tuned.epsilon(_DELTA).by_accountant["PLD"] == pytest.approx(2 * half, rel=1e-9)


@pytest.mark.parametrize(
    "part",
    [
        dp_accounting.LaplaceDpEvent(20.0),
        _GEOMETRIC.event(sampled_gaussian(0.01, 2.0)),
    ],
)
def test_runs_of_other_events(part):
    run = PrivacyLedger()
    run.record(part, 5)
    tuned = private_selection(run, _GEOMETRIC).epsilon(_DELTA).epsilon
    assert run.epsilon(_DELTA).epsilon < tuned < math.inf


@pytest.mark.slow
def test_what_is_observed_of_dpsur_stays_with_it():
    attempt = SelectiveReleaseDpEvent(sampled_gaussian(0.02, 3.0), sampled_gaussian(0.005, 1.3))
    epsilons = {}
    for mode in ("conditional", "per_attempt"):
        run = PrivacyLedger(selective_release=mode)
        run.record(attempt, 20)
        tuned = private_selection(run, _GEOMETRIC)
        assert tuned.selective_release == mode
        assert run.epsilon(_DELTA).epsilon < tuned.epsilon(_DELTA).epsilon < math.inf
        epsilons[mode] = tuned.epsilon(_DELTA).epsilon
    assert epsilons["conditional"] != epsilons["per_attempt"]


def test_the_unit_of_privacy_stays():
    run = PrivacyLedger(unit="user")
    run.record(_STEP, 10)
    tuned = private_selection(run, _GEOMETRIC)
    assert tuned.unit == "user"
    assert "each user is in each batch" in " ".join(privacy_statement(tuned, _DELTA).split())


def test_interval_holds_the_epsilon_of_one_run():
    run, tuned = _run(), private_selection(_run(), _GEOMETRIC)
    interval = epsilon_interval(tuned, _DELTA)
    # NumPy's last bits depend on where its arrays lie in memory.
    assert interval.lower == pytest.approx(epsilon_interval(run, _DELTA).lower, rel=1e-12)
    assert interval.upper == pytest.approx(tuned.epsilon(_DELTA).epsilon, rel=1e-12)
    assert interval.lower > 0
    with_prior = epsilon_interval(tuned, _DELTA, prior=run)
    assert interval.lower < with_prior.lower < with_prior.upper
    # There may be no run at all.
    assert epsilon_interval(private_selection(_run(), Repetitions("poisson", 3)), _DELTA).lower == 0


def test_statement_says_what_was_selected_and_what_is_assumed():
    text = " ".join(privacy_statement(private_selection(_run(), _GEOMETRIC), _DELTA).split())
    assert "1 private selection: the best of a random number of runs (geometric" in text
    assert "mean 10), of which each is 1000 steps of the Gaussian mechanism" in text
    assert "then 1 step of GaussianDpEvent(noise_multiplier=20.0)" in text
    assert "only the best run is released" in text
    assert "only the best run" not in privacy_statement(_run(), _DELTA)
    other = private_selection(_run(), Repetitions("negative_binomial", 7, 0.5))
    assert "(truncated negative binomial of shape 0.5 distribution, mean 7)" in " ".join(
        privacy_statement(other, _DELTA).split()
    )


@pytest.mark.parametrize("repetitions", [_GEOMETRIC, Repetitions("poisson", 3)])
def test_a_ledger_survives_being_written(repetitions):
    tuned = private_selection(_run(1e-20), repetitions)
    again = PrivacyLedger.from_dict(tuned.to_dict())
    assert again.releases == tuned.releases
    assert again.epsilon(_DELTA) == tuned.epsilon(_DELTA)


def test_filter_prices_a_selection_at_its_order():
    budget = RdpFilter(6.0, _DELTA)
    event = _GEOMETRIC.event(sampled_gaussian(0.01, 5.0))
    rdp = RdpAccountant([budget.order]).compose(event).rdp[0]
    assert budget.cost(event) == pytest.approx(rdp) and rdp > 0


_SIZES = {"steps": 1000, "sampling_probability": 0.01}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("repetitions", "score"), [(_GEOMETRIC, None), (Repetitions("poisson", 3), _SCORE)]
)
def test_noise_meets_the_target_and_less_noise_does_not(repetitions, score):
    def epsilon(noise):
        run = PrivacyLedger()
        run.record(sampled_gaussian(0.01, noise), 1000)
        if score is not None:
            run.record(score)
        return private_selection(run, repetitions).epsilon(_DELTA).epsilon

    budget = {"target_epsilon": 2.0, "delta": _DELTA}
    noise = calibrate_private_selection(repetitions, **budget, **_SIZES, score=score)
    assert epsilon(noise) <= 2.0 < epsilon(0.998 * noise)
    assert noise > calibrate_noise_multiplier(**budget, **_SIZES)


@pytest.mark.slow
def test_noise_allows_for_earlier_releases():
    budget = {"target_epsilon": 4.0, "delta": _DELTA}
    prior = private_selection(_run(), Repetitions("geometric", 2))
    noise = calibrate_private_selection(_GEOMETRIC, **budget, **_SIZES, prior=prior)
    run = PrivacyLedger()
    run.record(sampled_gaussian(0.01, noise), 1000)
    whole = private_selection(run, _GEOMETRIC)
    whole.record(prior.releases[0].event)
    assert whole.epsilon(_DELTA).epsilon <= 4.0
    # And training that follows a selection has what is left.
    left = calibrate_steps(**budget, noise_multiplier=2.0, sampling_probability=0.01, prior=prior)
    alone = calibrate_steps(**budget, noise_multiplier=2.0, sampling_probability=0.01)
    assert 0 < left < alone


def _allocated(noise, point):
    """Densities of an epoch of two steps, with an example and without, at points `[2, ...]`."""

    def density(*mean):
        return np.prod([stats.norm.pdf(y, m, noise) for y, m in zip(point, mean, strict=True)], 0)

    return (density(1, 0) + density(0, 1)) / 2, density(0, 0)


def test_selections_of_epochs_by_random_allocation_are_never_above_the_bound():
    """The best of runs of an epoch of two steps, by attacks that rank what was released."""
    noise = 0.8
    event = allocated_gaussian(1.0, noise, 2)
    bound = private_selection(event, _GEOMETRIC).epsilon(_DELTA)
    cells = np.linspace(-9 * noise, 9 * noise + 1, 1001)
    point = np.meshgrid(cells, cells)
    with_one, without = (p / p.sum() for p in map(np.ravel, _allocated(noise, point)))
    ratio, least = np.log(with_one / without), 0.0
    for p, q, towards in ((with_one, without, ratio), (without, with_one, -ratio)):
        for low in (-0.5, 0.0, 0.5):
            for telling in (1.0, 2.0, 3.0):
                score = np.where(towards < low, 2, np.where(towards > telling, 1, 0))
                order = np.lexsort((towards, score))
                least = max(least, _epsilon_of(*(_best_of_ten(one[order]) for one in (p, q))))
    assert all(least <= one for one in bound.by_accountant.values())
    assert bound.epsilon < 1.35 * least
    # A mutant that takes the example's step to be one of twice as many is caught.
    mutant = private_selection(allocated_gaussian(1.0, noise, 4), _GEOMETRIC)
    assert mutant.epsilon(_DELTA).epsilon < least


def _best_of_ten(probabilities):
    """Probabilities of the best of a geometric number of runs, from the worst to the best."""
    better = np.cumsum(probabilities[::-1])[::-1] - probabilities / 2
    return 10 * (0.1 / (0.1 + 0.9 * better)) ** 2 * probabilities


def _epsilon_of(p, q):
    def log_gap(epsilon):
        return math.log(max(np.maximum(p - math.exp(epsilon) * q, 0).sum(), 1e-300) / _DELTA)

    return optimize.brentq(log_gap, 0, 60, xtol=1e-6) if log_gap(0) > 0 else 0.0


@pytest.mark.slow
def test_noise_of_epochs_meets_the_target():
    sampling = PoissonSampling(1000, 100, cycle_length=10, redraws_sets=True)
    budget = {"target_epsilon": 2.0, "delta": _DELTA, "steps": 50}
    noise = calibrate_private_selection(_GEOMETRIC, **budget, sampling=sampling)

    def epsilon(noise):
        run = dp_accounting.SelfComposedDpEvent(allocated_gaussian(1.0, noise, 10), 5)
        return private_selection(run, _GEOMETRIC).epsilon(_DELTA).epsilon

    assert epsilon(noise) <= 2.0 < epsilon(0.998 * noise)
    by_poisson = PoissonSampling(1000, 100)
    more = calibrate_private_selection(_GEOMETRIC, **budget, sampling=by_poisson)
    assert noise < 0.97 * more
    assert more == calibrate_private_selection(_GEOMETRIC, **budget, sampling_probability=0.1)
    with pytest.raises(ValueError, match="`sampling` must be a PoissonSampling without other"):
        calibrate_private_selection(
            _GEOMETRIC, **budget, sampling=sampling, sampling_probability=0.1
        )


def test_errors_name_the_argument():
    for run in (PrivacyLedger(), [_STEP], None):
        with pytest.raises(ValueError, match="Argument `run` must be a PrivacyLedger"):
            private_selection(run, _GEOMETRIC)
    with pytest.raises(ValueError, match=r"Argument `repetitions` must be a tfdp\.accounting"):
        private_selection(_run(), 10)
    with pytest.raises(ValueError, match="Argument `score` must be"):
        calibrate_private_selection(
            _GEOMETRIC, target_epsilon=2.0, delta=_DELTA, **_SIZES, score="accuracy"
        )
    with pytest.raises(ValueError, match="Argument `mean` must be"):
        PrivacyLedger().record(RepeatAndSelectDpEvent(_STEP, 0.5, 1.0))


def test_a_score_that_may_be_cut_off_costs_as_much_in_a_calibration_as_in_a_ledger():
    score, run = PrivacyLedger(), PrivacyLedger()
    score.record(_SCORE, truncation_probability=1e-7)
    noise = calibrate_private_selection(
        _GEOMETRIC,
        target_epsilon=2.0,
        delta=_DELTA,
        steps=50,
        sampling_probability=0.05,
        score=score,
    )
    run.record(sampled_gaussian(0.05, noise), 50)
    run.record(_SCORE, truncation_probability=1e-7)
    assert 1.98 < private_selection(run, _GEOMETRIC).epsilon(_DELTA).epsilon <= 2.0
