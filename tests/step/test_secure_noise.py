"""Secure noise: grids, sensitivities, scales, and every kind of step that adds it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.step import test_adaptive_clip, test_noisy_acceptance
from tests.step.test_noise import CLIP, SIGMA, assert_normal, make, noise_of_one_step
from tests.support import compiled, crossentropy
from tfdp.base import devices
from tfdp.base.random.key_streams import KeyStream
from tfdp.step import secure_noise
from tfdp.step.secure_noise import add_secure_noise, grid_of, moved_sensitivity

pytestmark = pytest.mark.rewritten_graphs

X, Y = support.small_data(200)
KEY = tf.constant([1, 2, 3, 4, 5], tf.int64)
RULES = ["flat", "per_layer", "automatic", "adaptive_quantile", "importance_sampling"]


# The grid.


@pytest.mark.parametrize("sensitivity", [1e-15, 0.3, 0.5, 1.0, 1.9, 2e10])
def test_grids(sensitivity):
    step = float(grid_of(sensitivity))
    assert math.frexp(step)[0] == 0.5
    assert sensitivity * 2.0**-23 < step <= sensitivity * 2.0**-22


def released(sums, dtype=tf.float64, sensitivity=0.3, noise=1.5):
    sums = [None if s is None else tf.constant(s, tf.float64) for s in sums]
    return add_secure_noise(sums, sensitivity, noise, 1e-9, KEY, [dtype] * len(sums))


def assert_on_the_grid(found, sensitivity=0.3):
    steps = found.numpy().astype(np.float64) / float(grid_of(sensitivity))
    np.testing.assert_array_equal(steps, np.round(steps))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_whatever_the_sum_what_is_released_is_on_the_grid(dtype):
    for sums in ([0.0] * 500, np.random.default_rng(0).normal(size=500), [1e-30] * 500):
        (found,) = released([sums], dtype)
        assert found.dtype == dtype
        assert_on_the_grid(found)


def test_a_sum_that_is_not_moved_to_the_grid_is_caught(monkeypatch):
    monkeypatch.setattr(tf, "round", tf.identity)  # Mutant; scales are raised by `ceil`.
    with pytest.raises(AssertionError):
        test_whatever_the_sum_what_is_released_is_on_the_grid(tf.float64)


def test_shapes_and_variables_without_a_gradient():
    found = released([np.zeros([3, 4]), None, np.zeros([5])])
    assert [None if f is None else f.shape.as_list() for f in found] == [[3, 4], None, [5]]
    noise = np.concatenate([np.ravel(found[0]), np.ravel(found[2])])
    assert len(set(noise)) == 17
    assert released([None]) == [None]


def zeros_that_show_a_sign(jit_compile):
    """How many released zeros are negative, of sums that are rounded to -0.0 and to 0.0."""
    sums = tf.constant(-0.1 * float(grid_of(0.3)), tf.float64, [4000])

    @tf.function(jit_compile=jit_compile)
    def draw():
        return add_secure_noise([sums], 0.3, 1e-7, 0.0, KEY, [tf.float64])[0]

    found = draw().numpy()
    assert np.sum(found == 0) > 1000
    return np.sum(np.signbit(found[found == 0]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_released_zeros_have_no_sign(jit_compile):
    assert zeros_that_show_a_sign(jit_compile) == 0


def test_a_zero_with_the_sign_of_the_sum_is_caught(monkeypatch):
    mutant = lambda steps, grid, dtype: tf.cast(steps * grid + 0.0, dtype)  # noqa: E731
    monkeypatch.setattr(secure_noise, "_on_grid", mutant)
    assert zeros_that_show_a_sign(False) > 100


# Sensitivity and scale.


def moved_on_the_grid(sensitivity, size, rng):
    """The exact distance of two sums on the grid that are one sensitivity apart, squared."""
    step = float(grid_of(sensitivity))
    way = rng.normal(size=size)
    way *= sensitivity / np.linalg.norm(way) * (1 - 1e-12)
    # On either side of the middle between two points: as far apart as the grid makes it.
    first = (np.floor(rng.normal(size=size) / step) + 0.5) * step - np.sign(way) * step * 1e-6
    ends = [np.round(end / step) for end in (first, first + way)]
    return sum(Fraction(int(d)) ** 2 for d in ends[1] - ends[0]) * Fraction(step) ** 2


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_neighbours_on_the_grid_are_at_most_the_moved_sensitivity_apart(size):
    rng = np.random.default_rng(size)
    for sensitivity in (0.3, 1.0):
        moved = moved_on_the_grid(sensitivity, size, rng)
        assert moved <= Fraction(float(moved_sensitivity(sensitivity, 0.0, size))) ** 2
        if size == 1 and sensitivity == 0.3:  # Without the charge, it would be too little.
            assert moved > Fraction(sensitivity) ** 2


def test_the_charge_is_small():
    assert float(moved_sensitivity(1.0, 1e-6, 550_570)) < 1.0002
    assert float(moved_sensitivity(1.9, 1e-6, 10_000_000)) < 1.9 * 1.001


def test_sums_with_too_much_rounding_are_not_released():
    found = add_secure_noise([tf.zeros([3], tf.float64)], 1.0, 1.0, 1.5, KEY, [tf.float32])[0]
    assert np.all(np.isnan(found))


def scale_of(monkeypatch, sensitivity, noise, error, size):
    """The standard deviation that is asked for, over the noise multiplier."""
    scales = []

    def drawing(key, count, scale):
        scales.append(float(scale) * float(grid_of(sensitivity)))
        return tf.zeros([count], tf.float64)

    monkeypatch.setattr(secure_noise, "rounded_normals", drawing)
    zeros = [tf.zeros([size - 1], tf.float64), tf.zeros([1], tf.float64)]
    add_secure_noise(zeros, sensitivity, noise, error, KEY, [tf.float32] * 2)
    return scales[0] / noise


def test_the_scale_covers_the_sensitivity_the_rounding_and_the_grid(monkeypatch):
    scale = scale_of(monkeypatch, 0.3, 1.7, 1e-4, 10_000)
    expected = 0.3 * (1 + 2e-4) + 100 * float(grid_of(0.3))
    assert expected <= scale <= expected * (1 + 1e-9)


def without_the_grid(sensitivity, error, size):
    """Mutant."""
    return tf.constant(sensitivity * (1 + 2 * error), tf.float64)


def without_the_rounding(sensitivity, error, size):
    """Mutant."""
    return moved_sensitivity(sensitivity, 0.0, size)


@pytest.mark.parametrize("mutant", [without_the_grid, without_the_rounding])
def test_a_scale_that_covers_less_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(secure_noise, "moved_sensitivity", mutant)
    with pytest.raises(AssertionError):
        test_the_scale_covers_the_sensitivity_the_rounding_and_the_grid(monkeypatch)


# Steps.


def test_distribution_of_the_noise_of_a_step():
    optimizer = make(gradient_accumulation_steps=4, secure_noise=True)
    assert_normal(noise_of_one_step(optimizer, 4), SIGMA * CLIP)


@pytest.mark.slow
def test_distribution_of_the_noise_with_microbatches():
    noise = noise_of_one_step(make(num_microbatches=20, secure_noise=True))
    assert_normal(noise, 2 * SIGMA * CLIP)


class NoGrid(tfdp.DPSGD):
    """Mutant: floats in the place of the grid."""

    def _add_noise(self, total, step):
        self._clipping.wide_sums = False
        try:
            return super()._add_noise(total, step)
        finally:
            self._clipping.wide_sums = True


def sums_are_on_the_grid(cls=tfdp.DPSGD, jit_compile=None, chunk_size=None, **kwargs):
    """Checks what the base optimizer gets, times the divisor, in one step."""
    data = tfdp.data.poisson_batches(
        (X, Y),
        expected_batch_size=32,
        seed=0,
        steps_per_epoch=1,
        chunk_size=chunk_size,
        padding="full",
    )
    optimizer = cls(
        0.5, 1.0, learning_rate=1.0, sampling=data.sampling, secure_noise=True, **kwargs
    )
    model = support.small_model()
    model.compile(optimizer, crossentropy(), jit_compile=jit_compile)
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    clip = optimizer.current_l2_norm_clip
    model.fit(data, verbose=0)  # From weights of zero: weights are -1/32 of the noisy sum, exactly.
    sensitivity = clip * (1 if kwargs.get("num_microbatches") is None else 2)
    for weights in model.get_weights():
        assert np.any(weights != 0)
        assert_on_the_grid(tf.constant(weights * 32), sensitivity)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", RULES)
def test_steps_release_points_of_the_grid(rule):
    sums_are_on_the_grid(clipping_rule=rule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [{"engine": "vectorized"}, {"num_microbatches": 32}, {"chunk_size": 12}, {"jit_compile": True}],
)
def test_kinds_of_steps(kwargs):
    sums_are_on_the_grid(**kwargs)


@pytest.mark.slow
def test_noise_in_float32_is_caught():
    with pytest.raises(AssertionError):
        sums_are_on_the_grid(NoGrid)


@pytest.mark.slow
@pytest.mark.parametrize("cls", support.OPTIMIZERS)
def test_updates_are_those_without_it_but_for_the_noise(cls):
    weights = []
    for secure in (False, True):
        data = tfdp.data.poisson_batches(
            (X, Y), expected_batch_size=32, seed=0, steps_per_epoch=2, padding="full"
        )
        optimizer = cls(0.5, 1e-6, sampling=data.sampling, noise_seed=1, secure_noise=secure)
        model = compiled(optimizer)
        model.fit(data, verbose=0)
        weights.append(support.flat(model.get_weights()))
    np.testing.assert_allclose(*weights, atol=1e-4)


@pytest.mark.slow
def test_without_noise_nothing_changes():
    weights = []
    for secure in (False, True):
        data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, seed=0, steps_per_epoch=1)
        model = compiled(tfdp.DPSGD(0.5, 0.0, sampling=data.sampling, secure_noise=secure))
        model.fit(data, verbose=0)
        weights.append(support.flat(model.get_weights()))
    np.testing.assert_array_equal(*weights)


class Watching(tfdp.DPSGD):
    """Keeps the bound on the rounding of the last sum."""

    def _add_noise(self, total, step):
        self.watched.assign(total.error)
        return super()._add_noise(total, step)


@pytest.mark.slow
def test_the_error_of_chunks_is_added_up():
    found = []
    for chunk_size in (None, 12):
        data = tfdp.data.poisson_batches(
            (X, Y),
            expected_batch_size=32,
            seed=0,
            steps_per_epoch=1,
            chunk_size=chunk_size,
            padding="full",
        )
        optimizer = Watching(0.5, 1.0, sampling=data.sampling, secure_noise=True)
        optimizer.watched = tf.Variable(0.0, dtype=tf.float64)
        compiled(optimizer).fit(data, verbose=0)
        found.append(optimizer.watched.numpy())
    assert 0 < found[0] < 1e-7
    assert found[1] == pytest.approx(found[0], rel=0.2)


# The adaptive clip's count, and DPSUR's test.


@pytest.mark.slow
def test_the_count_is_on_its_grid_and_its_noise_has_its_distribution():
    keys = KeyStream(3, "count")
    draw = tf.function(
        lambda: secure_noise.add_secure_noise_to_count(tf.constant(10.5), 30.0, keys.next_key())
    )
    counts = np.array([float(draw()) for _ in range(2000)])
    assert np.all(counts * 2**23 == np.round(counts * 2**23))
    assert_normal(counts - 10.5, 30.0)


@pytest.mark.slow
def test_an_adaptive_clip_follows_the_norms():
    rule = tfdp.clipping.AdaptiveQuantileClipping(0.5, learning_rate=0.5, count_noise=2.0)
    data = test_adaptive_clip.batches(padding="full")
    kwargs = {"clipping_rule": rule, "sampling": data.sampling}
    optimizer = tfdp.DPSGD(50.0, 1.0, secure_noise=True, **kwargs)
    compiled(optimizer).fit(data, epochs=5, verbose=0)
    assert 0.1 < optimizer.current_l2_norm_clip < 10
    assert optimizer.release == tfdp.DPSGD(50.0, 1.0, **kwargs).release


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("new", [-9.0, -0.1, 9.0])
@pytest.mark.parametrize(("actual", "right"), [(1.3, True), (1.3 * 2 / 3, False)])
def test_acceptance(new, actual, right, monkeypatch):
    test = test_noisy_acceptance.make
    monkeypatch.setattr(test_noisy_acceptance, "make", lambda **kw: test(secure_noise=True, **kw))
    test_noisy_acceptance.test_the_distribution_of_acceptance(new, actual, right)


@pytest.mark.parametrize("beta", [-0.7, -1.0, 0.0, 1e-9, 0.3333, 1000.0, -1000.0])
@pytest.mark.parametrize("noise", [0.125, 1.3, 2.0**14])
@pytest.mark.parametrize("clip", [0.25, 0.001, 0.7, 1e20])
def test_acceptance_stays_within_its_bounds_to_the_last_bit(beta, noise, clip, monkeypatch):
    """Whatever the difference, the half that decides is in their range, in exact arithmetic."""
    scales, noise_drawn = [], [0.0]

    def known_noise(key, count, scale):
        scales.append(math.ceil(float(scale) * 2**16) / 2**16)
        return tf.constant(noise_drawn, tf.float64)

    monkeypatch.setattr("tfdp.step.noisy_acceptance.rounded_normals", known_noise)
    test = test_noisy_acceptance.make(
        threshold=beta, noise_multiplier=noise, clip=clip, secure_noise=True
    )
    step = 2.0 ** math.floor(math.log2(clip)) / 2**22
    most = math.floor(clip / step) - 1
    for difference in (-clip, -clip / 3, 0.0, clip):
        steps = np.clip(np.round(float(np.float32(difference)) / step), -most, most)
        least_rejected = math.ceil(beta * clip / step) - steps
        for noise_drawn[0] in (least_rejected - 1, least_rejected):
            accepts = test._is_below_threshold(tf.constant(difference, tf.float32), KEY)
            assert accepts == (noise_drawn[0] < least_rejected)
        ratio = (Fraction(least_rejected) - Fraction(1, 2)) / Fraction(scales[-1])
        exact = Fraction(2) * Fraction(clip) * Fraction(noise)
        low, high = ((Fraction(beta) + s) * Fraction(clip) / exact for s in (-1, 1))
        assert low <= ratio <= high


@pytest.mark.slow
def test_dpsur_trains():
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, seed=0, padding="full")
    optimizer = tfdp.DPSURSGD(
        0.5,
        1.0,
        sampling=data.sampling,
        validation_batch_size=16,
        validation_noise_multiplier=1.3,
        secure_noise=True,
    )
    assert optimizer._test.secure_noise and optimizer.get_config()["secure_noise"] is True
    model = compiled(optimizer, tfdp.SelectiveModel(support.small_model()))
    model.fit(data, steps_per_epoch=2, verbose=0)
    assert optimizer.ledger.steps == 2


# Arguments.


@pytest.mark.parametrize("padding", ["none", "buckets"])
@pytest.mark.parametrize("cls", [tfdp.DPSGD, tfdp.DPSURSGD])
def test_batches_of_several_sizes_are_refused(padding, cls):
    """A row's gradient depends on their number: see `tests/clipping/test_last_bits.py`."""
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, padding=padding)
    kwargs = {"sampling": data.sampling, "secure_noise": True}
    if cls is tfdp.DPSURSGD:
        kwargs |= {"validation_batch_size": 16, "validation_noise_multiplier": 1.3}
    cls(0.5, 0.0, **kwargs)
    with pytest.raises(ValueError, match=f'(?s)`sampling` .*{padding}.*padding="full"'):
        cls(0.5, 1.0, **kwargs)


