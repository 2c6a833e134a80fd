"""Plans of a training: their noise, and the row that is recommended."""

import dataclasses

import pytest

import tfdp
from tfdp.accounting import planning
from tfdp.accounting.planning import PlanRow


def test_rows_are_within_the_budget_and_in_order():
    plan = tfdp.plan(3000, target_epsilon=2.0, epochs=4)
    assert [row.batch_size for row in plan.rows] == [16, 32, 64, 128, 256]
    assert plan.delta == 0.00014 and plan.recommended in plan.rows
    for row in plan.rows:
        assert row.steps == 4 * round(3000 / row.batch_size)
        ledger = tfdp.accounting.PrivacyLedger()
        step = tfdp.accounting.event_codec.sampled_gaussian(
            row.batch_size / 3000, row.noise_multiplier
        )
        ledger.record(step, row.steps)
        assert 1.99 <= ledger.epsilon(plan.delta).epsilon <= 2.0
        noise = 3000 * row.noise_multiplier / (row.batch_size * row.steps**0.5)
        assert row.noise_of_the_run == pytest.approx(noise)
    text = str(plan)
    assert text.count("\n* ") == 2  # The row, and the reason.
    assert f"* {plan.recommended.batch_size:7}  " in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epochs = 3


def rows(*noises, steps=(800, 400, 200)):
    sizes = zip((128, 256, 512), steps, noises, strict=True)
    return tuple(PlanRow(size, count, 1.0, noise) for size, count, noise in sizes)


@pytest.mark.parametrize(
    ("given", "batch", "reason"),
    [
        (rows(2.0, 1.5, 1.4), 256, "lower the noise of the run by only 7%."),
        (rows(2.0, 1.5, 1.0), 512, "each doubling up to it lowers the noise of the run by 10%"),
        (rows(2.0, 2.0, 2.0), 128, "by only 0%."),
        (rows(2.0, 1.9, 1.85, steps=(2000, 1000, 500)), 256, "half as large, they take 2000 steps"),
        (rows(2.0, 1.9, 1.85, steps=(9000, 6000, 3000)), 512, "smaller ones take more steps"),
        (rows(2.0, 1.9, 1.85)[:1], 128, "no other size was looked at"),
    ],
)
def test_the_recommended_row(given, batch, reason):
    row, why = planning._recommended(given)
    assert row.batch_size == batch and reason in why


@pytest.mark.parametrize(
    ("size", "largest"), [(1, 1), (9, 1), (19, 1), (20, 2), (50_000, 4096), (10**8, 16384)]
)
def test_the_largest_batch(size, largest, monkeypatch):
    monkeypatch.setattr(planning, "calibrate_noise_multiplier", lambda **_: 1.0)
    assert tfdp.plan(size, 1.0).rows[-1].batch_size == largest


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset_size": 0},
        {"dataset_size": 1.5},
        {"target_epsilon": 0.0},
        {"target_epsilon": float("nan")},
        {"delta": 1.0},
        {"delta": float("nan")},
        {"epochs": 0},
        {"epochs": 10**8},
        {"max_batch_size": 2001},
        {"max_batch_size": 0},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        tfdp.plan(**{"dataset_size": 2000, "target_epsilon": 1.0, **wrong})
