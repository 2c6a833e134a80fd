import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import WeightsTwice
from tests.front_ends import keras, needs_keras_3
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.report import Entry, Report

layers = tf.keras.layers


def test_report_of_a_model():
    model = tf.keras.Sequential([layers.Input([4]), layers.Dense(6), WeightsTwice()])
    report = OnePassEngine(1.0).report(model)
    assert [entry.fast for entry in report.entries] == [True, True, False]
    assert report.entries[2].parameters == 6
    text = str(report)
    assert "SLOW" in text
    assert all(entry.variable in text for entry in report.entries)
    assert 0 < report.fast_fraction < 1
    assert "2 of 3 variables" in report.summary and report.summary in text
    assert f"{model.layers[-1].name}/w" in report.warning
    assert "register_op_gradients" in report.warning


@needs_keras_3
def test_report_of_a_model_of_keras_3():
    inputs = {name: keras.Input(shape, name=name) for name, shape in (("a", [4]), ("b", [2, 3]))}
    hidden = keras.layers.Dense(3, name="first")(inputs["a"])
    total = keras.layers.Add()([hidden, keras.layers.LSTM(3, name="second")(inputs["b"])])
    report = OnePassEngine(1.0).report(keras.Model(inputs, total))
    assert [entry.parameters for entry in report.entries] == [12, 3, 36, 36, 12]
    assert all(entry.fast for entry in report.entries)
    assert "first" in report.entries[0].variable
    with pytest.raises(ValueError, match="must have been called"):
        OnePassEngine(1.0).report(keras.Sequential([keras.layers.Dense(3)]))


def test_a_summary_never_says_all_where_one_is_slow():
    fast = Entry("kernel", 10**6, "matmul", True, 10**9)
    slow = Entry("gamma", 3, "vectorized: no rule", False, 3)
    assert "99.9%" in Report((fast, slow)).summary and "100" not in Report((fast, slow)).summary
    assert Report((fast, fast)).summary == "All of the 2 variables are on the fast path."
    assert Report((fast, fast)).warning is None
    assert "None of the 1" in Report((slow,)).summary


def test_report_of_the_vectorised_engine():
    report = VectorizedEngine(1.0).report(support.small_model())
    assert report.fast_fraction == 0 and len(report.entries) == 4


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_report_of_the_last_step(engine):
    clipping, model, (x, y) = engine(1.0), support.small_model(), support.small_data(3)
    support.ClippedSum(clipping, model, x)(x, y)
    assert clipping.report(None) == clipping.report() == clipping.report(model)


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_report_needs_a_model_or_a_step(engine):
    with pytest.raises(ValueError, match="`model` must be given"):
        engine(1.0).report()


def test_report_needs_a_model_that_was_called():
    with pytest.raises(ValueError, match="must have been called"):
        OnePassEngine(1.0).report(tf.keras.Sequential([layers.Dense(3)]))
