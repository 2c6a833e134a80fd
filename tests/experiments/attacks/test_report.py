"""Results of attacks stand beside what the guarantee allows."""

import numpy as np
import pytest
from scipy import optimize

from experiments.attacks import report


def allowed_numerically(epsilon, delta):
    """The largest accuracy over pairs of error rates that (epsilon, delta) leaves, as a program."""
    e = np.exp(epsilon)
    # Errors a of "in", b of "out": minimize a + b with 1 - b <= e a + delta, 1 - a <= e b + delta.
    found = optimize.linprog(
        [1, 1], [[-e, -1], [-1, -e]], [delta - 1, delta - 1], bounds=[(0, 1), (0, 1)]
    )
    return 1 - found.fun / 2


@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 4.0])
def test_the_allowed_accuracy_is_the_largest_one(epsilon, delta):
    expected = allowed_numerically(epsilon, delta)
    assert report.largest_accuracy(epsilon, delta) == pytest.approx(expected, abs=1e-7)
    # Mutants: the accuracy of pure DP, that of twice the epsilon.
    if delta > 0.1:
        assert report.largest_accuracy(epsilon, 0.0) < expected - 1e-3
    if epsilon:
        assert report.largest_accuracy(2 * epsilon, delta) > expected + 1e-3


def test_randomised_response_reaches_it():
    epsilon = 1.5
    keep = np.exp(epsilon) / (1 + np.exp(epsilon))
    assert report.largest_accuracy(epsilon, 0.0) == pytest.approx(keep)


def test_of_a_group_of_two_it_is_that_of_two_steps():
    """(epsilon, delta) twice: P <= e^epsilon (e^epsilon Q + delta) + delta."""
    epsilon, delta = 0.7, 0.01
    both = allowed_numerically(2 * epsilon, delta * (1 + np.exp(epsilon)))
    assert report.largest_accuracy(epsilon, delta, 2) == pytest.approx(both, abs=1e-7)


def test_a_large_epsilon_allows_everything():
    assert report.largest_accuracy(1e4, 1e-5) == 1.0
    assert report.largest_accuracy(1e4, 1e-5, 2) == 1.0
