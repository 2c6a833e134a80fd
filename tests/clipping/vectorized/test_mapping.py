import logging

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import N
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.loss_graph import out_of_range
from tfdp.clipping.one_pass import per_example_gradients
from tfdp.clipping.vectorized import mapping
from tfdp.clipping.vectorized.mapping import vectorized_map

RNG = np.random.default_rng(0)
X = tf.constant(RNG.normal(size=(4, 1, 3, 5)), tf.float32)
IDS = tf.constant(RNG.integers(0, 3, (4, 1, 3)), tf.int32)
SQUARE = tf.constant(RNG.normal(size=(5, 5)), tf.float32)
SEVERAL = tf.constant(RNG.normal(size=(2, 5, 5)), tf.float32)


@tf.function
def nested(x):
    return tf.roll(x @ SQUARE, 1, -1)


def real_product(x, y):
    return tf.math.real(tf.matmul(tf.complex(x, -x), tf.complex(y, 2 * y), adjoint_b=True))


FUNCTIONS = {
    "weights on the right": lambda x, ids: x @ SQUARE,
    "weights on the left": lambda x, ids: tf.matmul(SQUARE, x, transpose_b=True),
    "one position": lambda x, ids: x[:, tf.newaxis] @ SQUARE,
    "several weights": lambda x, ids: x[:, tf.newaxis] @ SEVERAL[tf.newaxis],
    "adjoint weights": lambda x, ids: tf.matmul(x, SEVERAL, adjoint_b=True),
    "data on both sides": lambda x, ids: tf.matmul(x, tf.sin(x), transpose_a=True),
    "data, broadcast": lambda x, ids: tf.matmul(x[tf.newaxis], tf.stack([x, 2 * x]), True),
    "complex": lambda x, ids: real_product(x, SEVERAL),
    "with an output type": lambda x, ids: tf.raw_ops.BatchMatMulV3(x=x, y=SQUARE, Tout=tf.float32),
    "first version": lambda x, ids: tf.raw_ops.BatchMatMul(x=x, y=x, adj_y=True),
    "segments": lambda x, ids: tf.math.unsorted_segment_sum(x, ids, 3),
    "negative segments": lambda x, ids: tf.math.unsorted_segment_max(x, ids - 1, 3),
    "segments of integers": lambda x, ids: tf.math.unsorted_segment_prod(ids + 2, ids, 3),
    "sparse segments": lambda x, ids: tf.sparse.segment_mean(x[0], ids[0], tf.constant([0, 0, 1])),
    "gathered": lambda x, ids: tf.gather(x, tf.cast(ids, tf.int64), axis=1, batch_dims=1),
    "roll": lambda x, ids: tf.roll(x, 1, -1),
    "roll over two axes": lambda x, ids: tf.roll(x, [1, 2], [-2, 2]),
    "roll by data": lambda x, ids: tf.roll(x, ids[0, 0], -2),
    "roll of a constant": lambda x, ids: tf.roll(SQUARE, ids[0, 0], -1),
    "nested function": lambda x, ids: nested(x),
}
# What TensorFlow's own converters get wrong.
WRONG = ["roll", "roll over two axes", "nested function"]


def of_each(function, x, ids):
    return np.stack([np.asarray(function(*row)) for row in zip(x, ids, strict=True)])


def with_gradient(function):
    """A function, and its gradient where it has one."""

    def both(row):
        value = function(*row)
        weighted = tf.sin(tf.cast(value, tf.float32))
        (gradient,) = tf.gradients(weighted, row[0])
        return value, tf.zeros_like(row[0]) if gradient is None else gradient

    return both


def differs(name, jit_compile=None):
    function = FUNCTIONS[name]
    both = with_gradient(function)
    alone = tf.function(lambda x, ids: both((x, ids)))
    expected = [of_each(lambda *row, i=i: alone(*row)[i], X, IDS) for i in range(2)]
    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (X, IDS)]
    run = tf.function(
        lambda x, ids: vectorized_map(both, (x, ids)),
        input_signature=specs,
        jit_compile=jit_compile,
    )
    found = run(X, IDS)
    return not all(
        np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_and_gradients_are_those_of_a_loop(name):
    assert not differs(name)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["weights on the right", "several weights", "segments", "roll"])
