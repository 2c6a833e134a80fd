import functools
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdp
from tests import support
from tests.clipping.models import (
    CLIP,
    FAST,
    SEQUENCES,
    SLOW,
    VECTORS,
    ExpectsRows,
    N,
    Y,
    assert_equals_loop,
    built,
)
from tfdp.base import devices
from tfdp.clipping import OnePassEngine, SlowClippingWarning, VectorizedEngine, norms
from tfdp.clipping.one_pass import (
    combined_gradients,
    per_example_gradients,
    weight_uses,
    weighted_sums,
)
from tfdp.clipping.one_pass.op_gradients import registry

layers = tf.keras.layers


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("options", [{}, {"rows_per_pass": 3}], ids=["whole", "chunks"])
def test_what_has_no_rule_falls_back_and_says_so(name, options):
    engine = OnePassEngine(CLIP, **options)
    with pytest.warns(SlowClippingWarning, match="slower vectorized engine") as caught:
        assert_equals_loop(engine, *SLOW[name])
    assert len([w for w in caught if w.category is SlowClippingWarning]) == 1
    report = engine.report()
    assert report.fast_fraction < 1
    assert any(not entry.fast and "vectorized" in entry.how for entry in report.entries)
    assert (report.fallback is not None) == ("loop" in name)


COMPILED = ["dense", "embedding", "attention", "tied embedding", "rnn of a cell, masked"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "rows_per_pass"),
    [*((name, None) for name in COMPILED), ("conv2d", 3), ("rnn of a cell, masked", 3)],
)
def test_compiled_by_xla(name, rows_per_pass):
    engine = OnePassEngine(CLIP, rows_per_pass=rows_per_pass)
    assert_equals_loop(engine, *FAST[name], jit_compile=True)


def test_a_weight_without_dimensions_keeps_its_shape():
    weight = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def clipped(x):
        losses, key = tf.reduce_sum(x, axis=1) * weight, tf.constant([1, 2], tf.int64)
        return OnePassEngine(1.0).clipped_sum(losses, [weight], key).gradients[0]

    found = clipped(tf.ones([4, 3]))
    assert found.shape == []
    assert float(found) == pytest.approx(4, rel=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["swish", "custom gradients"])
def test_custom_gradients_are_copied_for_the_vectorised_engine(name):
    assert_equals_loop(VectorizedEngine(CLIP), *FAST[name])


CHUNKED = ["conv2d", "simple rnn", "embedding", "computed weights", "swish"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "rows_per_pass"),
    [*((name, 3) for name in CHUNKED), ("lstm", 1), ("conv2d", 1), ("conv2d", 100)],
)
def test_chunks_do_not_change_the_sum(name, rows_per_pass):
    assert_equals_loop(OnePassEngine(CLIP, rows_per_pass=rows_per_pass), *{**FAST, **SLOW}[name])


@pytest.mark.slow
def test_chunks_know_the_shapes_that_layers_state():
    """Shapes of a copy are not all inferred again: the same rules are used as for the whole."""
    model = tf.keras.Sequential([layers.Input([3, 4, 2])])
    for _ in range(3):
        model.add(layers.Dense(20, activation="gelu"))
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(2))
    model.build()
    x, y = np.random.default_rng(0).random([7, 3, 4, 2], "float32"), np.zeros([7], int)
    reports = []
    for rows_per_pass in (None, 3):
        engine = OnePassEngine(CLIP, rows_per_pass=rows_per_pass)
        support.ClippedSum(engine, model, x)(x, y)
        reports.append(engine.report())
    assert reports[0] == reports[1]
    assert "Gram" in reports[0].entries[2].how


def test_a_small_memory_budget_makes_chunks(monkeypatch):
    chunks = []
    original = OnePassEngine._in_chunks

    def watched(self, *args):
        chunks.append(args[-1])
        return original(self, *args)

    monkeypatch.setattr(OnePassEngine, "_in_chunks", watched)
    assert_equals_loop(ExpectsRows(CLIP, memory_budget=1000), *FAST["dense"])
    assert chunks and 1 <= chunks[0] < N


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", ["conv2d", "depthwise", "gram", "embedding", "shared layer, two inputs"]
)
@pytest.mark.parametrize("working_set", [1, 10_000])
def test_parts_of_norms_do_not_change_the_sum(name, working_set, monkeypatch):
    monkeypatch.setattr("tfdp.base.devices._CPU_BYTES", working_set)
    assert_equals_loop(OnePassEngine(CLIP), *FAST[name])


