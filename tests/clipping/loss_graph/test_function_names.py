"""Functions of imported graphs, whose names come again: each is read as it is."""

import functools
import gc
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

from tests import support
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.loss_graph import data_flow

CLIP = 0.1
X = np.random.default_rng(0).normal(size=[6, 3]).astype("float32")
X[0] *= 100
Y = np.arange(6) % 3
_COUNT = itertools.count()


def in_a_loop(step, nested=True):
    """Three steps of a loop, whose body calls another function or computes the step itself."""

    def function(x):
        called = tf.function(step, autograph=False) if nested else step
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, called(y)), [0, x])[1]

    return function


@pytest.fixture
def imported():
    """Imports functions, with the same names for all of a test."""
    return functools.partial(import_, prefix=f"test{next(_COUNT)}_")


def import_(function, prefix):
    """Imports what a function does, from a definition whose names do not say which it is."""
    spec = tf.TensorSpec([None, 3])
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
    definition = traced.graph.as_graph_def()
    kinds = ("body", "cond", "inference")
    new = {
        f.signature.name: prefix + next(kind for kind in kinds if kind in f.signature.name)
        for f in definition.library.function
    }
    assert len(set(new.values())) == len(new) >= 2
    nodes = list(definition.node)
    for function_def in definition.library.function:
        function_def.signature.name = new[function_def.signature.name]
        nodes += function_def.node_def
    for node in nodes:
        for attribute in node.attr.values():
            if attribute.func.name in new:
                attribute.func.name = new[attribute.func.name]
    source, result = traced.inputs[0].name, traced.outputs[0].op.inputs[0].name

    def call(x):
        (found,) = tf.graph_util.import_graph_def(
            definition, input_map={source: x}, return_elements=[result]
        )
        return tf.ensure_shape(found, [None, 3])

    return call


def trace(features, engine):
    """A function that returns the clipped sum of a layer behind some features."""
    tf.keras.utils.set_random_seed(1)
    layer = tf.keras.layers.Dense(3)
    layer.build([None, 3])

    @tf.function(input_signature=support.open_spec((X, Y)), autograph=False)
    def run(x, y):
        losses = support.crossentropy()(y, layer(features(x)))
        found = engine.clipped_sum(losses, layer.trainable_variables, tf.constant([1, 2]))
        return found.gradients

    return run.get_concrete_function()


def clipped_sum(features, engine):
    return support.flat(trace(features, engine)(tf.constant(X), tf.constant(Y)))


def looped(step):
    """The clipped sum, one eager example at a time."""
    tf.keras.utils.set_random_seed(1)
    layer = tf.keras.layers.Dense(3)
    layer.build([None, 3])
    return support.looped_clipped_sum(_Plain(layer), in_a_loop(step)(X), Y, CLIP)


class _Plain:
    """A layer that takes the arguments of a model."""

    def __init__(self, layer):
        self._layer, self.trainable_variables = layer, layer.trainable_variables

    def __call__(self, x, training):
        return self._layer(x)


def by_name(monkeypatch):
    """Mutant: the graphs are kept by name, for all graphs that will ever be."""
    known = {}

    def read(graph, function):
        if function.name not in known:
            definition = function.definition
            known[function.name] = function_def_to_graph.function_def_to_graph(definition)
        return known[function.name]

    monkeypatch.setattr(data_flow, "_graph_of_imported", read)


def centred(x):
    """Mixes the examples."""
    return x - tf.reduce_mean(x, 0)


def forget():
    gc.collect()
    tf.keras.backend.clear_session()


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_clipped_sums_of_one_model_after_the_other(engine, imported):
    for step in (tf.tanh, tf.sin):
        found = clipped_sum(imported(in_a_loop(step)), engine(CLIP))
        np.testing.assert_allclose(found, looped(step), atol=1e-6)
        forget()


@pytest.mark.parametrize("nested", [True, False])
def test_another_function_of_a_name_is_read_anew(nested, imported):
    trace(imported(in_a_loop(tf.tanh, nested)), OnePassEngine(CLIP))
    forget()
    with pytest.raises(ValueError, match="mixes examples"):
        trace(imported(in_a_loop(centred, nested)), OnePassEngine(CLIP))


def test_functions_that_are_kept_by_name_let_examples_mix(monkeypatch, imported):
    by_name(monkeypatch)
    trace(imported(in_a_loop(tf.tanh, nested=False)), OnePassEngine(CLIP))
    forget()
    engine = OnePassEngine(CLIP)
    trace(imported(in_a_loop(centred, nested=False)), engine)
    assert engine.report().fast_fraction == 1.0  # Accepted, and clipped as if it kept them apart.


def test_functions_that_outlive_their_graph_lack_what_they_call(monkeypatch, imported):
    by_name(monkeypatch)
    trace(imported(in_a_loop(tf.tanh)), OnePassEngine(CLIP))
    forget()
    with pytest.raises(ValueError, match="inference', which cannot be read"):
        flow(imported(in_a_loop(tf.tanh)))
    monkeypatch.undo()
    flow(imported(in_a_loop(tf.tanh)))


def flow(features):
    """Follows the data through some features, as the check of a step does."""
    spec = tf.TensorSpec([None, 3])
    graph = tf.function(features, autograph=False).get_concrete_function(spec).graph
    data_flow.Flow().values(graph)