def test_nor_do_they_differ_with_xla(name):
    assert not differs(name, jit_compile=True)


@pytest.mark.parametrize("name", WRONG)
def test_what_the_converters_are_for(name, monkeypatch):
    """Mutant: TensorFlow's own."""
    monkeypatch.setattr(mapping, "_CONVERTERS", {})
    logging.getLogger("tensorflow").disabled = True
    try:
        wrong = differs(name)
    except Exception:
        wrong = True
    finally:
        logging.getLogger("tensorflow").disabled = False
    assert wrong


def test_a_broadcast_product_never_runs(monkeypatch):
    """The check of the vectorized graph would find one, also in nested functions."""

    @tf.function(input_signature=[tf.TensorSpec([None, 1, 3, 5])])
    def run(x):
        return vectorized_map(tf.function(lambda row: row @ SQUARE), x)

    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    run.get_concrete_function()
    kept = {k: v for k, v in mapping._CONVERTERS.items() if "MatMul" not in k}
    monkeypatch.setattr(mapping, "_CONVERTERS", kept)
    run = tf.function(run.python_function, input_signature=run.input_signature)
    with pytest.raises(ValueError, match=r"Received '.*MatMul.*' *, a product of the shapes"):
        run.get_concrete_function()


def test_converters_of_others_are_left_as_they_were():
    before = dict(mapping.pfor._pfor_converter_registry)
    with mapping._safe_converters():
        assert mapping.pfor._pfor_converter_registry != before
    assert mapping.pfor._pfor_converter_registry == before


# Ids outside a range are not another example's.


def segments(ids, dtype, jit_compile):
    function = tf.function(
        lambda x, ids: vectorized_map(
            lambda row: tf.math.unsorted_segment_sum(row[0], row[1], 4), (x, ids)
        ),
        jit_compile=jit_compile,
    )
    return function(tf.ones([3, 2]), tf.constant(ids, dtype)).numpy()


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_segments_outside_their_range(dtype, jit_compile):
    found = segments([[0, 4], [-1, 1], [3, 3]], dtype, jit_compile)
    assert np.all(np.isnan(found[0]))
    np.testing.assert_array_equal(found[1:], [[0, 1, 0, 0], [0, 0, 0, 2]])


def test_they_were_the_next_examples(monkeypatch):
    monkeypatch.setattr(mapping, "_CONVERTERS", {})
    found = segments([[0, 4], [-1, 1], [3, 3]], tf.int32, True)
    assert found[1, 0] == 1


def looked_up(engine, dtype, ids, jit_compile=True, tied=False):
    """The clipped sums of a batch of which one example has those ids, with it and without."""
    table = tf.Variable(tf.reshape(tf.range(12.0), [4, 3]) / 10)

    def losses(ids, mask):
        h = tf.reduce_sum(tf.gather(tf.identity(table), tf.cast(ids, dtype)), 1)
        h = h @ tf.transpose(table) if tied else h
        # XLA gathers the nearest row.
        return 1e4 * tf.reduce_sum(tf.sin(h), 1) * tf.cast(mask, tf.float32)

    @tf.function(
        jit_compile=jit_compile,
        input_signature=[tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.bool)],
    )
    def run(ids, mask):
        clipped = engine.clipped_sum(losses(ids, mask), [table], tf.constant([1, 2], tf.int64))
        return clipped.gradients[0]

    batch = np.array([ids, [0, 1], [2, 3], [1, 1]])
    return run(batch, [True] * 4).numpy(), run(batch, [False] + [True] * 3).numpy()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [OnePassEngine, VectorizedEngine])
