import pytest
import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import data_flow
from tfdp.clipping.one_pass import loop_recordings


def loop(again, body, *variables, **kwargs):
    """Traces a loop of `[None, 3]` tensors; returns the operation and its body's graph."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def trace(x):
        tf.while_loop(lambda *v: again(x, *v), lambda *v: body(x, *v), [*variables, x], **kwargs)
        graph = tf.compat.v1.get_default_graph()
        (op,) = [op for op in graph.get_operations() if op.type in op_types.LOOPS]
        graph_of_body = data_flow.function_graph(graph, op.get_attr("body").name)
        found.extend([op, graph_of_body, loop_recordings.number_of_steps(op, graph_of_body)])

    trace.get_concrete_function()
    return found


def step(x, i, y):
    return i + 1, y + x


@pytest.mark.parametrize(
    ("again", "start", "options", "expected"),
    [
        (lambda x, i, y: i < 7, 2, {}, 5),
        (lambda x, i, y: i < tf.shape(x)[1], 0, {}, 3),
        (lambda x, i, y: i < 7, 0, {"maximum_iterations": 4}, 4),
        (lambda x, i, y: tf.logical_and(i < 7, i < 3), 0, {}, 3),
        (lambda x, i, y: i < 7, 9, {}, 0),
        (lambda x, i, y: i <= 7, 0, {}, None),
        (lambda x, i, y: tf.logical_or(i < 7, i < 3), 0, {}, None),
        (lambda x, i, y: tf.reduce_sum(y) < 7, 0, {}, None),
    ],
)
def test_numbers_of_steps(again, start, options, expected):
    assert loop(again, step, start, **options)[2] == expected


def test_a_number_of_steps_that_is_a_tensor():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def trace(x):
        limit = tf.shape(x)[0]
        tf.while_loop(lambda i, y: i < limit, lambda i, y: (i + 1, y + x), [2, x])
        graph = tf.compat.v1.get_default_graph()
        (op,) = [op for op in graph.get_operations() if op.type in op_types.LOOPS]
        body = data_flow.function_graph(graph, op.get_attr("body").name)
        return loop_recordings.number_of_steps(op, body)

    assert trace(tf.ones([7, 3])) == 5
    assert trace(tf.ones([1, 3])) == 0


def test_a_counter_that_skips_is_none():
    assert loop(lambda x, i, y: i < 7, lambda x, i, y: (i + 2, y), 0)[2] is None


def test_draws_are_recorded_once():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def trace(x):
        def body(i, y):
            return i + 1, tf.nn.dropout(y, 0.5) + tf.random.normal([3])

        _, y = tf.while_loop(lambda i, _: i < 4, body, [0, x])
        y = tf.square(y)
        graph = tf.compat.v1.get_default_graph()
        assert loop_recordings.record_draws(graph.get_operations(), [y])
        (op,) = [op for op in graph.get_operations() if op.type == "While" and "_1" in op.name]
        body_graph = data_flow.function_graph(graph, op.get_attr("body").name)
        draws = loop_recordings.draws_of(body_graph)
        assert len(draws) == 2
        assert len({loop_recordings.recorder(body_graph, draw) for draw in draws} - {None}) == 2
        first = y.op.inputs[0]
        assert first.op.inputs[0].op is op or first.op is op
        return y

    trace.get_concrete_function()


def test_loops_without_random_numbers_stay():
    op, _, _ = loop(lambda x, i, y: i < 7, step, 0)
    assert not loop_recordings.record_draws([op], [])
