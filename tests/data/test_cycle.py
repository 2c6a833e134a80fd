"""Cyclic Poisson sampling: every example has one chance in a cycle, whatever the others do."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tfdp.accounting.sampling import PoissonSampling
from tfdp.data.cycle import Cycle, RedrawnCycle

N = 60


def drawn(steps, size=N, **kwargs):
    """The indices in each batch."""
    x = np.arange(size)
    batches = tfdp.data.poisson_batches((x, x), steps_per_epoch=steps, **kwargs)
    rows = []
    for batch in batches:
        rows.append(batch[0].numpy()[batch[2].numpy().astype(bool)] if len(batch) > 2 else batch[0])
    return [np.asarray(one) for one in rows]


@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_whole_passes_hold_every_example_once(padding):
    batches = drawn(18, expected_batch_size=10, cycle_length=6, padding=padding)
    cycles = [np.concatenate(batches[i : i + 6]) for i in (0, 6, 12)]
    for cycle in cycles:
        assert sorted(cycle) == list(range(N))
    for step in range(6):  # Always the same sets.
        assert set(batches[step]) == set(batches[step + 6]) == set(batches[step + 12])


def test_samples_hold_every_example_at_most_once_in_a_cycle():
    batches = drawn(400, expected_batch_size=5, cycle_length=4)
    counts = np.zeros([400, N], int)
    for step, batch in enumerate(batches):
        if not (len(batch) == 1 and batch[0] == 0):  # Or an empty draw.
            np.add.at(counts[step], batch, 1)
    for first in range(396):
        assert counts[first : first + 4].sum(axis=0).max() <= 1
    chosen = counts.sum(axis=0)[1:]  # 100 chances of probability 1 / 3 each.
    assert scipy.stats.binomtest(int(chosen.sum()), 100 * (N - 1), 1 / 3).pvalue > 1e-9
    assert (chosen > 0).all()


def test_an_added_example_moves_no_other():
    sets = []
    for size in (N, N + 1):
        cycle = Cycle(size, 4, seed=3)
        taken = [cycle.draw(tf.constant(i, tf.int64), lambda n: tf.range(n)) for i in range(4)]
        sets.append({int(i): which for which, one in enumerate(taken) for i in one})
    more = sets[1].pop(N)
    assert sets[0] == sets[1] and 0 <= more < 4


def test_sets_are_secret_independent_and_even():
    first, second = (Cycle(40_000, 4, None) for _ in range(2))
    assert not np.array_equal(first.order, second.order)
    of = np.zeros([2, 40_000], int)
    for row, cycle in zip(of, (first, second), strict=True):
        starts = cycle._starts.numpy()
        for which in range(4):
            row[cycle.order.numpy()[starts[which] : starts[which + 1]]] = which
    table = np.zeros([4, 4])
    np.add.at(table, tuple(of), 1)
    assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-9
    neighbours = np.zeros([4, 4])
    np.add.at(neighbours, (of[0][:-1], of[0][1:]), 1)
    assert scipy.stats.chisquare(neighbours.ravel()).pvalue > 1e-9


def test_sampling_of_a_cycle():
    sampling = PoissonSampling(1000, 50, cycle_length=5)
    plain = PoissonSampling(1000, 50)
    assert sampling.sampling_probability == 0.25
    assert sampling.padded_batch_size == plain.padded_batch_size
    assert sampling.truncation_probability == plain.truncation_probability
    assert sampling.bucket_sizes == plain.bucket_sizes


def test_users_are_sampled_in_turns():
    users = np.arange(N) // 3
    x = np.arange(N)
    batches = tfdp.data.poisson_batches(
        (x, x),
        expected_batch_size=5,
        cycle_length=4,
        steps_per_epoch=4,
        privacy_unit=users,
        examples_per_user=3,
    )
    rows = np.concatenate([x.numpy()[w.numpy() > 0] for x, _, w in batches])
    assert sorted(rows) == list(range(N))


@pytest.mark.parametrize("length", [0, -1, 2.5, True, 13])
def test_lengths_that_cannot_be(length):
    with pytest.raises(ValueError, match="Argument `cycle_length` must be"):
        tfdp.data.poisson_batches(
            (np.zeros(N), np.zeros(N)), expected_batch_size=5, cycle_length=length
        )


def test_parts_of_replicas_have_no_cycles():
    with pytest.raises(ValueError, match="`cycle_length` must be 1 with several parts"):
        PoissonSampling(100, 10, parts=2, cycle_length=2)


def key_of(number, secret=7):
    return tf.constant([secret, 1, 2, 3, number], tf.int64)


def members(cycle, key, last=None):
    """The examples of the set whose turn it is, in their order."""
    sets = cycle.sets_of(key, cycle.no_sets if last is None else last)
    which = int(key[-1]) % cycle.length
    return sets.order.numpy()[int(sets.starts[which]) : int(sets.starts[which + 1])]


def test_sets_are_handed_on_within_a_cycle_alone():
    cycle = RedrawnCycle(500, 4)
    first = cycle.sets_of(key_of(0), cycle.no_sets)
    marked = first._replace(order=first.order[::-1])  # Tells them from sets that are drawn anew.
    assert cycle.sets_of(key_of(3), marked).order[0] == marked.order[0]
    for key in (key_of(4), key_of(3, secret=8)):
        np.testing.assert_array_equal(members(cycle, key, marked), members(cycle, key))
    assert set(members(cycle, key_of(4))) != set(members(cycle, key_of(0)))


@pytest.mark.parametrize("padding", ["none", "full"])
def test_redrawn_sets_hold_every_example_once_in_a_cycle(padding):
    options = {"expected_batch_size": 10, "cycle_length": 6, "padding": padding}
    batches = drawn(18, redraw_sets=True, **options)
    cycles = [batches[i : i + 6] for i in (0, 6, 12)]
    for cycle in cycles:
        rows = np.concatenate([one for one in cycle if len(one) != 1 or one[0] != 0])
        assert len(rows) == len(set(rows)) >= N - 1  # No draw, or that of example 0, may be a 0.
    assert len({tuple(sorted(cycle[0])) for cycle in cycles}) == 3


def test_redrawn_sets_are_even_and_independent():
    """Of each other example, of the other cycles, and of other objects."""
    cycle = RedrawnCycle(20_000, 4)
    sets = np.full([3, 20_000], -1)
    for number in range(12):
        found = members(cycle, key_of(number))
        assert (sets[number // 4, found] == -1).all()
        sets[number // 4, found] = number % 4
    assert (sets >= 0).all()
    for one, other in ((sets[0], sets[1]), (sets[1], sets[2]), (sets[0, 1:], sets[0, :-1])):
        table = np.histogram2d(one, other, bins=4)[0]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-9
        assert scipy.stats.chisquare(table.sum(axis=0)).pvalue > 1e-9
    others = members(cycle, key_of(0, secret=8))
    assert np.isin(others, np.flatnonzero(sets[0] == 0)).mean() < 0.3


def test_batches_in_chunks_share_no_sets_with_those_before():
    x = np.arange(400)
    batches = tfdp.data.poisson_batches(
        (x, x), expected_batch_size=100, cycle_length=4, redraw_sets=True
    )
    others = tfdp.data.poisson.in_chunks(batches, 400)
    first, second = (set(next(iter(each))[0].numpy().tolist()) for each in (batches, others))
    assert len(first & second) < 0.6 * len(first)


def test_an_added_example_moves_no_other_where_sets_are_redrawn():
    for number in range(8):
        few, many = (members(RedrawnCycle(size, 4), key_of(number)) for size in (N, N + 1))
        assert set(few) == set(many) - {N}


def test_sets_cannot_be_redrawn_without_a_cycle():
    with pytest.raises(ValueError, match="redraws_sets"):
        PoissonSampling(100, 10, redraws_sets=True)
    with pytest.raises(ValueError, match="redraws_sets"):
        PoissonSampling(100, 10, cycle_length=5, redraws_sets=1)
