import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp
from tests import support
from tests.support import compiled, small_model
from tfdp.clipping import AdaptiveQuantileClipping, clipping_rules
from tfdp.clipping.clipping_rules import LARGEST_CLIP, LEAST_CLIP
from tfdp.step import adaptive_clip
from tfdp.step.adaptive_clip import AdaptiveClip

X, Y = support.small_data(400)


def batches(seed=0, **kwargs):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=100, seed=seed, **kwargs)


def make(rule="adaptive_quantile", cls=tfdp.DPSGD, clip=5.0, noise=1.0, **kwargs):
    data = batches(**kwargs)
    return cls(clip, noise, clipping_rule=rule, sampling=data.sampling), data


@pytest.mark.slow
@pytest.mark.parametrize("cls", [tfdp.DPSGD, tfdp.DPSignAdam])
def test_the_clip_follows_the_median_norm(cls):
    rule = AdaptiveQuantileClipping(0.5, learning_rate=0.5, count_noise=2.0)
    optimizer, data = make(rule, cls, clip=50.0)
    optimizer.learning_rate = 0.0
    model = compiled(optimizer)
    model.fit(data, epochs=12, verbose=0)
    norms = [
        np.linalg.norm(support.looped_clipped_sum(model, X[i : i + 1], Y[i : i + 1], np.inf))
        for i in range(100)
    ]
    assert optimizer.current_l2_norm_clip == pytest.approx(np.median(norms), rel=0.25)
    assert optimizer.l2_norm_clip == 50.0


def test_the_ledger_counts_the_noise_of_both():
    adaptive, data = make()
    flat, _ = make("flat")
    for optimizer in (adaptive, flat):
        compiled(optimizer).fit(data, epochs=2, verbose=0)
    assert adaptive.ledger.epsilon(1e-5).epsilon == flat.ledger.epsilon(1e-5).epsilon
    # The sum gets a little more noise for that.
    assert adaptive.noise_stddev > adaptive.noise_multiplier * adaptive.current_l2_norm_clip


def noise():
    """The noise on the sum and, as far as the clip shows it, on the count, in units of each."""
    clip = AdaptiveClip(AdaptiveQuantileClipping(count_noise=30.0), 2.0, [1.5], 100)
    variable = tf.Variable(2.0)
    clip.create(lambda *args, **kwargs: variable)
    traced = tf.function(clip.step)
    sums, counts = [], []
    for step in range(800):
        variable.assign(2.0)
        key = tf.constant([7, step], tf.int64)
        noisy = traced([tf.zeros([40])], tf.constant(0.0), clip.value(), key)
        sums.append(noisy[0].numpy())
        counts.append((np.log(variable.numpy() / 2.0) / -0.2) * 100)
    return np.concatenate(sums) / (clip.sum_noises[0] * 2.0), np.array(counts) / 30.0


@pytest.mark.slow
def test_distribution_of_the_noise():
    found = noise()

    def p_values(scale):
        return [stats.kstest(scale * values, "norm").pvalue for values in found]

    assert min(p_values(1.0)) > 1e-4
    for scale in (2 / 3, 3 / 2):  # Mutants.
        assert max(p_values(scale)) < 1e-4


def test_one_example_moves_the_count_by_half():
    model = small_model()
    engine = tfdp.clipping.OnePassEngine(1.0)
    model(X[:1])

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4]),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.bool),
        ]
    )
    def count(x, y, mask):
        losses = support.crossentropy()(y, model(x), sample_weight=mask)
        seed = tf.constant([1, 2])
        return engine.clipped_sum(losses, model.trainable_variables, seed).within_clip

    full = np.ones(50, bool)
    counts = [float(count(X[:50], Y[:50], full))]
    for row in range(50):
        counts.append(float(count(X[:50], Y[:50], np.arange(50) != row)))
    np.testing.assert_allclose(np.abs(np.array(counts[1:]) - counts[0]), 0.5)
    broken = X[:50].copy()
    broken[3] = np.nan
    assert abs(float(count(broken, Y[:50], full)) - counts[0]) in (0.0, 1.0)