@pytest.mark.parametrize(("dtype", "tied"), [(tf.int32, False), (tf.int64, True)])
def test_tokens_outside_the_vocabulary_contribute_nothing(make, dtype, tied):
    with_it, without = looked_up(make(1.0), dtype, [5, 6], tied=tied)
    np.testing.assert_allclose(with_it, without, atol=1e-6)
    with_it, without = looked_up(make(1.0), dtype, [3, 0], tied=tied)
    assert 0.5 < np.linalg.norm(with_it - without) <= 1 + 1e-5


def test_negative_tokens_contribute_nothing():
    with_it, without = looked_up(OnePassEngine(1.0), tf.int32, [-1, 1])
    np.testing.assert_allclose(with_it, without, atol=1e-6)


@pytest.mark.parametrize("make", [OnePassEngine, VectorizedEngine])
def test_narrow_tokens_do_not_overflow(make):
    """Offsets of int16 tokens would be more than int16 holds."""
    table, rows = tf.Variable(tf.random.stateless_normal([1000, 3], [1, 2])), 80
    tokens = RNG.integers(0, 1000, (rows, 2))
    engine = make(1.0)

    @tf.function(
        input_signature=[tf.TensorSpec([None, 2], tf.int16), tf.TensorSpec([None], tf.bool)]
    )
    def run(ids, mask):
        # Used twice: all of an example's gradients are instantiated.
        h = tf.reduce_sum(tf.raw_ops.GatherV2(params=tf.identity(table), indices=ids, axis=0), 1)
        losses = tf.reduce_sum(tf.sin(h @ tf.transpose(table)), 1) * tf.cast(mask, tf.float32)
        return engine.clipped_sum(losses, [table], tf.constant([1, 2], tf.int64)).gradients[0]

    mask = np.arange(rows) == rows - 1
    clipped = np.linalg.norm(run(np.int16(tokens), mask))
    moved = np.linalg.norm(run(np.int16(tokens), ~mask) - run(np.int16(tokens), mask | ~mask))
    assert clipped == pytest.approx(1, rel=1e-4) and moved == pytest.approx(1, rel=1e-3)


def test_unchecked_tokens_are_caught(monkeypatch):
    def everything(self, indices):
        return tf.ones_like(indices[:, 0], tf.bool)

    monkeypatch.setattr(per_example_gradients.Lookups, "in_table", everything)
    monkeypatch.setattr(out_of_range, "_number_of_values", lambda op: None)  # Comes first.
    with_it, without = looked_up(OnePassEngine(1.0), tf.int32, [5, 6], tied=True)
    assert np.linalg.norm(with_it - without) > 0.1


def test_unchecked_segments_are_caught(monkeypatch):
    monkeypatch.setattr(mapping, "_CONVERTERS", {})
    monkeypatch.setattr(out_of_range, "_number_of_values", lambda op: None)  # Comes first.
    with_it, without = looked_up(VectorizedEngine(1.0), tf.int32, [5, 6])
    assert np.linalg.norm(with_it - without) > 0.1  # By the gradient of another example.


def test_a_dense_layer_written_as_a_product():
    """A maximum over positions, of `x @ w`, for which the one-pass engine falls back."""
    w = tf.Variable(RNG.normal(size=(3, 3)).astype("float32"))
    x = RNG.normal(size=(N, 4, 3)).astype("float32")
    engine = VectorizedEngine(0.1)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 3])])
    def run(x):
        losses = tf.reduce_max(x @ w, [1, 2])
        return engine.clipped_sum(losses, [w], tf.constant([1, 2], tf.int64)).gradients[0]

    expected = 0
    for row in x:
        with tf.GradientTape() as tape:
            loss = tf.reduce_max(tf.matmul(row, w))
        gradient = tape.gradient(loss, w).numpy()
        expected = expected + gradient * min(1, 0.1 / np.linalg.norm(gradient))
    np.testing.assert_allclose(run(x), expected, atol=1e-6)
    assert support.flat([run(x)]).shape == (9,)
