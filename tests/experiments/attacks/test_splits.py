"""Targets and shadows share no example, and neither do members and others."""

import numpy as np
import pytest

from experiments.attacks.splits import split
from experiments.datasets import Data, DataError

X, Y = np.arange(100), np.arange(100) % 7
WHOLE = Data(X[:70], Y[:70], X[70:], Y[70:])


def parts(target, shadow):
    return [target.train_x, target.eval_x, shadow.train_x, shadow.eval_x]


def problems(found, size):
    """Says what is wrong with a split of `X`."""
    wrong = []
    if [len(part) for part in found] != [2 * size, size, 2 * size, size]:
        wrong.append("sizes")
    together = np.concatenate(found)
    if len(np.unique(together)) != len(together):
        wrong.append("overlap")
    if not np.isin(together, X).all():
        wrong.append("others")
    return wrong


@pytest.mark.parametrize(("examples", "size"), [(None, 16), (100, 16), (96, 16), (13, 2), (12, 2)])
def test_parts_are_disjoint_and_of_the_printed_ratio(examples, size):
    assert problems(parts(*split(WHOLE, 0, examples)), size) == []


def test_mutants():
    found = parts(*split(WHOLE, 0))
    # The shadow model gets an example of the target; others are taken from the members.
    assert problems([found[0], found[1], np.append(found[2][1:], found[0][0]), found[3]], 16) == [
        "overlap"
    ]
    assert problems([found[0], found[0][:16], found[2], found[3]], 16) == ["overlap"]
    assert problems([found[0][1:], *found[1:]], 16) == ["sizes"]


def test_labels_stay_with_their_examples():
    for data in split(WHOLE, 3):
        np.testing.assert_array_equal(data.train_y, data.train_x % 7)
        np.testing.assert_array_equal(data.eval_y, data.eval_x % 7)


def test_the_split_is_random_and_follows_from_the_seed():
    """A contiguous one would hand an attacker the order of the data set."""
    first, again, other = (parts(*split(WHOLE, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(again))
    assert set(first[0]) != set(other[0])
    for part in first:
        assert set(part) != set(range(part.min(), part.min() + len(part)))
    few = np.concatenate(parts(*split(WHOLE, 0, 12)))
    assert few.max() > 12  # They are not the first ones.


@pytest.mark.parametrize("examples", [0, 11, 101])
def test_a_number_that_does_not_fit_is_refused(examples):
    with pytest.raises(
        DataError, match=rf"--examples must be in \[12, 100\].*--examples={examples}\."
    ):
        split(WHOLE, 0, examples)
