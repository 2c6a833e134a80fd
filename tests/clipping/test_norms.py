"""Norms must never be too low: what is left of a gradient is compared with exact arithmetic."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import FAST, N, built
from tfdp.base import devices
from tfdp.clipping import (
    AutomaticClipping,
    FlatClipping,
    OnePassEngine,
    PerLayerClipping,
    VectorizedEngine,
    norms,
)
from tfdp.clipping.engine import LARGEST_CLIP, LEAST_CLIP
from tfdp.clipping.one_pass.combined_gradients import combine
from tfdp.clipping.one_pass.per_example_gradients import (
    Direct,
    Lookups,
    OuterProducts,
    weighted_sum,
)
from tfdp.contrib import ImportanceSamplingClipping

pytestmark = pytest.mark.rewritten_graphs

layers = tf.keras.layers
MOST = 1 + 1e-5
# Powers of ten from denormal numbers to nearly the largest of float32.
POWERS = [-44, -40, -38, -37, -30, -23, -20, -19, -18, -12, -6, 0, 3, 9, 15, 18, 19, 25, 38]
RULES = [
    FlatClipping(),
    PerLayerClipping(),
    AutomaticClipping(),
    AutomaticClipping(LEAST_CLIP),
    ImportanceSamplingClipping(),
]
CLIPS = [LEAST_CLIP, 1e-6, 1.0, LARGEST_CLIP]


def pairs(dtype):
    """Two scales for each row, all pairs of those that the type can hold."""
    limits = np.array([float(dtype.min), float(dtype.max)])
    scales = [10.0**p for p in POWERS if 10.0**p < limits[1]]
    if dtype == tf.float64:
        scales += [1e-300, 1e-160, 1e150]
    return np.array(list(itertools.product(scales, scales)))


def factors_of(shape, scales, rng):
    """Random numbers of those scales; some rows have equal entries, some mostly zeros."""
    kind = rng.integers(0, 3, (len(scales), 1, 1))
    values = rng.normal(size=shape)
    values = np.where(kind == 1, 0.7, values)
    values = np.where(kind == 2, values * (rng.random(shape) < 0.2), values)
    return values * scales[:, np.newaxis, np.newaxis]


def cast(values, dtype):
    with np.errstate(over="ignore"):
        return tf.constant(values, dtype)


def outer_products(positions, fan_in, fan_out, dtype, rng):
    scales = pairs(dtype)
    a = cast(factors_of((len(scales), positions, fan_in), scales[:, 0], rng), dtype)
    g = cast(factors_of((len(scales), positions, fan_out), scales[:, 1], rng), dtype)
    exact = np.einsum("ntp,ntd->npd", *(np.longdouble(tf.cast(t, tf.float64)) for t in (a, g)))
    return OuterProducts(a, g, [fan_in, fan_out], positions, fan_in, fan_out, ""), exact


def lookups(dtype, rng):
    scales = pairs(dtype)
    g = cast(factors_of((len(scales), 4, 3), scales[:, 1], rng), dtype)
    ids = rng.integers(0, 2, (len(scales), 4))
    exact = np.zeros([len(scales), 2, 3], np.longdouble)
    for i, row in enumerate(np.longdouble(tf.cast(g, tf.float64))):
        np.add.at(exact[i], ids[i], row)
    return Lookups(tf.constant(ids), g, [2, 3]), exact


def tied(dtype, rng):
    """Lookups and products of which some nearly cancel."""
    looked_up, first = lookups(dtype, rng)
    scales = pairs(dtype)
    a = cast(factors_of((len(scales), 3, 2), scales[:, 0], rng), dtype)
    b = cast(factors_of((len(scales), 3, 3), scales[:, 1], rng), dtype)
    wide = [np.longdouble(tf.cast(t, tf.float64)) for t in (a, b)]
    products = OuterProducts(b, a, [2, 3], 3, 3, 2, "", order=[1, 0])
    exact = first + np.einsum("nsv,nsd->nvd", *wide)
    return combine([looked_up, products], [2, 3]), exact


def direct(dtype, rng):
    scales = pairs(dtype)
    g = cast(factors_of((len(scales), 1, 2000), scales[:, 1], rng), dtype)
    exact = np.longdouble(tf.cast(g, tf.float64))
    return Direct([g], [2000], "", lambda g: g[:, 0]), exact


FORMS = {
    "product": lambda dtype, rng: outer_products(1, 50, 3, dtype, rng),
    "gram": lambda dtype, rng: outer_products(3, 60, 40, dtype, rng),
    "instantiated": lambda dtype, rng: outer_products(40, 4, 3, dtype, rng),
    "lookups": lookups,
    "tied": tied,
    "direct": direct,
}


def longest_of(form, dtype=tf.float32, jit_compile=False, seed=0, wide=False):
    """The largest norm that is left of a gradient, in units of the clip, over rules and clips.

    Norms of gradients are of numbers beyond float64's range too: long double.
    """
    contribution, exact = FORMS[form](dtype, np.random.default_rng(seed))
    run = tf.function(contribution.squares, jit_compile=jit_compile, autograph=False)
    squares = run(contribution.tensors)
    narrow = dtype == tf.bfloat16 and devices.multiplies_bfloat16()
    if (wide or narrow) and not (contribution.factored or contribution.whole):
        exact = np.longdouble(contribution.flat(contribution.tensors).numpy())  # It is rounded.
    with np.errstate(over="ignore", invalid="ignore"):
        true = np.sqrt(np.sum(np.square(exact.reshape(len(exact), -1)), axis=1))
    # Where the exact norm is non-finite, a factor must be zero.
    longest, kept, keep = 0.0, 0, tf.ones([len(true)], tf.bool)
    uniforms = tf.zeros([len(true)])  # Keeps as little as possible of what importance sampling may.
    for rule, clip in itertools.product(RULES, CLIPS):
        engine = OnePassEngine(clip, clipping_rule=rule)
        engine.wide_sums = wide
        for numbers in (uniforms, uniforms + 0.999999):
            found = engine._factors([squares], [0], keep, None, numbers)
            factors = np.longdouble(found.of_variable(0).numpy())
            assert np.all(np.isfinite(factors)) and np.all(factors >= 0)
            left = np.where(factors == 0, 0, factors * np.where(factors == 0, 0, true))
            longest = max(longest, float(np.max(left)) / clip)
            # Nor may a product on the way to the sum overflow.
            clean = [
                tf.where(
                    tf.reshape(found.bad, [-1] + [1] * (t.shape.rank - 1)), tf.zeros_like(t), t
                )
                for t in contribution.tensors
            ]
            if contribution.factored or contribution.whole:
                total = contribution.total(clean, found.of_variable(0), wide)
            else:
                total = weighted_sum(contribution.flat(clean), found.of_variable(0), wide)
            longest = longest if np.all(np.isfinite(total)) else math.inf
            kept += np.count_nonzero(factors)
    assert kept > len(true)
    return longest


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
def test_nothing_longer_than_the_clip_is_left(form, dtype, monkeypatch):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: False)
    assert longest_of(form, dtype) <= MOST


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_nor_where_products_are_of_bfloat16(form, monkeypatch):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: True)
    assert longest_of(form, tf.bfloat16) <= MOST


def test_it_would_be_with_norms_of_what_was_not_rounded(monkeypatch):
    """Mutant: sums are of gradients in bfloat16, and their norms of products in float32."""
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: True)

    def squares(self, tensors):
        a, g = self.pairs(tensors)
        product = tf.matmul(g, a, transpose_a=True)
        return norms.of_rows(tf.reshape(product, [-1, self.size]), self.size)

    monkeypatch.setattr(OuterProducts, "squares", squares)
    assert longest_of("instantiated", tf.bfloat16) > 1.001


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_nor_with_xla(form):
    assert longest_of(form, jit_compile=True) <= MOST


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_with_wide_sums_not_a_bit_more(form, dtype):
    assert longest_of(form, dtype, wide=True) <= 1


@pytest.mark.parametrize("form", ["product", "gram"])  # Others have no valid clip so short.
def test_without_the_share_of_underflow_it_would(form, monkeypatch):
    monkeypatch.setattr(norms, "TINY", 0.0)
    assert longest_of(form) > 1.5


def test_float64_squares_that_float32_cannot_hold(monkeypatch):
    squares = tf.constant([1e-300, 1e-50, 1e-40, 1.0, 1e37], tf.float64)
    assert np.all(np.float64(norms.in_float32(squares)) >= squares)
    assert np.isinf(norms.in_float32(tf.constant(1e39, tf.float64)))
    monkeypatch.setattr(norms, "TINY", 0.0)
    assert not np.all(np.float64(norms.in_float32(squares)) >= squares)


@pytest.mark.parametrize("size", [1000, 2**17])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_sums_of_equal_squares_are_not_too_low(size, jit_compile):
    """Rounding errors of equal terms point in the same direction."""
    values = np.float32(np.linspace(0.5, 1, 12))[:, np.newaxis] * np.ones([1, size], np.float32)
    exact = size * np.float64(values[:, 0]) ** 2
    for function in (norms.of_rows, norms.of_slices):
        run = tf.function(lambda v, f=function: f(v, size), jit_compile=jit_compile)
        squares = np.float64(run(values))
        most = 1 + 1e-4 + 8 * devices.product_rounding()
        assert np.all((squares >= exact) & (squares <= exact * most))


def cancelling(fan, rng):
    """Pairs of positions whose gradients nearly cancel; many rounding errors are alike."""
    a = 0.5 + 0.5 * rng.random((200, 1, 1)) * np.ones([1, 1, fan])
    a = np.concatenate([a, a * (1 + 10.0 ** rng.uniform(-4, -2, (200, 1, 1)))], axis=1)
    g = np.ones([200, 1, fan]) * rng.uniform(0.5, 1, (200, 1, 1))
    return np.float32(a), np.float32(np.concatenate([g, -g], axis=1))


def least_ratio(fan):
    a, g = cancelling(fan, np.random.default_rng(0))
    grams = [np.einsum("ntp,nsp->nts", np.float64(t), np.float64(t)) for t in (a, g)]
    exact = np.sum(grams[0] * grams[1], axis=(1, 2))
    found = norms.of_sums_of_outer_products(tf.constant(a), tf.constant(g), fan, fan, 2)
    return np.min(np.float64(found) / exact)


@pytest.mark.parametrize("fan", [40, 500])
def test_gram_matrices_of_cancelling_positions(fan, monkeypatch):
    assert least_ratio(fan) >= 1
    monkeypatch.setattr(norms, "_guard", lambda *_: 1e-7)  # Mutant.
    assert least_ratio(fan) < 0.99


# Coarser products: TF32 on GPUs, bfloat16 on CPUs.


def rounded(values, bits):
    """To so many digits after the first, as such products round their factors."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)