def test_selective_models_refuse_batches_of_several_sizes():
    optimizer = tfdp.DPSURSGD(
        0.5, 1.0, 32, validation_batch_size=16, validation_noise_multiplier=1.3, secure_noise=True
    )
    model = compiled(optimizer, tfdp.SelectiveModel(support.small_model()))
    with pytest.raises(ValueError, match="`x` must be sampled with padding=full"):
        model.fit(tfdp.data.poisson_batches((X, Y), expected_batch_size=32), steps_per_epoch=1)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--xla_cpu_enable_fast_math", True),
        ("--xla_dump_to=/tmp --xla_cpu_enable_fast_math=true", True),
        ("--xla_cpu_enable_fast_math=false", False),
        ("--xla_cpu_enable_fast_math=1 --xla_cpu_enable_fast_math=0", False),
        ("--xla_cpu_enable_fast_math_honor_nans=true", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_inexact_arithmetic_is_refused(flags, refused, in_file, monkeypatch, tmp_path):
    if in_file:
        (tmp_path / "flags").write_text(flags)
        flags = str(tmp_path / "flags")
    monkeypatch.setenv("XLA_FLAGS", flags)
    tfdp.DPSGD(CLIP, 0.0, 20)
    for secure in (False, True):
        if not refused:
            make(secure_noise=secure)
            continue
        with pytest.raises(ValueError, match="XLA_FLAGS must not have --xla_cpu_enable_fast_math:"):
            make(secure_noise=secure)


def test_it_is_in_the_config():
    optimizer = make(secure_noise=True)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.secure_noise is True and again._clipping.wide_sums
    assert make().get_config()["secure_noise"] is False
    old = make().get_config()
    del old["secure_noise"]
    assert type(optimizer).from_config(old).secure_noise is False


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"secure_noise": "yes"}, "`secure_noise` must be True or False. Received: .*'yes'"),
        ({"secure_noise": 1}, "`secure_noise` must be True or False"),
        ({"noise_multiplier": 1e6}, "`noise_multiplier` must be at most 32768 .*1000000"),
        (
            {"clipping_rule": tfdp.clipping.AdaptiveQuantileClipping(count_noise=1e6)},
            "`count_noise` must be at most 131072 .*1000000",
        ),
    ],
)
def test_arguments_are_checked(kwargs, message):
    kwargs = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "secure_noise": True, **kwargs}
    with pytest.raises(ValueError, match=message):
        tfdp.DPSGD(expected_batch_size=10, **kwargs)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"noise_multiplier": 0.1}, "validation_noise_multiplier"),
        ({"noise_multiplier": 1e5}, "validation_noise_multiplier"),
        ({"threshold": 1001.0}, "threshold"),
    ],
)
def test_arguments_of_the_test_are_checked(changes, name):
    test_noisy_acceptance.make(**changes)
    with pytest.raises(ValueError, match=f"`{name}` must be from .* with `secure_noise`"):
        test_noisy_acceptance.make(secure_noise=True, **changes)


