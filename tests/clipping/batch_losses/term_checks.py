"""Whether the functions of a TwoTermLoss are refused, or what their clipped sum is."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.two_term_support import SEED, Codes, data
from tfdp.clipping import (
    OnePassEngine,
    TermWiseAggregation,
    TwoTermLoss,
)
from tfdp.contrib import BatchAggregation, MicroAggregation

TERMS = ["sample_wise", "batch_wise", "regularizer"]
FUNCTIONS = TERMS[:2]
AGGREGATIONS = [TermWiseAggregation(0.1, 4), MicroAggregation(), BatchAggregation()]

NOT_BY_ROW = "Argument `batch` must hold data, or what is (provably )?computed|mixes exam"
OF_THE_DATA = "Argument `regularizer` must return a scalar that depends on no data"
KEEPS_A_STATISTIC = "writes a statistic of the batch into its variable"
SIDE_EFFECTS = "must have no side effects, by which examples could get into each other's losses"


def of_outside(term):
    if term == "regularizer":
        return OF_THE_DATA
    return f"Argument `{term}` must compute its result from its arguments, variables and constants"


def clipped_in_graph(changes, model, x, y, mask):
    """The clipped sum, and the gradient of the regularizer, with a changed loss."""
    arguments = {
        "sample_wise": model.sample_wise,
        "batch_wise": model.batch_wise,
        "batch": (x, y),
        "mask": mask,
        "aggregation": AGGREGATIONS[0],
        **changes(model, x, y, mask),
    }
    variables = model.trainable_variables
    found = TwoTermLoss(**arguments).clipped_sum(
        OnePassEngine(0.5), variables, tf.constant(SEED, tf.int64), 32
    )
    return [
        tf.concat([tf.reshape(tf.zeros_like(v) if g is None else g, [-1]) for g, v in pairs], 0)
        for pairs in (
            list(zip(found.gradients, variables, strict=True)),
            list(zip(found.regularizer_gradients, variables, strict=True)),
        )
    ]


def clipped(changes=lambda *_: {}, arrays=None, step=clipped_in_graph):
    """As `clipped_in_graph`, of a batch, in a step of its own."""
    model, arrays = Codes(), arrays or data()

    def run(x, y, mask):
        return step(changes, model, x, y, mask)

    traced = tf.function(run, input_signature=support.open_spec(arrays), autograph=False)
    return [np.array(part) for part in traced(*arrays)]


def refused(message, changes, **kwargs):
    with pytest.raises(ValueError, match=message):
        clipped(changes, **kwargs)


def same(changes, expected=lambda *_: {}, **kwargs):
    """Whether a loss is accepted, and its sum that of another one."""
    for found, other in zip(clipped(changes, **kwargs), clipped(expected), strict=True):
        np.testing.assert_allclose(found, other, atol=1e-5)
        assert np.any(found) or not np.any(other)


def using(term, model, number):
    """A loss of which a term uses the number that `number` returns."""
    return {
        term: {
            "sample_wise": lambda *rows: number() * model.sample_wise(*rows),
            "batch_wise": lambda *rows: number() * model.batch_wise(*rows),
            "regularizer": lambda: number() * tf.reduce_sum(model.head.kernel),
        }[term]
    }
