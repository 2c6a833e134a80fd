"""The average of the weights is what it says, changes nothing, and survives interruptions."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tests.support import compiled
from tfdp.keras2 import ExponentialMovingAverage

X, Y = support.small_data(64)
DELTA = 1e-4


class Weights(tf.keras.callbacks.Callback):
    """The weights after each batch, and the number of steps."""

    def __init__(self):
        super().__init__()
        self.seen, self.steps = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([v.numpy() for v in self.model.trainable_variables])
        self.steps.append(int(self.model.optimizer.iterations.numpy()))


class Fails(tf.keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def make(model=None, **kwargs):
    """A model that is trained without privacy, which is quicker to trace."""
    optimizer = tf.keras.optimizers.legacy.SGD(0.05)
    loss = support.crossentropy("sum")
    return compiled(optimizer, model or support.small_model(), loss=loss, **kwargs)


def make_private(data=None, **kwargs):
    sampling = (data or batches()).sampling
    optimizer = tfdp.DPSGD(1.0, 1.0, learning_rate=0.5, noise_seed=3, sampling=sampling)
    return compiled(optimizer, **kwargs)


def batches(**kwargs):
    return tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=16, seed=7, steps_per_epoch=5, **kwargs
    )


def fit(model, *callbacks, data=None, epochs=2, **kwargs):
    if data is None:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(13)  # 5 batches.
    return model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks), **kwargs)


def average_of(first, weights, decay):
    """The average, as it is defined."""
    average = [w.astype(np.float64) for w in first]
    for t, now in enumerate(weights):
        d = min(decay, (1 + t) / (10 + t))
        average = [d * a + (1 - d) * w for a, w in zip(average, now, strict=True)]
    return average


def assert_close(found, expected, close=True):
    differences = [np.abs(a - b).max() for a, b in zip(found, expected, strict=True)]
    assert (max(differences) < 1e-5) == close, differences


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.99])
def test_average(decay):
    model, weights = make(), Weights()
    first = [v.numpy() for v in model.trainable_variables]
    callback = ExponentialMovingAverage(decay, set_at_end=False)
    fit(model, callback, weights)
    assert len(weights.seen) == 10
    assert_close(callback.average, average_of(first, weights.seen, decay))
    assert_close(callback.average, weights.seen[-1], close=decay == 0)
    # A mutant that misses a step is caught.
    if decay == 0.99:
        assert_close(callback.average, average_of(first, weights.seen[1:], decay), close=False)


@pytest.mark.slow
def test_training_does_not_depend_on_it_and_it_costs_no_privacy():
    plain, averaged = make_private(), make_private()
    fit(plain, data=batches())
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    fit(averaged, callback, data=batches(), validation_data=(X, Y))
    for a, b in zip(plain.get_weights(), averaged.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    # Nor does the average cost more when it is in the model.
    averaged.set_weights(callback.average)
    assert averaged.optimizer.ledger.releases == plain.optimizer.ledger.releases
    assert tfdp.privacy_statement(averaged, DELTA) == tfdp.privacy_statement(plain, DELTA)


def test_the_average_is_evaluated_and_put_into_the_model_at_the_end():
    model, callback = make(), ExponentialMovingAverage(0.9)
    history = fit(model, callback, validation_data=(X, Y)).history
    assert_close([v.numpy() for v in model.trainable_variables], callback.average)
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    again = make()
    raw = fit(again, validation_data=(X, Y)).history
    assert raw["val_loss"][-1] != pytest.approx(history["val_loss"][-1], rel=1e-3)


@pytest.mark.slow
def test_only_complete_steps_count():
    data = batches(chunk_size=20)
    chunks = data.sampling.gradient_accumulation_steps
    assert chunks > 1
    model, weights = make_private(data), Weights()
    first = [v.numpy() for v in model.trainable_variables]
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    fit(model, callback, weights, data=data)
    steps = np.diff([0, *weights.steps])
    assert len(steps) == chunks * steps.sum()
    complete = [seen for seen, is_step in zip(weights.seen, steps, strict=True) if is_step]
    assert_close(callback.average, average_of(first, complete, 0.9))
    # A mutant that counts chunks is caught.
    assert_close(callback.average, average_of(first, weights.seen, 0.9), close=False)


def test_several_steps_at_a_time_count_as_such():
    model, weights = make(steps_per_execution=5), Weights()
    first = [v.numpy() for v in model.trainable_variables]
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    fit(model, callback, weights)
    repeated = [seen for seen in weights.seen for _ in range(5)]
    assert len(weights.seen) == 2
    assert_close(callback.average, average_of(first, repeated, 0.9))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["conditional", "per_attempt"])
def test_rejected_updates_do_not_enter_it(mode):
    data = selective_support.batches(steps_per_epoch=8)
    optimizer = selective_support.optimizer(data=data, selective_release=mode)
    model, weights = selective_support.compiled(optimizer), Weights()
    first = [v.numpy() for v in model.trainable_variables]
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    fit(model, callback, weights, data=data)
    accepted, last = [], 0
    for seen, steps in zip(weights.seen, weights.steps, strict=True):
        accepted += [seen] if steps > last else []
        last = steps
    assert len(accepted) == int(model.optimizer.iterations)
    assert_close(callback.average, average_of(first, accepted, 0.9))
    if mode == "per_attempt":
        assert sum(model.optimizer.released_steps()) > len(accepted)  # Some were rejected.


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_survives_an_interruption(tmp_path, order):
    whole = ExponentialMovingAverage(0.9)
    fit(make(), whole, epochs=4)

    def attempt(*others):
        callback = ExponentialMovingAverage(0.9)
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path))
        fit(make(), *[callback, backup][::order], *others, epochs=4)
        return callback

    with pytest.raises(KeyboardInterrupt):
        attempt(Fails(2))
    resumed = attempt()
    assert int(resumed._state.steps) == 20
    assert_close(resumed.average, whole.average)


def test_a_checkpoint_of_the_model_holds_the_average(tmp_path):
    model, callback = make(), ExponentialMovingAverage(0.9, set_at_end=False)
    fit(model, callback)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    for restore_first in (True, False):
        other, restored = make(), ExponentialMovingAverage(0.9)

        class Restores(tf.keras.callbacks.Callback):
            def on_train_begin(self, logs=None, other=other):
                tf.train.Checkpoint(model=other).restore(path)

        order = 1 if restore_first else -1
        with pytest.raises(KeyboardInterrupt):
            fit(other, *[Restores(), restored][::order], Fails(0), epochs=1)
        assert_close(restored.average, callback.average)
        assert int(restored._state.steps) == 10
    # A mutant that does not keep it begins with the weights.
    assert_close([v.numpy() for v in make().trainable_variables], callback.average, close=False)


def test_callbacks_that_are_given_see_the_average(tmp_path):
    path = str(tmp_path / "{epoch}.keras")
    saves = tf.keras.callbacks.ModelCheckpoint(path)
    model, weights = make(), Weights()
    callback = ExponentialMovingAverage(0.9, set_at_end=False, on_average=[saves])
    fit(model, callback, weights)
    saved = tf.keras.models.load_model(tmp_path / "2.keras")
    assert_close([v.numpy() for v in saved.trainable_variables], callback.average)
    assert (tmp_path / "1.keras").exists()
    assert_close([v.numpy() for v in model.trainable_variables], weights.seen[-1])


def test_weights_come_back_after_an_evaluation_that_failed():
    class FailsToEvaluate(tf.keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            raise KeyboardInterrupt

    model, weights = make(), Weights()
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    with pytest.raises(KeyboardInterrupt):
        fit(model, FailsToEvaluate(), callback, weights, validation_data=(X, Y))
    assert_close([v.numpy() for v in model.trainable_variables], callback.average)
    first = weights.seen[-1]
    fit(model, callback, weights, epochs=1)
    assert_close(callback.average, average_of(make().get_weights(), weights.seen, 0.9))
    assert_close(weights.seen[4], first)


def test_training_goes_on_where_it_was_with_the_same_callback():
    model, weights = make(), Weights()
    first = [v.numpy() for v in model.trainable_variables]
    callback = ExponentialMovingAverage(0.9, set_at_end=False)
    fit(model, callback, weights)
    fit(model, callback, weights)
    assert len(weights.seen) == 20
    assert_close(callback.average, average_of(first, weights.seen, 0.9))


@pytest.mark.slow
def test_another_model_begins_anew():
    callback = ExponentialMovingAverage(0.9)
    fit(make(), callback)
    other = make(support.small_model(seed=5))
    first, weights = [v.numpy() for v in other.trainable_variables], Weights()
    fit(other, callback, weights)
    assert_close(callback.average, average_of(first, weights.seen, 0.9))


@pytest.mark.slow
def test_other_trainable_variables_begin_anew():
    model, callback, weights = make(), ExponentialMovingAverage(0.9), Weights()
    model.layers[0].trainable = False
    make(model)
    fit(model, callback)
    assert len(callback.average) == 2
    model.layers[0].trainable = True
    make(model)
    first = [v.numpy() for v in model.trainable_variables]
    fit(model, callback, weights)
    assert_close(callback.average, average_of(first, weights.seen, 0.9))


@pytest.mark.slow
def test_two_of_them_do_not_take_averages_for_weights():
    plain, model = make(), make()
    fit(plain)
    callbacks = [ExponentialMovingAverage(d, set_at_end=False) for d in (0.9, 0.5)]
    history = fit(model, *callbacks, validation_data=(X, Y)).history
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for variable, value in zip(model.trainable_variables, callbacks[0].average, strict=True):
        variable.assign(value)
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)


def test_a_model_without_variables_begins_with_its_first_weights():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    callback, weights = ExponentialMovingAverage(0.9, set_at_end=False), Weights()
    fit(make(model), callback, weights)
    assert_close(callback.average, average_of(weights.seen[0], weights.seen, 0.9))


def test_half_precision_is_averaged_in_more():
    layer = tf.keras.layers.Dense(3, dtype="bfloat16")
    model = make(tf.keras.Sequential([tf.keras.layers.Input([4]), layer]))
    callback = ExponentialMovingAverage(0.999)
    fit(model, callback)
    assert {a.dtype for a in callback.average} == {np.dtype("float32")}
    assert model.trainable_variables[0].dtype == tf.bfloat16


@pytest.mark.slow
def test_replicas():
    with support.mirrored(2).scope():
        model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(3)])
        model.compile("sgd", support.crossentropy("sum_over_batch_size"))
    first = [v.numpy() for v in model.trainable_variables]
    callback, weights = ExponentialMovingAverage(0.9), Weights()
    model.fit(X, Y, batch_size=16, epochs=1, callbacks=[callback, weights], verbose=0)
    assert_close(callback.average, average_of(first, weights.seen, 0.9))
    assert_close([v.numpy() for v in model.trainable_variables], callback.average)


@pytest.mark.slow
def test_the_model_has_no_more_weights(tmp_path):
    model, plain = make(), make()
    fit(model, ExponentialMovingAverage(0.9))
    fit(plain)
    assert [w.shape for w in model.weights] == [w.shape for w in plain.weights]
    for name in ("model.keras", "saved_model"):
        model.save(tmp_path / name)
        loaded = tf.keras.models.load_model(tmp_path / name)
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"decay": 1.0}, "decay"),
        ({"decay": -0.1}, "decay"),
        ({"decay": float("nan")}, "decay"),
        ({"set_at_end": 1}, "set_at_end"),
        ({"on_average": ["checkpoint"]}, "on_average"),
        ({"on_average": [tf.keras.callbacks.ModelCheckpoint("x", save_freq=3)]}, "on_average"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        ExponentialMovingAverage(**arguments)


def test_no_average_before_training():
    with pytest.raises(RuntimeError, match="before `fit`"):
        _ = ExponentialMovingAverage().average