def test_where_products_are_rounded_to_ten_bits(monkeypatch):
    """The sum is made of rounded factors; the norm must be that of the sum or more."""
    monkeypatch.setattr(devices, "product_rounding", lambda: 2.0**-11)
    rng = np.random.default_rng(0)
    a, g = np.float32(rng.normal(size=(2, 300, 2, 30)))
    a[:, 1], g[:, 1] = a[:, 0], -g[:, 0] * (1 + 1e-3 * rng.random((300, 1)))
    a10, g10 = rounded(np.float64(a), 10), rounded(0.3 * np.float64(g), 10) / 0.3
    summed = np.linalg.norm(np.einsum("ntp,ntd->npd", a10, g10).reshape(300, -1), axis=1)
    # What a TF32 product would make of the Gram matrices.
    monkeypatch.setattr(
        tf,
        "matmul",
        lambda x, y, transpose_b: tf.constant(
            np.float32(np.einsum("ntp,nsp->nts", *[rounded(np.float64(t), 10) for t in (x, y)]))
        ),
    )
    bound = np.sqrt(norms.of_sums_of_outer_products(tf.constant(a), tf.constant(g), 30, 30, 2))
    assert np.all(summed <= bound)
    up = np.full([1, 30], 1 + 1.01 * 2.0**-11, np.float32)  # All are rounded up.
    product = 30 * rounded(np.float64(up[0, 0]), 10) ** 2
    assert product <= np.sqrt(norms.of_outer_products(up, up, 30, 30))
    monkeypatch.setattr(devices, "product_rounding", lambda: 0.0)  # Mutant.
    assert product > 1.0009 * np.sqrt(norms.of_outer_products(up, up, 30, 30))


