"""Sums of clipped gradients in float64: their rounding, and how far an example moves them."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import FAST, SEQUENCES, Y, built
from tests.support import crossentropy, open_spec
from tfdp.base import devices
from tfdp.clipping import OnePassEngine, VectorizedEngine, engine
from tfdp.clipping.engine import sum_error
from tfdp.clipping.one_pass import weighted_sums

pytestmark = pytest.mark.rewritten_graphs

CLIP = 0.3
MODELS = [
    "conv2d",
    "conv2d, gram and dilation",
    "conv3d",
    "depthwise",
    "einsum dense",
    "embedding",
    "lstm",
    "shared convolution",
    "tied embedding",
]
MODEL = "einsum dense"


def wide(cls, clip=CLIP, is_wide=True, **kwargs):
    made = cls(clip, **kwargs)
    made.wide_sums = is_wide
    return made


def summing(made, model, x, y, **kwargs):
    """From a mask to the clipped sum, a flat vector of float64; and its error."""

    data = (x, np.asarray(y), np.ones(len(y), bool))

    @tf.function(input_signature=open_spec(data), **kwargs)
    def run(x, y, mask):
        losses = crossentropy()(y, model(x, training=True), sample_weight=mask)
        clipped = made.clipped_sum(losses, model.trainable_variables, tf.constant([1, 2]))
        present = [g for g in clipped.gradients if g is not None]
        assert all(g.dtype == tf.float64 for g in present) == made.wide_sums
        flat = tf.concat([tf.reshape(tf.cast(g, tf.float64), [-1]) for g in present], 0)
        return flat, tf.zeros([], tf.float64) if clipped.error is None else clipped.error

    return lambda mask: run(x, y, mask)


def exact_sum(parts):
    return np.array([math.fsum(column) for column in np.transpose(parts)])


def check_sums(made, name, **kwargs):
    """The sum is that of the examples' own, which are no longer than the clip."""
    make, x = FAST[name]
    run = summing(made, built(make, x), x, Y, **kwargs)
    total, error = run(np.ones(len(Y), bool))
    alone = [run(np.arange(len(Y)) == i)[0].numpy() for i in range(len(Y))]
    for own in alone:
        assert math.sqrt(math.fsum(np.square(own))) <= CLIP * (1 + 1e-12)
    assert np.linalg.norm(total - exact_sum(alone)) <= 2 * error * CLIP
    for i in range(2):
        other, _ = run(np.arange(len(Y)) != i)
        assert np.linalg.norm(total - other) <= CLIP * (1 + 2 * error)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_models(name):
    check_sums(wide(OnePassEngine), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d", MODEL])
def test_sums_of_instantiated_gradients(name):
    check_sums(wide(VectorizedEngine), name)


@pytest.mark.parametrize("rule", ["automatic", "per_layer", "importance_sampling"])
def test_sums_of_rules(rule):
    check_sums(wide(OnePassEngine, clipping_rule=rule), MODEL)


@pytest.mark.slow
def test_sums_compiled_by_xla():
    check_sums(wide(OnePassEngine), MODEL, jit_compile=True)


def test_sums_of_chunks():
    check_sums(wide(OnePassEngine, rows_per_pass=3), MODEL)


def test_sums_in_parts(monkeypatch):
    monkeypatch.setattr(devices, "working_set_bytes", lambda: 2000)
    check_sums(wide(OnePassEngine), MODEL)


def test_sums_of_float32_are_caught(monkeypatch):
    """Mutant: only the result is of float64."""
    narrow = lambda flat, factors, wide: tf.cast(  # noqa: E731
        tf.matmul(factors[tf.newaxis], flat)[0], tf.float64
    )
    monkeypatch.setattr(weighted_sums, "weighted_sum", narrow)
    monkeypatch.setattr("tfdp.clipping.one_pass.per_example_gradients.weighted_sum", narrow)
    with pytest.raises(AssertionError):
        check_sums(wide(OnePassEngine), MODEL)


def test_both_engines_have_wide_sums():
    check_sums(wide(support.ComparedClipping), MODEL)


def test_groups_are_summed_in_float64():
    model, everyone = built(FAST[MODEL][0], SEQUENCES), np.ones(len(Y), bool)
    (total, error), (narrow, _) = (
        summing(wide(OnePassEngine, CLIP, is_wide, num_microbatches=3), model, SEQUENCES, Y)(
            everyone
        )
        for is_wide in (True, False)
    )
    assert 0 < error < 1e-9
    np.testing.assert_allclose(total, narrow, rtol=1e-4, atol=1e-6)


# Reordering (Casacuberta et al., 2022).


def sum_of_rows(made, x):
    """The clipped sum of gradients that are the rows of `x`."""
    weights = tf.Variable(tf.zeros([x.shape[1]]))

    @tf.function
    def run(x):
        made_sum = made.clipped_sum(tf.linalg.matvec(x, weights), [weights], tf.constant([1, 2]))
        return tf.cast(made_sum.gradients[0], tf.float64)

    return run(x).numpy()


def distance_of_neighbours(is_wide):
    """Of two orders of 2,048 examples, in the second of which there is one more."""
    small = np.full([1024, 1], 2.0**-13 * 1.3, np.float32)
    large = np.ones([1024, 1], np.float32)
    before = np.concatenate([small, large])
    after = np.concatenate([large, small, large[:1]])
    made = wide(OnePassEngine, 1.0, is_wide)
    first, second = (sum_of_rows(made, tf.constant(x)) for x in (before, after))
    # The other order of the neighbors, if roundings point the other way.
    third, fourth = (sum_of_rows(made, tf.constant(x[::-1])) for x in (before, after))
    return max(np.abs(second - first).item(), np.abs(fourth - third).item())


def test_another_order_moves_sums_of_float32_beyond_the_sensitivity_and_not_those_of_float64():
    assert distance_of_neighbours(False) > 1.01
    assert distance_of_neighbours(True) <= 1 + 2 * float(sum_error(2049, 2049, 1.0))


def test_clip_factors_without_a_margin_are_caught(monkeypatch):
    """Mutant."""
    monkeypatch.setattr(engine, "rounding_margin", lambda _: 0.0)
    rows = np.random.default_rng(0).normal(size=(2000, 1)).astype(np.float32) * 10
    made = wide(VectorizedEngine, 0.3)
    factors = made._factors([tf.square(rows[:, 0])], [0], tf.ones([2000], tf.bool), None, None)
    longest = np.max(np.abs(np.float64(factors.of_variable(0)) * rows[:, 0]))
    assert longest > 0.3 and longest <= 0.3 * (1 + 2.0**-21)


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
@pytest.mark.parametrize("rows_per_pass", [None, 4])
def test_the_bound_says_nothing_of_the_number_of_rows(engine, rows_per_pass):
    """Without padding that is private, and the noise follows from the bound."""
    weights, clipping = tf.Variable(tf.ones([3])), engine(1.0, rows_per_pass=rows_per_pass)
    clipping.wide_sums = True

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def error(x):
        key = tf.constant([1, 2], tf.int64)
        losses = tf.linalg.matvec(x, weights)
        return clipping.clipped_sum(losses, [weights], key, most_rows=50).error

    assert len({float(error(tf.ones([rows, 3]))) for rows in (1, 7, 50)}) == 1
