"""`fit` with a private optimizer: what it refuses, and how short its errors are."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both, with_one
from tests.support import small_data

X, Y = small_data(64)
KERAS_3 = [front for front in FRONT_ENDS if front.name == "keras"]


def compiled(front, **kwargs):
    keras = front.keras
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    optimizer = front.tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model.compile(optimizer, front.crossentropy(), **kwargs)
    return model, batches


@with_both
@pytest.mark.parametrize("data", [(X, Y), (tf.constant(X), tf.constant(Y)), ([X], Y)])
def test_arrays_are_refused_before_training(front, data):
    model, _ = compiled(front)
    with pytest.raises(ValueError, match=r"must be given the Poisson batches, `model.fit\(batches"):
        model.fit(*data, verbose=0)
    assert model.optimizer.own_steps() == 0


@with_both
def test_other_optimizers_get_arrays(front):
    model, _ = compiled(front)
    model.compile("sgd", front.crossentropy())
    assert model.fit(X, Y, validation_split=0.5, verbose=0).history["val_loss"]
    model.compile(front.tfdp.DPSGD(1.0, 0.0, 16), front.crossentropy())  # Without an epsilon.
    assert model.fit(X, Y, batch_size=16, verbose=0).history["loss"]


@with_both
def test_training_without_privacy_after_private_training(front):
    """The statement covers the private steps alone: it says so once for each model."""
    model, batches = compiled(front)
    model.fit(batches.take(1), verbose=0)
    copy = front.keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    untrained = front.keras.models.clone_model(model)
    for one in (model, copy):
        one.compile("sgd", front.crossentropy())
        with pytest.warns(UserWarning, match=r"with SGD, .* only if the data of this `fit` are"):
            one.fit(X, Y, verbose=0)
        one.fit(X, Y, verbose=0)
    untrained.compile("sgd", front.crossentropy())
    untrained.fit(X, Y, verbose=0)
    copy.trainable = False
    head = front.keras.Sequential([front.keras.Input([4]), copy, front.keras.layers.Dense(3)])
    head.compile("sgd", front.crossentropy())
    head.fit(X, Y, verbose=0)  # What is frozen stays private.
    model.trainable = True
    unbuilt = front.keras.Sequential([model, front.keras.layers.Dense(3)])
    unbuilt.compile("sgd", front.crossentropy())
    with pytest.warns(UserWarning, match="covers the private steps alone"):
        unbuilt.fit(X, Y, verbose=0)


@with_both
def test_validation_split_is_refused_and_held_examples_are_the_remedy(front):
    model, batches = compiled(front)
    with pytest.raises(ValueError, match=r"`validation_split`.*validation_data=\(x_held, y_held\)"):
        model.fit(batches, validation_split=0.1, verbose=0)
    assert model.fit(batches, validation_data=(X[:9], Y[:9]), verbose=0).history["val_loss"]


@with_both
def test_errors_of_steps_are_one_message(front):
    model, batches = compiled(front)
    batch = next(iter(batches))
    model.train_on_batch(*batch)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.train_on_batch(*batch)
    message = str(caught.value)
    assert message.startswith("The batch of this step is no unused draw") and "\\" not in message
    assert message.endswith("Epsilon would not hold for it.")
    cached = tf.data.Dataset.from_tensors((X[:9], Y[:9]))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(cached, verbose=0)
    assert str(caught.value).startswith("The batch of this step is no unused draw")
    assert caught.value.__cause__ is None and caught.value.__context__ is None


@with_both
def test_errors_of_others_stay_as_they_are(front):
    keras = front.keras
    x = np.array(["a", "1"] * 8)[:, np.newaxis]
    number = keras.layers.Lambda(tf.strings.to_number, output_shape=(1,), dtype="float32")
    model = keras.Sequential([keras.Input([1], dtype="string"), number, keras.layers.Dense(1)])
    batches = tfdp.data.poisson_batches((x, np.zeros([16, 1])), expected_batch_size=16)
    model.compile(front.tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling), "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="StringToNumber"):
        model.fit(batches, verbose=0)


@with_both
def test_keras_does_not_say_that_it_does_not_shuffle(front):
    model, batches = compiled(front)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(batches, verbose=0)
    assert not [warning for warning in found if "shuffle" in str(warning.message)]


@pytest.mark.parametrize("front", KERAS_3, ids=["tfdp.keras3"])
def test_keras_says_it_of_other_data(front):
    model, _ = compiled(front)
    model.compile("sgd", front.crossentropy())
    with pytest.warns(UserWarning, match="shuffle"):
        model.fit(tf.data.Dataset.from_tensors((X, Y)), verbose=0)


@with_one
def test_one_batch_is_for_one_step(front):
    keras = front.keras

    class Twice(keras.Sequential):
        def train_step(self, data):
            x, y = data
            for _ in range(2):
                loss = tf.reduce_mean(
                    (self(x, training=True) - tf.cast(y, tf.float32)[:, None]) ** 2
                )
                self.optimizer.minimize(loss, self.trainable_variables, **tape(front))
            return {"loss": loss}

    _, batches = compiled(front)
    model = Twice([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(front.tfdp.DPAdam(1.0, 1.0, sampling=batches.sampling))
    with pytest.raises(ValueError, match="used by one private step"):
        model.fit(batches, verbose=0)


def tape(front):
    return {} if front.name == "keras" else {"tape": tf.GradientTape()}


@with_both
def test_compiled_steps_assert_nothing_that_xla_would_drop(front):
    """XLA writes a line into the log for each assertion that it drops."""
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, padding="full")

    def operations(jit_compile):
        keras = front.keras
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        optimizer = front.tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
        optimizer.build(model.trainable_variables)

        @tf.function(jit_compile=jit_compile)
        def step(x, y, weights):
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            losses *= tf.cast(weights, losses.dtype)
            optimizer.minimize(losses, model.trainable_variables, **tape(front))

        graph = step.get_concrete_function(*batches.element_spec).graph
        return [op.type for op in graph.get_operations()]

    assert "Assert" in operations(jit_compile=False)
    assert "Assert" not in operations(jit_compile=True)