def test_when_products_are_rounded(monkeypatch):
    monkeypatch.delenv("TF_SET_ONEDNN_FPMATH_MODE", raising=False)
    gpus: list[str] = []
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    assert devices.product_rounding() == 0
    gpus.append("GPU:0")
    assert devices.product_rounding() == 2.0**-10
    monkeypatch.setenv("TF_SET_ONEDNN_FPMATH_MODE", "BF16")
    assert devices.product_rounding() == 2.0**-8


# Engines.


def weighted(y_true, y_pred, sample_weight=None):
    """A loss whose gradients are as large as the targets."""
    axes = list(range(1, y_pred.shape.rank))
    y_true = tf.reshape(y_true, [-1] + [1] * len(axes))
    return tf.reduce_sum(y_true * y_pred, axes) * tf.cast(sample_weight, tf.float32)


MODELS = {
    "dense": FAST["dense"],
    "gram": FAST["gram"],
    "conv2d": FAST["conv2d"],
    "lstm": FAST["lstm, both directions"],
    "gru": FAST["gru"],
    "embedding": FAST["embedding"],
}


def longest_contribution(engine, name, jit_compile=False):
    """The largest norm that an example adds to the sum, with inputs and targets of any scale."""
    make, x = MODELS[name]
    model = built(make, x)
    clipped_sum = support.ClippedSum(
        engine, model, x, loss=weighted, jit_compile=jit_compile, target_dtype=tf.float32
    )
    longest, count = 0.0, 0
    floats = x.dtype == np.float32
    inputs = [-38, -19, 0, 10, 18] if floats else [0]
    for of_x, of_y in itertools.product(inputs, [-40, -20, 0, 19, 37]):
        scaled = x * np.float32(10.0**of_x) if floats else x
        targets = np.full(N, 10.0**of_y, np.float32)
        added = np.float64(clipped_sum(scaled, targets, np.arange(N) == 2))
        assert np.all(np.isfinite(added))
        longest, count = max(longest, np.linalg.norm(added)), count + bool(np.any(added))
    assert count >= 2
    return longest / engine.l2_norm_clip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_contributions(name):
    assert longest_contribution(OnePassEngine(0.3), name) <= MOST


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["dense", "embedding"])
def test_vectorised_contributions(name):
    assert longest_contribution(VectorizedEngine(0.3), name) <= MOST


