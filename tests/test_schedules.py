"""Schedules of the noise multiplier: their values, their cost, calibration and the callback."""

import dataclasses

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp

import tfdp
from tests import support
from tests.front_ends import needs_keras_3
from tfdp import schedules
from tfdp.schedules import ExponentialDecayNoise, PiecewiseConstantNoise

SCHEDULE = PiecewiseConstantNoise([30, 70], [1.5, 1.2, 1.0])
Q, DELTA, STEPS = 0.05, 1e-5, 100
BUDGET = {"target_epsilon": 2.0, "delta": DELTA, "sampling_probability": Q}


def events(schedule=SCHEDULE, steps=STEPS):
    """One event for each step, by the schedule as it is called."""
    return [
        dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(schedule(step)))
        for step in range(steps)
    ]


def ledger_of(schedule, steps=STEPS):
    ledger = tfdp.accounting.PrivacyLedger()
    for event in events(schedule, steps):
        ledger.record(event)
    return ledger


# Values.


def test_values_change_at_the_boundaries():
    assert [SCHEDULE(step) for step in (0, 29, 30, 69, 70, 10**9)] == [1.5, 1.5, 1.2, 1.2, 1, 1]
    decay = ExponentialDecayNoise(2.0, 10, 0.8, 1.0)
    expected = [max(1.0, 2.0 * 0.8 ** (step // 10)) for step in range(60)]
    assert [decay(step) for step in range(60)] == expected
    assert decay.stages().boundaries == (10, 20, 30, 40)


def test_stages_are_products_which_every_machine_rounds_alike():
    """Powers would differ in their last bits."""
    values = ExponentialDecayNoise(2.0, 7, 0.97, 0.5).stages().values
    products = [values[0]]
    for _ in values[2:]:
        products.append(products[-1] * 0.97)
    assert values == (*products, 0.5) and len(values) > 40
    assert values[:-1] != tuple(2.0 * 0.97**i for i in range(len(products)))


@pytest.mark.parametrize("first", [0, 5, 29, 30, 75])
@pytest.mark.parametrize("count", [0, 1, 25, 60, 1000])
def test_groups_are_the_steps_one_by_one(first, count):
    noises = [SCHEDULE(step) for step in range(first, first + count)]
    groups = SCHEDULE.stages().groups(first, count)
    assert [noise for noise, steps in groups for _ in range(steps)] == noises


@pytest.mark.parametrize("schedule", [SCHEDULE, ExponentialDecayNoise(2.0, 10, 0.8, 1.0)])
def test_config_and_scaling(schedule):
    assert schedules.get(schedules.serialize(schedule)) == schedule
    assert type(schedule)(**schedule.get_config()) == schedule
    doubled = schedule.scaled(2.0)
    assert [doubled(step) for step in range(90)] == [2 * schedule(step) for step in range(90)]
    assert doubled.stages().fingerprint != schedule.stages().fingerprint != 0


def test_a_constant_schedule_is_a_number():
    for constant in (PiecewiseConstantNoise([], [1.1]), PiecewiseConstantNoise([5], [1.1, 1.1])):
        assert schedules.stages_of(constant) == schedules.stages_of(1.1)
        assert constant.stages().fingerprint == 0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PiecewiseConstantNoise([3, 3], [1.0, 2.0, 3.0]), "boundaries"),
        (lambda: PiecewiseConstantNoise([0], [1.0, 2.0]), "boundaries"),
        (lambda: PiecewiseConstantNoise([2.5], [1.0, 2.0]), "boundaries"),
        (lambda: PiecewiseConstantNoise(3, [1.0, 2.0]), "boundaries"),
        (lambda: PiecewiseConstantNoise([3], [1.0, 0.0]), "values"),
        (lambda: PiecewiseConstantNoise([3], [1.0, float("nan")]), "values"),
        (lambda: PiecewiseConstantNoise([3], [1.0]), "values"),
        (lambda: PiecewiseConstantNoise(range(1, 65), [1.0] * 65), "values"),
        (lambda: ExponentialDecayNoise(0.0, 10, 0.5, 1.0), "initial"),
        (lambda: ExponentialDecayNoise(2.0, 0, 0.5, 1.0), "decay_steps"),
        (lambda: ExponentialDecayNoise(2.0, 10, 1.0, 1.0), "decay_rate"),
        (lambda: ExponentialDecayNoise(2.0, 10, 0.5, 2.1), "least"),
        (lambda: ExponentialDecayNoise(2.0, 10, 0.999, 1.0), "least"),
        (lambda: SCHEDULE(-1), "step"),
        (lambda: SCHEDULE.scaled(0.0), "factor"),
        (lambda: tfdp.calibrate_noise_schedule(1.0, steps=5, **BUDGET), "schedule"),
        (lambda: tfdp.calibrate_steps(noise_multiplier=abs, **BUDGET), "noise_multiplier"),
    ],
)
def test_bad_arguments(make, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must"):
        make()


# The cost.


@pytest.mark.slow
def test_epsilon_is_that_of_composing_every_step():
    bound = ledger_of(SCHEDULE).epsilon(DELTA)
    by_rdp, by_pld = rdp.RdpAccountant(), pld.PLDAccountant()
    for accountant in (by_rdp, by_pld):
        for event in (events()[0], events()[30], events()[70]):
            accountant.compose(event, events().count(event))
    assert bound.by_accountant["PLD"] == pytest.approx(by_pld.get_epsilon(DELTA), rel=2e-3)
    # Theirs uses a coarser set of orders.
    assert bound.by_accountant["RDP"] == pytest.approx(by_rdp.get_epsilon(DELTA), rel=2e-2)
    first, last = (tfdp.accounting.PrivacyLedger() for _ in range(2))
    first.record(events()[0], STEPS)
    last.record(events()[-1], STEPS)
    assert first.epsilon(DELTA).epsilon < 0.9 * bound.epsilon < 0.81 * last.epsilon(DELTA).epsilon


def test_a_scaled_schedule_spends_the_budget():
    scaled = tfdp.calibrate_noise_schedule(SCHEDULE, steps=STEPS, **BUDGET)
    factor = scaled(0) / SCHEDULE(0)
    assert scaled == SCHEDULE.scaled(factor)
    assert ledger_of(scaled).epsilon(DELTA).epsilon <= 2.0
    assert ledger_of(SCHEDULE.scaled(0.998 * factor)).epsilon(DELTA).epsilon > 2.0
    # Stages that are never reached do not count.
    few = tfdp.calibrate_noise_schedule(SCHEDULE, steps=20, **BUDGET)
    alone = tfdp.calibrate_noise_multiplier(steps=20, **BUDGET)
    assert few(0) == pytest.approx(alone, rel=2e-3)


def test_most_steps_of_a_schedule():
    most = tfdp.calibrate_steps(noise_multiplier=SCHEDULE, **BUDGET)
    assert most > 70
    assert ledger_of(SCHEDULE, most).epsilon(DELTA).epsilon <= 2.0
    # As batches may be cut off, too, there may be one step fewer.
    assert ledger_of(SCHEDULE, most + 2).epsilon(DELTA).epsilon > 2.0


def test_the_statement_prints_the_schedule():
    text = " ".join(tfdp.privacy_statement(ledger_of(SCHEDULE), DELTA).split())
    assert (
        "100 steps of the Gaussian mechanism with noise multipliers 1.5 (30 steps), then 1.2 "
        "(40 steps), then 1 (30 steps), on Poisson-sampled batches" in text
    )


# The callback.


def schedule_for_budget():
    return PiecewiseConstantNoise([4], [3.0, 1.5])


def trained_within(budget):
    x, y = support.small_data(64)
    data = tfdp.data.poisson_batches((x, y), expected_batch_size=16, steps_per_epoch=5)
    optimizer = tfdp.DPSGD(1.0, schedule_for_budget(), sampling=data.sampling)
    model = support.compiled(optimizer)
    model.fit(data, epochs=20, callbacks=[budget], verbose=0)
    return model


class PlansWithTheFirst(tfdp.PrivacyBudget):
    """Mutant: all steps to come cost as much as the first."""

    def _next_releases(self, ledger):
        releases = super()._next_releases(ledger)
        return lambda count: [dataclasses.replace(releases(1)[0], count=count)]


@pytest.mark.slow
def test_the_callback_stops_before_a_later_stage_overspends():
    model = trained_within(tfdp.PrivacyBudget(2.5, 1e-4))
    ledger = model.optimizer.ledger
    assert ledger.steps > 4 and ledger.epsilon(1e-4).epsilon <= 2.5
    more = tfdp.accounting.PrivacyLedger()
    more.record(model.optimizer.release.event)
    both = tfdp.accounting.ledger.compose_ledgers([ledger, more])
    assert both.epsilon(1e-4).epsilon > 2.5
    with pytest.raises(ValueError, match="allows no further step"):
        model.fit(
            tfdp.data.poisson_batches(
                support.small_data(64), expected_batch_size=16, steps_per_epoch=5
            ),
            callbacks=[tfdp.PrivacyBudget(2.5, 1e-4)],
            verbose=0,
        )


@pytest.mark.slow
def test_planning_with_the_first_noise_alone_is_caught():
    model = trained_within(PlansWithTheFirst(2.5, 1e-4))
    assert model.optimizer.ledger.epsilon(1e-4).epsilon > 2.5


# Keras 3.


@needs_keras_3
@pytest.mark.slow
def test_keras_3_records_and_saves_it(tmp_path):
    import keras

    import tfdp.keras3
    from tests.keras3.support import compiled

    data = tfdp.data.poisson_batches(
        support.small_data(64), expected_batch_size=16, steps_per_epoch=6
    )
    optimizer = tfdp.keras3.DPSGD(1.0, schedule_for_budget(), sampling=data.sampling)
    model = compiled(optimizer)
    before = model.optimizer.noise_stddev
    model.fit(data, verbose=0)
    assert (before, model.optimizer.noise_stddev) == (3.0, 1.5)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.noise_multiplier == schedule_for_budget()
    again.fit(data, verbose=0)
    counts = [(r.event.event.noise_multiplier, r.count) for r in again.optimizer.ledger.releases]
    assert counts == [(3.0, 4), (1.5, 8)]
    assert np.all(np.isfinite(again.get_weights()[0]))
