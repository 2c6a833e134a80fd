"""Runs of `experiments.classify` with Keras 3."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from experiments import classify, datasets
from experiments.settings import RefusedError, resolve
from tests import forks
from tests.experiments.classify_support import classify_here, parse
from tests.experiments.test_resume import FIXED, interrupt
from tests.front_ends import keras, needs_keras_3

pytestmark = needs_keras_3


@pytest.mark.slow
def test_the_saved_model_has_the_accuracy_and_the_ledger_of_the_result(tmp_path):
    result = classify_here(
        "--keras=3", "--epochs=1", "--method=dpsignadam", f"--output_dir={tmp_path}"
    )
    model = keras.models.load_model(tmp_path / "model.keras")
    assert type(model.optimizer) is tfdp.keras3.DPSignAdam
    assert result["steps"] == model.optimizer.ledger.steps == int(model.optimizer.iterations)
    assert model.optimizer.ledger.to_dict() == result["ledger"]
    assert 2.9 < result["epsilon"] <= 3.0
    data = datasets.load("digits")
    accuracy = np.mean(np.argmax(model(data.eval_x), axis=1) == data.eval_y)
    assert accuracy == pytest.approx(result["accuracy"], abs=1e-6)
    assert result["versions"]["keras"].startswith("3.") and "tf-keras" not in result["versions"]
    assert "epsilon = " in (tmp_path / "privacy.txt").read_text()


@pytest.mark.slow
def test_a_selective_method_keeps_no_times(tmp_path):
    arguments = ("--method=dpsur_sgd", "--threshold=0.5", "--validation_noise_multiplier=0.7")
    result = classify_here("--keras=3", "--epochs=1", *arguments, f"--output_dir={tmp_path}")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert type(model) is tfdp.keras3.SelectiveModel
    assert type(model.optimizer) is tfdp.keras3.DPSURSGD
    assert result["steps"] == model.optimizer.ledger.steps == int(model.optimizer.iterations)
    assert model.optimizer.ledger.to_dict() == result["ledger"]
    assert 2.9 < result["epsilon"] <= 3.0
    assert result["seconds"] is None


@pytest.mark.slow
def test_an_interrupted_run_resumes_as_if_nothing_had_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    arguments = ("--method=dpis_adam", "--learning_rate_schedule=linear", "--chunk_size=100")
    results = []
    for name in ("whole", "part"):
        run = ("--keras=3", "--epochs=2", *FIXED, *arguments, f"--output_dir={tmp_path / name}")
        if name == "part":
            interrupt(monkeypatch, 1, *run)
        results.append(classify_here(*run))
    assert results[0]["ledger"] == results[1]["ledger"]
    assert results[0]["steps"] == results[1]["steps"]
    # Not before: weights of the same seeds are known from files, too, and each run has its cost.
    states = []
    for name in ("whole", "part"):
        model = keras.models.load_model(tmp_path / name / "model.keras")
        assert model.optimizer.ledger.steps >= results[0]["steps"]
        inner = model.optimizer.inner_optimizer.variables
        states.append([*model.get_weights(), *(v.numpy() for v in inner)])
    whole, part = states
    assert len(whole) > 12
    for array, other in zip(whole, part, strict=True):
        np.testing.assert_allclose(other, array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method=dpagd"], "--method must be one of dpsgd, .* with --keras=3"),
        (["--activation=tempered_sigmoid"], "--activation must be one of relu, tanh with"),
        (["--dataset=imdb_reviews"], "--learning_rate_schedule must be one of constant, linear"),
    ],
)
def test_what_is_there_for_keras_2_alone_is_refused(arguments, complaint):
    with pytest.raises(RefusedError, match=complaint):
        classify.settings_from(parse("--keras=3", *arguments))


def test_keras_2_is_the_default():
    assert resolve({"keras": 2}) == resolve({})
    folder = classify.default_output_dir(resolve({"keras": 3}))
    assert folder == "results/classify/digits_dpsgd_eps3_keras3"


# The command, on a Python that TensorFlow Privacy does not support.
WITHOUT_TENSORFLOW_PRIVACY = """
import sys
sys.modules["tensorflow_privacy"] = None
import experiments.training
"""
COMMAND = """
import runpy
runpy.run_module("experiments.classify", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_without_tensorflow_privacy(tmp_path):
    """Keras 3 needs nothing of Keras 2; Keras 2 is refused with a sentence, not a traceback."""
    arguments = [
        (f"--keras={version}", "--epochs=1", f"--output_dir={tmp_path / version}")
        for version in ("2", "3")
    ]
    refused, trained = forks.run_each(COMMAND, arguments, WITHOUT_TENSORFLOW_PRIVACY)
    assert refused.status == 1 and "--keras must be 3 where Keras 2 is missing" in refused.errors
    assert "Traceback" not in refused.errors
    assert trained.status == 0, trained.errors[-2000:]
    assert "epsilon" in trained.output
