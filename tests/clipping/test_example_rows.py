"""Examples that consist of several rows: their mean gradient is clipped, once."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import CLIP, FAST, SLOW, VECTORS, Y, built
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.one_pass import example_rows, plan

EACH, EXAMPLES = 3, 2
ROWS = EACH * EXAMPLES
# Keras's weights of rows: the second example has one row less.
WEIGHTS = np.array([1, 0.5, 2, 0, 1, 3], "float32")


def of_examples(engine, each=EACH):
    engine.rows_per_example = each
    return engine


def cut(x, rows=slice(ROWS)):
    return tf.nest.map_structure(lambda t: t[rows], x)


def looped_gradients(model, x, y, weights, each=EACH):
    """The gradient of each example, a flat vector; one eager example at a time."""
    gradients = []
    for start in range(0, len(y), each):
        rows = slice(start, start + each)
        with tf.GradientTape() as tape:
            outputs = model(tf.nest.map_structure(tf.constant, cut(x, rows)), training=True)
            losses = support.crossentropy()(y[rows], outputs, sample_weight=weights[rows])
            loss = tf.reduce_mean(losses)
        found = tape.gradient(loss, model.trainable_variables)
        gradients.append(support.flat(tf.convert_to_tensor(g) for g in found))
    return gradients


def looped(model, x, y, weights, clip=CLIP, each=EACH):
    """The clipped sum, one eager example at a time."""
    return support.sum_of_clipped(looped_gradients(model, x, y, weights, each), clip)


class Sum:
    """Runs an engine on a model: `Sum(engine, model, x)(x, y, weights)`."""

    def __init__(self, engine, model, x, jit_compile=False):
        def run(x, y, weights):
            losses = support.crossentropy()(y, model(x, training=True), sample_weight=weights)
            key = tf.constant([1, 2])
            return engine.clipped_sum(losses, model.trainable_variables, key).gradients

        spec = (support.open_spec(x), tf.TensorSpec([None], tf.int64), tf.TensorSpec([None]))
        self._run = tf.function(run, jit_compile=jit_compile, input_signature=spec)

    def __call__(self, x, y, weights):
        return support.flat(self._run(x, y, weights))


def assert_equals_loop(engine, name, **kwargs):
    make, x = {**FAST, **SLOW}[name]
    model, x, y = built(make, x), cut(x), Y[:ROWS]
    gradients = looped_gradients(model, x, y, WEIGHTS)
    expected = support.sum_of_clipped(gradients, CLIP)
    np.testing.assert_allclose(Sum(engine, model, x, **kwargs)(x, y, WEIGHTS), expected, atol=3e-6)
    assert np.linalg.norm(sum(gradients) - expected) > 1e-2


# One of each form that gradients come in.
FORMS = (
    *("dense", "gram", "time major", "conv2d", "conv2d, gathered patches", "conv3d, transposed"),
    *("depthwise, large kernels", "embedding", "embedding, masked", "einsum, reordered", "lstm"),
    *("rnn of a cell, masked", "recurrent layers, open time axis", "hidden in a call"),
    *("computed weights", "grouped convolution", "batch normalization, frozen statistics"),
    *("attention", "open time axis", "shared convolution", "shared embedding", "tied embedding"),
)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FORMS)
def test_the_mean_gradient_of_an_examples_rows_is_clipped(name):
    assert_equals_loop(of_examples(OnePassEngine(CLIP)), name)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["dense", "conv2d", "embedding", "lstm"])
@pytest.mark.parametrize("options", [{"rows_per_pass": 1}, {"rows_per_pass": 4}])
def test_passes_hold_whole_examples(name, options):
    assert_equals_loop(of_examples(OnePassEngine(CLIP, **options)), name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["dense", "lstm", "embedding"])
@pytest.mark.parametrize("rows_per_pass", [None, 1, 3])
def test_the_vectorised_engine(name, rows_per_pass):
    assert_equals_loop(of_examples(VectorizedEngine(CLIP, rows_per_pass=rows_per_pass)), name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
@pytest.mark.parametrize("name", SLOW)
def test_variables_without_a_rule(name):
    assert_equals_loop(of_examples(OnePassEngine(CLIP)), name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["dense", "gram", "embedding"])
def test_compiled_by_xla(name):
    assert_equals_loop(of_examples(OnePassEngine(CLIP)), name, jit_compile=True)


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_sums_in_float64(engine):
    engine = of_examples(engine(CLIP))
    engine.wide_sums = True
    assert_equals_loop(engine, "dense")


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_an_added_example_moves_the_sum_by_the_clip_at_most(engine):
    model = built(*FAST["dense"])
    clipped = Sum(of_examples(engine(CLIP)), model, VECTORS)
    x = np.concatenate([VECTORS[:3], 1e4 * VECTORS[3:6]])
    moved = clipped(x, Y[:6], np.ones(6)) - clipped(x[:3], Y[:3], np.ones(3))
    assert np.linalg.norm(moved) == pytest.approx(CLIP, rel=1e-5)
    # Alone, each of its rows would move the sum by the clip.
    alone = Sum(engine(CLIP), model, VECTORS)
    moved = alone(x, Y[:6], np.ones(6)) - alone(x[:3], Y[:3], np.ones(3))
    assert np.linalg.norm(moved) > 1.5 * CLIP


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_an_example_with_a_bad_row_contributes_nothing(engine):
    model = built(*FAST["dense"])
    clipped = Sum(of_examples(engine(CLIP)), model, VECTORS)
    x = VECTORS[:6].copy()
    x[4, 0] = np.nan
    found = clipped(x, Y[:6], np.ones(6))
    np.testing.assert_allclose(found, clipped(VECTORS[:3], Y[:3], np.ones(3)), atol=1e-6)
    assert np.linalg.norm(found) > 0.1 * CLIP


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_rows_that_make_no_whole_example_are_an_error(engine):
    model = built(*FAST["dense"])
    clipped = Sum(of_examples(engine(CLIP)), model, VECTORS)
    with pytest.raises(tf.errors.InvalidArgumentError, match="requires a multiple of"):
        clipped(VECTORS[:5], Y[:5], np.ones(5))


def test_mutant_that_clips_rows_apart_is_caught(monkeypatch):
    monkeypatch.setattr(plan, "of_examples", lambda rows, each: example_rows.of_examples(rows, 1))
    with pytest.raises((AssertionError, ValueError, tf.errors.InvalidArgumentError)):
        assert_equals_loop(of_examples(OnePassEngine(CLIP)), "dense")


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_short_gradients_are_means(engine):
    model, x, y = built(*FAST["dense"]), VECTORS[:ROWS], Y[:ROWS]
    found = Sum(of_examples(engine(100.0)), model, x)(x, y, WEIGHTS)
    np.testing.assert_allclose(found, looped(model, x, y, WEIGHTS, 100.0), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_mutant_that_takes_no_mean_is_caught(monkeypatch, engine):
    monkeypatch.setattr(
        "tfdp.clipping.loss_graph.loss_reader.LossGraph.averaged", lambda g, rows: g
    )
    with pytest.raises(AssertionError):
        test_short_gradients_are_means(engine)
