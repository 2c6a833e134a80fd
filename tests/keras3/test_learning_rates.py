"""Learning rates and batches where none are given."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.keras3.support import crossentropy, small_model

X, Y = support.small_data(200)


def make(**kwargs):
    arguments = {"epochs": 2, "target_epsilon": 2.0, "batch_size": 50, "verbose": False}
    return tfdp.keras3.make_private(
        small_model(), (X, Y), loss=crossentropy(), **{**arguments, **kwargs}
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "wrong", [{"momentum": 1.5}, {"momentum": "x"}, {"l2_norm_clip": 0.0}, {"l2_norm_clip": "x"}]
)
def test_what_is_out_of_range_is_refused_by_its_name(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        make(optimizer="sgd", **wrong)


@pytest.mark.parametrize("chunk_size", [None, 20])
def test_the_rate_ends_at_zero_with_the_planned_steps(chunk_size, capsys):
    """Steps are those of whole batches: in chunks, the rate would end too early or too late."""
    model, batches, budget = make(chunk_size=chunk_size, verbose=True)
    optimizer = model.optimizer
    assert "Optimizer: DPAdam, learning rate 0.04, which falls linearly to 0." in (
        capsys.readouterr().out
    )
    assert float(optimizer.learning_rate) == pytest.approx(0.04)
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert float(optimizer.learning_rate) == pytest.approx(0.02)
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert optimizer.ledger.steps == 8 and float(optimizer.learning_rate) == 0.0


def test_a_rate_that_is_given_is_kept():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    for rate, expected in ((0.3, 0.3), (schedule, 0.1)):
        assert float(make(learning_rate=rate).model.optimizer.learning_rate) == pytest.approx(
            expected
        )
    model = make(optimizer=keras.optimizers.Adam(0.007)).model
    assert float(model.optimizer.learning_rate) == pytest.approx(0.007)


@pytest.mark.slow
def test_the_default_batch_is_that_of_the_plan():
    x = np.zeros([30_000, 4], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(len(x), "int64")))
    for given in ((x, np.zeros(len(x), "int64")), data):
        model, batches, _ = tfdp.keras3.make_private(
            small_model(), given, epochs=5, target_epsilon=2.0, loss=crossentropy(), verbose=False
        )
        expected = tfdp.plan(30_000, 2.0, epochs=5, max_batch_size=512).recommended
        assert batches.sampling.expected_batch_size == expected.batch_size == 256
        assert int(batches.cardinality()) == 117 and expected.steps == 585
        assert model.optimizer.noise_multiplier == expected.noise_multiplier


def peak(optimizer):
    """Returns the rate with which training begins, and that with which it ends."""
    rate = optimizer.get_config()["learning_rate"]
    if isinstance(rate, float):
        return rate, rate
    return rate["config"]["initial_learning_rate"], rate["config"]["end_learning_rate"]


def compiled(by_compile, **kwargs):
    model = small_model()
    model.compile(by_compile, crossentropy())
    arguments = {"epochs": 2, "target_epsilon": 2.0, "batch_size": 50, "verbose": False}
    return tfdp.keras3.make_private(model, (X, Y), **arguments, **kwargs).model.optimizer


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda: "adamw", (0.04, 0.0)),
        (lambda: keras.optimizers.Adam(), (0.04, 0.0)),
        (lambda: "rmsprop", (0.04, 0.0)),
        (lambda: "sgd", (4.0, 0.0)),
        (lambda: keras.optimizers.SGD(momentum=0.9), (0.4, 0.0)),
        (lambda: keras.optimizers.Adam(0.002), (pytest.approx(0.002),) * 2),
        (lambda: keras.optimizers.Adam(5e-5), (pytest.approx(5e-5),) * 2),  # Not a task.
        (lambda: "lion", (pytest.approx(0.001),) * 2),
    ],
)
def test_only_a_rate_that_nobody_chose_is_replaced(optimizer, expected):
    assert peak(compiled(optimizer()).inner_optimizer) == expected


def test_a_rate_of_an_argument_is_a_choice():
    given = compiled("sgd", optimizer=keras.optimizers.Adam(0.001)).inner_optimizer
    assert peak(given) == (pytest.approx(0.001),) * 2
    assert peak(compiled("sgd", learning_rate=0.01).inner_optimizer) == (pytest.approx(0.01),) * 2


def test_a_callback_that_sets_the_rate_is_told_how_to():
    model, batches, budget = make()
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    with pytest.raises(TypeError, match="`make_private`, the argument `learning_rate`, a number"):
        model.fit(batches, epochs=2, callbacks=[budget, halving], verbose=0)
    model, batches, budget = make(learning_rate=0.4)
    model.fit(batches, epochs=2, callbacks=[budget, halving], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
