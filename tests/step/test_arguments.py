import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import keras, needs_keras_3, with_both
from tfdp.step import arguments


@pytest.mark.parametrize("cls", support.OPTIMIZERS)
@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "`l2_norm_clip` and `noise_multiplier`"), ({"l2_norm_clip": 1.0}, "`noise_multiplier`")],
)
def test_missing_arguments_are_named_for_the_users_class(cls, given, missing):
    with pytest.raises(
        ValueError, match=f"^Argument {missing} must be given to tfdp.{cls.__name__}"
    ):
        cls(**given)


@with_both
@pytest.mark.parametrize("name", [cls.__name__ for cls in support.OPTIMIZERS])
def test_a_learning_rate_in_the_place_of_the_clip_is_named(front, name):
    cls = getattr(front.tfdp, name)
    message = rf"^Argument `l2_norm_clip` of {name} is the first .* `learning_rate=0.01`.* 0.01 by"
    with pytest.raises(TypeError, match=message):
        cls(0.01, l2_norm_clip=1.0, noise_multiplier=1.1)
    assert cls(1.0, 1.1, 16, learning_rate=0.01).get_config()["l2_norm_clip"] == 1.0


@needs_keras_3
def test_models_of_keras_3_are_refused_with_advice():
    optimizer = tfdp.DPSGD(1.0, 1.0, 5)
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"tfdp.DPSGD, for models of Keras 2 \(`tf.keras`\)"):
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"Keras 3 .* need an optimizer of `tfdp\.keras3`"):
        arguments.check_variables(model.trainable_variables)


@with_both
@pytest.mark.parametrize("name", ["DPSGD", "DPAdam", "DPSignSGD", "DPSignAdam"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "x", [0.1], 1j, True, np.float32("nan")])
def test_hyperparameters_that_are_no_numbers_are_named(front, name, value):
    for argument in ("learning_rate", "weight_decay"):
        with pytest.raises(ValueError, match=f"`{argument}` (must|should) be"):
            getattr(front.tfdp, name)(1.0, 1.1, 16, **{argument: value})
    with pytest.raises(ValueError, match="`learning_rate`"):
        getattr(front.tfdp, name)(1.0, 1.1, 16, learning_rate=None)


@needs_keras_3
def test_hyperparameters_of_inner_optimizers_are_looked_at():
    for inner in (
        keras.optimizers.SGD(0.1, momentum=math.nan),
        keras.optimizers.Adam(math.inf),
        keras.optimizers.RMSprop(0.1, rho=math.nan),
    ):
        with pytest.raises(ValueError, match=r"must be a (finite )?number"):
            tfdp.keras3.DPOptimizer(inner, 1.0, 1.1, 16)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    tfdp.keras3.DPOptimizer(keras.optimizers.AdamW(schedule, weight_decay=0.1), 1.0, 1.1, 16)


@with_both
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("learning_rate", one) for one in (math, b"x", {"a": 1}, lambda a, b: a, tf.zeros([2]))],
        *[("learning_rate", one) for one in (tf.constant("a"), tf.ragged.constant([[1.0], []]))],
        *[("beta_1", one) for one in (-0.5, 1.0, None, lambda a: a, tf.constant(1j))],
        *[("beta_2", 2.5), ("epsilon", -1), ("weight_decay", -1), ("name", 0.5), ("name", [])],
        ("epsilon", lambda: 1e-7),
        ("weight_decay", tf.constant("a")),
    ],
)
def test_hyperparameters_out_of_range_are_named(front, argument, value):
    with pytest.raises(ValueError, match=rf"`{argument}` must be .* Received: {argument}="):
        front.tfdp.DPAdam(1.0, 1.1, 16, **{argument: value})


@with_both
def test_rates_may_be_numbers_functions_variables_and_schedules(front):
    schedule = front.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    rates = [0.1, np.float32(0.1), np.array(0.1), lambda: 0.1, schedule]
    if front.part == "tfdp":  # Keras 3 makes a variable itself.
        rates.append(tf.Variable(0.1))
    for rate in rates:
        front.tfdp.DPAdam(1.0, 1.1, 16, learning_rate=rate)


def test_descriptions_of_a_sampling_are_named():
    with pytest.raises(ValueError, match="Argument `sampling` must be what `get_config` wrote"):
        tfdp.keras3.DPSGD(1.0, 1.1, sampling={})
