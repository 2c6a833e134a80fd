"""Tests of the transfer functions for texts, tables, counts, images and branches.

As in `test_analysis`: what is proven is evaluated, with one example changed, taken away, or moved.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.clipping.row_checks import Disproved, Traced
from tfdp.clipping.loss_graph import lookup_tables
from tfdp.clipping.row_analysis import analysis, transfer_functions
from tfdp.clipping.row_analysis.states import Public, Ragged, Rows, Unproven

raw = tf.raw_ops
FIRST = Rows()
V, M, I = (None, 6), (None, 2, 3), (None, 4, 4, 3)  # noqa: E741


def integers(x):
    """Numbers from 0 to 3."""
    return tf.cast(tf.abs(x) * 2, tf.int64) % 4


def names(x):
    return tf.strings.as_string(integers(x))


def texts(x):
    """A text of some words for each example, `[rows]`; some are empty."""
    joined = tf.strings.join(tf.unstack(names(x), axis=1))
    return tf.strings.regex_replace(joined, "[01]", " ")


def words(x):
    return tf.strings.split(texts(x))


def static_table(keys, values, default):
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(keys), tf.constant(values))
    return tf.lookup.StaticHashTable(initializer, default)


OF_NAMES = static_table(["1", "2", "22"], np.array([4, 5, 6]), -1)
OF_NUMBERS = static_table(np.array([1, 2], "int64"), ["one", "two"], "many")
MUTABLE = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
OF_VECTORS = tf.lookup.experimental.DenseHashTable(
    tf.int64, tf.int64, 0, tf.constant([-1] * 4, tf.int64), tf.constant([-2] * 4, tf.int64)
)
STEP = tf.Variable(1)
SEVERAL = tf.constant(np.random.default_rng(0).normal(size=[4, 8]), tf.float32)


def counted(x, **kwargs):
    return tf.math.bincount(integers(x), minlength=4, maxlength=4, axis=-1, **kwargs)


def transformed(x, transforms, size=(4, 4)):
    return raw.ImageProjectiveTransformV3(
        images=x,
        transforms=transforms,
        output_shape=tf.stack(list(size)),
        fill_value=0.0,
        interpolation="BILINEAR",
    )


def shifts(x):
    """A shift for each example, `[rows, 8]`."""
    own = x[:, 0, 0, 0][:, tf.newaxis]
    return tf.concat([tf.ones_like(own), 0 * own, own, 0 * own, own + 1, *[0 * own] * 3], 1)


def crossed(*columns):
    return tf.sparse.to_dense(tf.sparse.cross_hashed(list(columns), 7))


def branch(x, condition, then=tf.tanh, otherwise=tf.square):
    return tf.cond(condition, lambda: then(x), lambda: otherwise(x))


def public_condition():
    return STEP > 0


PROVEN = {
    "as string": (V, names, FIRST),
    "joined": (V, lambda x: tf.strings.join([names(x), "a"]), FIRST),
    "lower": (V, lambda x: tf.strings.lower(tf.strings.upper(names(x))), FIRST),
    "replaced": (V, lambda x: tf.strings.regex_replace(names(x), "1", "2"), FIRST),
    "replaced by a pattern": (
        V,
        lambda x: raw.RegexReplace(input=names(x), pattern="1", rewrite=tf.constant("2")),
        FIRST,
    ),
    "matched": (V, lambda x: tf.strings.regex_full_match(names(x), "[12]"), FIRST),
    "length": (V, lambda x: tf.strings.length(tf.strings.strip(texts(x))), FIRST),
    "part": (V, lambda x: tf.strings.substr(names(x), 0, 1), FIRST),
    "number": (V, lambda x: tf.strings.to_number(names(x)), FIRST),
    "hashed": (V, lambda x: tf.strings.to_hash_bucket_fast(names(x), 3), FIRST),
    "hashed with a key": (
        V,
        lambda x: tf.strings.to_hash_bucket_strong(names(x), 3, [1, 2]),
        FIRST,
    ),
    "bucket": (V, lambda x: raw.Bucketize(input=x, boundaries=[0.0, 1.0]), FIRST),
    # Tables.
    "looked up": (V, lambda x: OF_NAMES.lookup(names(x)), FIRST),
    "looked up, transposed": (V, lambda x: OF_NAMES.lookup(tf.transpose(names(x))), Rows(1)),
    "names": (M, lambda x: OF_NUMBERS.lookup(integers(x)), FIRST),
    "of a shape": (V, lambda x: tf.ensure_shape(OF_NAMES.lookup(names(x)), [None, 6]), FIRST),
    "of a shape, transposed": (V, lambda x: tf.ensure_shape(tf.transpose(x), [6, None]), Rows(1)),
    # Counts.
    "count": (V, counted, FIRST),
    "multi hot": (V, lambda x: counted(x, binary_output=True), FIRST),
    "count of parts": (
        M,
        lambda x: raw.DenseBincount(
            input=tf.reshape(integers(x), [-1, 3]), size=tf.constant(4, tf.int64), weights=[0.0] * 0
        ),
        Rows(0, 2),
    ),
    "crossed": (
        V,
        lambda x: tf.reshape(crossed(names(x)[:, :1], integers(x)[:, 1:2]), [-1, 1]),
        FIRST,
    ),
    "crossed, one hot": (
        V,
        lambda x: tf.one_hot(tf.squeeze(crossed(names(x)[:, :1], integers(x)[:, 1:2]), 1), 7),
        FIRST,
    ),
    "crossed, as a number": (
        V,
        lambda x: tf.cast(crossed(names(x)[:, :1], integers(x)[:, 1:2]), tf.float32) / 7,
        FIRST,
    ),
    # Texts.
    "cut words": (V, lambda x: words(x).to_tensor("", shape=[None, 3]), FIRST),
    "word ids": (
        V,
        lambda x: tf.ragged.map_flat_values(OF_NAMES.lookup, words(x)).to_tensor(shape=[None, 4]),
        FIRST,
    ),
    "words of a shape": (
        V,
        lambda x: tf.ragged.map_flat_values(
            lambda w: tf.ensure_shape(w, [None]), words(x)
        ).to_tensor("", shape=[None, 3]),
        FIRST,
    ),
    "no words": (V, lambda x: words(x).to_tensor("", shape=[None, 0]), FIRST),
    "counted words": (
        V,
        lambda x: tf.math.bincount(
            tf.ragged.map_flat_values(lambda w: tf.strings.to_hash_bucket_fast(w, 5), words(x)),
            minlength=5,
            maxlength=5,
            axis=-1,
        ),
        FIRST,
    ),
    "pairs of words": (
        V,
        lambda x: tf.strings.ngrams(words(x), 2, separator=" ").to_tensor("", shape=[None, 3]),
        FIRST,
    ),
    "characters": (
        V,
        lambda x: tf.strings.unicode_decode(texts(x), "UTF-8").to_tensor(shape=[None, 3]),
        FIRST,
    ),
    # Images.
    "shifted": (I, lambda x: transformed(x, shifts(x)), FIRST),
    "all shifted": (I, lambda x: transformed(x, SEVERAL[:1]), FIRST),
    "contrast": (I, lambda x: tf.image.adjust_contrast(x, 0.5), FIRST),
    "colors": (I, lambda x: tf.image.adjust_hue(tf.sigmoid(x), 0.1), FIRST),
    "cut, its size computed": (
        I,
        lambda x: tf.slice(
            x,
            tf.stack([0, tf.shape(x)[1] // tf.constant(2), 0, 0]),
            tf.stack([-1, tf.cast(tf.cast(tf.shape(x)[1], tf.float32) / 2, tf.int32), -1, -1]),
        ),
        FIRST,
    ),
    # Branches.
    "branch": (V, lambda x: branch(x, public_condition()), FIRST),
    "branch within a branch": (
        V,
        lambda x: branch(x, public_condition(), lambda y: branch(y, public_condition())),
        FIRST,
    ),
}


def stored(x):
    """Returns values that examples have stored in a table."""
    MUTABLE.insert(names(x), x)
    return MUTABLE.lookup(names(x))


def of_all(x):
    """Values of keys that are made of one feature of four examples."""
    return OF_VECTORS.lookup(tf.transpose(tf.cast(x > 0, tf.int64)))


def of_two_texts(x):
    """Words of one text, in the rows of another."""
    return raw.RaggedTensorToTensor(
        shape=[-1, 3],
        values=words(x).flat_values,
        default_value="",
        row_partition_tensors=[tf.strings.split(tf.strings.lower(texts(x))).row_splits],
        row_partition_types=["ROW_SPLITS"],
    )


def dense_words(x):
    indices, values, shape = raw.StringSplitV2(input=texts(x), sep="")
    return raw.SparseToDense(
        sparse_indices=indices, output_shape=shape, sparse_values=values, default_value=""
    )


UNPROVEN = {
    "as long as the longest": (V, lambda x: words(x).to_tensor("")),
    "as long as the longest, from a sparse one": (V, dense_words),
    "all words": (V, lambda x: words(x).flat_values),
    "number of words": (V, lambda x: x * tf.cast(tf.size(words(x).flat_values), tf.float32)),
    "longest text": (V, lambda x: x * tf.cast(words(x).bounding_shape()[1], tf.float32)),
    "where words begin": (V, lambda x: words(x).row_splits[:-1]),
    "ids of words": (V, lambda x: words(x).value_rowids()),
    "numbered words": (
        V,
        lambda x: tf.ragged.map_flat_values(
            lambda w: tf.strings.join([w, tf.as_string(tf.range(tf.size(w)))]), words(x)
        ).to_tensor("", shape=[None, 3]),
    ),
    "sorted words": (
        V,
        lambda x: (
            words(x)
            .with_flat_values(tf.sort(tf.strings.length(words(x).flat_values)))
            .to_tensor(shape=[None, 3])
        ),
    ),
    "reversed words": (
        V,
        lambda x: (
            words(x)
            .with_flat_values(tf.reverse(words(x).flat_values, [0]))
            .to_tensor("", shape=[None, 3])
        ),
    ),
    "filled up with their number": (
        V,
        lambda x: words(x).to_tensor(tf.as_string(tf.shape(x)[0]), shape=[None, 3]),
    ),
    "so many rows": (V, lambda x: words(x).to_tensor("", shape=[2, 3])),
    "words in other rows": (V, of_two_texts),
    "weighted counts": (V, lambda x: counted(x, weights=x)),
    "crossed by two": (
        V,
        lambda x: tf.reshape(crossed(names(x)[:, :2], integers(x)[:, 1:2]), [-1, 1]),
    ),
    "crossed by two, as numbers": (
        V,
        lambda x: tf.cast(crossed(names(x)[:, :2], integers(x)[:, 1:2]), tf.float32),
    ),
    "crossed, as a number of all": (
        V,
        lambda x: raw.SparseToDense(
            sparse_indices=(cross := tf.sparse.cross_hashed([integers(x)[:, :1]] * 2, 7)).indices,
            output_shape=cross.dense_shape,
            sparse_values=cross.values,
            default_value=tf.cast(tf.shape(x)[0], tf.int64),
        ),
    ),
    "crossed, sparse": (
        V,
        lambda x: tf.reshape(
            crossed(tf.sparse.from_dense(integers(x)[:, :1]), integers(x)[:, 1:2]), [-1, 1]
        ),
    ),
    "mutable table": (V, lambda x: MUTABLE.lookup(names(x))),
    "filled table": (V, stored),
    "table of vectors": ((4, 6), of_all),
    "shifted by place": (
        (4, 4, 4, 3),
        lambda x: transformed(x, SEVERAL),
    ),
    "as large as the batch": (I, lambda x: transformed(x, shifts(x), (4, tf.shape(x)[0]))),
    "chosen by an example": (V, lambda x: branch(x, tf.equal(tf.shape(x)[0], 3))),
    "one of the branches mixes sizes": (
        V,
        lambda x: branch(x, public_condition(), lambda y: y / tf.cast(tf.shape(y)[0], tf.float32)),
    ),
    "branches that disagree": (
        (6, 6),
        lambda x: branch(x, public_condition(), tf.transpose),
    ),
}

MIXES = {
    "counted over the batch": (V, lambda x: tf.math.bincount(integers(x)[:, 0], maxlength=4)),
    "as many bins as the largest": (V, lambda x: tf.math.bincount(integers(x), axis=-1)),
    "at most so many bins": (V, lambda x: tf.math.bincount(integers(x), maxlength=9, axis=-1)),
    "contrast of the batch": (
        I,
        lambda x: tf.image.adjust_contrast(tf.transpose(x, [1, 2, 0, 3]), 0.5),
    ),
    "mixed in a branch": (
        V,
        lambda x: branch(x, public_condition(), lambda y: y - tf.reduce_mean(y, 0)),
    ),
    "chosen by examples": (V, lambda x: branch(x, tf.reduce_sum(x) > 0)),
}


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("name", PROVEN)
def test_proven(name):
    shape, function, expected = PROVEN[name]
    traced = Traced(function, shape)
    assert traced.state == expected
    for seed in range(3):
        traced.check(seed)
    traced.check(count=1)


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven(name):
    shape, function = UNPROVEN[name]
    assert isinstance(Traced(function, shape).state, Unproven | Ragged)


@pytest.mark.parametrize("name", MIXES)
def test_mixes(name):
    shape, function = MIXES[name]
    with pytest.raises(ValueError, match="mixes examples"):
        Traced(function, shape)


def test_a_length_is_what_a_ragged_tensor_needs():
    state = Traced(lambda x: words(x).to_tensor(""), V).state
    assert "output_sequence_length" in state.reason


# Mutants: transfer functions that claim too much.


def claims(state):
    return lambda op, inputs: state if len(op.outputs) == 1 else [state] * len(op.outputs)


RAGGED_MUTANTS = {
    "RaggedTensorToTensor": [UNPROVEN["as long as the longest"][1]],
    "ConcatV2": [lambda x: tf.concat([words(x).flat_values, [""]], 0)],
    "Size": [UNPROVEN["number of words"][1]],
    "SparseToDense": [dense_words],
    "ReverseV2": [UNPROVEN["reversed words"][1]],
}


@pytest.mark.parametrize(
    ("op_type", "function"),
    [(op_type, function) for op_type, found in RAGGED_MUTANTS.items() for function in found],
)
def test_what_is_wrongly_declared_of_ragged_rows_is_caught(op_type, function, monkeypatch):
    claimed = {"Size": Public(), "ReverseV2": None}.get(op_type, FIRST)
    monkeypatch.setitem(
        analysis._RAGGED_TRANSFERS,
        op_type,
        (lambda op, inputs: inputs[0]) if claimed is None else claims(claimed),
    )
    if op_type == "Size":
        monkeypatch.setattr(analysis, "_of_sizes", lambda values: Public())
    with pytest.raises(Disproved):
        for seed in range(3):
            Traced(function, V).check(seed)


@pytest.mark.parametrize(
    ("op_type", "shape", "function"),
    [
        ("StringSplitV2", V, lambda x: words(x).flat_values),
        (
            "DenseBincount",
            V,
            lambda x: raw.DenseBincount(
                input=integers(x)[:, 0], size=tf.constant(4, tf.int64), weights=[0.0] * 0
            ),
        ),
        ("AdjustContrastv2", I, MIXES["contrast of the batch"][1]),
        ("ImageProjectiveTransformV3", (4, 4, 4, 3), UNPROVEN["shifted by place"][1]),
        ("ReverseV2", (4, 4, 4, 3), lambda x: transformed(x, tf.reverse(shifts(x), [0]))),
        ("SparseCross", V, lambda x: tf.sparse.cross_hashed([integers(x)], 7).values),
    ],
)
def test_what_is_wrongly_declared_row_wise_is_caught(op_type, shape, function, monkeypatch):
    monkeypatch.setitem(analysis._TRANSFERS, op_type, claims(FIRST))
    if op_type == "AdjustContrastv2":
        monkeypatch.setitem(analysis._TRANSFERS, op_type, claims(Rows(2)))
    with pytest.raises(Disproved):
        for seed in range(3):
            Traced(function, shape).check(seed)


def test_a_table_that_is_written_into_is_caught(monkeypatch):
    monkeypatch.setattr(lookup_tables, "is_static", lambda handle: True)
    with pytest.raises(Disproved):
        Traced(stored, V).check()


def test_keys_of_several_examples_are_caught(monkeypatch):
    monkeypatch.setattr(lookup_tables, "is_static", lambda handle: True)
    keys = np.array(list(itertools.product([0, 1], repeat=4)))
    OF_VECTORS.insert(tf.constant(keys), tf.range(16, dtype=tf.int64))
    with pytest.raises(Disproved):
        Traced(of_all, (4, 6)).check()


def test_branches_that_disagree_are_caught(monkeypatch):
    monkeypatch.setattr(transfer_functions.branches, "_differs", lambda op, state, other: other)
    with pytest.raises(Disproved):
        Traced(UNPROVEN["branches that disagree"][1], (6, 6)).check()


def test_the_check_reads_ragged_parts():
    traced = Traced(PROVEN["counted words"][1], V)
    parts = {state.part for state in traced.states.values() if isinstance(state, Ragged)}
    assert parts == {"indices", "values", "shape", "ids", "lengths", "ends", "splits"}