# Mutants of what rules have in common.


class SumOfNorms(per_example_gradients.Direct):
    """Mutant: the squared norms of a shared variable's uses are added up."""

    def __init__(self, parts, shape):
        tensors = [t for part in parts for t in part.tensors]
        super().__init__(tensors, shape, "mutant", lambda *args: None)
        self._parts = parts
        self._whole = combined_gradients._sum_of(parts, shape)

    def flat(self, tensors):
        return self._whole.flat(tensors)

    factored = True

    def squares(self, tensors):
        ends = np.cumsum([len(part.tensors) for part in self._parts])
        pieces = [
            part.squares(tensors[end - len(part.tensors) : end])
            for part, end in zip(self._parts, ends, strict=True)
        ]
        return tf.add_n(pieces)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["shared layer, two inputs", "tied embedding", "shared embedding"])
def test_sums_of_norms_are_caught(name, monkeypatch):
    combine = combined_gradients.combine

    def wrong(parts, shape):
        return combine(parts, shape) if len(parts) == 1 else SumOfNorms(parts, shape)

    monkeypatch.setattr("tfdp.clipping.one_pass.plan.combine", wrong)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), *FAST[name])


@pytest.mark.slow
def test_comparing_the_engines_notices_a_wrong_rule(monkeypatch):
    make, x = FAST["dense"]
    engine = support.ComparedClipping(CLIP)
    support.ClippedSum(engine, built(make, x), x)(x, Y)
    rule = registry.find_op_gradients("BiasAdd", 1)

    def wrong(use):
        return rule(weight_uses.Use(**{**use.__dict__, "gradient": 2 * use.gradient}))

    monkeypatch.setitem(registry._RULES, ("BiasAdd", 1), wrong)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sums differ"):
        support.ClippedSum(engine, built(make, x), x)(x, Y)


# Sensitivity, bad examples, masks.


@functools.cache
def _traced(name):
    make, x = FAST[name]
    engine = OnePassEngine(CLIP)
    return engine, support.ClippedSum(engine, built(make, x), x)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    name=st.sampled_from(["dense", "gram", "conv2d, gram and dilation", "conv1d"]),
)
def test_sensitivity_of_random_neighbours(seed, scale, name):
    make, x = FAST[name]
    x = x * np.float32(scale)
    row = seed % N
    engine, clipped_sum = _traced(name)
    clipped_sum.model.set_weights(built(make, x, seed).get_weights())
    others = np.arange(N) != row
    whole, masked = clipped_sum(x, Y), clipped_sum(x, Y, others)
    removed = clipped_sum(x[others], Y[others])
    bound = engine.sensitivity() * (1 + 1e-5)
    assert np.linalg.norm(whole - masked) <= bound
    assert np.linalg.norm(whole - removed) <= bound
    np.testing.assert_allclose(masked, removed, atol=1e-5)


class UnclippedOnePass(OnePassEngine):
    """Mutant: the clip is skipped."""

    @property
    def clips(self):
        return False


def test_a_skipped_clip_is_caught():
    make, x = FAST["dense"]
    engine = UnclippedOnePass(CLIP)
    clipped_sum = support.ClippedSum(engine, built(make, x), x)
    moved = clipped_sum(x, Y) - clipped_sum(x[1:], Y[1:])
    assert np.linalg.norm(moved) > engine.sensitivity()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["dense", "gram", "conv2d", "lstm, both directions"])
def test_a_bad_example_contributes_nothing(name):
    make, x = FAST[name]

    def loss(y_true, y_pred, sample_weight=None):  # So that large inputs give large gradients.
        return tf.reduce_sum(tf.square(y_pred), 1) * tf.cast(sample_weight, tf.float32)

    clipped_sum = support.ClippedSum(OnePassEngine(CLIP), built(make, x), x, loss=loss)
    others = np.arange(N) != 3
    expected = clipped_sum(x[others], Y[others])
    for bad in (np.nan, np.inf, 1e30):
        broken = x.copy()
        broken[3] = bad
        result = clipped_sum(broken, Y)
        assert np.all(np.isfinite(result)), bad
        if not (bad == 1e30 and "lstm" in name):  # Its gates saturate: the gradient is finite.
            np.testing.assert_allclose(result, expected, atol=1e-5, err_msg=str(bad))


