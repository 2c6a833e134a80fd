import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass import memory
from tfdp.clipping.row_analysis.analysis import RowAnalysis

layers = tf.keras.layers


def estimated(function, variables, shape):
    """The estimate for a function of a batch of examples of that shape."""

    @tf.function
    def traced(x):
        return function(x)

    concrete = traced.get_concrete_function(tf.TensorSpec([None, *shape]))
    graph = concrete.graph
    batch = graph.inputs[0]
    operations = [op for op in graph.get_operations() if op.type not in ("Placeholder", "Identity")]
    handles = [graph.capture(variable.handle) for variable in variables]
    return memory.bytes_per_row(RowAnalysis(operations, [batch]), handles)


def test_values_and_gradients_behind_variables_are_kept():
    first, second = tf.Variable(tf.ones([4, 8])), tf.Variable(tf.ones([8, 3]))

    def model(x):
        return tf.nn.relu(x @ first) @ second

    # The largest operation is the activation, 8 + 8. The input, the activation and the gradients of
    # both products are kept.
    assert estimated(model, [first, second], [4]) == 4 * (8 + 8) + 4 * (4 + 8 + 8 + 3)
    # Nothing of the frozen product is kept.
    assert estimated(model, [second], [4]) == 4 * (8 + 8) + 4 * (8 + 3)
    assert estimated(model, [], [4]) == 4 * (8 + 8)


def test_tensors_are_counted_once_and_only_if_gradients_need_them():
    w, b = tf.Variable(tf.ones([4, 8])), tf.Variable(tf.ones([8]))
    plain = estimated(lambda x: tf.tanh(x @ w), [w], [4])
    assert estimated(lambda x: tf.tanh(tf.nn.bias_add(x @ w, b)), [w], [4]) == plain
    # Another shape of the same memory. Its product is the largest operation, with a gradient.
    again = estimated(lambda x: tf.reshape(tf.tanh(x @ w), [-1, 2, 4]) @ w[None], [w], [4])
    assert again == plain + 4 * (8 + 16 - (8 + 8)) + 4 * 16
    # What is not known keeps what it takes and gives, and may use weights.
    assert estimated(lambda x: tf.math.erf(x @ w), [w], [4]) == plain + 4 * (8 + 8)


def test_the_largest_operation_of_a_model_that_nothing_is_proven_of():
    @tf.function
    def traced(x):
        return tf.tanh(tf.repeat(x, 3, axis=1)) @ tf.ones([12, 5]) + tf.ones([7, 1, 5])

    spec = tf.TensorSpec([None, 4])
    operations = traced.get_concrete_function(spec).graph.get_operations()
    # It has 12 and 12 numbers. The sum has no rows of examples.
    assert memory.largest_operation(operations) == 4 * (12 + 12)


def test_steps_of_loops_are_kept():
    w = tf.Variable(tf.ones([4, 4]))

    def model(x, steps):
        loop = tf.while_loop(lambda i, h: i < steps, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))
        return loop[1]

    few, many = (estimated(lambda x, n=n: model(x, n), [w], [4]) for n in (2, 20))
    assert 2 * 16 * 4 * 18 <= many - few <= 2 * 64 * 4 * 18
    assert estimated(lambda x: model(x, 20), [], [4]) < few


@pytest.mark.slow
def test_a_frozen_base_of_large_outputs_makes_no_chunks(monkeypatch):
    """Chunks evaluate the model again, which is most of the step where only a head is trained."""

    def unexpected(*args):
        raise AssertionError("The batch is worked on in chunks.")

    base = tf.keras.Sequential([layers.Input([64, 64, 1])])
    for _ in range(20):
        base.add(layers.Conv2D(8, 3, padding="same", activation="relu"))
    base.add(layers.GlobalAveragePooling2D())
    base.trainable = False
    model = tf.keras.Sequential([base, layers.Dense(2)])
    x, y = np.ones([40, 64, 64, 1], "float32"), np.zeros([40], int)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=4, steps_per_epoch=1)
    optimizer = tfdp.DPSGD(1.0, 1.0, learning_rate=0.1, sampling=batches.sampling)
    optimizer.clipping.memory_budget = 2**25
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    monkeypatch.setattr(OnePassEngine, "_in_chunks", unexpected)
    model.compile(optimizer, loss)
    model.fit(batches, verbose=0)
    base.trainable = True
    model.compile(optimizer, loss)
    with pytest.raises(AssertionError, match="in chunks"):
        model.fit(batches, verbose=0)


def test_memory_is_planned_for_usual_batches():
    """Of 64 expected of 6,000 examples: 88 rows, not the 266 that may be drawn once in 1e80 steps.

    A chunk size that was chosen holds for all batches.
    """
    x, y = np.ones([6000, 4], "float32"), np.zeros([6000], int)
    for padding, rows, most in (("none", 88, 266), ("full", 145, 145)):
        batches = tfdp.data.poisson_batches((x, y), expected_batch_size=64, padding=padding)
        optimizer = tfdp.DPSGD(1.0, 1.0, learning_rate=0.1, sampling=batches.sampling)
        assert optimizer.clipping.usual_rows == rows
        assert batches.sampling.padded_batch_size == most
    engine = OnePassEngine(1.0, memory_budget=100)

    class Plan:
        bytes_per_row = 1

    assert engine._chunk_rows(Plan, most_rows=174, expected_rows=88) is None
    assert engine._chunk_rows(Plan, most_rows=174, expected_rows=101) == 100
    engine.rows_per_pass = 100
    assert engine._chunk_rows(Plan, most_rows=174, expected_rows=88) == 100
    assert engine._chunk_rows(Plan, most_rows=100, expected_rows=88) is None


def test_a_batch_that_is_larger_than_usual_is_whole():
    """It takes more memory; its sum and its bounds are those of the most rows."""
    w = tf.Variable(tf.ones([3]))
    engine = OnePassEngine(1.0)
    engine.usual_rows = 2

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def clipped(x):
        losses, key = tf.reduce_sum(x * w, axis=1), tf.constant([1, 2], tf.int64)
        return engine.clipped_sum(losses, [w], key, most_rows=50).gradients[0]

    x = np.random.default_rng(0).normal(size=[50, 3]).astype("float32")
    expected = (x / np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))).sum(axis=0)
    np.testing.assert_allclose(clipped(x), expected, rtol=1e-5)