@pytest.mark.slow
def test_accumulated_batches_move_the_clip_like_one():
    clips = []
    for chunk, steps in ((None, 1), (40, None)):
        data = batches(chunk_size=chunk)
        optimizer = tfdp.DPSGD(
            1.0,
            0.0,
            clipping_rule=AdaptiveQuantileClipping(count_noise=0.0),
            learning_rate=0.0,
            sampling=data.sampling,
        )
        assert (data.sampling.gradient_accumulation_steps == 1) == (steps == 1)
        compiled(optimizer).fit(data, epochs=1, verbose=0)
        clips.append(optimizer.current_l2_norm_clip)
    assert clips[0] == pytest.approx(clips[1], rel=1e-5)
    assert clips[0] != 1.0


@pytest.mark.slow
def test_the_clip_is_saved_and_restored(tmp_path):
    optimizer, data = make()
    model = compiled(optimizer)
    model.fit(data, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    restored = tf.keras.models.load_model(tmp_path / "model.keras")
    restored.optimizer.build(restored.trainable_variables)
    assert restored.optimizer.current_l2_norm_clip == optimizer.current_l2_norm_clip
    assert restored.optimizer.clipping.clipping_rule == optimizer.clipping.clipping_rule
    assert optimizer.current_l2_norm_clip != 5.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"clip": float("inf"), "noise": 0.0}, "l2_norm_clip"),
        ({"rule": "ghost"}, "clipping_rule"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        make(**arguments)


def test_microbatches_and_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="`num_microbatches` must be None with an adaptive clip"):
        tfdp.DPSGD(1.0, 1.0, 10, num_microbatches=2, clipping_rule="adaptive_quantile")
    with pytest.raises(ValueError, match=r"`engine` must be one of .*Received: engine='ghost'"):
        tfdp.DPSGD(1.0, 1.0, 10, engine="ghost")


def clip_after(steps, within, first=1e-13):
    """The clip after steps in which all gradients of 10 are, or are not, longer than it."""
    clip = AdaptiveClip(AdaptiveQuantileClipping(learning_rate=2.0), first, [1.0], 10)
    variable = tf.Variable(first)
    clip.create(lambda *args, **kwargs: variable)
    step = tf.function(clip.step)
    for i in range(steps):
        key = tf.constant([7, i], tf.int64)
        noisy = step([tf.zeros([3])], tf.constant(within), clip.value(), key)
        assert np.all(np.isfinite(noisy[0]))
    return clip, variable


def falls_without_end():
    clip, variable = clip_after(60, 5.0)
    return float(variable) < 0.99 * LEAST_CLIP or float(clip.value()) < 0.99 * LEAST_CLIP


def test_the_clip_has_a_floor_and_a_ceiling(monkeypatch):
    """A clip whose square vanishes would let short gradients pass unclipped."""
    assert not falls_without_end()
    clip, variable = clip_after(60, -5.0, first=1e8)
    assert float(clip.value()) == float(variable) == pytest.approx(LARGEST_CLIP)
    monkeypatch.setattr(clipping_rules, "within_range", lambda clip: clip)  # Mutant.
    monkeypatch.setattr(adaptive_clip, "within_range", lambda clip: clip)
    assert falls_without_end()


@pytest.mark.parametrize("count", [np.nan, np.inf, -np.inf])
def test_counts_that_are_non_finite_leave_the_clip(count):
    _, variable = clip_after(2, count, first=0.5)
    assert float(variable) == 0.5


@pytest.mark.parametrize("loaded", [np.nan, np.inf, 0.0, -1.0, 1e-40])
def test_clips_from_elsewhere_are_brought_into_their_range(loaded):
    clip, variable = clip_after(0, 0.0)
    variable.assign(loaded)
    assert LEAST_CLIP * 0.999 <= float(clip.value()) <= LARGEST_CLIP
