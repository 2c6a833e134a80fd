"""Regularizers, masks and clips of a TwoTermLoss."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.clipping.batch_losses.term_checks import (
    AGGREGATIONS,
    FUNCTIONS,
    KEEPS_A_STATISTIC,
    OF_THE_DATA,
    clipped,
    refused,
    same,
)
from tests.two_term_support import Codes, data
from tfdp.clipping import (
    OnePassEngine,
    TermWiseAggregation,
    TwoTermLoss,
)
from tfdp.clipping.engine import LEAST_CLIP

layers = tf.keras.layers


# Regularizers and layers.


class Activity(layers.Layer):
    """Adds what it is made with to the losses of a model."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


def of_step(model, x, y):
    return {"regularizer": lambda: tf.reduce_mean(model.sample_wise(x, y))}


def of_rows_of_step(model, x, y):
    return {"regularizer": lambda: tf.reduce_sum(x, 1) * model.head.kernel[0, 0]}


def of_layer(layer):
    def changes(model, x, y):
        def sample_wise(x, y):
            return model.sample_wise(layer(x), y)

        return {"sample_wise": sample_wise, "regularizer": lambda: tf.add_n([0.0, *layer.losses])}

    return changes


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda: of_step,
        lambda: of_rows_of_step,
        lambda: of_layer(Activity(tf.reduce_sum)),
        lambda: of_layer(Activity(tf.reduce_mean)),
        lambda: of_layer(layers.Dense(3, activity_regularizer="l2")),
    ],
    ids=["mean of losses", "rows", "add_loss sum", "add_loss mean", "activity_regularizer"],
)
def test_regularizers_that_depend_on_data(make, aggregation):
    def changes(model, x, y, mask):
        return {**make()(model, x, y), "aggregation": aggregation}

    refused(OF_THE_DATA, changes)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_regularizers_of_weights_are_public(aggregation):
    def changes(model, x, y, mask):
        square = tf.reduce_sum
        return {"regularizer": lambda: square(model.head.kernel**2), "aggregation": aggregation}

    (found, public), model = clipped(changes), Codes()
    without, _ = clipped(lambda *_: {"aggregation": aggregation})
    np.testing.assert_allclose(found, without, atol=1e-5)
    of_head = [2 * v if v is model.head.kernel else 0 * v for v in model.trainable_variables]
    np.testing.assert_allclose(public, support.flat(of_head), rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("term", FUNCTIONS)
def test_batch_normalization(term, aggregation):
    def normalized(training):
        layer = layers.BatchNormalization(epsilon=0.0)
        layer.build([None, 3])

        def changes(model, x, y, mask):
            function = getattr(model, term)
            return {
                term: lambda x, *rest: function(layer(x, training=training), *rest),
                "aggregation": aggregation,
            }

        return changes

    refused(KEEPS_A_STATISTIC, normalized(training=True))
    same(normalized(training=False), lambda *_: {"aggregation": aggregation})


# Masks, variables and clips.


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:2], ids=lambda a: type(a).__name__)
def test_a_mask_must_apply_to_all_of_the_loss(aggregation):
    def changes(model, x, y, mask):
        def finds_the_mask(x, y):
            operations = tf.compat.v1.get_default_graph().get_operations()
            found = next(op.outputs[0] for op in operations if op.outputs[0].dtype == tf.bool)
            return model.sample_wise(x, y) * (2 - tf.cast(found, tf.float32))

        return {"sample_wise": finds_the_mask, "aggregation": aggregation}

    refused("must return all that depends on the rows, so that `mask` applies to it", changes)


def test_rows_that_the_mask_excludes_do_not_matter():
    x, y, mask = data()
    other = np.where(mask[:, None], x, 100 + x), np.where(mask, y, -y), mask
    same(lambda *_: {}, arrays=other)


@pytest.mark.parametrize("two_terms", [False, True])
def test_complex_variables_are_refused(two_terms):
    """Only the real part would get noise."""
    weight = tf.Variable(tf.zeros([3], tf.complex64))
    optimizer = tfdp.DPSGD(1.0, 1.0, expected_batch_size=32)

    def sample_wise(x, y):
        return tf.linalg.matvec(x, tf.math.imag(weight)) - y

    @tf.function(input_signature=support.open_spec(data()))
    def step(x, y, mask):
        if two_terms:
            loss = TwoTermLoss(sample_wise, None, (x, y), AGGREGATIONS[0], mask)
            optimizer.minimize(loss, [weight])
        else:
            losses = sample_wise(x, y) * tf.cast(mask, tf.float32)
            optimizer.minimize(losses, [weight], tape=tf.GradientTape())

    with pytest.raises(ValueError, match=r"`var_list` must hold real floating-point .*complex64"):
        step(*data())


@pytest.mark.parametrize("clip", [0.0, -1.0, LEAST_CLIP / 2])
def test_clips_whose_squares_vanish_are_refused(clip):
    """Norms below them would be found to be zero, and not be clipped."""
    message = f"must be a positive number, at least {LEAST_CLIP}. Received: .*={clip}"
    with pytest.raises(ValueError, match="`l2_norm_clip` " + message):
        tfdp.DPSGD(clip, 1.0, expected_batch_size=32)
    with pytest.raises(ValueError, match="`batch_clip` " + message):
        TermWiseAggregation(clip)


def test_engines_refuse_such_clips_too():
    with pytest.raises(ValueError, match="`l2_norm_clip` must be a positive number, at least"):
        OnePassEngine(LEAST_CLIP / 2)


def test_the_least_clip_clips():
    def changes(model, *_):
        return {"aggregation": TermWiseAggregation(LEAST_CLIP, 1), **zero_and(model)}

    def zero_and(model):
        return {"sample_wise": lambda x, y: 0.0 * model.sample_wise(x, y)}

    found, _ = clipped(changes)
    assert np.linalg.norm(found.astype("float64")) == pytest.approx(32 * LEAST_CLIP, rel=1e-4)
