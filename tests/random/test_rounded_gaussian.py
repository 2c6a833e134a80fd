"""Rounded normal numbers: their distribution, and decisions that float64 cannot make."""

import functools

import mpmath
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.random.test_chacha import check_distribution
from tfdp.base.random import chacha, rounded_gaussian
from tfdp.base.random.rounded_gaussian import rounded_exactly, rounded_normals

KEY = tf.constant([1, 2, 3, 4, 5], tf.int64)
SCALE = 2.0**22
BITS = 600


# The distribution.


def p_value(drawn, scale):
    """Chi-square of the integers, out to where 10 are expected on either side."""
    edge = np.floor(-scale * scipy.stats.norm.ppf(10 / len(drawn)))
    edges = np.concatenate([[-np.inf], np.arange(-edge, edge) + 0.5, [np.inf]])
    expected = len(drawn) * np.diff(scipy.stats.norm.cdf(edges / scale))
    found = np.histogram(drawn, edges)[0]
    return scipy.stats.chisquare(found, expected).pvalue


def test_the_integers_have_the_distribution_of_a_rounded_normal_number():
    drawn = np.concatenate([rounded_normals(KEY + i, 400_000, 7.5) for i in range(5)])
    assert np.all(drawn == np.round(drawn))
    assert p_value(drawn, 7.5) > 1e-6
    assert p_value(drawn, 7.5 * 1.01) < 1e-9 and p_value(drawn, 7.5 / 1.01) < 1e-9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("scale", [SCALE, 2.0**-3, 2.0**33])
def test_large_and_small_scales(scale):
    drawn = rounded_normals(KEY, 300_000, scale).numpy()
    if scale > 1:
        check_distribution(drawn / scale)
    else:  # Beyond 1/2 are 4 standard deviations.
        assert abs(np.sum(drawn != 0) - 300_000 * 2 * scipy.stats.norm.sf(4)) < 5 * np.sqrt(19)


def test_scales_are_raised_to_what_the_decision_knows():
    """Cutting them off would give less noise than is stated."""
    a, b = (rounded_normals(KEY, 1000, s) for s in (1000.0, 1000.0 - 2.0**-30))
    np.testing.assert_array_equal(a, b)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("count", [1, 30_000])
def test_they_are_rounded_normals_of_the_same_key(count, jit_compile):
    draw = tf.function(lambda key: rounded_normals(key, count, SCALE), jit_compile=jit_compile)
    drawn, normal = draw(KEY).numpy(), chacha.normals(KEY, count).numpy()
    assert drawn.shape == (count,) and drawn.dtype == np.float64
    assert np.all(np.abs(drawn - SCALE * normal) < 0.5 + 1e-6)


# float64: the bound on the error of `box_muller`.


def fraction(words):
    bits = int.from_bytes(np.asarray(words, ">u4").tobytes(), "big")
    return mpmath.mpf(2 * bits + 1) / mpmath.mpf(2) ** (32 * len(words) + 1)


def uniforms_of(words, further=()):
    """The uniform numbers of a pair's radius and angle, bit by bit: the middle of what is open."""
    bits = "".join(f"{int(word):032b}" for word in words)
    radius, angle = bits[:64] + bits[117:], bits[64:117]
    more = "".join(f"{int(word):032b}" for word in further)
    # The 21 bits that complete a word, then words; and 11 of the angle, then words.
    numbers = radius + more[:21] + more[32:192], angle + more[192:203] + more[224:416]
    return [mpmath.mpf(2 * int(n, 2) + 1) / mpmath.mpf(2) ** (len(n) + 1) for n in numbers]


def exact_pair(u, v):
    radius = mpmath.sqrt(-2 * mpmath.log(u))
    return radius, [radius * f(2 * mpmath.pi * v) for f in (mpmath.cos, mpmath.sin)]


