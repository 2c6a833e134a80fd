"""The budget of a training of Keras 3."""

import keras
import numpy as np
import pytest

import tfdp
from tests.keras3.support import compiled
from tests.support import small_data
from tests.test_callbacks import DELTA, allowed_steps

X, Y = small_data(64)


def batches(**kwargs):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=5, **kwargs)


class Overspends(tfdp.keras3.PrivacyBudget):
    """Mutant: looks only after the epoch."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def train(budget, **kwargs):
    data = batches()
    model = compiled(tfdp.keras3.DPSGD(1.0, 2.0, sampling=data.sampling), **kwargs)
    return model, model.fit(data, epochs=30, callbacks=[budget], verbose=0).history


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_training_stops_before_the_budget_is_overspent(steps_per_execution):
    budget = tfdp.keras3.PrivacyBudget(2.0, DELTA)
    model, history = train(budget, steps_per_execution=steps_per_execution)
    steps = model.optimizer.ledger.steps
    assert allowed_steps(2.0) - steps_per_execution < steps <= allowed_steps(2.0)
    assert steps % 5 != 0  # Within an epoch: the epoch's end would have been too late.
    assert history["epsilon"][-1] == model.optimizer.ledger.epsilon(DELTA).epsilon <= 2.0
    assert np.all(np.diff(history["epsilon"]) > 0)
    with pytest.raises(ValueError, match="allows no further step"):
        model.fit(batches(), callbacks=[tfdp.keras3.PrivacyBudget(2.0, DELTA)], verbose=0)


@pytest.mark.slow
def test_stopping_only_after_epochs_is_caught():
    model, _ = train(Overspends(2.0, DELTA))
    assert model.optimizer.ledger.epsilon(DELTA).epsilon > 2.0


@pytest.mark.slow
def test_unweighted_metrics_of_padded_batches_are_warned_about():
    data = batches(padding="full")
    model = compiled(tfdp.keras3.DPSGD(1.0, 2.0, sampling=data.sampling), metrics=["accuracy"])
    with pytest.warns(UserWarning, match="weighted_metrics"):
        model.fit(data, callbacks=[tfdp.keras3.PrivacyBudget(2.0, DELTA)], verbose=0)


class WithoutOptimizer(keras.Sequential):
    """Updates weights itself, and leaves the private optimizer as it was."""

    def train_step(self, batch):
        self.trainable_variables[-1].assign_add([0.0, 1.0, 2.0])
        return {"loss": 0.0}


def test_a_step_without_the_private_optimizer_is_no_step_at_epsilon_zero():
    data = batches()
    model = WithoutOptimizer([keras.Input([4]), keras.layers.Dense(3)])
    model = compiled(tfdp.keras3.DPSGD(1.0, 2.0, sampling=data.sampling), model)
    with pytest.raises(RuntimeError, match=r"must take a step of the private optimizer.*DPSGD as"):
        model.fit(data, callbacks=[tfdp.keras3.PrivacyBudget(2.0, DELTA)], verbose=0)


@pytest.mark.parametrize("budget", [tfdp.keras3.PrivacyBudget, tfdp.PrivacyBudget])
def test_optimizers_of_others_are_refused(budget):
    optimizer = tfdp.keras3.DPSGD(1.0, 2.0, sampling=batches().sampling)
    if budget is tfdp.keras3.PrivacyBudget:
        optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="needs one of tfdp"):
        compiled(optimizer).fit(batches(), callbacks=[budget(2.0, DELTA)], verbose=0)
