"""Rows are selected by noisy counts, touched or not, with the probabilities of the mechanism."""

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tfdp.base.random import chacha
from tfdp.clipping.engine import ClippedSum, TouchedRows
from tfdp.step import sparse_embeddings
from tfdp.step.sparse_embeddings import RowSelection

SPARSE = tfdp.SparseEmbeddings(threshold=3.0, count_share=0.2, count_clip=2.0, min_rows=1)
Z = 0.5
# With noise of s = Z / sqrt(0.2) * 2, which is about 2.24, counts of these rows are below and above
# the threshold.
ROWS, WIDTH, OTHERS = 40, 2, 300
COUNTS = {5: 0.0, 9: 1.0, 17: 3.0, 33: 6.0}
RUNS = 800


def sums(counts=COUNTS):
    """A clipped sum of two tables and a dense variable; each touched row's sum is its number."""
    ids = tf.constant(list(counts), tf.int64)
    values = tf.tile(tf.cast(ids, tf.float32)[:, tf.newaxis], [1, WIDTH])
    touched = TouchedRows(ids, tf.constant(list(counts.values()), tf.float64), ROWS)
    # Of this table, one row is touched, by no example that counts: as rows of padding do.
    other = TouchedRows(tf.constant([0], tf.int64), tf.zeros([1], tf.float64), OTHERS)
    gradients = [values, tf.ones([3]), tf.zeros([1, WIDTH])]
    return ClippedSum(gradients, [None] * 3, tf.zeros([]), [], None, touched=[touched, None, other])


def selected(sparse=SPARSE, noises=(Z,), stage=None, runs=RUNS, counts=COUNTS):
    """Returns which rows of the two tables are selected in each step, bool `[runs, rows]`."""

    @tf.function
    def run(key):
        selection = RowSelection(sparse, list(noises))
        at = None if stage is None else tf.constant(stage, tf.int64)
        total, ids = selection.select(sums(counts), tf.stack([key, 7]), at)
        assert ids[1] is None and total.gradients[1].shape == [3]
        return total.gradients[0], ids[0], ids[2]

    found = np.zeros([runs, ROWS + OTHERS], bool)
    for i in range(runs):
        values, first, second = (t.numpy() for t in run(tf.constant(i, tf.int64)))
        rows = np.concatenate([first, second + ROWS])
        assert np.all(np.diff(rows) > 0)  # Each once, in an order that tells nothing.
        touched = np.isin(first, list(counts))
        np.testing.assert_array_equal(values[:, 0], np.where(touched, first, 0))
        found[i, rows] = True
    return found


def expected(sparse=SPARSE, noise=Z):
    counts = np.zeros(ROWS + OTHERS)
    counts[list(COUNTS)] = list(COUNTS.values())
    stddev = noise / math.sqrt(sparse.count_share) * sparse.count_clip
    return scipy.stats.norm.sf(sparse.threshold, counts, stddev)


def assert_selected_as_stated(found, probabilities):
    """Every row has its probability, and rows are independent.

    It fails by luck with probability below 1e-9.
    """
    p_value = min(
        scipy.stats.binomtest(int(k), len(found), p).pvalue
        for k, p in zip(found.sum(axis=0), probabilities, strict=True)
    )
    assert p_value > 1e-12
    # The number of rows in a step has the variance of a sum of independent ones.
    variance = np.sum(probabilities * (1 - probabilities))
    ratio = found.sum(axis=1).var() / variance
    assert abs(ratio - 1) < 7 * np.sqrt(2 / len(found)) + 0.02
    # Touched by nobody, a row is selected like one that was not looked at.
    untouched = [i for i in range(ROWS) if i not in COUNTS]
    table = (
        [found[:, 5].sum(), len(found) - found[:, 5].sum()],
        [
            found[:, untouched].sum(),
            found[:, untouched].size - found[:, untouched].sum(),
        ],
    )
    assert scipy.stats.fisher_exact(table).pvalue > 1e-12


def test_rows_are_selected_with_the_probabilities_of_noisy_counts():
    assert_selected_as_stated(selected(), expected())


def test_stages_of_a_schedule_have_probabilities_of_their_own():
    found = selected(noises=(Z, 2 * Z), stage=1)
    assert_selected_as_stated(found, expected(noise=2 * Z))


def silent(key, count, use=0, dtype=tf.float64):
    return tf.zeros([count], dtype)


def half(key, count, use=0, dtype=tf.float64, normals=chacha.normals):
    return normals(key, count, use, dtype) / 2


def never(self, sizes, key, stage):
    return [tf.zeros([0], tf.int64) for _ in sizes]


def clustered(key, count, use=0, words=chacha.random_words):
    """The same gap before each row: right on average."""
    return tf.tile(words(key, 4, use)[:, tf.newaxis], [1, count // 4])


MUTANTS = {
    "exact counts": (chacha, "normals", silent),
    "half the noise": (chacha, "normals", half),
    "touched rows alone": (RowSelection, "_drawn_rows", never),
    "rows that depend on each other": (chacha, "random_words", clustered),
    "touched rows first": (tf, "argsort", lambda rows: tf.range(tf.size(rows))),
    "touched rows drawn again": (sparse_embeddings, "_without", lambda rows, others: rows),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    with mock.patch.object(*MUTANTS[name]), pytest.raises(AssertionError):
        assert_selected_as_stated(selected(), expected())


def test_without_noise_counts_decide():
    found = selected(noises=(0.0,), runs=3)
    assert np.all(found == (expected(noise=1e-9) > 0.25))  # A count at the threshold is kept.


def test_a_high_threshold_draws_nothing_outside():
    sparse = dataclasses.replace(SPARSE, threshold=1e6)
    assert not selected(sparse, runs=50).any()


@pytest.mark.parametrize("mean", [0.0, 0.3, 50.0, 1e5])
def test_there_is_room_for_all_rows_that_are_drawn(mean):
    room = sparse_embeddings._room(mean)
    assert scipy.stats.poisson.logsf(room, mean) < -100 * math.log(2)
    assert room < mean + 50 + 13 * math.sqrt(mean)


def test_noise_is_that_of_one_gaussian_mechanism():
    for share in (0.01, 0.3, 0.9):
        counts, gradients = tfdp.SparseEmbeddings(5.0, share).noise(1.3)
        assert counts**-2 + gradients**-2 == pytest.approx(1.3**-2, rel=1e-12)
        assert counts**-2 == pytest.approx(share * 1.3**-2, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", 0.0),
        ("threshold", math.inf),
        ("count_share", 1.0),
        ("count_share", 0),
        ("count_clip", 0.0),
        ("min_rows", 0),
    ],
)
def test_arguments_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        tfdp.SparseEmbeddings(**{"threshold": 3.0, name: value})


@pytest.mark.parametrize("given", ["sparse", {"share": 1.0}, {"threshold": 1.0, "name": "x"}, 5.0])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(ValueError, match="`sparse_embeddings` must be a `tfdp"):
        sparse_embeddings.get(given)


def test_config_makes_it_again():
    assert sparse_embeddings.get(SPARSE.get_config()) == SPARSE


def test_keras_2_refuses_it():
    with pytest.raises(ValueError, match="`sparse_embeddings` must be None in Keras 2"):
        tfdp.keras2.DPAdam(1.0, 1.0, 8, sparse_embeddings=SPARSE)
