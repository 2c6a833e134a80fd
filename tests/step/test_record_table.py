import numpy as np
import pytest
import tensorflow as tf

from tests.step.release_support import PARAMETERS
from tfdp.step.record import record_table
from tfdp.step.record.record_table import COLUMNS, COUNTS, GAUSSIAN, KIND, MIXED, STEPS, UID
from tfdp.step.record.release_count import ReleaseRecord


def table(rows):
    return tf.constant(np.array(rows).reshape(-1, COLUMNS), tf.float64)


def row(uid, steps, noise=1.0):
    made = record_table.new_row(uid, GAUSSIAN, False, {**PARAMETERS, "noise_multiplier": noise})
    made[STEPS] = steps
    return made


def totals(rows):
    found = {}
    for one in np.asarray(rows)[np.asarray(rows)[:, UID] > 0]:
        key = record_table.parameters_of(one)["noise_multiplier"]
        found[key] = found.get(key, 0) + one[STEPS]
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_full_table_adds_rows_of_equal_parameters_up(jit_compile):
    known = np.zeros([6, COLUMNS])
    known[:5] = [row(i + 1, 10 + i, 1.0 + i % 2) for i in range(5)]
    incoming = table([row(3, 20), row(9, 5, 2.0), row(10, 7, 3.0), row(11, 99)])
    merge = tf.function(record_table.merge, jit_compile=jit_compile)
    own = tf.constant(11.0, tf.float64)
    merged = merge(tf.constant(known), incoming, own).numpy()
    assert merged.shape == known.shape
    assert totals(merged) == {1.0: 10 + 20 + 14, 2.0: 11 + 13 + 5, 3.0: 7}
    assert not set(merged[:, UID]) & {1, 2, 3, 4, 5, 9, 11} and 10 in merged[:, UID]
    # The same once more, and what came out of it: nothing is counted twice.
    again = merge(tf.constant(known), incoming, own).numpy()
    np.testing.assert_array_equal(again, merged)
    assert totals(merge(tf.constant(merged), tf.constant(again), own)) == totals(merged)
    # What was added up comes back by itself: it may be counted twice, but the total never falls.
    back = totals(merge(tf.constant(merged), table([row(1, 10)]), own))
    assert back[1.0] >= 44


def test_parameters_without_room_get_no_epsilon():
    known = np.zeros([3, COLUMNS])
    incoming = table([row(i, 10 + i, 1.0 + i) for i in range(1, 6)])
    merged = record_table.merge(tf.constant(known), incoming, tf.constant(0.0, tf.float64)).numpy()
    assert merged[:, COUNTS].sum() == sum(10 + i for i in range(1, 6))
    assert merged[2, KIND] == MIXED and merged[2, STEPS] == 0


@pytest.mark.slow
def test_more_optimizers_in_a_row_than_a_table_has_rows():
    saved, total = None, 0
    for _ in range(record_table.ROWS + 20):
        record = ReleaseRecord(GAUSSIAN, PARAMETERS, False)
        record._own.assign([[1, 0, 0]])
        if saved is not None:
            record.absorb(saved)
            record.refresh()
        saved, total = record._table().numpy(), total + 1
        assert saved[:, STEPS].sum() == total