@pytest.mark.parametrize("name", ["dense", "embedding", "conv1d"])
def test_masked_rows_contribute_nothing_and_empty_batches_are_zero(name):
    make, x = FAST[name]
    clipped_sum = support.ClippedSum(OnePassEngine(CLIP), built(make, x), x)
    mask = np.arange(N) % 2 == 0
    padded = x.copy()
    padded[~mask] = np.nan if x.dtype == np.float32 else 3
    expected = clipped_sum(x[mask], Y[mask])
    np.testing.assert_allclose(clipped_sum(padded, Y, mask), expected, atol=1e-6)
    assert not np.any(clipped_sum(x, Y, np.zeros(N, bool)))
    assert not np.any(clipped_sum(x[:0], Y[:0]))


def test_cancelling_positions_do_not_weaken_the_clip():
    """Norms by Gram matrices lose digits where positions cancel: they must not come out too low."""
    steps, features = 8, 64
    rng = np.random.default_rng(0)
    direction = rng.normal(size=features)
    signs = np.where(np.arange(steps) % 2, 1, -1)
    x = 1e4 * signs[np.newaxis, :, np.newaxis] * direction + rng.normal(size=(N, steps, features))
    x = x.astype("float32")

    def make():
        dense = layers.Dense(64, use_bias=False)
        return tf.keras.Sequential([dense, layers.GlobalAveragePooling1D()])

    def loss(y_true, y_pred, sample_weight=None):
        return tf.reduce_sum(y_pred, 1) * tf.cast(sample_weight, tf.float32)

    engine = OnePassEngine(CLIP)
    clipped_sum = support.ClippedSum(engine, built(make, x), x, loss=loss)
    lengths = [np.linalg.norm(clipped_sum(x, Y, np.arange(N) == i)) for i in range(N)]
    assert max(lengths) <= CLIP * (1 + 1e-3)
    assert "Gram" in engine.report().entries[0].how


def test_without_the_guard_the_clip_would_be_too_weak(monkeypatch):
    monkeypatch.setattr(norms, "_guard", lambda *_: 0.0)
    with pytest.raises(AssertionError):
        test_cancelling_positions_do_not_weaken_the_clip()


@pytest.mark.slow
def test_microbatches_are_those_of_the_vectorised_engine():
    make, x = FAST["dense"]
    model = built(make, x)
    engine = OnePassEngine(CLIP, num_microbatches=2)
    fast = support.ClippedSum(engine, model, x)(x, Y)
    slow = support.ClippedSum(VectorizedEngine(CLIP, num_microbatches=2), model, x)(x, Y)
    np.testing.assert_allclose(fast, slow, atol=1e-7)
    assert "Microbatches" in engine.report().fallback


# Other clipping rules.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", ["per_layer", "automatic"])
@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_other_rules_equal_a_loop(rule, engine):
    make, x = FAST["conv2d"]
    model = built(make, x)
    expected = 0
    for i in range(N):
        one = support.looped_clipped_sum(model, x[i : i + 1], Y[i : i + 1], np.inf)
        sizes = [v.shape.num_elements() for v in model.trainable_variables]
        names = [v.name.rpartition("/")[0] for v in model.trainable_variables]
        parts = np.split(one, np.cumsum(sizes)[:-1])
        if rule == "automatic":
            expected = expected + CLIP * one / (np.linalg.norm(one) + 0.01)
            continue
        limit = CLIP / math.sqrt(len(set(names)))
        for layer in set(names):
            norm = np.linalg.norm(
                np.concatenate([p for p, n in zip(parts, names, strict=True) if n == layer])
            )
            for j, n in enumerate(names):
                if n == layer:
                    parts[j] = parts[j] / max(1, norm / limit)
        expected = expected + np.concatenate(parts)
    actual = support.ClippedSum(engine(CLIP, clipping_rule=rule), model, x)(x, Y)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


