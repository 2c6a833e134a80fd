"""`fit` shows the loss of the examples, whether batches are padded or not."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import with_both, with_one
from tests.support import small_data
from tfdp.base.tf.private_variables import is_private
from tfdp.step import shown_loss

N, RATE = 100, 0.0
X, CLASSES = small_data(N)
NUMBERS = np.linspace(-1, 1, N, dtype="float32")[:, np.newaxis]
WEIGHTS = np.linspace(0.5, 2, N, dtype="float32")

# Arguments of `history`, and the padding: a case knows of rows of padding, and not how many sizes
# batches have. XLA would compile a step for each size.
CASES = {
    "one output": ({}, ("buckets", "full")),
    "regularized, several steps in one call": (
        {"regularized": True, "steps_per_execution": 2},
        ("full",),
    ),
    "two outputs": ({"outputs": 2, "regularized": True}, ("buckets",)),
    "a sum": ({"reduction": "sum"}, ("full",)),
    "weights": ({"weights": WEIGHTS}, ("buckets",)),
    "compiled by XLA": ({"jit_compile": True}, ("full",)),
}


def history(front, padding, **kwargs):
    """Returns the logs of an epoch in which nothing changes, and the model."""
    model, batches = untrained(front, padding, **kwargs)
    return {n: v[0] for n, v in model.fit(batches, verbose=0).history.items()}, model


def untrained(
    front,
    padding,
    regularized=False,
    outputs=1,
    reduction=None,
    weights=None,
    steps_per_execution=1,
    jit_compile=False,
    **data,
):
    keras = front.keras
    keras.utils.set_random_seed(1)
    y = CLASSES if outputs == 1 else {"classes": CLASSES, "numbers": NUMBERS}
    given = (X, y) if weights is None else (X, y, weights)
    data = {"expected_batch_size": 16, "steps_per_epoch": 4, "seed": 3, **data}
    batches = tfdp.data.poisson_batches(given, padding=padding, **data)
    regularizer = keras.regularizers.L2(0.1) if regularized else None
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(5, "relu", kernel_regularizer=regularizer)(inputs)
    made = {"classes": keras.layers.Dense(3, name="classes")(hidden)}
    if outputs == 2:
        made["numbers"] = keras.layers.Dense(1, name="numbers")(hidden)
    model = keras.Model(inputs, made if outputs == 2 else made["classes"])
    loss = front.crossentropy(*([reduction] if reduction else []))
    several = {"loss_weights": {"classes": 1.0, "numbers": 0.5}} if outputs == 2 else {}
    model.compile(
        front.tfdp.DPSGD(1.0, 1.0, learning_rate=RATE, sampling=batches.sampling),
        {"classes": loss, "numbers": "mse"} if outputs == 2 else loss,
        steps_per_execution=steps_per_execution,
        # Without padding a step is not compiled.
        jit_compile=jit_compile and padding != "none",
        **several,
    )
    return model, batches


@pytest.mark.quick_cases(1)
@with_both
@pytest.mark.parametrize("name", CASES)
def test_padding_changes_no_loss(name, front):
    arguments, paddings = CASES[name]
    expected, _ = history(front, "none", **arguments)
    for padding in paddings:
        shown, _ = history(front, padding, **arguments)
        assert shown.keys() == expected.keys()
        assert shown["loss"] == pytest.approx(expected["loss"], rel=1e-5), padding
        if "classes_loss" in shown:  # (Without padding, Keras 3 weighs batches alike here.)
            total = shown["classes_loss"] + 0.5 * shown["numbers_loss"]
            penalty = expected["loss"] - history_without_penalty(front)
            assert total + penalty == pytest.approx(shown["loss"], rel=1e-5), padding


def history_without_penalty(front):
    return history(front, "none", outputs=2)[0]["loss"]


@with_one
def test_rows_of_padding_that_count_are_caught(front, monkeypatch):
    expected, _ = history(front, "none")
    monkeypatch.setattr(shown_loss, "show_examples", lambda *_: None)
    shown, _ = history(front, "full")
    assert shown["loss"] < 0.9 * expected["loss"]


@pytest.mark.slow
@with_both
def test_batches_in_chunks(front):
    expected, _ = history(front, "none")
    shown, _ = history(front, "full", chunk_size=8)
    assert shown["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.quick_cases(1)
@with_both
def test_an_empty_draw_shows_a_number(front):
    """Without padding it has one row, of zeros, whose loss Keras shows."""
    data = {"expected_batch_size": 1, "steps_per_epoch": 1}
    losses = {}
    for padding in ("none", "buckets"):
        model, batches = untrained(front, padding, **data)
        losses[padding] = np.array(model.fit(batches, epochs=8, verbose=0).history["loss"])
    empty = losses["buckets"] == 0
    assert 0 < empty.sum() < 8 and np.isfinite(losses["buckets"]).all()
    np.testing.assert_allclose(losses["buckets"][~empty], losses["none"][~empty], rtol=1e-5)


@with_both
def test_files_hold_neither_losses_nor_the_number_of_examples(front, tmp_path):
    shown, model = history(front, "full")
    evaluated = [metric for metric in model.metrics if metric.name == "loss"]
    variables = [getattr(v, "value", v) for v in evaluated[0].variables]
    variables = [
        v if isinstance(v, tf.Variable) else w
        for v, w in zip(variables, evaluated[0].variables, strict=True)
    ]
    assert len(variables) == 2 and all(map(is_private, variables))
    assert [float(v.numpy()) for v in variables] == [0.0, 0.0]
    total, count = (float(tf.function(v.read_value)()) for v in variables)
    assert 40 < count < 90 and total / count == pytest.approx(shown["loss"], rel=1e-5)


@with_both
def test_evaluations_are_as_before(front):
    _, model = history(front, "full")
    expected = model.loss(CLASSES, model(X))
    assert model.evaluate(X, CLASSES, verbose=0) == pytest.approx(float(expected), rel=1e-5)


@with_both
def test_metrics_of_a_step_of_ones_own_are_left_alone(front):
    """What a model adds up itself is not what Keras means by the loss."""
    keras = front.keras

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y, weights = data
            with tf.GradientTape():
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, self(x, training=True), from_logits=True
                )
                loss = tf.reduce_mean(losses * tf.cast(weights, losses.dtype))
            self.optimizer.minimize(loss, self.trainable_variables, **TAPE[front.part])
            self.mean.update_state(loss)
            return {"mean": self.mean.result()}

    batches = tfdp.data.poisson_batches(
        (X, CLASSES), expected_batch_size=16, steps_per_epoch=1, padding="full", seed=3
    )
    model = Own([keras.Input([4]), keras.layers.Dense(3, kernel_initializer="zeros")])
    model.mean = keras.metrics.Mean("mean")
    sampling = batches.sampling
    model.compile(front.tfdp.DPSGD(1.0, 1.0, learning_rate=RATE, sampling=sampling))
    shown = model.fit(batches, verbose=0).history["mean"][0]
    share = shown / math.log(3)  # Share of rows that are examples: each has loss log 3.
    assert share * sampling.padded_batch_size == pytest.approx(
        round(share * sampling.padded_batch_size), abs=1e-3
    )
    assert 0 < share < 0.7


TAPE = {"tfdp": {"tape": tf.GradientTape()}, "tfdp.keras3": {}}
