"""`make_private` with a noise multiplier in place of a budget, and with budgets that are large."""

import inspect
import math
import re

import pytest

import tfdp
from tests.front_ends import FRONT_ENDS, needs_keras_3, with_both, with_one
from tests.support import small_data
from tfdp.accounting import RandomAllocationDpEvent, event_codec

X, Y = small_data(300)


def private(front, **kwargs):
    keras = front.keras
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    arguments = {"epochs": 2, "loss": front.crossentropy(), **kwargs}
    return front.tfdp.make_private(model, (X, Y), **arguments)


@with_both
def test_the_noise_is_as_given_and_the_budget_what_it_costs(front, capsys):
    model, batches, budget = private(front, noise_multiplier=1.1)
    said = capsys.readouterr().out
    assert "noise multiplier 1.1, as given." in said
    assert f"epsilon <= {budget.target_epsilon:g} " in said
    assert model.optimizer.noise_multiplier == 1.1
    logs = model.fit(batches, epochs=3, callbacks=[budget], verbose=0).history
    assert len(logs["loss"]) == 2 and "stops training after 76 steps" in capsys.readouterr().out
    spent = model.optimizer.ledger.epsilon(budget.delta).epsilon
    assert spent == pytest.approx(budget.target_epsilon, rel=1e-9)


@with_one
def test_a_schedule_is_taken_as_it_is(front):
    schedule = tfdp.schedules.PiecewiseConstantNoise([10], [1.0, 2.0])
    model, batches, budget = private(front, noise_multiplier=schedule, verbose=False)
    model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.noise_multiplier == schedule
    spent = model.optimizer.ledger.epsilon(budget.delta).epsilon
    assert spent == pytest.approx(budget.target_epsilon, rel=1e-9)


@with_one
def test_what_was_spent_before_is_in_the_budget(front):
    prior = tfdp.accounting.PrivacyLedger()
    prior.record(event_codec.sampled_gaussian(0.1, 1.0), 10)
    budget = private(front, noise_multiplier=1.1, prior=prior, verbose=False).budget
    alone = private(front, noise_multiplier=1.1, verbose=False).budget
    assert budget.target_epsilon > 1.1 * alone.target_epsilon


@pytest.mark.quick_cases(1)
@with_both
def test_epochs_need_less_noise_than_poisson_batches(front, capsys):
    arguments = {"target_epsilon": 2.0, "batch_size": 70}
    model, batches, budget = private(front, sampling="epochs", **arguments)
    said = capsys.readouterr().out
    assert (
        "epochs of 4, 70 examples expected" in said and "(of none with probability 0.067)" in said
    )
    assert "in each epoch; 8 steps." in said
    model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert 1.98 < model.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
    (release,) = model.optimizer.ledger.releases
    assert release.event.event == RandomAllocationDpEvent(model.optimizer.noise_multiplier, 4)
    assert release.count == 2
    poisson = private(front, verbose=False, **arguments).model
    assert model.optimizer.noise_multiplier < 0.97 * poisson.optimizer.noise_multiplier
    with pytest.raises(ValueError, match="allows no further step"):
        model.fit(batches, epochs=1, callbacks=[budget], verbose=0)


@with_both
def test_without_noise_there_is_no_privacy_and_all_say_so(front, capsys):
    model, batches, budget = private(front, noise_multiplier=0)
    assert "Privacy: none, as there is no noise: epsilon is infinite" in capsys.readouterr().out
    logs = model.fit(batches, epochs=3, callbacks=[budget], verbose=0).history
    assert logs["epsilon"] == [math.inf] * 3
    assert "No differential privacy" in str(tfdp.privacy_statement(model, delta=budget.delta))


@with_one
def test_a_budget_that_limits_nothing_is_told(front, capsys):
    private(front, target_epsilon=1e6)
    assert "no less is chosen for so large a budget" in capsys.readouterr().out
    private(front, target_epsilon=3.0)
    assert "the least for this budget." in capsys.readouterr().out


@with_both
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "Either argument `target_epsilon`"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "Either argument `target_epsilon`"),
        ({"noise_multiplier": -1.0}, "`noise_multiplier` must be a non-negative"),
        ({"noise_multiplier": 1.0, "sampling": "shuffled"}, "`sampling` must be one of"),
        (
            {"noise_multiplier": 1.0, "sampling": "epochs", "batch_size": 151},
            "`batch_size` must be at most 150, half of the 300",
        ),
        (
            {
                **{"target_epsilon": 1.0, "sampling": "epochs"},
                "noise_schedule": tfdp.schedules.PiecewiseConstantNoise([1], [1.0, 2.0]),
            },
            "`noise_schedule` must be None with sampling='epochs'",
        ),
        (
            {
                "noise_multiplier": 1.0,
                "noise_schedule": tfdp.schedules.PiecewiseConstantNoise([10], [1.0, 2.0]),
            },
            "`noise_schedule` must be None",
        ),
    ],
)
def test_one_of_noise_and_budget_must_be_given(front, arguments, match):
    with pytest.raises(ValueError, match=match):
        private(front, **arguments)


def parts_of(docstring):
    """The guarantee, each argument, what is returned and what is raised."""
    text = inspect.cleandoc(docstring).partition("\nGuarantees:")[2].partition("\nExample:")[0]
    head, *others = re.split(r"^(?:  )?(?=\**\w+: |Returns:$|Raises:$)", text, flags=re.MULTILINE)
    return {"Guarantees": head} | {one.partition(":")[0]: one for one in others}


@needs_keras_3
def test_both_kerases_say_the_same_of_the_arguments_that_they_share():
    functions = [front.tfdp.make_private for front in FRONT_ENDS]
    first, second = (parts_of(function.__doc__) for function in functions)
    assert {"Guarantees", "Returns", "Raises"} < set(first) == set(second)
    differ = {name for name in first if first[name] != second[name]}
    assert differ == {"model", "optimizer", "learning_rate"}
    named = [name.lstrip("*") for name in first if name[0] == "*" or name[0].islower()]
    for function in functions:
        assert named == list(inspect.signature(function).parameters)
