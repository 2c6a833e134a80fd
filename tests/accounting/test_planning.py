"""Plans of a training: their noise, and the row that is recommended."""

import dataclasses

import pytest

import tfdp
from tfdp.accounting import planning


def test_rows_are_within_the_budget_and_in_order():
    plan = tfdp.plan(3000, target_epsilon=2.0, epochs=4)
    assert [row.batch_size for row in plan.rows] == [4, 8, 16, 32, 64]
    assert plan.recommended.batch_size == 16  # Of 32, 376 steps are left.
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


@pytest.mark.parametrize(
    ("size", "epochs", "most", "batch", "reason"),
    [
        (60_000, 5, 6000, 512, "the largest that leave 500 steps (585 steps)"),
        (60_000, 50, 1000, 1000, "the largest (3000 steps)"),
        (1000, 1, 100, 8, "125 steps are few: train more epochs"),
        (60, 1, 6, 6, "10 steps are few"),  # No smaller than 8, where N allows it.
        (3, 500, 3, 3, "the largest (500 steps)"),
    ],
)
def test_the_recommended_row(size, epochs, most, batch, reason, monkeypatch):
    monkeypatch.setattr(planning, "calibrate_noise_multiplier", lambda **_: 1.0)
    plan = tfdp.plan(size, 1.0, epochs=epochs, max_batch_size=most)
    assert plan.recommended.batch_size == batch and reason in plan.reason
    assert plan.recommended in plan.rows and plan.rows[-1].batch_size <= most


@pytest.mark.parametrize(
    ("size", "largest"), [(1, 1), (9, 1), (19, 1), (20, 2), (50_000, 4096), (10**8, 16384)]
)
def test_the_largest_batch(size, largest):
    assert planning.planned_batch_size(size, 10**5) == largest


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
