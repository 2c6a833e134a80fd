import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import WeightsTwice
from tfdp.clipping import OnePassClipping, VectorizedClipping

layers = tf.keras.layers


def test_report_of_a_model():
    model = tf.keras.Sequential([layers.Input([4]), layers.Dense(6), WeightsTwice()])
    report = OnePassClipping(1.0).report(model)
    assert [entry.fast for entry in report.entries] == [True, True, False]
    assert report.entries[2].parameters == 6
    text = str(report)
    assert "SLOW" in text
    assert all(entry.variable in text for entry in report.entries)
    assert 0 < report.fast_fraction < 1


def test_report_of_the_vectorised_engine():
    report = VectorizedClipping(1.0).report(support.small_model())
    assert report.fast_fraction == 0 and len(report.entries) == 4


@pytest.mark.parametrize("engine", [OnePassClipping, VectorizedClipping])
def test_report_of_the_last_step(engine):
    clipping, model, (x, y) = engine(1.0), support.small_model(), support.small_data(3)
    support.ClippedSum(clipping, model, x)(x, y)
    assert clipping.report(None) == clipping.report() == clipping.report(model)


@pytest.mark.parametrize("engine", [OnePassClipping, VectorizedClipping])
def test_report_needs_a_model_or_a_step(engine):
    with pytest.raises(ValueError, match="`model` must be given"):
        engine(1.0).report()


def test_report_needs_a_model_that_was_called():
    with pytest.raises(ValueError, match="must have been called"):
        OnePassClipping(1.0).report(tf.keras.Sequential([layers.Dense(3)]))
