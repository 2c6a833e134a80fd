"""What the tensors of a traced function follow from, also through functions that it calls."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine
from tfdp.clipping.loss_graph import data_flow, loss_reader
from tfdp.clipping.loss_graph.data_flow import DATA, METRIC, RAGGED, SIZE, Flow

METRIC_OF = tf.keras.metrics.Sum()
IMAGE = np.ones([2, 2, 1])
VARIABLE = tf.Variable([1.0, 2.0])


def size(x):
    return tf.shape(x)[0]


def integer(x):
    return tf.cast(x[0], tf.int32)


def looped(x):
    """Gets data in the second round only."""
    return tf.while_loop(lambda i, y, z: i < 3, lambda i, y, z: (i + 1, z, x[0]), [0, 0.0, 0.0])[1]


CASES = {
    "constant": (lambda x: tf.constant(1.0), 0),
    "data": (lambda x: x, DATA),
    "sum": (lambda x: tf.reduce_sum(x), DATA),
    "variable": (lambda x: VARIABLE + 1.0, 0),
    "entry of a variable": (lambda x: tf.gather(VARIABLE, 1), 0),
    "entry that data choose": (lambda x: tf.gather(VARIABLE, tf.cast(x, tf.int32)), DATA),
    "rows": (size, SIZE),
    "zeros for rows": (lambda x: tf.zeros([size(x)]), SIZE),
    "zeros like": (lambda x: tf.zeros_like(x), SIZE),
    "number of some rows": (lambda x: size(tf.boolean_mask(x, x > 0)), DATA | RAGGED),
    "number of values": (lambda x: size(tf.unique(x)[0]), DATA | RAGGED),
    "number of random numbers": (lambda x: size(tf.random.uniform([integer(x)])), DATA | RAGGED),
    "number of random numbers for rows": (lambda x: size(tf.random.uniform([size(x)])), SIZE),
    "stateless": (
        lambda x: size(tf.random.stateless_normal([integer(x)], [1, 2])),
        DATA | RAGGED,
    ),
    "from a range": (lambda x: size(tf.linspace(0.0, 1.0, integer(x))), DATA | RAGGED),
    "segments": (
        lambda x: size(tf.math.unsorted_segment_sum(x, tf.zeros_like(x, tf.int32), integer(x))),
        DATA | RAGGED,
    ),
    "of a size": (lambda x: size(tf.image.resize(IMAGE, [integer(x), 2])), DATA | RAGGED),
    "size that a metric decides": (
        lambda x: size(tf.zeros([integer([METRIC_OF.result()])])),
        METRIC,
    ),
    "metric": (lambda x: METRIC_OF.result(), METRIC),
    "metric and data": (lambda x: METRIC_OF.result() * x, METRIC | DATA),
    "called": (lambda x: tf.function(lambda y: y + 1.0)(x), DATA),
    "called without data": (lambda x: tf.function(lambda y: y + 1.0)(3.0), 0),
    "captured": (lambda x: tf.function(lambda: x + 1.0)(), DATA),
    "metric in a function": (lambda x: tf.function(METRIC_OF.result)(), METRIC),
    "branch": (lambda x: tf.cond(x[0] > 0, lambda: 1.0, lambda: 2.0), DATA),
    "public branch": (lambda x: tf.cond(VARIABLE[0] > 0, lambda: 1.0, lambda: 2.0), 0),
    "in a branch": (lambda x: tf.cond(VARIABLE[0] > 0, lambda: x[0], lambda: 2.0), DATA),
    "of a switch": (lambda x: tf.switch_case(size(x), [lambda: 1.0, lambda: 2.0]), SIZE),
    "loop": (looped, DATA),
    "public loop": (lambda x: tf.while_loop(lambda i: i < 3, lambda i: [i + 1], [0]), 0),
    "as long as": (lambda x: tf.while_loop(lambda i: i < x[0], lambda i: [i + 1], [0.0]), DATA),
    "reduced data set": (
        lambda x: tf.data.Dataset.range(3).reduce(0.0, lambda total, _: total + x[0]),
        DATA,
    ),
}


def colors(compute, **kwargs):
    traced = tf.function(lambda x: tf.nest.flatten(compute(x))[0], autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec([None])).graph
    return Flow(**kwargs).values(graph)[graph.outputs[0].op.inputs[0].ref()].colors


@pytest.mark.parametrize("name", CASES)
def test_what_a_tensor_follows_from(name):
    compute, expected = CASES[name]
    assert colors(compute) == expected


def test_what_is_marked_holds_data():
    table = tf.constant([1.0, 2.0])
    assert colors(lambda x: tf.identity(table, "rows") + 1.0) == 0
    assert colors(lambda x: tf.identity(table, "rows") + 1.0, marked=lambda g: {"rows:0"}) == DATA


def test_an_argument_of_another_function_is_what_it_is_called_with():
    seen = []

    def visit(op, inputs, control):
        seen.extend(value.colors for value in inputs if op.type == "Sin")
        return True

    def compute(x):
        sine = tf.function(tf.sin)
        return sine(VARIABLE[0]) + sine(x[0])

    colors(compute, visit=visit)
    assert sorted(seen) == [0, DATA]


def test_functions_of_imported_graphs_are_read():
    inner = tf.function(lambda x: x + METRIC_OF.total.read_value())
    outer = tf.function(lambda x: tf.function(tf.sin)(x)).get_concrete_function(tf.TensorSpec([]))
    definition = outer.graph.as_graph_def()
    name = outer.graph.outputs[0].op.inputs[0].name
    source = next(op.outputs[0].name for op in outer.graph.get_operations() if op.outputs)

    def imported(x):
        (found,) = tf.graph_util.import_graph_def(
            definition, input_map={source: x[0]}, return_elements=[name]
        )
        return found

    assert colors(imported) == DATA
    assert colors(lambda x: inner(1.0)) == METRIC


def test_operations_come_after_their_inputs():
    """Also where an input was replaced by a later operation."""
    graph = tf.Graph()
    with graph.as_default():
        first = tf.constant(1.0)
        last = tf.sin(first)
        last.op._update_input(0, tf.cos(first))
    ordered = [op.type for op in data_flow.in_order(graph.get_operations())]
    assert ordered.index("Cos") < ordered.index("Sin")


def test_the_operations_of_a_loss_come_after_their_inputs():
    model = tf.keras.Sequential([tf.keras.layers.Embedding(5, 3, input_length=2)])
    model.build([None, 2])

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def run(x):
        read = loss_reader.read_loss(tf.reduce_sum(model(x), axis=[1, 2]))
        seen = set()
        for op in read.operations():
            names = {t.op.name for t in op.inputs}
            assert not (names & {other.name for other in read.operations()}) - seen
            seen.add(op.name)
        return x

    run(np.array([[0, 7]]))


def test_a_function_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="'nowhere', which cannot be read"):
        data_flow.function_graph(tf.Graph(), "nowhere")


def test_engines_see_metrics_without_an_optimizer():
    model = support.small_model()

    def loss(y, logits, sample_weight):
        return support.crossentropy()(y, logits, sample_weight) * METRIC_OF.result()

    x, y = support.small_data(4)
    with pytest.raises(ValueError, match="The loss must depend on no metric"):
        support.ClippedSum(OnePassEngine(1.0), model, x, loss)(x, y)