def four_words():
    """Words of any pairs, of radii next to 0 and far out, and of angles next to quarters."""
    words = np.random.default_rng(0).integers(0, 2**32, [4, 600], np.uint32)
    words[0, :100] = 2**32 - 1 - words[0, :100] % 2 ** np.arange(100).clip(0, 31)
    words[0, 100:200] = words[0, 100:200] % 2 ** np.arange(100).clip(9, 31)
    words[2, 200:300] = 2**30 * (words[2, 200:300] % 4) + words[2, 200:300] % 3 - 1
    words[3, 250:300] %= 2**13
    return words


def largest_doubt():
    """The largest error over the radius plus its inverse, whatever the bits that follow are."""
    words = four_words()
    found = chacha.box_muller(tf.constant(words)).numpy().reshape(2, -1)
    most = 0.0
    with mpmath.workprec(BITS):
        for column, pair in zip(words.T, found.T, strict=True):
            for word in (0, 2**32 - 1):
                radius, exact = exact_pair(*uniforms_of(column, [word] * 13))
                if radius**2 > rounded_gaussian._FARTHEST:
                    continue
                for a, b in zip(pair, exact, strict=True):
                    most = max(most, float(abs(mpmath.mpf(a) - b) / (radius + 1 / radius)))
    return most


def test_normal_numbers_are_right_to_half_of_the_doubt():
    assert largest_doubt() <= rounded_gaussian._DOUBT / 2


def test_normal_numbers_of_float32_are_caught(monkeypatch):
    right = chacha.box_muller
    monkeypatch.setattr(
        chacha, "box_muller", lambda w: tf.cast(tf.cast(right(w), tf.float32), tf.float64)
    )
    with pytest.raises(AssertionError):
        test_normal_numbers_are_right_to_half_of_the_doubt()


# What float64 leaves open.


@functools.cache
def next_to_halves(count=60):
    """Words of numbers that are 2^-190 to either side of a half, and which side it is."""
    rng = np.random.default_rng(1)
    cases = []
    while len(cases) < count:
        scale = np.ceil(2.0 ** rng.uniform(-2, 27) * 2**16) / 2**16
        is_sine, above = rng.integers(0, 2, 2).astype(bool)
        turn = rng.integers(0, 2**32, 8, np.uint32)
        with mpmath.workprec(BITS):
            angle = 2 * mpmath.pi * fraction(turn)
            part = abs(mpmath.sin(angle) if is_sine else mpmath.cos(angle))
            below = np.floor(scale * rng.uniform(0.01, 9) * float(part))
            u = mpmath.exp(-(((below + 0.5) / (scale * part)) ** 2) / 2)
            if u < 2.0**-50:
                continue
            bits = int(u * 2**256) + (-1 if above else 1) * 2 ** int(rng.integers(66, 120))
            words = np.frombuffer(bits.to_bytes(32, "big"), ">u4").astype(np.uint32)
            beyond = scale * mpmath.sqrt(-2 * mpmath.log(fraction(words))) * part > below + 0.5
        cases.append((words, turn, is_sine, scale, below, bool(beyond)))
    return cases


def split(radius, angle):
    """The words of a pair, and further ones, that hold the bits of eight words each."""
    bits = [int.from_bytes(np.asarray(w, ">u4").tobytes(), "big") for w in (radius, angle)]
    radius, angle = (f"{number:0256b}" for number in bits)
    drawn = radius[:64] + angle[:53] + radius[64:75]
    further = radius[75:96] + "0" * 11 + radius[96:] + angle[53:64] + "0" * 21 + angle[64:]
    return [
        np.array([int(text[i : i + 32], 2) for i in range(0, len(text), 32)], np.uint32)
        for text in (drawn, further)
    ]


