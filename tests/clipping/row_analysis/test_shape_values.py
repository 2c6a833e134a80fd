"""What is known of computed sizes, against what they are."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clipping.row_checks import Disproved, operations_of
from tfdp.clipping.row_analysis import shape_values
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import BatchSize, Public, Rows

BATCH, TIME = 5, 4
ROW, TIMES = Rows(), Public()


def analyse(function):
    """The state of what is computed from `[batch, time, 6]`, and its value for 5 and 4."""
    states = []

    def run(x):
        outputs = tf.nest.flatten(function(x))
        analysis = RowAnalysis(operations_of(outputs, [x]), [x])
        states[:] = [analysis.state(t) for t in outputs]
        return outputs

    spec = tf.TensorSpec([None, None, 6])
    traced = tf.function(run, input_signature=[spec], autograph=False).get_concrete_function()
    return states, [t.numpy() for t in traced(tf.zeros([BATCH, TIME, 6]))]


def check(state, value):
    """That a size is what its state says."""
    known = state.values
    if known is None:
        return
    if len(known) != np.size(value):
        raise Disproved(f"{value} has not the {len(known)} sizes {known}")
    for size, number in zip(known, np.ravel(value), strict=True):
        wrong = isinstance(size, int) and size != number
        if isinstance(size, Rows):
            wrong = number != BATCH * size.each if size.each is not None else number % BATCH != 0
        if wrong:
            raise Disproved(f"{number} is not {size}")


def count(x):
    return tf.shape(x)[0]


def column(x):
    return tf.reshape(x, [-1, 1])


def table(x):
    return tf.concat([column(tf.shape(x)), [[1], [2], [3]]], 1)


KNOWN = {
    "shape": (tf.shape, BatchSize((ROW, TIMES, 6))),
    "rows": (count, BatchSize((ROW,))),
    "time": (lambda x: tf.shape(x)[1], TIMES),
    "features": (lambda x: tf.shape(x)[-1], Public((6,))),
    "number of numbers": (tf.size, BatchSize((Rows(0, None),))),
    "numbers at a time": (lambda x: tf.size(x[:, 0]), BatchSize((Rows(0, 6),))),
    "part": (lambda x: tf.shape(x)[1:], Public((TIMES, 6))),
    "tail": (lambda x: tf.slice(tf.shape(x), [2], [-1]), Public((6,))),
    "head": (lambda x: tf.slice(tf.shape(x), [0], [2]), BatchSize((ROW, TIMES))),
    "reversed": (lambda x: tf.shape(x)[::-1], BatchSize((6, TIMES, ROW))),
    "gathered": (lambda x: tf.gather(tf.shape(x), [2, 0]), BatchSize((6, ROW))),
    "product": (lambda x: tf.reduce_prod(tf.shape(x)[::2]), BatchSize((Rows(0, 6),))),
    "product with time": (lambda x: tf.reduce_prod(tf.shape(x)), BatchSize((Rows(0, None),))),
    "no product": (lambda x: tf.reduce_prod(tf.shape(x), axis=[]), BatchSize()),
    "twice": (lambda x: 2 * count(x), BatchSize((Rows(0, 2),))),
    "squared": (lambda x: count(x) * count(x), BatchSize((None,))),
    "negative": (lambda x: -2 * count(x), BatchSize((None,))),
    "one more": (lambda x: count(x) + 1, BatchSize(None)),
    "half": (lambda x: count(x) // 2, BatchSize(None)),
    "half of the features": (lambda x: tf.shape(x)[2] // 2, Public((3,))),
    "features and one": (lambda x: tf.shape(x)[2] + 1, Public((7,))),
    "stacked": (lambda x: tf.stack([count(x), -1, 3]), BatchSize((ROW, -1, 3))),
    "concatenated": (
        lambda x: tf.concat([tf.shape(x)[:1], [2, 3], tf.shape(x)[1:]], 0),
        BatchSize((ROW, 2, 3, TIMES, 6)),
    ),
    "int64": (lambda x: tf.shape(x, tf.int64)[:1], BatchSize((ROW,))),
    "a float": (lambda x: tf.cast(count(x), tf.float32), BatchSize()),
    "a bool and back": (
        lambda x: tf.cast(tf.cast(tf.shape(x)[2], tf.bool), tf.int32),
        Public(),
    ),
    "a small integer": (lambda x: tf.cast(100 * tf.shape(x)[2], tf.int8), Public()),
    "a matrix": (lambda x: tf.stack([tf.shape(x), tf.shape(x)])[0], BatchSize()),
    "range": (lambda x: tf.range(count(x)), BatchSize()),
    "shape of a range": (lambda x: tf.shape(tf.range(count(x))), BatchSize((None,))),
    "rows and as many less": (lambda x: 2 * count(x) - 2 * count(x), Public((0,))),
    "rows and more": (lambda x: 2 * count(x) - count(x), BatchSize()),
    "unknown rows and as many less": (lambda x: tf.size(x) - tf.size(x), BatchSize()),
    "larger": (lambda x: tf.maximum(tf.shape(x)[1:], [1, 9]), Public((TIMES, 9))),
    "larger of the same": (
        lambda x: tf.maximum(tf.shape(x), tf.shape(2 * x)),
        BatchSize((ROW, TIMES, 6)),
    ),
    "smaller of the same": (
        lambda x: tf.minimum(2 * count(x), 2 * count(x)),
        BatchSize((Rows(0, 2),)),
    ),
    "larger of rows and a number": (lambda x: tf.maximum(count(x), 3), BatchSize()),
    "larger of more rows": (lambda x: tf.maximum(count(x), 2 * count(x)), BatchSize()),
    "time and one": (lambda x: tf.shape(x)[1:] + 1, Public((TIMES, 7))),
    "column": (lambda x: tf.reshape(tf.shape(x), [3, 1]), BatchSize((ROW, TIMES, 6))),
    "paddings": (
        lambda x: tf.concat([tf.zeros([3, 1], tf.int32), column(tf.shape(x))], 1),
        BatchSize((0, ROW, 0, TIMES, 0, 6)),
    ),
    "stacked paddings": (
        lambda x: tf.stack([tf.shape(x)[:2], [1, 2]]),
        BatchSize((ROW, TIMES, 1, 2)),
    ),
    "paddings in front": (
        lambda x: tf.reshape(tf.slice(table(x), [1, 0], [2, 1]), [-1]),
        Public((TIMES, 6)),
    ),
    "paddings behind": (
        lambda x: tf.reshape(tf.slice(table(x), [0, 1], [-1, 1]), [-1]),
        Public((1, 2, 3)),
    ),
    "rows that are not in order": (
        lambda x: tf.shape(tf.space_to_batch(x, [2], [[0, 0]])),
        BatchSize((None, TIMES, 6)),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known(name):
    function, expected = KNOWN[name]
    (state,), (value,) = analyse(function)
    assert state == expected
    check(state, value)


OPERATIONS = [
    lambda a, b, i, j: tf.stack([tf.reshape(a, [-1])[0], i]),
    lambda a, b, i, j: tf.concat([tf.reshape(a, [-1]), tf.reshape(b, [-1])], 0),
    lambda a, b, i, j: tf.gather(a, [i, j]),
    lambda a, b, i, j: a[i],
    lambda a, b, i, j: a[i:j],
    lambda a, b, i, j: a[j::-1],
    lambda a, b, i, j: tf.slice(a, [i], [j]),
    lambda a, b, i, j: a * b,
    lambda a, b, i, j: a * i,
    lambda a, b, i, j: a + b,
    lambda a, b, i, j: a - j,
    lambda a, b, i, j: a // b,
    lambda a, b, i, j: tf.reduce_prod(a),
    lambda a, b, i, j: tf.reduce_prod(a, [], keepdims=True),
    lambda a, b, i, j: tf.cast(tf.cast(a, tf.int64), tf.int32),
    lambda a, b, i, j: tf.reshape(a, [-1, 1])[0],
    lambda a, b, i, j: tf.shape(tf.zeros(tf.abs(a))),
    lambda a, b, i, j: tf.reshape(tf.concat([column(a), column(b)], 1), [-1]),
    lambda a, b, i, j: tf.reshape(tf.slice(tf.stack([a, b]), [i, 0], [j, 1]), [-1]),
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(-3, 3),
        st.integers(-3, 3),
    ),
    min_size=2,
    max_size=12,
)


def check_steps(steps):
    def function(x):
        found = [tf.shape(x), tf.shape(x)[0]]
        for operation, first, second, *numbers in steps:
            operands = [found[-min(n, len(found))] for n in (first, second)]
            try:
                found.append(operation(*operands, *numbers))
            except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError):
                continue
        return found

    states, values = analyse(function)
    for state, value in zip(states, values, strict=True):
        check(state, value)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_computed_sizes_are_what_is_known_of_them(steps):
    # What cannot be computed has no sizes.
    errors = tf.errors
    with contextlib.suppress(errors.InvalidArgumentError, errors.ResourceExhaustedError):
        check_steps(steps)


@pytest.mark.parametrize(
    ("op_type", "mutant", "function"),
    [
        ("Mul", lambda op, inputs: (Rows(0, 1),), lambda x: 2 * count(x)),
        ("Prod", lambda op, inputs: inputs[0][:1], lambda x: tf.reduce_prod(tf.shape(x))),
        ("ConcatV2", lambda op, i: (*i[1], *i[0]), lambda x: tf.concat([tf.shape(x), [2]], 0)),
        ("StridedSlice", lambda op, inputs: inputs[0][:1], lambda x: tf.shape(x)[2:]),
        ("FloorDiv", lambda op, inputs: inputs[0], lambda x: count(x) // 2),
        ("Sub", lambda op, inputs: (0,), lambda x: 2 * count(x) - count(x)),
        ("Maximum", lambda op, i: i[0], lambda x: tf.maximum(count(x), 2 * count(x))),
        ("Minimum", lambda op, i: i[1], lambda x: tf.minimum(count(x), 2 * count(x))),
    ],
)
def test_wrong_functions_are_caught(op_type, mutant, function, monkeypatch):
    (state,), (value,) = analyse(function)
    check(state, value)
    monkeypatch.setitem(shape_values._FUNCTIONS, op_type, mutant)
    (state,), (value,) = analyse(function)
    with pytest.raises(Disproved):
        check(state, value)


@pytest.mark.parametrize(
    ("op_type", "mutant", "function"),
    [
        ("ConcatV2", lambda op, i: (*i[0], *i[1]), table),
        ("Slice", lambda op, i: i[0][:3], lambda x: tf.slice(table(x), [0, 1], [3, 1])),
        ("Pack", lambda op, i: (*i[1], *i[0]), lambda x: tf.stack([[1, 2], tf.shape(x)[1:]])),
    ],
)
def test_wrong_functions_of_paddings_are_caught(op_type, mutant, function, monkeypatch):
    (state,), (value,) = analyse(function)
    assert state.values is not None
    check(state, value)
    monkeypatch.setitem(shape_values._OF_TABLES, op_type, mutant)
    (state,), (value,) = analyse(function)
    with pytest.raises(Disproved):
        check(state, value)
