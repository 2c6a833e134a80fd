"""The noisy test: its range, its noise, and what it does with broken losses."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.base.random.key_streams import KeyStream
from tfdp.step.noisy_acceptance import ValidationLoss, ValidationTest

C_V, SIGMA, BETA = 0.25, 1.3, -0.7


def make(**changes):
    return ValidationTest(
        **{"batch_size": 8, "noise_multiplier": SIGMA, "clip": C_V, "threshold": BETA, **changes}
    )


def loss(rows, regularizer=0.0):
    return ValidationLoss(tf.constant(rows, tf.float32), tf.constant(regularizer))


def difference(old, new, mask=None, test=None, old_regularizer=0.0, new_regularizer=0.0):
    mask = tf.constant([True] * len(old) if mask is None else mask)
    result = (test or make()).clipped_difference(
        loss(old, old_regularizer), loss(new, new_regularizer), mask
    )
    return float(result)


def test_it_is_the_difference_of_the_means_of_the_examples():
    assert difference([1.0, 2.0, 9.0], [1.1, 2.3, 0.0], [True, True, False]) == pytest.approx(0.2)


def test_the_regularizer_is_part_of_the_objective():
    assert difference([1.0], [1.0], new_regularizer=0.1) == pytest.approx(0.1)


def test_an_empty_batch_tells_nothing():
    assert difference([1.0, 2.0], [0.0, 0.0], [False, False], new_regularizer=0.1) == 0.0


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 3e38])
def test_a_broken_example_changes_nothing(broken):
    assert difference([1.0, broken], [1.2, broken]) == pytest.approx(0.1)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_an_update_that_breaks_the_model_is_as_bad_as_can_be(broken):
    assert difference([1.0, 1.0], [0.5, broken]) == C_V
    assert difference([1.0, 1.0], [broken, broken]) == C_V


EXTREME = st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EXTREME, EXTREME), min_size=1, max_size=40))
def test_whatever_the_losses_the_difference_is_within_the_clip(losses):
    old, new = zip(*losses, strict=True)
    assert -C_V <= difference(list(old), list(new)) <= C_V


def test_finite_losses_that_cancel_do_not_break_the_test():
    """Their sums are infinite, and the difference of these is not a number."""
    old, new = [3e38, 3e38, -3e38, -3e38] * 4, [-3e38, -3e38, 1e30, 1e30] * 4
    assert -C_V <= difference(old, new) <= C_V


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_sensitivity_of_one_example(seed):
    """An example that comes or goes moves the difference by 2 C_v at most, whatever its loss."""
    rng = np.random.default_rng(seed)
    old, new = rng.normal(size=(2, 6)) * 10.0 ** rng.integers(-2, 3, size=(2, 1))
    mask = rng.random(6) < 0.5
    other = mask.copy()
    other[rng.integers(6)] ^= True
    assert abs(difference(old, new, mask) - difference(old, new, other)) <= 2 * C_V


def acceptances(test, new, n=3000):
    source = KeyStream(5, "test_noise")

    @tf.function
    def run():
        return tf.map_fn(
            lambda i: test.accepts(
                loss([0.0]),
                ValidationLoss(new[None], tf.zeros([])),
                tf.constant([True]),
                source.next_key(i),
            ),
            tf.range(n, dtype=tf.int64),
            fn_output_signature=tf.bool,
        )

    return int(tf.reduce_sum(tf.cast(run(), tf.int32)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("new", [-9.0, -0.1, 0.0, 9.0])
@pytest.mark.parametrize(("actual", "right"), [(SIGMA, True), (SIGMA * 2 / 3, False)])
def test_the_distribution_of_acceptance(new, actual, right):
    """Binomial test: accepts sigma_v, rejects 2/3 of it (where the noise makes a difference)."""
    n = 3000
    clipped = np.clip(new, -C_V, C_V)
    p = scipy.stats.norm.cdf((BETA - clipped / C_V) / (2 * SIGMA))
    wrong = scipy.stats.norm.cdf((BETA - clipped / C_V) / (2 * SIGMA * 2 / 3))
    found = acceptances(make(noise_multiplier=actual), tf.constant(new))
    p_value = scipy.stats.binomtest(found, n, p).pvalue
    if right:
        assert p_value > 1e-4
    elif abs(wrong - p) > 0.05:
        assert p_value < 1e-4


BAD = [
    ("batch_size", 0, "validation_batch_size"),
    ("batch_size", 2.5, "validation_batch_size"),
    ("noise_multiplier", 0.0, "validation_noise_multiplier"),
    ("noise_multiplier", float("inf"), "validation_noise_multiplier"),
    ("clip", -1.0, "validation_clip"),
    ("clip", float("nan"), "validation_clip"),
    ("threshold", float("nan"), "threshold"),
    ("threshold", True, "threshold"),
]


@pytest.mark.parametrize(("field", "value", "name"), BAD)
def test_bad_arguments_are_named(field, value, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        make(**{field: value})