# Models that mix examples, and models of which nothing is known.


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - tf.reduce_mean(x, axis=0),
        lambda x: tf.nn.softmax(x, axis=0),
        lambda x: tf.cumsum(x, axis=0),
        lambda x: tf.reverse(x, [0]),
        lambda x: tf.matmul(tf.matmul(x, x, transpose_b=True), x),
        lambda x: tf.gather(x, tf.argsort(x[:, 0])),
        lambda x: tf.einsum("ij,kj->ij", x, x),
        lambda x: tf.transpose(tf.sort(tf.transpose(x))),
        tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, axis=0))),
    ],
    ids=["mean", "softmax", "cumsum", "reverse", "matmul", "gather", "einsum", "sort", "gradient"],
)
def test_mixing_examples_is_an_error(mix):
    model = tf.keras.Sequential([layers.Dense(4), layers.Lambda(mix), layers.Dense(3)])
    with pytest.raises(ValueError, match="mixes examples"):
        support.ClippedSum(OnePassEngine(CLIP), model, VECTORS)(VECTORS, Y)


class Opaque(layers.Layer):
    """An operation that no rule knows."""

    def call(self, x):
        return tf.math.bessel_i0e(x) * tf.reduce_max(x, axis=-1, keepdims=True)


@pytest.mark.slow
def test_a_model_of_unknown_layers_still_trains():
    def make(engine):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([layers.Dense(4), Opaque(), layers.Dense(3)])
        optimizer = tfdp.DPSGD(CLIP, 0.0, expected_batch_size=N, engine=engine)
        return support.compiled(optimizer, model)

    data = tf.data.Dataset.from_tensor_slices((VECTORS, Y)).batch(N)
    trained = []
    for engine in ("one_pass", "vectorized"):
        model = make(engine)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SlowClippingWarning)
            model.fit(data, epochs=3, verbose=0)
            model.fit(data, epochs=1, verbose=0)
        slow = [w for w in caught if w.category is SlowClippingWarning]
        assert len(slow) == (engine == "one_pass")
        trained.append(support.flat(model.trainable_variables))
        if engine == "one_pass":
            assert "no rule says" in model.optimizer.clipping.report().fallback
            assert "cannot prove" in str(slow[0].message)
    np.testing.assert_allclose(*trained, atol=1e-6)


def test_weights_that_multiply_the_sum_of_the_losses_are_not_forgotten():
    class Weighted(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.w = layers.Dense(3), self.add_weight("w", [], initializer="ones")

        def call(self, x):
            return self.dense(x)

    model = built(Weighted, VECTORS)

    def loss(y_true, y_pred, sample_weight=None):
        losses = support.crossentropy("sum")(y_true, y_pred, sample_weight=sample_weight)
        return losses * model.w

    engine = OnePassEngine(CLIP)
    actual = support.ClippedSum(engine, model, VECTORS, loss=loss)(VECTORS, Y)
    expected = support.looped_clipped_sum(model, VECTORS, Y, CLIP, loss=loss)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert engine.report().fallback is None


def test_half_precision_batches_keep_their_type_where_there_is_no_rule():
    make, x = SLOW["weights twice"]
    model = tf.keras.Sequential([layers.Lambda(lambda t: tf.cast(t, tf.float32)), make()])
    half = x.astype("float16")
    expected = support.looped_clipped_sum(model, half, Y, CLIP)
    actual = support.ClippedSum(OnePassEngine(CLIP), model, half)(half, Y)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


@pytest.mark.slow
def test_float64_models():
    tf.keras.backend.set_floatx("float64")
    try:
        for name in ("conv2d", "dense on sequences", "gram"):
            make, x = FAST[name]
            assert_equals_loop(OnePassEngine(CLIP), make, x.astype("float64"))
    finally:
        tf.keras.backend.set_floatx("float32")


# Precision and tracing.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "narrow"), [("dense", False), ("conv2d", True), ("conv2d", False), ("gram", False)]
)
def test_mixed_bfloat16(name, narrow, monkeypatch):
    """Norms in float32: nobody's contribution is longer than the clip, and it is about right.

    Also where products of bfloat16 are `narrow`: the sums are of what has these norms.
    """
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: narrow)
    make, x = FAST[name]
    reference = support.looped_clipped_sum(built(make, x), x, Y, CLIP)
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = built(make, x)
        clipped_sum = support.ClippedSum(OnePassEngine(CLIP), model, x)
        gradients = clipped_sum.gradients(x, Y)[0]
        total = clipped_sum(x, Y)
        single = [clipped_sum(x, Y, np.arange(N) == i) for i in range(N)]
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert all(g.dtype == tf.float32 for g in gradients)
    assert max(np.linalg.norm(s) for s in single) <= CLIP * (1 + 1e-5)
    np.testing.assert_allclose(np.sum(single, axis=0), total, atol=1e-5)
    assert np.linalg.norm(total - reference) < 0.1 * np.linalg.norm(reference)


