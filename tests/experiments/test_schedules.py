import numpy as np
import pytest
import tensorflow as tf

from experiments import schedules
from experiments.datasets import load
from experiments.report import RunFolder
from experiments.settings import resolve
from experiments.training import Training


def rates(name, steps):
    schedule = schedules.make_schedule(name, 0.8, steps)
    return [float(schedule(tf.constant(step, tf.int64))) for step in range(steps + 2)]


def test_a_constant_rate_is_a_number():
    assert schedules.make_schedule("constant", 0.8, 10) == 0.8


def test_linear_falls_from_the_first_step_to_zero_after_the_last():
    expected = [*np.linspace(0.8, 0.0, 11), 0.0]
    np.testing.assert_allclose(rates("linear", 10), expected, atol=1e-6)


def test_cooldown_is_constant_and_falls_to_zero_over_the_last_30_percent():
    found = rates("cooldown", 20)
    # The last 6 of 20 steps fall: 0.8 at step 14, and a sixth less with each of them.
    expected = [0.8] * 14 + [0.8 * left / 6 for left in (6, 5, 4, 3, 2, 1, 0)] + [0.0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`name` must be one of \('constant'.*name='cosine'"):
        schedules.make_schedule("cosine", 0.8, 10)


# In chunks, and with updates that are rolled back, too: the rate belongs to logical steps.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "chunk_size", "name"),
    [
        ("dpsgd", 64, "cooldown"),
        ("dpsignadam", None, "linear"),
        ("dpsur_sgd", None, "cooldown"),
        ("sgd", None, "linear"),
    ],
)
def test_a_run_ends_at_a_rate_of_zero_and_its_model_can_be_loaded(
    tmp_path, method, chunk_size, name
):
    given = dict(dataset="digits", method=method, learning_rate_schedule=name, seed=0)
    settings = resolve({**given, "chunk_size": chunk_size, "epochs": 2, "learning_rate": 0.01})
    folder = RunFolder(tmp_path)
    training = Training(settings, load("digits"), folder, progress=False)
    training.run()
    rate = training.model.optimizer.learning_rate
    steps = int(training.model.optimizer.iterations)
    assert steps == 2 * training.steps_per_epoch
    assert float(rate(0)) == pytest.approx(0.01) and float(rate(steps)) == 0
    loaded = tf.keras.models.load_model(folder.model)
    assert loaded.optimizer.learning_rate.get_config() == rate.get_config()
    assert type(loaded.optimizer) is type(training.model.optimizer)
