"""The key stream and the normal numbers made of it."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.step.test_noise import assert_normal
from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.tf import one_loop
from tfdp.step.noise import add_gaussian_noise

KEY = tf.constant([1, 2], tf.int64)
# RFC 8439, section 2.3.2 and test vectors 1 and 2 of appendix A.1: key, nonce, number, block.
VECTORS = [
    (
        bytes(range(32)),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32),
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
]


def by_xla(blocks):
    def compiled(key, nonce, first, count):
        compute = tf.function(lambda *tensors: blocks(*tensors, count), jit_compile=True)
        return compute(key, nonce, first)

    return compiled


PLAIN, COMPILED = chacha.blocks, by_xla(chacha.blocks)
IN_ONE_LOOP = by_xla(chacha.blocks_in_one_loop)


def stream(key, nonce, number, count=1, blocks=PLAIN):
    words = [tf.constant(np.frombuffer(part, "<u4")) for part in (key, nonce)]
    drawn = blocks(*words, tf.constant(number, tf.uint32), count)
    return drawn.numpy().T.astype("<u4").tobytes().hex()


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("blocks", [PLAIN, COMPILED, IN_ONE_LOOP], ids=["plain", "xla", "loop"])
@pytest.mark.parametrize(("key", "nonce", "number", "expected"), VECTORS)
def test_vectors_of_the_rfc(key, nonce, number, expected, blocks):
    assert stream(key, bytes.fromhex(nonce), number, blocks=blocks) == expected


@pytest.mark.parametrize("blocks", [PLAIN, IN_ONE_LOOP], ids=["plain", "loop"])
def test_blocks_follow_each_other(blocks):
    (_, nonce, _, first), (*_, second) = VECTORS[1:]
    assert stream(bytes(32), bytes.fromhex(nonce), 0, 2, blocks) == first + second


@pytest.mark.parametrize("words_of_key", [4, 8])
def test_one_loop_gives_the_same_blocks(words_of_key):
    rng = np.random.default_rng(0)
    key, nonce = (tf.constant(rng.integers(0, 2**32, n, np.uint32)) for n in (words_of_key, 3))
    first = tf.constant(2**32 - 300, tf.uint32)  # The counter passes its end.
    expected = COMPILED(key, nonce, first, 1000)
    np.testing.assert_array_equal(IN_ONE_LOOP(key, nonce, first, 1000), expected)


def test_words_are_the_same_with_and_without_one_loop(monkeypatch):
    drawn, zero = [], tf.constant(0, tf.uint32)
    for is_fast in (lambda: False, lambda: True):
        monkeypatch.setattr(one_loop, "is_fast", is_fast)
        words = tf.function(lambda: chacha.words_of_pairs(KEY, zero, zero, chacha._MANY))
        drawn.append(tf.function(words, jit_compile=True)().numpy())
    np.testing.assert_array_equal(*drawn)
    words = chacha.random_words(KEY, 16 * chacha._MANY).numpy()
    np.testing.assert_array_equal(words.reshape(-1, 16).T.ravel(), drawn[0].ravel())


def test_a_diagonal_that_is_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(chacha, "_DIAGONALS", chacha._DIAGONALS[:3])
    monkeypatch.setattr(chacha, "_double_round", chacha._mixed)
    with pytest.raises(AssertionError):
        test_vectors_of_the_rfc(*VECTORS[0], IN_ONE_LOOP)


@pytest.mark.parametrize("rounds", [8, 12])
def test_fewer_rounds_are_caught(rounds, monkeypatch):
    loop = tf.while_loop
    fewer = lambda _, body, start: loop(lambda i, *_: i < rounds // 2, body, start)  # noqa: E731
    monkeypatch.setattr(tf, "while_loop", fewer)
    with pytest.raises(AssertionError):
        test_vectors_of_the_rfc(*VECTORS[0], PLAIN)


# Keys.


def words_of(key, use=0):
    return chacha.random_words(tf.constant(key), 4, use).numpy()


def assert_all_bits_count(words_of):
    """Words change in half of their bits with any bit of the secret, the number and the use."""
    key = np.array([1, 2, 3, 4, 7], np.int64)
    drawn = [words_of(key)]
    for bit in range(0, 320, 5):
        changed = key.copy()
        changed[bit // 64] ^= np.int64(1) << np.int64(bit % 64)
        drawn.append(words_of(changed))
    drawn.extend(words_of(key, use) for use in (1, 2))
    ones = np.unpackbits(np.array(drawn).view(np.uint8), axis=1)
    distances = np.sum(ones[1:] != ones[0], axis=1)  # 64 +- 5.7 of 128 bits each.
    assert distances.min() > 64 - 7 * 5.7 and distances.max() < 64 + 7 * 5.7
    assert abs(distances.mean() - 64) < 5 * 5.7 / np.sqrt(len(distances))


def test_words_depend_on_every_bit_of_the_key():
    assert_all_bits_count(words_of)


@pytest.mark.parametrize("lost", [2, 4])
def test_a_key_of_which_a_part_is_lost_is_caught(lost):
    def without(key, use=0):
        return words_of(np.where(np.arange(5) == lost, 0, key), use)

    with pytest.raises(AssertionError):
        assert_all_bits_count(without)


def test_keys_of_a_stream_are_its_secret_and_a_number():
    stream = KeyStream()
    for number in range(3):
        np.testing.assert_array_equal(stream.next_key(), [*stream.secret(), number])


def test_streams_have_256_bits_of_entropy():
    secrets = [KeyStream().secret().numpy() for _ in range(50)]
    assert all(secret.shape == (4,) for secret in secrets)
    words = np.array(secrets).view(np.uint32).ravel()
    assert len(set(words)) == 50 * 8


# Normal numbers.


def test_logarithms():
    numbers = np.concatenate([2.0 ** -np.linspace(0, 129, 1001), np.linspace(0.4, 1, 1001)])
    np.testing.assert_allclose(chacha._log(numbers), np.log(numbers), rtol=2e-15, atol=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("count", [1, 340, 341, 5000, 90_000])
def test_any_number_of_them(count):
    drawn = chacha.normals(KEY, count).numpy()
    assert drawn.shape == (count,) and drawn.dtype == np.float64
    assert len(set(drawn)) == count
    unknown = tf.function(lambda n: chacha.normals(KEY, n))
    assert unknown(tf.constant(count)).shape == (count,)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_they_are_the_same_within_any_function(jit_compile):
    compute = tf.function(lambda key: chacha.normals(key, 1000), jit_compile=jit_compile)
    np.testing.assert_allclose(compute(KEY), chacha.normals(KEY, 1000), rtol=1e-12, atol=1e-12)


def test_points_lie_on_the_circle():
    turns = np.concatenate([np.linspace(0, 1, 9), np.random.default_rng(0).uniform(size=10_000)])
    for found, exact in zip(
        chacha._on_circle(tf.constant(turns)),
        (np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)),
        strict=True,
    ):
        np.testing.assert_allclose(found, exact, atol=5e-16)


def check_distribution(sample):
    """Kolmogorov-Smirnov, chi-square of bins out to where 10 are expected, and independence."""
    count = len(sample)
    assert_normal(sample, 1.0)
    edge = -scipy.stats.norm.ppf(10 / count)
    edges = np.linspace(-edge, edge, 200)
    expected = count * np.diff(scipy.stats.norm.cdf([-np.inf, *edges, np.inf]))
    found = np.histogram(sample, [-np.inf, *edges, np.inf])[0]
    assert scipy.stats.chisquare(found, expected).pvalue > 1e-6
    half = count // 2  # The two of one pair are that far apart, within a part.
    for lag in (1, half):
        assert abs(np.corrcoef(sample[lag:], sample[:-lag])[0, 1]) < 5 / np.sqrt(count - lag)


@pytest.mark.slow
def test_distribution_of_ten_million():
    check_distribution(np.concatenate([chacha.normals(KEY + i, 87_380) for i in range(115)]))


@pytest.mark.slow
def test_distribution_of_what_comes_in_parts():
    check_distribution(chacha.normals(KEY, 600_000).numpy())


def tail(words, further=None):
    """P-value of the radii of pairs, given that the first words of their bits are zero.

    The largest of 40,000 numbers is returned, too.
    """
    rng = np.random.default_rng(0)
    numbers, more = rng.integers(0, 2**32, [2, 4, 40_000], np.uint32)
    numbers[:words] = 0
    if words == 2:
        numbers[3] &= 2**32 - 2**11  # Its last 11 bits are the radius's: 75 bits are zero.
    further = more[:2] if further is None else further
    pairs = chacha.box_muller(tf.constant(numbers), tf.constant(further)).numpy().reshape(2, -1)
    radii = np.hypot(*pairs)
    # exp(-r^2 / 2) is uniform below the place value of the last zero.
    log_uniform = -(radii**2) / 2 + (0, 32, 75)[words] * np.log(2)
    return scipy.stats.kstest(np.exp(log_uniform), "uniform").pvalue, np.abs(pairs).max()


@pytest.mark.parametrize(("words", "farthest"), [(0, 4), (1, 7.5), (2, 10.5)])
def test_the_tail_is_right_far_beyond_what_is_ever_drawn(words, farthest):
    p_value, most = tail(words)
    assert p_value > 1e-4
    assert most > farthest


def test_a_tail_without_further_bits_is_caught():
    assert tail(2, np.full([2, 40_000], 2**31, np.uint32))[0] < 1e-9


def test_a_tail_of_32_bits_is_caught(monkeypatch):
    """Mutant: what `tf.random.stateless_normal` does."""
    right = chacha.box_muller

    def short(words, further):
        first, second, *angle = tf.unstack(words)
        middle = tf.fill(tf.shape(second), tf.constant(2**31, tf.uint32))
        return right(tf.stack([first, middle, *angle]), further)

    monkeypatch.setattr(chacha, "box_muller", short)
    with pytest.raises(AssertionError):
        test_the_tail_is_right_far_beyond_what_is_ever_drawn(1, 7.5)


@pytest.fixture
def traced_anew():
    """Makes functions be traced with what the test replaces, and then forgotten."""
    chacha._drawing_normals.cache_clear()
    yield
    chacha._drawing_normals.cache_clear()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("few_bits", [2.0**-22, 0.0])
def test_a_part_with_a_small_uniform_number_gets_further_bits(few_bits, traced_anew, monkeypatch):
    """They are words of another use of the key; no pair has a number below 2^-22 by itself here."""

    def first_words(words, further=None):
        numbers = [words[0], words[0] if further is None else further[0]]
        return tf.cast(tf.concat(numbers, 0), tf.float64)

    if few_bits:
        monkeypatch.setattr(chacha, "radius_uniform", lambda _: tf.constant([1.0, few_bits / 2]))
    monkeypatch.setattr(chacha, "box_muller", first_words)
    drawn, size = chacha.normals(KEY, 5000).numpy(), 672
    uses = tf.constant([0, 2**31], tf.uint32)
    same, other = (chacha.words_of_pairs(KEY, use, use * 0, size)[0].numpy() for use in uses)
    np.testing.assert_array_equal(drawn[: 4 * size], same)
    further = drawn[4 * size :]
    np.testing.assert_array_equal(further, (other if few_bits else same)[: len(further)])


def on_the_grid_of_float32(key):
    (noisy,) = add_gaussian_noise([tf.zeros([1000], tf.float64)], 1.0, key)
    return np.mean(noisy.numpy() == noisy.numpy().astype(np.float32))


def test_noise_for_float64_is_float64():
    """Or else what is added to it could be told from what is left on the grid."""
    assert on_the_grid_of_float32(KEY) == 0


def test_noise_of_float32_is_caught(monkeypatch):
    def coarse(key, count, dtype):
        return tf.cast(tf.random.stateless_normal([count], key[:2]), dtype)

    monkeypatch.setattr(chacha, "normals", coarse)
    with pytest.raises(AssertionError):
        test_noise_for_float64_is_float64()


# Other numbers.


def test_uses_of_one_key_are_independent():
    drawn = [chacha.random_words(KEY, 1000, use).numpy() for use in range(3)]
    assert len(set(np.concatenate(drawn))) > 2990
    ones = np.unpackbits(np.array(drawn).view(np.uint8), axis=1)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.mean(ones[first] == ones[second]) - 0.5) < 5 / 2 / np.sqrt(32_000)


@pytest.mark.parametrize("count", [3, 1000, 300_000])
def test_words_are_those_of_the_key_stream(count):
    words = chacha.random_words(KEY, count, use=5).numpy()
    key = tf.constant(KEY.numpy().view(np.uint32))
    nonce, zero = tf.constant([0, 0, 5], tf.uint32), tf.constant(0, tf.uint32)
    stream = chacha.blocks(key, nonce, zero, count // 16 + 1).numpy()
    np.testing.assert_array_equal(words, stream.T.ravel()[:count])


def test_distributions_of_uniform_and_exponential_numbers():
    uniform = chacha.uniforms(KEY, 200_000).numpy()
    assert np.all((uniform >= 0) & (uniform < 1)) and len(set(uniform)) == 200_000
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-6
    assert np.all(uniform * 2.0**53 == np.floor(uniform * 2.0**53))
    words = tf.reshape(chacha.random_words(KEY, 800_000, 1), [4, -1])
    exponential = chacha.exponentials(words).numpy()
    assert np.all(exponential >= 0)
    assert scipy.stats.kstest(exponential, "expon").pvalue > 1e-6
