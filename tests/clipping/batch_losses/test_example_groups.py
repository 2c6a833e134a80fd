import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.two_term_support import Codes, data
from tfdp.clipping.batch_losses.example_groups import clipped_group_sum, draw_groups, one_group

M, CAPACITY = 4, 30


def rows_of(x):
    return tf.constant(x), {"twice": tf.constant(2 * x)}


def drawn(x, mask, seed=1, num_groups=M, capacity=CAPACITY):
    """The examples of each group."""
    key = tf.constant([seed, seed], tf.int64)
    (values, more), there = draw_groups(
        rows_of(x), None if mask is None else tf.constant(mask), key, num_groups, capacity
    )
    np.testing.assert_array_equal(more["twice"], 2 * values)
    return [np.array(v)[np.array(t)] for v, t in zip(values, there, strict=True)]


def test_every_example_is_in_one_group():
    x, _, mask = data()
    groups = drawn(x, mask)
    together = np.concatenate(groups)
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(x[mask], axis=0))


def test_rows_without_an_example_are_zero():
    x, _, mask = data()
    x[~mask] = np.nan
    (values, _), there = draw_groups(
        rows_of(x), tf.constant(mask), tf.constant([1, 1], tf.int64), M, CAPACITY
    )
    assert values.shape == [M, CAPACITY, 3]
    assert not np.any(np.array(values)[~np.array(there)])


def test_another_example_moves_no_other_to_another_group():
    x, _, mask = data(seed=2)
    for row in np.flatnonzero(mask)[:10]:
        absent = mask.copy()
        absent[row] = False
        changed = [
            (a, b)
            for a, b in zip(drawn(x, mask), drawn(x, absent), strict=True)
            if not np.array_equal(a, b)
        ]
        ((with_it, without),) = changed
        assert len(with_it) == len(without) + 1


def test_groups_cut_from_consecutive_examples_would_move_others():
    x, _, mask = data(seed=2)
    absent = mask.copy()
    absent[np.flatnonzero(mask)[0]] = False
    cuts = [np.array_split(x[m], M) for m in (mask, absent)]
    assert sum(not np.array_equal(a, b) for a, b in zip(*cuts, strict=True)) > 1


def test_groups_do_not_depend_on_what_the_examples_are():
    x, _, mask = data()
    one = [len(group) for group in drawn(x, mask)]
    assert one == [len(group) for group in drawn(-x[::-1].copy(), mask)]
    assert one != [len(group) for group in drawn(x, mask, seed=2)]


def test_groups_are_drawn_uniformly_and_independently():
    x = np.arange(40, dtype="float32").reshape(40, 1)
    pairs = np.zeros([M, M])
    for seed in range(300):
        group_of = {int(v[0]): j for j, g in enumerate(drawn(x, None, seed)) for v in g}
        pairs[group_of[0], group_of[1]] += 1
        pairs[group_of[38], group_of[39]] += 1
    assert scipy.stats.chisquare(pairs.ravel()).pvalue > 1e-4
    # The mutant that puts neighbors into one group.
    assert scipy.stats.chisquare(np.diag(pairs.sum(axis=1)).ravel()).pvalue < 1e-4


def test_a_full_group_keeps_the_first_of_its_own_examples():
    x, _, mask = data()
    for whole, kept in zip(drawn(x, mask), drawn(x, mask, capacity=3), strict=True):
        np.testing.assert_array_equal(whole[:3], kept)


def test_one_group_is_the_batch():
    x, _, mask = data()
    x[~mask] = np.nan
    (values, _), there = one_group(rows_of(x), tf.constant(mask))
    np.testing.assert_array_equal(there[0], mask)
    np.testing.assert_array_equal(values[0], np.where(mask[:, None], x, 0))


def summed(function, x, y, mask, model):
    @tf.function
    def run(x, y, mask):
        return clipped_group_sum(function, (x, y), mask, model.trainable_variables, 1.0)

    return run(tf.constant(x)[None], tf.constant(y)[None], tf.constant(mask)[None])


def test_variables_that_are_not_in_the_loss_have_no_sum():
    model = Codes()
    found = summed(model.batch_wise, *data(), model)
    assert [f is None for f in found] == [False, False, True, True]


def test_a_group_loss_must_be_a_scalar():
    model = Codes()
    with pytest.raises(ValueError, match=r"`batch_wise` must return a scalar.*Received: .*40"):
        summed(lambda x, y, mask: model(x), *data(), model)


def test_a_layer_that_keeps_statistics_of_the_group_is_refused():
    model = Codes()
    normalization = tf.keras.layers.BatchNormalization()
    normalization(tf.zeros([1, 2]))

    def batch_wise(x, y, mask):
        return tf.reduce_sum(normalization(model.codes(x), training=True) ** 2)

    with pytest.raises(ValueError, match="writes a statistic of the batch into its variable"):
        summed(batch_wise, *data(), model)
