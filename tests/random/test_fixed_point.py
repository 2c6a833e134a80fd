"""Numbers of 304 places, compared with mpmath's."""

import mpmath
import numpy as np
import pytest
import tensorflow as tf

from tfdp.base.random import fixed_point

BITS = 450


def value(digits):
    return sum(mpmath.mpf(int(d)) * mpmath.mpf(2) ** (-16 * i) for i, d in enumerate(digits))


def words():
    """Eight words each: of any numbers, and of those next to 0 and 1."""
    drawn = np.random.default_rng(0).integers(0, 2**32, [40, 8], np.uint32)
    for i in range(8):
        drawn[i, :i] = 0
        drawn[8 + i, :i] = 2**32 - 1
    return tf.constant(np.concatenate([drawn, [[0] * 8], [[2**32 - 1] * 8]]).astype(np.uint32))


def largest_errors(jit_compile=False):
    """Of cosine and logarithm."""

    @tf.function(jit_compile=jit_compile)
    def compute(words):
        number = fixed_point.of_words(words)
        return number, fixed_point.cosine_of_turns(number), fixed_point.logarithm(words)

    errors = []
    with mpmath.workprec(BITS):
        for row in words():
            number, cosine, logarithm = (value(digits.numpy()) for digits in compute(row))
            errors.append(
                [
                    abs(cosine - mpmath.cos(2 * mpmath.pi * number)),
                    abs(logarithm + mpmath.log(number)),
                ]
            )
    return np.max(np.array(errors, float), axis=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_functions_are_right_to_275_places(jit_compile):
    assert np.all(largest_errors(jit_compile) < 2.0**-275)


@pytest.mark.slow
def test_a_series_that_is_cut_short_is_caught(monkeypatch):
    for name, terms in (("_COSINE", 8), ("_EXPONENTIAL", 16), ("_LOG", 8)):
        with monkeypatch.context() as patch:
            patch.setattr(fixed_point, name, getattr(fixed_point, name)[:-terms])
            assert np.max(largest_errors()) > 2.0**-275


def test_a_wrong_bit_of_pi_is_caught(monkeypatch):
    one = fixed_point._ONE
    wrong = fixed_point._coefficients(4 * (fixed_point._PI + (one >> 270)) ** 2 // one, one, 2)
    monkeypatch.setattr(fixed_point, "_COSINE", wrong)
    assert largest_errors()[0] > 2.0**-275


def test_integers_and_words():
    with mpmath.workprec(BITS):
        for number in (0, 1, 2**47, 2**60 + 12345):
            digits = fixed_point.of_integer(tf.constant(number, tf.int64)).numpy()
            assert value(digits) == mpmath.mpf(number) / 2**48
        digits = fixed_point.of_words(tf.constant([1] + [0] * 7, tf.uint32)).numpy()
        assert value(digits) == mpmath.mpf(2) ** -32 + mpmath.mpf(2) ** -257


def test_products_and_signs():
    rng = np.random.default_rng(0)
    with mpmath.workprec(700):
        for _ in range(20):
            a, b = (tf.constant(rng.integers(0, 2**16, 20)) for _ in range(2))
            exact = value(a.numpy()) * value(b.numpy())
            assert abs(value(fixed_point.product(a, b).numpy()) - exact) < mpmath.mpf(2) ** -283
            assert fixed_point.is_positive(a - b) == (value(a.numpy()) >= value(b.numpy()))
    zero, least = np.zeros(20, np.int64), np.eye(20, dtype=np.int64)[19]
    assert fixed_point.is_positive(tf.constant(zero))
    assert fixed_point.is_positive(tf.constant(least))
    assert not fixed_point.is_positive(tf.constant(-least))
