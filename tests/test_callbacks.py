import contextlib
import io
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import compiled

X, Y = support.small_data(64)
DELTA = 1e-4


def batches(**kwargs):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=5, **kwargs)


def make(data, **kwargs):
    optimizer = tfdp.DPSGD(1.0, 2.0, sampling=data.sampling)
    return compiled(optimizer, **kwargs)


def allowed_steps(epsilon):
    return tfdp.calibrate_steps(
        target_epsilon=epsilon,
        delta=DELTA,
        noise_multiplier=2.0,
        dataset_size=64,
        expected_batch_size=16,
    )


class Overspends(tfdp.PrivacyBudget):
    """Mutant: looks only after the epoch."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def train(budget, **kwargs):
    data = batches()
    model = make(data, **kwargs)
    history = model.fit(data, epochs=30, callbacks=[budget], verbose=0).history
    return model, history


@pytest.fixture(scope="module")
def spent():
    """A training that a budget of 2 has stopped, and what it printed."""
    budget, printed = tfdp.PrivacyBudget(2.0, DELTA), io.StringIO()
    with contextlib.redirect_stdout(printed):
        model, history = train(budget)
    return budget, model, history, printed.getvalue()


def test_training_stops_before_the_budget_is_overspent(spent):
    _, model, history, _ = spent
    check_budget_of_two(model, history, 1)


@pytest.mark.slow
def test_training_of_several_steps_at_a_time_stops_before_the_budget_is_overspent():
    budget = tfdp.PrivacyBudget(2.0, DELTA)
    check_budget_of_two(*train(budget, steps_per_execution=3), 3)


def check_budget_of_two(model, history, steps_per_execution):
    steps = model.optimizer.ledger.steps
    assert allowed_steps(2.0) - steps_per_execution < steps <= allowed_steps(2.0)
    assert steps % 5 != 0  # Within an epoch: the epoch's end would have been too late.
    assert model.optimizer.ledger.epsilon(DELTA).epsilon <= 2.0
    assert history["epsilon"][-1] == model.optimizer.ledger.epsilon(DELTA).epsilon
    assert np.all(np.diff(history["epsilon"]) > 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("epsilon", [2.0, 2.5, 3.0])
def test_a_short_last_call_of_an_epoch_is_no_reason_to_overspend(epsilon):
    """Keras takes one step at the end of an epoch of five, and then four at a time again."""
    budget = tfdp.PrivacyBudget(epsilon, DELTA)
    model, _ = train(budget, steps_per_execution=4)
    assert allowed_steps(epsilon) - 4 < model.optimizer.ledger.steps <= allowed_steps(epsilon)


@pytest.mark.slow
def test_stopping_only_after_epochs_is_caught():
    model, _ = train(Overspends(2.0, DELTA))
    assert model.optimizer.ledger.steps > allowed_steps(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_chunks_count_as_one_step_which_is_completed(steps_per_execution):
    """A step is counted at its first chunk, and those that follow overspend nothing."""
    data = batches(chunk_size=20)
    assert data.sampling.gradient_accumulation_steps == 3
    model = make(data, steps_per_execution=steps_per_execution)
    model.fit(data, epochs=30, callbacks=[tfdp.PrivacyBudget(2.0, DELTA)], verbose=0)
    steps = model.optimizer.ledger.steps
    assert allowed_steps(2.0) - (steps_per_execution > 1) <= steps <= allowed_steps(2.0)
    if steps_per_execution == 1:
        assert int(model.optimizer.iterations) == steps


def test_a_step_broken_off_at_each_epoch_is_no_reason_to_overspend():
    data = batches(chunk_size=20)
    model = make(data)
    # Values of its own: it keeps them, and others that begin with them would be copies.
    model.set_weights([w + 0.1 for w in model.get_weights()])
    budget = tfdp.PrivacyBudget(2.0, DELTA)
    for _ in range(allowed_steps(2.0)):
        model.fit(data, steps_per_epoch=1, callbacks=[budget], verbose=0)
    with pytest.raises(ValueError, match="allows no further step"):
        model.fit(data, steps_per_epoch=1, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == allowed_steps(2.0)


def test_a_spent_budget_allows_no_further_training(spent):
    budget, model, _, _ = spent
    before = model.optimizer.ledger.steps
    with pytest.raises(ValueError, match=f"allows no further step: {before} steps"):
        model.fit(batches(), callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == before


@pytest.mark.slow
def test_unaccounted_batches_stop_at_once():
    """Compiled by XLA, which drops the assertion that refuses them."""
    data = batches(padding="full")
    model = make(data, jit_compile=True)
    others = tf.data.Dataset.from_tensor_slices((X, Y, np.ones(len(X), bool))).batch(16)
    with pytest.raises(Exception, match="UnsupportedDpEvent"):
        model.fit(others, callbacks=[tfdp.PrivacyBudget(2.0, DELTA)], verbose=0)
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.slow
def test_unweighted_metrics_are_warned_about():
    data = batches(padding="full")
    model = make(data, metrics=["accuracy"])
    with pytest.warns(UserWarning, match="weighted_metrics"):
        model.fit(data, callbacks=[tfdp.PrivacyBudget(9.0, DELTA)], verbose=0)


@pytest.mark.slow
def test_without_padding_metrics_are_right():
    data = batches()
    model = make(data, metrics=["accuracy"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(data, callbacks=[tfdp.PrivacyBudget(9.0, DELTA)], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0, 1e-5), "target_epsilon"),
        ((-1, 1e-5), "target_epsilon"),
        (("x", 1e-5), "target_epsilon"),
        ((1.0, 0.0), "delta"),
        ((1.0, "x"), "delta"),
    ],
)
def test_bad_arguments(arguments, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must"):
        tfdp.PrivacyBudget(*arguments)


def test_other_optimizers_are_refused():
    model = compiled(tf.keras.optimizers.legacy.SGD(), loss=support.crossentropy("auto"))
    with pytest.raises(ValueError, match="one of tfdp's optimizers"):
        model.fit(X, Y, callbacks=[tfdp.PrivacyBudget(1.0, 1e-5)], verbose=0)


class WithoutOptimizer(tf.keras.Sequential):
    """Updates weights itself, and leaves the private optimizer as it was."""

    def train_step(self, batch):
        x, y, *_ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.compiled_loss(y, self(x, training=True)))
        for variable, g in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * g)
        return {"loss": loss}


def test_a_step_without_the_private_optimizer_is_no_step_at_epsilon_zero():
    data = batches()
    model = make(data, model=WithoutOptimizer([tf.keras.layers.Dense(3, input_shape=[4])]))
    with pytest.raises(RuntimeError, match=r"must take a step of the private optimizer.*DPSGD as"):
        model.fit(data, callbacks=[tfdp.PrivacyBudget(2.0, DELTA)], verbose=0)
    assert "trained in another way are not\ncovered" in tfdp.privacy_statement(model, DELTA)


@pytest.mark.slow
def test_prior_costs_leave_fewer_steps():
    prior = tfdp.accounting.PrivacyLedger()
    data = batches()
    release = make(data).optimizer.release
    prior.record(release.event, 5, release.truncation_probability)
    budget = tfdp.PrivacyBudget(2.0, DELTA, prior=[prior])
    model, history = train(budget)
    assert model.optimizer.ledger.steps == allowed_steps(2.0) - 5
    prior.record(release.event, model.optimizer.ledger.steps, release.truncation_probability)
    assert history["epsilon"][-1] == prior.epsilon(DELTA).epsilon <= 2.0
    with pytest.raises(ValueError, match="Argument `prior` must be"):
        tfdp.PrivacyBudget(2.0, DELTA, prior={"epsilon": 1.0})


@pytest.mark.slow
def test_a_recompiled_model_has_what_is_left_of_the_budget():
    budget = tfdp.PrivacyBudget(2.0, DELTA)
    data = batches()
    model = make(data)
    model.fit(data, epochs=2, verbose=0)
    compiled(make(data).optimizer, model)
    model.fit(data, epochs=30, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == allowed_steps(2.0)


def test_the_steps_of_another_optimizer_count_while_training():
    class Alternates(tf.keras.callbacks.Callback):
        """Stands for a second optimizer that trains the same variables in the same loop."""

        def on_train_batch_end(self, batch, logs=None):
            record = self.model.optimizer._released
            rows = [t for t in record.tables() if len(t) == 1][-1].copy()
            rows[0, 0], rows[0, 1] = 7, rows[0, 1] * 3
            record.absorb(rows)

    data = batches()
    model = make(data)
    callbacks = [Alternates(), tfdp.PrivacyBudget(2.0, DELTA)]
    model.fit(data, epochs=30, callbacks=callbacks, verbose=0)
    assert 2.0 * 0.8 < model.optimizer.ledger.epsilon(DELTA).epsilon <= 2.0


def test_one_line_says_why_training_was_stopped(spent):
    *_, printed = spent
    (line,) = [line for line in printed.splitlines() if line]
    steps = allowed_steps(2.0)
    assert line.startswith(f"PrivacyBudget stops training after {steps} steps, at epsilon ")
    assert line.endswith(": the next step would exceed target_epsilon=2.")


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [50.0, None])
def test_no_line_where_all_epochs_were_trained(epsilon, capsys):
    data = batches()
    if epsilon is None:  # Just enough.
        ledger = tfdp.accounting.PrivacyLedger()
        ledger.record(make(data).optimizer.release.event, 10, 1e-30)
        epsilon = ledger.epsilon(DELTA).epsilon
    model, budget = make(data), tfdp.PrivacyBudget(epsilon, DELTA)
    model.fit(data, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 10
    assert "PrivacyBudget" not in capsys.readouterr().out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("budget_comes_first", [True, False])
def test_a_restored_training_has_what_is_left_of_the_budget(budget_comes_first, tmp_path):
    def train(epochs):
        data = batches()
        model = make(data)
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        callbacks = [tfdp.PrivacyBudget(2.0, DELTA), backup]
        callbacks = callbacks if budget_comes_first else callbacks[::-1]
        model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)
        return model.optimizer.ledger.steps

    assert train(2) == 10
    assert train(30) == allowed_steps(2.0)
