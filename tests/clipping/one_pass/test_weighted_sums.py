import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.clipping.models import CLIP, IMAGES, ExpectsRows, N, Y, built, sequential
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass import weighted_sums

layers = tf.keras.layers


def mixed():
    """Gradients of every form: instantiated, small and large, products of norms, Gram matrices."""
    return sequential(
        lambda: layers.Conv2D(6, 3, padding="same"),
        lambda: layers.DepthwiseConv2D(3, padding="same"),
        lambda: layers.Conv2D(90, 1, strides=4, activation="tanh"),
        lambda: layers.Conv2D(80, 1),
        layers.Flatten,
        lambda: layers.Dense(4),
    )


FORMS = {
    "whole": (ExpectsRows, {}),
    "all side by side": (ExpectsRows, {"_SMALL": 10**9}),
    "none side by side": (ExpectsRows, {"_SMALL": 0}),
    "in parts": (OnePassEngine, {}),
}


@pytest.fixture(params=FORMS)
def engine_class(request, monkeypatch):
    engine_class, changes = FORMS[request.param]
    for name, value in changes.items():
        monkeypatch.setattr(weighted_sums, name, value)
    return engine_class


@pytest.fixture(scope="module")
def case():
    model = built(mixed(), IMAGES)
    return model, support.looped_clipped_sum(model, IMAGES, Y, CLIP)


@pytest.mark.quick_cases(2)
def test_all_forms_give_the_same_sums(engine_class, case):
    model, expected = case
    engine = engine_class(CLIP)
    np.testing.assert_allclose(
        support.ClippedSum(engine, model, IMAGES)(IMAGES, Y), expected, atol=3e-6
    )
    forms = " ".join(entry.how for entry in engine.report().entries)
    assert "Gram" in forms and "products of norms" in forms and "instantiated" in forms


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", ["per_layer", "automatic"])
def test_groups_are_weighted_by_their_own_factors(engine_class, rule, case):
    model, _ = case
    expected = tfdp.clipping.VectorizedEngine(CLIP, clipping_rule=rule)
    expected = support.ClippedSum(expected, model, IMAGES)(IMAGES, Y)
    found = support.ClippedSum(engine_class(CLIP, clipping_rule=rule), model, IMAGES)(IMAGES, Y)
    np.testing.assert_allclose(found, expected, atol=3e-6)


def sums_with_bad_rows(engine, model):
    images = IMAGES.copy()
    images[2], images[4] = np.nan, np.inf
    found = support.ClippedSum(engine, model, images)(images, Y)
    good = np.array([i not in (2, 4) for i in range(N)])
    return found, support.looped_clipped_sum(model, IMAGES[good], Y[good], CLIP)


@pytest.mark.quick_cases(2)
def test_bad_rows_contribute_nothing(engine_class, case):
    found, expected = sums_with_bad_rows(engine_class(CLIP), case[0])
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
def test_bad_rows_that_are_not_cleaned_are_caught(engine_class, case, monkeypatch):
    """Mutant: zero times NaN."""
    monkeypatch.setattr(weighted_sums, "cleaned", lambda tensors, bad: list(tensors))
    found, _ = sums_with_bad_rows(engine_class(CLIP), case[0])
    assert np.isnan(found).any()


def test_a_piece_that_is_left_out_of_the_norm_is_caught(case, monkeypatch):
    """Mutant: of gradients that lie side by side, the norm is that of the first."""
    original = weighted_sums.norms.of_rows
    monkeypatch.setattr(weighted_sums.norms, "of_rows", lambda flat, size: original(flat[:, :1], 1))
    model, expected = case
    found = support.ClippedSum(ExpectsRows(CLIP), model, IMAGES)(IMAGES, Y)
    assert np.linalg.norm(found - expected) > 0.1


@pytest.mark.parametrize("engine_class", [ExpectsRows, OnePassEngine])
def test_half_precision_gradients_of_an_operation_without_a_rule_are_summed_in_float32(
    engine_class,
):
    """1,000 equal examples; a sum in bfloat16 stops at 256 times the addend."""
    weights = tf.Variable(tf.zeros([1, 1, 4], tf.bfloat16))
    engine = engine_class(CLIP)

    @tf.function
    def clipped(x):
        losses = tf.reduce_sum(tf.matmul(x, weights), [1, 2])
        return engine.clipped_sum(losses, [weights], tf.constant([1, 2])).gradients[0]

    found = clipped.get_concrete_function(tf.TensorSpec([None, 1, 1], tf.bfloat16))(
        tf.ones([1000, 1, 1], tf.bfloat16)
    )
    assert "vectorized" in engine.report().entries[0].how
    np.testing.assert_allclose(np.float32(found), 1000 * CLIP / 2, rtol=2**-8)


def operations_of(blocks):
    """The number of operations of a private step of a network of so many blocks."""
    x = y = layers.Input([8, 8, 4])
    for _ in range(blocks):
        y = layers.Conv2D(8, 1, use_bias=False)(y)
        y = layers.BatchNormalization()(y, training=False)
        y = layers.DepthwiseConv2D(3, padding="same")(layers.ReLU()(y))
        y = layers.Dense(4)(y)
    model = tf.keras.Model(x, layers.Dense(3)(layers.Flatten()(y)))
    model.compile(tfdp.DPSGD(1.0, 1.0, N, learning_rate=0.1), support.crossentropy())
    data = tf.data.Dataset.from_tensors((np.zeros([N, 8, 8, 4], "f"), Y)).repeat()
    step = model.make_train_function().get_concrete_function(iter(data))
    library = step.graph.as_graph_def().library.function
    return len(step.graph.get_operations()) + sum(len(f.node_def) for f in library)


@pytest.mark.slow
def test_the_graph_grows_by_few_operations_for_each_variable():
    """A plain step grows by 11 for each of the seven variables of a block."""
    assert operations_of(12) - operations_of(6) <= 6 * 7 * 40