@pytest.mark.parametrize("rule", ["per_layer", "automatic", "importance_sampling"])
def test_contributions_with_other_rules(rule):
    assert longest_contribution(OnePassEngine(0.3, clipping_rule=rule), "dense") <= MOST


@pytest.mark.slow
def test_contributions_with_xla():
    assert longest_contribution(OnePassEngine(0.3), "conv2d", jit_compile=True) <= MOST


P = 10_000


def short_inputs_of_a_steep_loss(engine, jit_compile=False):
    """Squared inputs vanish in float32, and the output's gradient makes up for it."""
    model = tf.keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    x = np.full([N, P], 1e-19, np.float32)
    clipped_sum = support.ClippedSum(
        engine, model, x, loss=weighted, jit_compile=jit_compile, target_dtype=tf.float32
    )
    return np.linalg.norm(clipped_sum(x, np.full(N, 1e19, np.float32), np.arange(N) == 0))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("rule", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("make", [OnePassEngine, VectorizedEngine])
def test_products_of_norms_that_underflow(make, rule):
    assert 0.5 < short_inputs_of_a_steep_loss(make(1.0, clipping_rule=rule)) <= MOST


def test_they_were_not_clipped(monkeypatch):
    monkeypatch.setattr(norms, "TINY", 0.0)
    assert short_inputs_of_a_steep_loss(OnePassEngine(1.0)) > 90
    assert short_inputs_of_a_steep_loss(OnePassEngine(1.0, clipping_rule="automatic")) > 900


@pytest.mark.parametrize("clip", [LEAST_CLIP / 2, 0.0, -1.0, math.nan, 2 * LARGEST_CLIP])
def test_the_range_of_clips(clip):
    with pytest.raises(ValueError, match=r"`l2_norm_clip` must be .*Received: l2_norm_clip="):
        OnePassEngine(clip)
    assert OnePassEngine(math.inf).l2_norm_clip == math.inf


@pytest.mark.parametrize(
    "stability", [0.0, LEAST_CLIP / 2, 2 * LARGEST_CLIP, math.inf, math.nan, "x", None, [1]]
)
def test_the_range_of_stabilities(stability):
    with pytest.raises(ValueError, match=r"`stability` must be .*1e-15 to 1e\+10.*Received"):
        AutomaticClipping(stability)


class DividesByZero(FlatClipping):
    """A rule whose factors may be infinite."""

    def factors(self, norms, clip):
        return clip / (norms - 1.0)


def test_factors_that_are_non_finite_are_zero():
    engine = OnePassEngine(1.0, clipping_rule=DividesByZero())
    squares = norms.of_rows(tf.zeros([1, 3]), 3) * 0 + 1.0
    found = engine._factors([squares], [0], tf.constant([True]), None, tf.zeros([1]))
    assert found.by_block.numpy() == 0 and found.bad.numpy()


def test_bounds_allow_for_the_rounding_of_texts_of_any_length():
    g = tf.random.stateless_normal([2, 1000, 3], [1, 2])
    same = tf.ones([2, 1000, 1000])
    specs = [tf.TensorSpec([2, None, None]), tf.TensorSpec([2, None, 3])]
    traced = tf.function(lambda same, g: norms.of_lookups(same, g, 3), input_signature=specs)
    exact = np.sum(np.sum(g.numpy().astype(np.float64), 1) ** 2, 1)
    lost = norms.of_lookups(same, g, 3).numpy() - exact
    np.testing.assert_allclose(traced(same, g).numpy() - exact, lost, rtol=0.1)
    for terms in (3, 64, 1000):
        found = norms._rounding(tf.constant(terms))
        np.testing.assert_allclose(found, norms._rounding(terms), rtol=1e-6)


def test_lookups_of_open_length_have_the_bound_of_static_ones(monkeypatch):
    """Mutant: the bound allows for the rounding of 64 positions, whatever the length."""
    positions, width = 500, 4
    same = tf.eye(positions, batch_shape=[2])  # No token comes twice: rounding counts most.
    g = tf.ones([2, positions, width])

    def squares(*lengths):
        specs = [tf.TensorSpec([2, *lengths, *lengths]), tf.TensorSpec([2, *lengths, width])]
        of_lookups = tf.function(lambda s, g: norms.of_lookups(s, g, width), input_signature=specs)
        return of_lookups(same, g).numpy()

    static = squares(positions)
    np.testing.assert_allclose(squares(None), static, rtol=1e-6)
    guard = norms._guard
    monkeypatch.setattr(norms, "_guard", lambda fan_in, fan_out, _: guard(fan_in, fan_out, 64))
    assert (squares(None) < static * (1 - 1e-4)).all()


@pytest.mark.parametrize("terms", [1, 7, 64, 300, 5000])
def test_rounding_of_open_lengths_is_that_of_static_ones(terms):
    assert float(norms._rounding(tf.constant(terms))) == pytest.approx(norms._rounding(terms))
