"""Teachers share nothing, and a student learns from their noisy votes."""

import numpy as np
import pytest
from absl import flags

from experiments import datasets, pate
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    pate.define_flags(values)
    values(["pate", *arguments])
    return values


class KeepsTheOptimizer(pate.Learner):
    """Mutant: the state of the optimizer passes from one teacher to the next."""

    def _variables(self):
        return self.model.variables


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def assert_a_part_alone_makes_its_teacher(learner, data):
    x, y = data.train_x, data.train_y
    found = []
    for before in (slice(40, 60), slice(60, 100), slice(0, 0)):
        learner.train(x[before], y[before])
        learner.train(x[:40], y[:40])
        found.append(learner.predict(data.eval_x))
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, atol=1e-3)


@pytest.mark.slow
def test_a_part_alone_makes_its_teacher(digits):
    assert_a_part_alone_makes_its_teacher(pate.Learner("digits", epochs=2, seed=0), digits)
    with pytest.raises(AssertionError):
        assert_a_part_alone_makes_its_teacher(KeepsTheOptimizer("digits", 2, 0), digits)


@pytest.mark.slow
@pytest.mark.parametrize("tests_queries", [False, True])
def test_a_student_learns_from_votes(tests_queries):
    found = pate.run(
        _parse(
            *("--teachers=3", "--epochs=15", "--queries=100", "--noise=0.1", "--nodpsgd"),
            *("--test_queries", "--threshold=2.5", "--threshold_noise=0.1", "--max_answers=60"),
            f"--test_queries={tests_queries}",
        )
    )
    accuracy = dict(found.rows)
    assert found.answered == (60 if tests_queries else 100)
    assert accuracy["answers to queries"] > 0.85 and accuracy["student"] > 0.5
    assert f"{found.answered} of 100 queries were answered. Epsilon = " in str(found)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--queries=180", r"--queries must be at most 179, .* Received: --queries=180"),
        ("--noise=0", "`noise_stddev` must be a positive finite number"),
    ],
)
def test_refusals(argument, words):
    with pytest.raises(RefusedError, match=words):
        pate.run(_parse(argument))
