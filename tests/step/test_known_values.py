"""Values are known by hashes, in every floating-point type, and none is forgotten."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp.step import known_values
from tfdp.step.known_values import KnownValues
from tfdp.step.record import record_table

VALUES = np.random.default_rng(0).normal(size=[5, 4]).astype(np.float32)
LARGE = np.random.default_rng(1).normal(size=[300, 100]).astype(np.float32)


def row(uid, steps):
    rows = record_table.new_row(uid, record_table.GAUSSIAN, False, {})[np.newaxis]
    rows[0, record_table.STEPS] = steps
    return rows


def steps_of(known, one):
    rows = known.rows_of(one)
    return None if rows is None else rows[:, record_table.STEPS].sum()


@pytest.mark.parametrize("values", [VALUES, LARGE, VALUES * 1e-6], ids=["small", "large", "tiny"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "float32"])
def test_copies_of_every_type_have_a_hash_of_their_original(dtype, values):
    copy = tf.Variable(tf.cast(values, dtype))
    assert known_values.digest(copy) in known_values.digests(tf.constant(values))
    assert known_values.digest(copy * 1.5) not in known_values.digests(tf.constant(values))


def test_mutant_that_knows_no_rounded_copies_is_caught(monkeypatch):
    monkeypatch.setattr(known_values, "_ROUNDED", ())
    with pytest.raises(AssertionError):
        test_copies_of_every_type_have_a_hash_of_their_original("bfloat16", VALUES)


def hash_changes_with_each_entry():
    changed = LARGE.copy()
    changed[0, 1] += 1e-6  # Not one of those that are hashed.
    return known_values.digest(tf.constant(changed)) != known_values.digest(tf.constant(LARGE))


def test_a_few_trained_rows_of_a_large_variable_change_its_hash():
    assert hash_changes_with_each_entry()
    nearly = np.zeros([300, 100], np.float32)
    nearly[0, 1] = 1.0
    assert known_values.digest(tf.constant(nearly)) is not None


def test_mutant_that_looks_at_the_sample_alone_is_caught(monkeypatch):
    monkeypatch.setattr(known_values, "_total", lambda values, dtype=None: b"0")
    assert not hash_changes_with_each_entry()


ROUND = (np.float32(3.5), np.ones([1]), np.zeros([4]), np.full([2, 3], 0.125), [-0.0, 0.0])


def test_round_numbers_identify_nothing():
    for values in (*ROUND, np.full([100, 100], -0.5), np.zeros([10_000], np.float32)):
        assert known_values.digest(tf.constant(values)) is None
        assert not known_values.digests(tf.constant(values))
    # If there are few entries, rounded ones are not told from those of other tensors.
    assert len(known_values.digests(tf.constant([0.1234567, 0.7654321]))) == 1
    assert len(known_values.digests(tf.constant(VALUES))) == 3


def test_single_numbers_that_were_trained_identify_themselves():
    """Such as the weights of a regression on one feature, or steps of 0.1."""
    found = [
        known_values.digest(tf.constant(values, tf.float32))
        for values in (0.1234567, [[0.1234567, 0.1234567]], np.full([100, 100], 0.3), 0.7654321)
    ]
    assert None not in found and len(set(found)) == 4


def test_mutant_that_takes_any_number_for_a_round_one_is_caught(monkeypatch):
    monkeypatch.setattr(known_values.np, "float16", np.float32)
    with pytest.raises(AssertionError):
        test_single_numbers_that_were_trained_identify_themselves()


def costs_after_an_overflow():
    known = KnownValues()
    for i in range(1, 30):
        known.note([i], row(uid=i, steps=i))
    return [steps_of(known, i) for i in range(1, 31)]


def test_nothing_is_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(known_values, "_RECENT", 8)
    costs = costs_after_an_overflow()
    assert all(cost is not None and cost >= i for i, cost in enumerate(costs[:-1], 1))
    assert costs[-1] is None


def test_mutant_that_forgets_the_oldest_is_caught(monkeypatch):
    monkeypatch.setattr(np, "union1d", lambda old, new: old)
    with pytest.raises(AssertionError):
        test_nothing_is_forgotten_when_there_are_many(monkeypatch)


def test_costs_of_one_hash_are_united_and_free_values_stay_free():
    known = KnownValues()
    assert not known
    known.note([1], row(5, steps=3))
    known.note([1], row(5, steps=2))
    known.note([1], row(6, steps=1))
    assert known and steps_of(known, 1) == 4
    known.note_free(1)  # It was known to have a cost.
    known.note_free(2)
    known.note([1, 2], row(7, steps=10))
    assert steps_of(known, 1) == 14 and steps_of(known, 2) is None and known.is_free(2)