def test_a_loss_of_two_terms_is_refused():
    x = tf.constant(X)
    weights = tf.Variable(tf.zeros([4]))
    optimizer = tfdp.DPSGD(1.0, 1.0, 10, learning_rate=1.0, secure_noise=True)

    @tf.function
    def step(x):
        loss = tfdp.clipping.TwoTermLoss(
            lambda x: tf.linalg.matvec(x, weights),
            None,
            batch=(x,),
            mask=tf.ones([len(X)], tf.bool),
            aggregation=tfdp.clipping.TermWiseAggregation(1.0, 2),
        )
        optimizer.minimize(loss, [weights])

    with pytest.raises(ValueError, match="`secure_noise` must be False with a TwoTermLoss"):
        step(x)


def test_the_noise_covers_what_one_example_moves_the_released_sums_by():
    """The optimizer takes the steps of neighbors on the grid, in exact arithmetic."""
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=32, padding="full")
    engine = tfdp.DPSGD(0.5, 1.0, sampling=data.sampling, secure_noise=True).clipping
    model = support.small_model()
    run = support.ClippedSum(engine, model, X)
    step = float(grid_of(0.5))
    everyone = run(X, Y)
    for i in range(5):
        other = run(X, Y, np.arange(len(X)) != i)
        steps = np.round(everyone / step) - np.round(other / step)
        moved = sum(Fraction(int(s)) ** 2 for s in steps) * Fraction(step) ** 2
        assert moved <= Fraction(float(moved_sensitivity(0.5, 1e-9, steps.size))) ** 2


@pytest.mark.parametrize("sampled", [True, False])
def test_on_a_gpu_it_warns(sampled, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=8, padding="full")
    batches = {"sampling": data.sampling} if sampled else {"expected_batch_size": 8}
    model = compiled(tfdp.DPSGD(0.5, 1.0, secure_noise=True, **batches))
    with pytest.warns(UserWarning, match="`secure_noise` does not do on a GPU"):
        model.fit(data, verbose=0)
