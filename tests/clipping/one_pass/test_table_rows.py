"""Sums of touched rows are those of the whole table, and an example moves counts by the clip."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass.table_rows import RowSums, TableRows

layers = tf.keras.layers
WORDS, ITEMS, CLIP, COUNT_CLIP, N = 30, 20, 0.1, 1.5, 12
RNG = np.random.default_rng(0)
X = {
    "words": RNG.integers(0, 8, [N, 5]).astype("int32"),  # Some occur twice.
    "item": RNG.integers(0, ITEMS, [N]).astype("int32"),
}
Y = RNG.integers(0, 3, N)


def network():
    """Looks words up twice, in two places, and an item."""
    tf.keras.utils.set_random_seed(0)
    words, item = layers.Input([5], dtype="int32"), layers.Input([], dtype="int32")
    table = layers.Embedding(WORDS, 4)
    found = [layers.GlobalAveragePooling1D()(table(words)), table(words[:, 1])]
    found.append(layers.Embedding(ITEMS, 4)(item))
    outputs = layers.Dense(3)(layers.Concatenate()(found))
    return tf.keras.Model({"words": words, "item": item}, outputs)


class Sums:
    """Runs an engine that sums touched rows: traced once."""

    def __init__(self, model, clip=CLIP, min_rows=1):
        engine = OnePassEngine(clip)
        engine.table_rows = TableRows(COUNT_CLIP, min_rows)

        def run(x, y, mask):
            losses = support.crossentropy()(y, model(x), sample_weight=mask)
            found = engine.clipped_sum(losses, model.trainable_variables, tf.constant([1, 2]))
            touched = [None if t is None else (t.ids, t.counts) for t in found.touched]
            return found.gradients, touched

        spec = (
            support.open_spec(X),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.bool),
        )
        self._variables = model.trainable_variables
        self._run = tf.function(run, input_signature=spec)

    def __call__(self, x, y, mask=None):
        """The sums, shaped as the variables, and the counts of tables."""
        mask = np.ones(len(y), bool) if mask is None else mask
        gradients, touched = self._run(x, y, mask)
        sums, counts = [], []
        for variable, gradient, rows in zip(self._variables, gradients, touched, strict=True):
            if rows is None:
                sums.append(gradient.numpy())
                continue
            ids, added = (t.numpy() for t in rows)
            assert len(set(ids)) == len(ids) and len(gradient) == len(ids)
            table, count = np.zeros(variable.shape, "float32"), np.zeros(variable.shape[0])
            table[ids], count[ids] = gradient.numpy(), added
            sums.append(table)
            counts.append(count)
        return sums, counts


def looped_counts(mask):
    counts = [np.zeros(WORDS), np.zeros(ITEMS)]
    for i in np.flatnonzero(mask):
        words = np.unique(X["words"][i])
        weight = min(1.0, COUNT_CLIP / np.sqrt(len(words) + 1))
        counts[0][words] += weight
        counts[1][X["item"][i]] += weight
    return counts


def without(i):
    return {name: np.delete(x, i, axis=0) for name, x in X.items()}, np.delete(Y, i)


def test_sums_and_counts_equal_those_of_whole_tables():
    model, mask = network(), np.arange(N) % 4 != 0
    sums, counts = Sums(model)(X, Y, mask)
    whole = support.ClippedSum(OnePassEngine(CLIP), model, X).gradients(X, Y, mask)[0]
    for own, other in zip(sums, whole, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    for own, other in zip(counts, looped_counts(mask), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-9)


def test_examples_that_are_bad_count_nowhere():
    model = network()
    kernel = model.trainable_variables[1]
    run = Sums(model)
    outside = {**X, "item": np.where(np.arange(N) == 3, ITEMS + 7, X["item"])}
    for bad in (outside, X):
        if bad is X:  # Its gradient is not finite.
            kernel.assign(tf.where(tf.range(ITEMS)[:, tf.newaxis] == X["item"][3], np.nan, kernel))
        sums, counts = run(bad, Y)
        found = np.arange(N) != 3 if bad is outside else X["item"] != X["item"][3]
        assert all(np.all(np.isfinite(total)) for total in sums)
        for own, other in zip(counts, looped_counts(found), strict=True):
            np.testing.assert_allclose(own, other, atol=1e-9)


def assert_bounded():
    """Leaves each example out of the batch: no counts and no sums move by more than the clips."""
    run = Sums(network())
    sums, counts = run(X, Y)
    moved = []
    for i in range(N):
        others, fewer = run(*without(i))
        assert np.linalg.norm(support.flat(sums) - support.flat(others)) <= CLIP * (1 + 1e-5)
        moved.append(np.linalg.norm(support.flat(counts) - support.flat(fewer)))
    assert max(moved) <= COUNT_CLIP * (1 + 1e-12)
    assert max(moved) > COUNT_CLIP * (1 - 1e-9)  # The bound is attained.


def test_an_example_moves_counts_by_their_clip():
    assert_bounded()


def every_lookup(self):
    return tf.ones_like(self._rows, tf.bool)


def without_clip(self, contributions, counts, touched=TableRows.touched):
    return touched(dataclasses.replace(self, count_clip=1e6), contributions, counts)


def by_table(self, contributions, counts, touched=TableRows.touched):
    """Clips the counts of each table by itself."""
    found = []
    for c in contributions:
        own = touched(self, [c], counts) if isinstance(c, RowSums) else [None]
        found.append(own[0])
    return found


@pytest.mark.parametrize(
    ("cls", "name", "mutant"),
    [
        (RowSums, "first_lookups", every_lookup),
        (TableRows, "touched", without_clip),
        (TableRows, "touched", by_table),
    ],
)
def test_mutants_are_caught(cls, name, mutant):
    with mock.patch.object(cls, name, mutant), pytest.raises(AssertionError):
        assert_bounded()


@pytest.mark.parametrize("why", ["small", "multiplied", "parts", "microbatches"])
def test_what_has_no_touched_rows_is_refused(why):
    model = network()
    if why == "multiplied":  # With the words' table, as if tied.
        plain = model

        class Tied(tf.keras.Model):
            def call(self, x):
                tables = plain.trainable_variables[:2]
                products = [tf.reduce_sum(tf.matmul(t, tf.ones([4, 3])), 0) for t in tables]
                return plain(x) + 0.1 * tf.add_n(products)

        tied = Tied()
        tied(X)
        model = tied
        model.plain = plain
    engine = OnePassEngine(CLIP, 4 if why == "microbatches" else None)
    if why == "parts":
        engine.rows_per_pass = 2
    engine.table_rows = TableRows(COUNT_CLIP, 100 if why == "small" else 1)

    @tf.function(input_signature=(support.open_spec(X), tf.TensorSpec([None], tf.int64)))
    def run(x, y):
        losses = support.crossentropy()(y, model(x))
        return engine.clipped_sum(losses, model.trainable_variables, tf.constant([1, 2])).gradients

    message = "least min_rows" if why in ("small", "multiplied") else "clipped in one pass"
    with pytest.raises(ValueError, match=f"`sparse_embeddings` must be.*{message}"):
        run.get_concrete_function()
