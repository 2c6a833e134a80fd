"""Teachers share nothing, and a student learns from their noisy votes."""

import numpy as np
import pytest
from absl import flags

from experiments import datasets, pate, records
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


class KeepsWeights(pate.Ridge):
    """Mutant: a teacher learns from the weights of the one before it, too."""

    def train(self, x, y):
        before = self._weights
        super().train(x, y)
        self._weights = self._weights + 0.1 * before
        return self


def test_a_part_alone_makes_its_regression(digits):
    assert_a_part_alone_makes_its_teacher(pate.Ridge(), digits)
    with pytest.raises(AssertionError):
        assert_a_part_alone_makes_its_teacher(KeepsWeights(), digits)


def test_ridge_regression_solves_its_equations(digits):
    x, y = digits.train_x[:30], digits.train_y[:30]
    rows = np.concatenate([x.reshape(30, -1), np.ones([30, 1])], axis=1)
    targets = 2.0 * np.eye(10)[y] - 1
    weights = np.linalg.solve(rows.T @ rows + 100 * np.eye(65), rows.T @ targets)
    np.testing.assert_allclose(pate.Ridge().train(x, y).predict(x), rows @ weights, atol=1e-4)


def test_a_student_labels_public_images_itself(digits):
    asked, measured = 10 * digits.eval_x[:60], 10 * digits.eval_x[60:]  # The penalty is 100.
    few = pate.Ridge().train(asked, digits.eval_y[:60])
    more = pate.self_trained(10 * digits.train_x, few)
    accuracies = [
        np.mean(one.predict(measured).argmax(axis=1) == digits.eval_y[60:]) for one in (few, more)
    ]
    assert accuracies[1] > accuracies[0] + 0.05 > 0.65


@pytest.mark.slow
def test_the_noise_is_for_each_epsilon(tmp_path, monkeypatch):
    monkeypatch.setattr(pate, "Learner", lambda *arguments: pate.Ridge())  # It trains at once.
    record, picture = tmp_path / "record", tmp_path / "picture.png"
    arguments = ("--teachers=20", "--queries=50", "--epsilons=1,8", "--nodpsgd", "--runs=2")
    found = pate.run(_parse(*arguments, f"--record={record}"))
    spent = [outcome.bound.epsilon for outcome in found]
    assert len(found) == 4
    for epsilon, target in zip(spent, (1, 8, 1, 8), strict=True):
        assert 0.98 * target < epsilon <= target
    lines = records.read(record)
    assert [line["epsilon"] for line in lines] == spent
    assert [line["run"]["run"] for line in lines] == [0, 0, 1, 1]
    assert lines[0]["run"]["noise"] > 4 * lines[1]["run"]["noise"]
    # A function of the votes is not what the ledger states.
    assert all(line["not_private_data_dependent"] != line["epsilon"] for line in lines)
    assert "one direction" in str(found[0])
    assert len(pate.table(found).splitlines()) == 4
    pate.draw(found, str(picture))
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("tests_queries", [False, True])
def test_a_student_learns_from_votes(tests_queries):
    (found,) = pate.run(
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
        ("--epsilons=1,-1", "--epsilons must be positive numbers"),
        ("--epsilons=1 --test_queries", "--epsilons must be given with --notest_queries"),
    ],
)
def test_refusals(argument, words):
    with pytest.raises(RefusedError, match=words):
        pate.run(_parse(*argument.split()))
