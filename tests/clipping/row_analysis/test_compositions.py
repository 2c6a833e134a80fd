"""The proof of which rows belong to which example, for random compositions: see `test_analysis`."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clipping.row_checks import Disproved, Traced, integers, keeps, operations_of
from tfdp.clipping.row_analysis import analysis
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import Unproven

# Operations on one or two tensors `x, y`, and three numbers.
OPERATIONS = [
    lambda x, y, i, j, k: x + y,
    lambda x, y, i, j, k: tf.tanh(x) * y,
    lambda x, y, i, j, k: tf.where(x > 0, x, y),
    lambda x, y, i, j, k: x / tf.cast(tf.shape(y)[i], tf.float32),
    lambda x, y, i, j, k: tf.reduce_sum(x, i),
    lambda x, y, i, j, k: tf.reduce_max(x, [i], keepdims=True),
    lambda x, y, i, j, k: tf.cast(tf.argmax(x, i), tf.float32),
    lambda x, y, i, j, k: tf.nn.softmax(x, i),
    lambda x, y, i, j, k: tf.cumsum(x, i),
    lambda x, y, i, j, k: tf.reverse(x, [i]),
    lambda x, y, i, j, k: tf.math.top_k(x, tf.shape(y)[i])[0],
    lambda x, y, i, j, k: tf.expand_dims(x, i),
    lambda x, y, i, j, k: tf.squeeze(x, i),
    lambda x, y, i, j, k: tf.squeeze(tf.expand_dims(x, j), i),
    lambda x, y, i, j, k: tf.transpose(x, np.argsort(np.sin(np.arange(x.shape.rank) * (i + 9)))),
    lambda x, y, i, j, k: tf.reshape(x, [i, j]),
    lambda x, y, i, j, k: tf.reshape(x, [i, -1, k]),
    lambda x, y, i, j, k: tf.reshape(x, [-1, j]),
    lambda x, y, i, j, k: tf.reshape(x, tf.shape(y)),
    lambda x, y, i, j, k: tf.reshape(x, tf.stack([tf.shape(y)[i] * j, -1])),
    lambda x, y, i, j, k: tf.reshape(x, tf.concat([[i], tf.shape(y)[j:]], 0)),
    lambda x, y, i, j, k: tf.stack([x, y], i),
    lambda x, y, i, j, k: tf.unstack(x, axis=i)[-1],
    lambda x, y, i, j, k: tf.split(x, [1, tf.shape(x)[i] - 1], i)[k],
    lambda x, y, i, j, k: tf.concat([x, y], i),
    lambda x, y, i, j, k: x[:, i],
    lambda x, y, i, j, k: x[..., i:j],
    lambda x, y, i, j, k: x[tf.newaxis, ..., : tf.shape(y)[i]],
    lambda x, y, i, j, k: x[: tf.shape(y)[i], tf.newaxis],
    lambda x, y, i, j, k: tf.slice(x, [0] * x.shape.rank, tf.concat([tf.shape(x)[:-1], [j]], 0)),
    lambda x, y, i, j, k: tf.slice(
        x, [0] * x.shape.rank, tf.concat([tf.shape(x)[:1] - k, tf.shape(x)[1:]], 0)
    ),
    lambda x, y, i, j, k: x[: tf.shape(y)[i] // 2],
    lambda x, y, i, j, k: tf.tile(x, tf.concat([[1], tf.shape(y)[i : i + x.shape.rank - 1]], 0)),
    lambda x, y, i, j, k: tf.nn.bias_add(
        x, tf.ones([x.shape[-1]]) * tf.cast(tf.size(y), "float32")
    ),
    lambda x, y, i, j, k: tf.tile(tf.ones([1, j]), tf.stack([tf.shape(y)[i], 1])),
    lambda x, y, i, j, k: tf.fill(tf.shape(y)[:i], 2.0),
    lambda x, y, i, j, k: tf.nn.max_pool1d(x, 2, 1, "SAME"),
    lambda x, y, i, j, k: tf.space_to_batch(x, [2], [[0, k]]),
    lambda x, y, i, j, k: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=x, labels=integers(y)
    )[0],
    lambda x, y, i, j, k: tf.pad(x, np.eye(x.shape.rank, 2, i, dtype=int)),
    lambda x, y, i, j, k: tf.tile(x, 1 + np.eye(x.shape.rank, dtype=int)[i]),
    lambda x, y, i, j, k: tf.broadcast_to(x, tf.shape(y)),
    lambda x, y, i, j, k: tf.broadcast_to(x, tf.concat([[i], tf.shape(x)], 0)),
    lambda x, y, i, j, k: tf.one_hot(integers(x), 2, axis=i),
    lambda x, y, i, j, k: tf.gather(x, [0, 1], axis=i),
    lambda x, y, i, j, k: tf.gather(x, integers(y), axis=i, batch_dims=j),
    lambda x, y, i, j, k: tf.gather(tf.reshape(tf.range(6.0), [3, 2]), integers(x), axis=i),
    lambda x, y, i, j, k: tf.matmul(x, y, transpose_a=i > 0, transpose_b=j > 0),
    lambda x, y, i, j, k: tf.einsum("...ij,...kj->...ik", x, y),
    lambda x, y, i, j, k: tf.einsum("ab,ca->cab", x, y),
    lambda x, y, i, j, k: x + tf.ones(tf.shape(y)),
    lambda x, y, i, j, k: x * tf.fill([tf.shape(y)[i], 1], float(j)),
    lambda x, y, i, j, k: x + tf.reshape(tf.range(3.0), [3, 1]),
    lambda x, y, i, j, k: tf.nn.softmax_cross_entropy_with_logits(y, x),
    lambda x, y, i, j, k: tf.nn.conv1d(x, tf.ones([2, x.shape[-1], 2]), 1, "SAME"),
]
# An operation, which of the last tensors it works on, and numbers for it.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.integers(1, 6),
        st.integers(1, 6),
        st.integers(-3, 3),
        st.integers(-3, 3),
        st.integers(0, 3),
    ),
    min_size=3,
    max_size=14,
)
START = [(None, 2, 3), (3, 2, 3), (None, 3), (3, 3), (None, None, 2), (1, 2, 3)]


def compose(steps):
    """A function that takes the steps that are possible, and of which none is known to mix."""

    def function(x):
        tensors = [x]
        for operation, first, second, *numbers in steps:
            operands = (tensors[-min(n, len(tensors))] for n in (first, second))
            try:
                result = operation(*operands, *numbers)
                RowAnalysis(operations_of([result], [x]), [x])
            except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError):
                continue
            if not isinstance(
                RowAnalysis(operations_of([result], [x]), [x]).state(result), Unproven
            ):
                tensors.append(result)
        return tensors[::-1]

    return function


def check_composition(steps, shape, seed):
    traced = Traced(compose(steps), shape)
    # If shapes do not fit, there is nothing to prove.
    with contextlib.suppress(tf.errors.InvalidArgumentError):
        traced.check(seed, count=3 if shape[0] is None else None)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, shape=st.sampled_from(START), seed=st.integers(0, 99))
def test_compositions(steps, shape, seed):
    check_composition(steps, shape, seed)


def test_compositions_would_find_a_wrong_transfer_function(monkeypatch):
    monkeypatch.setitem(analysis._TRANSFERS, "Cumsum", keeps)
    steps = [(OPERATIONS[8], 1, 1, 0, 0, 0)]
    with pytest.raises(Disproved):
        check_composition(steps, (None, 2, 3), 0)
