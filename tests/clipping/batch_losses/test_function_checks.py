"""What the functions of a TwoTermLoss could see but their arguments: each is refused."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tests.clipping.batch_losses.term_checks import (
    AGGREGATIONS,
    FUNCTIONS,
    NOT_BY_ROW,
    TERMS,
    clipped,
    clipped_in_graph,
    of_outside,
    refused,
    same,
    using,
)
from tests.two_term_support import data
from tfdp.clipping import function_checks
from tfdp.contrib import BatchAggregation

layers = tf.keras.layers


# The batch: what looks like rows and is none.


def repeated(number, x):
    """A number that may depend on anything, once for each row."""
    return tf.fill([tf.shape(x)[0]], tf.cast(number, tf.float32))


@pytest.mark.parametrize(
    "column",
    [
        lambda x, mask: repeated(tf.shape(tf.where(x[:, 0] > 1))[0], x),
        lambda x, mask: repeated(tf.shape(tf.boolean_mask(x, mask))[0], x),
        lambda x, mask: repeated(tf.size(tf.unique(tf.cast(x[:, 0], tf.int32))[0]), x),
        lambda x, mask: repeated(tf.size(tf.zeros([tf.cast(tf.reduce_max(x), tf.int32)])), x),
        lambda x, mask: repeated(tf.reduce_max(x), x),
        lambda x, mask: tf.reduce_max(x) * tf.ones_like(x),
        lambda x, mask: x + tf.cast(tf.math.count_nonzero(mask), tf.float32),
    ],
    ids=["where", "boolean_mask", "unique", "zeros", "fill", "ones_like", "count"],
)
def test_a_number_of_the_data_is_no_row(column):
    refused(NOT_BY_ROW, lambda model, x, y, mask: {"batch": (x, column(x, mask))})


@pytest.mark.parametrize(
    "column",
    [
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: tf.random.stateless_normal([tf.shape(x)[0]], [1, 2]),
        lambda x: tf.random.stateless_normal([tf.shape(x)[0], 3], [1, 2]) * x,
        lambda x: tf.constant(np.arange(40, dtype="float32")),
        lambda x: tf.cumsum(tf.ones_like(x)),
    ],
    ids=["range", "stateless_normal", "times rows", "constant", "cumsum"],
)
def test_the_place_of_a_row_is_no_row(column):
    """To remove an example moves others to other places."""
    refused(NOT_BY_ROW, lambda model, x, y, mask: {"batch": (x, column(x))})


def test_a_number_is_no_row():
    refused(
        "Argument `batch` must hold tensors of the batch, first dimension the example",
        lambda model, x, y, mask: {"batch": (x, tf.reduce_max(y))},
    )


@pytest.mark.slow
def test_rows_computed_by_their_own_shapes_are_rows():
    def by_row(model, x, y, mask):
        x = tf.reshape(tf.reshape(x, [tf.shape(x)[0], 1, 3]), [-1, x.shape[1]])
        return {"batch": (x * tf.ones_like(x), tf.where(y > 0, y, tf.zeros_like(y) + y))}

    same(by_row)


def in_function(get):
    """The step calls a function, in which the loss is; `get` says what that captures."""

    def step(changes, model, x, y, mask):
        captured = get(x)

        @tf.function(autograph=False)
        def inner():
            rows = {"batch": (tf.identity(captured), y)}
            return clipped_in_graph(lambda *_: rows, model, x, y, mask)

        return inner()

    return step


def in_branch(get):
    def step(changes, model, x, y, mask):
        captured = get(x)

        def branch():
            rows = {"batch": (1 * captured, y)}
            return clipped_in_graph(lambda *_: rows, model, x, y, mask)

        zeros = tf.zeros([model.count_params()])
        return tf.cond(tf.reduce_sum(model.head.kernel) < 99, branch, lambda: [zeros, zeros])

    return step


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("within", [in_function, in_branch])
def test_rows_mixed_in_an_enclosing_function(within):
    for mixed in (lambda x: x - tf.reduce_mean(x, 0), lambda x: tf.reduce_max(x) * tf.ones_like(x)):
        refused("mixes examples", None, step=within(mixed))
    same(None, step=within(lambda x: tf.identity(x)))


# Tensors of elsewhere.


def of_tensor(x, y):
    largest = tf.reduce_max(x)
    return lambda: largest


def of_size(x, y):
    found = tf.shape(tf.where(x > 1))[0]
    return lambda: tf.cast(found, tf.float32)


def of_branch(x, y):
    number = tf.cond(tf.reduce_max(x) > 1, lambda: 1.0, lambda: -1.0)
    return lambda: tf.stop_gradient(number)


def of_tensor_array(x, y):
    array = tf.TensorArray(tf.float32, 1, clear_after_read=False).write(0, tf.reduce_max(x))
    return lambda: array.read(0)


def of_dataset(x, y):
    rows = tf.data.Dataset.from_tensor_slices(x)
    return lambda: rows.reduce(0.0, lambda total, row: total + row[0])


OUTSIDE = [of_tensor, of_size, of_branch, of_tensor_array, of_dataset]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("number", OUTSIDE)
def test_tensors_of_the_step_are_refused(number, term):
    refused(of_outside(term), lambda model, x, y, mask: using(term, model, number(x, y)))


@pytest.mark.parametrize("term", FUNCTIONS)
def test_functions_that_a_term_calls_may_not_see_the_step(term):
    axes = None if term == "batch_wise" else [1]  # Also what keeps the rows apart.

    def changes(model, x, y, mask):
        called = tf.function(lambda loss: tf.reduce_max(x, axes) * loss, autograph=False)
        return {term: lambda *rows: called(getattr(model, term)(*rows))}

    refused(of_outside(term), changes)


def test_functions_that_a_term_calls_may_not_mix_the_step():
    def changes(model, x, y, mask):
        called = tf.function(lambda loss: tf.reduce_max(x) * loss, autograph=False)
        return {"sample_wise": lambda *rows: called(model.sample_wise(*rows))}

    refused("mixes examples", changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("term", FUNCTIONS)
def test_terms_may_call_functions(term):
    called = tf.function(lambda loss: 2.0 * loss, autograph=False)

    def changes(model, x, y, mask):
        return {term: lambda *rows: called(getattr(model, term)(*rows))}

    same(changes, lambda model, *_: using(term, model, lambda: 2.0))


def test_random_distributions_that_follow_the_data_are_refused():
    def changes(model, x, y, mask):
        mean = tf.reduce_mean(x)
        return {"draws": lambda: (tfd.Normal(mean, 1.0),)}

    refused(of_outside("draws"), changes)


@pytest.mark.parametrize("kept", ["rows", "number"])
def test_tensors_of_the_other_term_are_refused(kept):
    def changes(model, x, y, mask):
        seen = []

        def sample_wise(x, y):
            seen.append(y if kept == "rows" else tf.reduce_max(y))
            return model.sample_wise(x, y)

        def batch_wise(*rows):
            return tf.reduce_sum(seen[0]) * model.batch_wise(*rows)

        return {"sample_wise": sample_wise, "batch_wise": batch_wise}

    refused(of_outside("batch_wise"), changes)


@pytest.mark.slow
@pytest.mark.parametrize("term", TERMS)
def test_schedules_may_be_computed_outside(term):
    step = tf.Variable(3.0)

    def changes(model, x, y, mask):
        rate = tf.exp(-step) * tf.where(step > 2, tf.constant([2.0]), 1.0)[0]
        return using(term, model, lambda: rate)

    same(changes, lambda model, *_: using(term, model, lambda: 2 * np.float32(np.exp(-3))))


# Gradients of one's own.


def custom(factor):
    """An identity whose gradient is multiplied by a number."""

    @tf.custom_gradient
    def identity(value):
        return tf.identity(value), lambda gradient: gradient * factor()

    return identity


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_custom_gradients_that_use_the_step(aggregation, called, term):
    def changes(model, x, y, mask):
        identity = custom(lambda: tf.reduce_max(x))
        identity = tf.function(identity, autograph=False) if called else identity
        function = getattr(model, term)
        return {term: lambda *rows: identity(function(*rows)), "aggregation": aggregation}

    name = "batch_wise" if isinstance(aggregation, BatchAggregation) else term
    refused(of_outside(name), changes)


@pytest.mark.slow
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
def test_custom_gradients_of_constants_are_their_gradients(called):
    def changes(model, x, y, mask):
        identity = custom(lambda: tf.constant(3.0))
        identity = tf.function(identity, autograph=False) if called else identity
        functions = [(term, getattr(model, term)) for term in FUNCTIONS]
        return {term: lambda *rows, f=f: identity(f(*rows)) for term, f in functions}

    def expected(model, *_):
        return {term: using(term, model, lambda: 3.0)[term] for term in FUNCTIONS}

    same(changes, expected)


# Mutants: without a check, one example moves the sum further than its clip.


def scaled_by_the_largest(model, x, y, mask):
    largest = tf.reduce_max(x)

    def sample_wise(x, y):
        return 1e3 * (25 - largest) * model(tf.ones_like(x))

    return {"sample_wise": sample_wise, "batch_wise": None}


def rows_of_the_largest(model, x, y, mask):
    def sample_wise(x, y):
        return 1e3 * (25 - y) * model(tf.ones_like(x))

    rows = (x, tf.reduce_max(x) * tf.ones_like(y))
    return {"sample_wise": sample_wise, "batch_wise": None, "batch": rows}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("check", "attack"),
    [("_is_public", scaled_by_the_largest), ("check_is_by_row", rows_of_the_largest)],
)
def test_without_a_check_the_data_would_leak(check, attack, monkeypatch):
    x, y, mask = data()
    mask[0], x[0] = True, 50
    absent, zeros = mask & (np.arange(len(y)) > 0), np.where(x == 50, 0, x)
    refused("must compute its result from its arguments|mixes examples", attack)
    monkeypatch.setattr(function_checks, check, lambda *_: True)
    (with_it, _), (without, _) = (
        clipped(attack, arrays=arrays) for arrays in ((x, y, mask), (zeros, y, absent))
    )
    assert np.linalg.norm(with_it - without) > 2 * 0.5