def wrong_numbers(round_exactly, off=0):
    """How many are rounded to another integer, from an estimate that is `off`."""
    wrong = 0
    for u, v, is_sine, scale, below, beyond in next_to_halves():
        words, further = split(u, v)
        about = max(0, below + off)
        found = round_exactly(
            tf.constant(words),
            tf.constant(further),
            tf.constant(is_sine),
            tf.constant(scale, tf.float64),
            tf.constant(about, tf.float64),
        )
        turns = float(v[0]) / 2**32
        sign = np.sign(np.sin(2 * np.pi * turns) if is_sine else np.cos(2 * np.pi * turns))
        wrong += float(found) != sign * (below + beyond)
    return wrong


traced = tf.function(rounded_exactly)  # Once, for all that is rounded.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("off", [-3, -1, 0, 1, 2])
def test_numbers_next_to_a_half_are_those_of_exact_arithmetic(off):
    assert wrong_numbers(traced, off) == 0


def by_float64(words, further, is_sine, scale, about):
    """Mutant."""
    normal = chacha.box_muller(words[:, tf.newaxis])
    return tf.round(scale * normal[tf.cast(is_sine, tf.int32)])


def without_further_bits(words, further, is_sine, scale, about):
    """Mutant."""
    return rounded_exactly(words, tf.zeros_like(further), is_sine, scale, about)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mutant", [by_float64, without_further_bits])
def test_other_numbers_are_caught(mutant):
    assert wrong_numbers(tf.function(mutant)) > 5


@pytest.mark.slow
def test_a_radius_of_which_float64_loses_all_is_rounded_exactly():
    """Next to u = 1, float64 finds a radius of 0; scaled, the number may be far from 0."""
    words = np.array([[2**32 - 1], [2**32 - 1], [2**29], [0]], np.uint32)
    scale = tf.constant(2.0**39, tf.float64)
    drawn, is_open = rounded_gaussian.round_pairs(tf.constant(words), scale)
    assert np.all(is_open) and np.all(np.abs(drawn) == 0.5)
    further = np.zeros(16, np.uint32)
    with mpmath.workprec(BITS):
        _, exact = exact_pair(*uniforms_of(words[:, 0], further))
        expected = [int(mpmath.nint(mpmath.mpf(2) ** 39 * z)) for z in exact]
    assert min(expected) > 50
    about = tf.constant(0.0, tf.float64)
    found = [
        float(traced(tf.constant(words[:, 0]), tf.constant(further), is_sine, scale, about))
        for is_sine in tf.constant([False, True])
    ]
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_is_settled_is_what_float64_finds_where_it_can(jit_compile, monkeypatch):
    """With a doubt that leaves some of the numbers open, they are the same."""
    count = 30_000
    expected = rounded_normals(KEY, count, SCALE).numpy()
    monkeypatch.setattr(rounded_gaussian, "_DOUBT", 2.0**-36)
    words = tf.reshape(chacha.random_words(KEY, 4 * 5000), [4, -1])
    _, is_open = rounded_gaussian.round_pairs(words, tf.constant(SCALE, tf.float64), 2.0**-36)
    assert 1 <= np.sum(is_open) <= 30
    draw = tf.function(lambda key: rounded_normals(key, count, SCALE), jit_compile=jit_compile)
    np.testing.assert_array_equal(draw(KEY), expected)


@pytest.mark.slow
def test_numbers_that_stay_open_are_caught(monkeypatch):
    monkeypatch.setattr(
        rounded_gaussian, "rounded_exactly", lambda *_: tf.constant(0.0, tf.float64)
    )
    rounded_gaussian._settling.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_what_is_settled_is_what_float64_finds_where_it_can(False, monkeypatch)
    finally:
        rounded_gaussian._settling.cache_clear()


def test_radii_of_which_75_bits_say_little_are_left_open():
    words = np.random.default_rng(0).integers(0, 2**32, [4, 50], np.uint32)
    words[0, :25] %= 2**8
    _, is_open = rounded_gaussian.round_pairs(tf.constant(words), tf.constant(SCALE, tf.float64))
    assert np.all(np.reshape(is_open, [2, 50])[:, :25]) and np.sum(is_open) == 50
