import numpy as np
import pytest
import tensorflow as tf

from tests.two_term_support import Codes, Pull, Sum, clip, data, gradient, looped_samples
from tfdp.clipping import TermWiseAggregation
from tfdp.contrib import BatchAggregation, MicroAggregation

C1, C2, B = 0.5, 0.2, 32


@pytest.mark.slow
def test_one_group_is_batch_aggregation_of_the_batch_wise_term():
    model, (x, y, mask) = Codes(), data()

    def nothing(x, y):
        return tf.zeros_like(y) * tf.reduce_sum(x, axis=1) * tf.reduce_sum(model.codes.bias)

    one = Sum(model, TermWiseAggregation(C2, num_groups=1, group_capacity=40), sample_wise=nothing)
    whole = Sum(model, BatchAggregation(), clip=C2, sample_wise=nothing)
    np.testing.assert_allclose(one(x, y, mask), whole(x, y, mask), atol=1e-5)
    assert np.linalg.norm(one(x, y, mask)) == pytest.approx(B * C2, rel=1e-3)


def test_micro_is_the_sum_of_clipped_gradients_that_all_have_the_batch_wise_one():
    model, (x, y, mask) = Codes(), data()
    common = gradient(model, lambda: model.batch_wise(x, y, mask))
    expected = looped_samples(model, x, y, mask, C1, common)
    np.testing.assert_allclose(Sum(model, MicroAggregation())(x, y, mask), expected, atol=1e-5)


def test_batch_is_the_clipped_gradient_of_the_whole_loss():
    model, (x, y, mask) = Codes(), data()

    def whole():
        samples = tf.reduce_sum(tf.boolean_mask(model.sample_wise(x, y), mask)) / B
        return samples + model.batch_wise(x, y, mask)

    for limit in (0.01, 100.0):
        expected = B * clip(gradient(model, whole), limit)
        found = Sum(model, BatchAggregation(), clip=limit)
        np.testing.assert_allclose(found(x, y, mask), expected, atol=1e-5)


def test_an_example_moves_the_baselines_by_their_sensitivities():
    n = 40
    x, mask = np.full([n, 3], 0.5, "float32"), np.ones(n, bool)
    x[7] = -1000.0
    absent = mask.copy()
    absent[7] = False
    micro = Sum(Pull(), MicroAggregation(), clip=C1)
    distance = np.abs(micro(x, x[:, 0], mask) - micro(x, x[:, 0], absent))
    assert distance == pytest.approx((2 * n - 1) * C1, rel=1e-4)
    assert MicroAggregation().sensitivity(C1, n) == (2 * n - 1) * C1
    whole = Sum(Pull(), BatchAggregation(), clip=C1)
    distance = np.abs(whole(x, x[:, 0], mask) - whole(x, x[:, 0], absent))
    assert distance / B == pytest.approx(2 * C1, rel=1e-4)
    assert whole.scales == [B * BatchAggregation().sensitivity(C1)]