def test_norms_of_what_was_not_yet_rounded_are_caught(monkeypatch):
    """Mutant: the norm is that of the float32 product, the sum is made of rounded ones."""

    def of_rounded(flat, factors, wide):
        rounded = tf.cast(tf.cast(flat, tf.bfloat16), flat.dtype)
        return per_example_gradients.weighted_sum(rounded, factors, wide)

    monkeypatch.setattr(weighted_sums, "weighted_sum", of_rounded)
    with pytest.raises(AssertionError):
        test_mixed_bfloat16("conv2d", False, monkeypatch)


@pytest.mark.parametrize("narrow", [True, False])
def test_products_of_bfloat16(narrow, monkeypatch):
    """Kernels have gradients in bfloat16 where that is faster, and in float32 elsewhere."""
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: narrow)
    make, x = FAST["conv2d"]
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        clipped_sum = support.ClippedSum(OnePassEngine(1e6), built(make, x), x)
        kernel = clipped_sum.gradients(x, Y, np.arange(N) == 0)[0][0].numpy()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    rounded = tf.cast(tf.cast(kernel, tf.bfloat16), tf.float32).numpy()
    assert kernel.any() and np.array_equal(kernel, rounded) == narrow


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_poisson_batches_trace_the_step_once(jit_compile):
    traces = []

    class Counting(layers.Layer):
        def call(self, x):
            traces.append(x.shape)
            return x

    x, y = support.small_data(300)
    padding = "buckets" if jit_compile else "none"
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=30, seed=0, padding=padding)
    model = tf.keras.Sequential([layers.Input([4]), Counting(), layers.Dense(3)])
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    support.compiled(optimizer, model, jit_compile=jit_compile)
    model.fit(batches, steps_per_epoch=1, epochs=1, verbose=0)
    before = len(traces)  # Keras traces the first step twice, to create variables.
    model.fit(batches, epochs=2, verbose=0)
    assert len(traces) == before
    assert np.all(np.isfinite(support.flat(model.trainable_variables)))


@pytest.mark.slow
def test_one_replica_changes_nothing():
    def train(strategy):
        with strategy.scope():
            model = support.small_model()
            optimizer = tfdp.DPSGD(CLIP, 0.0, expected_batch_size=20, learning_rate=0.5)
            support.compiled(optimizer, model)
        x, y = support.small_data(60)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
        model.fit(data, epochs=2, verbose=0)
        return support.flat(model.trainable_variables)

    one = support.mirrored(1)
    np.testing.assert_allclose(train(one), train(tf.distribute.get_strategy()), atol=1e-6)


def test_variables_that_the_loss_does_not_use_get_no_gradient():
    class Unused(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), self.add_weight("unused", [2])

        def call(self, inputs):
            return self.used(inputs)

    gradients, _ = support.ClippedSum(OnePassEngine(CLIP), Unused(), VECTORS).gradients(VECTORS, Y)
    assert [g is None for g in gradients].count(True) == 1


def test_dropout_is_on_the_fast_path():
    model = tf.keras.Sequential(
        [layers.Dropout(0.5), layers.SpatialDropout1D(0.5), layers.Flatten(), layers.Dense(3)]
    )
    engine = OnePassEngine(CLIP)
    clipped_sum = support.ClippedSum(engine, model, SEQUENCES)
    first, second = clipped_sum(SEQUENCES, Y), clipped_sum(SEQUENCES, Y)
    assert not np.array_equal(first, second)  # Equal masks: once in 1e16 runs.
    assert engine.report().fast_fraction == 1
