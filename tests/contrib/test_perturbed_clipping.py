"""Noise on each gradient before the clip: its distribution, the sensitivity, and what it costs."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tfdp.base.random import chacha
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.engine import ClippingEngine
from tfdp.contrib import PerturbedClipping
from tfdp.step.arguments import check_two_term_arguments

ROWS, WIDTH, STDDEV = 8, 3000, 0.005
UNITS = 2500
X = np.random.default_rng(0).normal(size=[ROWS, WIDTH]).astype("float32")


class Sums:
    """Clipped sums of a linear model of many weights: `Sums(clip)(seed, rows, x)`.

    The gradient of an example is its row of x.
    """

    def __init__(self, clip, rows_per_pass=3, stddev=STDDEV, engine=VectorizedEngine):
        kwargs = {} if rows_per_pass is None else {"rows_per_pass": rows_per_pass}
        self.engine = engine(clip, clipping_rule=PerturbedClipping(stddev), **kwargs)
        weights = tf.Variable(tf.zeros([WIDTH]))
        self._weights = weights

        @tf.function(
            input_signature=[
                tf.TensorSpec([2], tf.int64),
                tf.TensorSpec([None], tf.bool),
                tf.TensorSpec([None, WIDTH]),
            ]
        )
        def run(seed, rows, x):
            losses = tf.linalg.matvec(x, weights) * tf.cast(rows, tf.float32)
            return self.engine.clipped_sum(losses, [weights], seed).gradients[0]

        self._run = run

    def __call__(self, seed=0, rows=None, x=X):
        rows = np.ones(len(x), bool) if rows is None else rows
        return self._run([5, seed], rows, x).numpy()


LARGE = 1e3  # No gradient is clipped.


def noises(sums, steps=6):
    """The noise of steps in the sum over all rows, and over the first, in units of the clip."""
    total = np.stack([sums(seed) - X.sum(axis=0) for seed in range(steps)]) / LARGE
    one = np.stack([sums(seed, x=X[:1]) - X[0] for seed in range(steps)]) / LARGE
    return total, one


def assert_noise_of_each_example(sums):
    """Each row has noise of its own; a test fails by luck with probability below 1e-9."""
    total, one = noises(sums)
    for found, stddev in ((total, STDDEV * math.sqrt(ROWS)), (one, STDDEV)):
        assert scipy.stats.kstest(found.ravel(), scipy.stats.norm(0, stddev).cdf).pvalue > 1e-11
    for found in (total, one):
        for before, after in itertools.pairwise(found):
            assert scipy.stats.pearsonr(before, after).pvalue > 1e-12


@pytest.fixture(scope="module")
def large():
    return Sums(LARGE)


def test_each_example_has_noise_of_its_own(large):
    assert_noise_of_each_example(large)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_other_standard_deviations_are_caught(factor):
    with pytest.raises(AssertionError):
        assert_noise_of_each_example(Sums(LARGE, stddev=STDDEV * factor))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mutant", ["rows share it", "parts share it", "steps share it"])
def test_noise_that_is_shared_is_caught(mutant, monkeypatch):
    draw_keys, normals = ClippingEngine._draw_perturbation_keys, chacha.normals

    def keys(self, count, seed):
        seed = tf.zeros_like(seed) if mutant == "steps share it" else seed
        drawn = draw_keys(self, count, seed)
        return tf.zeros_like(drawn) + drawn[:1] if mutant == "parts share it" else drawn

    def one_row(key, count, use=0, dtype=tf.float64):
        if use or mutant != "rows share it":
            return normals(key, count, use, dtype)
        row = normals(key, WIDTH, use, dtype)
        return tf.tile(row, [count // WIDTH])

    monkeypatch.setattr(ClippingEngine, "_draw_perturbation_keys", keys)
    monkeypatch.setattr(chacha, "normals", one_row)
    with pytest.raises(AssertionError):
        assert_noise_of_each_example(Sums(LARGE))


def test_an_example_moves_the_sum_by_no_more_than_the_clip():
    clip = 0.7
    sums = Sums(clip, rows_per_pass=None, stddev=0.3)
    for row in range(3):
        others = np.arange(ROWS) != row
        moved = np.linalg.norm(sums(row) - sums(row, others))
        assert moved == pytest.approx(clip, rel=1e-3) and moved <= clip * (1 + 1e-4)
    # Noise alone is clipped, too: it is longer than the clip.
    assert np.linalg.norm(sums(x=0 * X[:1])) <= clip * (1 + 1e-4)
    nobody = np.zeros(ROWS, bool)
    assert not np.any(sums(rows=nobody))
    broken = X.copy()
    broken[2, 5] = np.inf
    moved = sums(x=broken) - sums(rows=np.arange(ROWS) != 2)
    assert np.linalg.norm(moved) <= 1e-4 * clip
    assert np.all(sums(x=X[:0]) == 0)


def test_the_one_pass_engine_forms_gradients_for_it():
    one_pass = Sums(LARGE, engine=OnePassEngine)
    np.testing.assert_allclose(one_pass(3), Sums(LARGE, rows_per_pass=None)(3), rtol=1e-4, atol=1)
    assert "Noise on each gradient" in str(one_pass.engine.report())


def test_without_a_clip_there_is_no_noise():
    np.testing.assert_allclose(Sums(math.inf)(1), X.sum(axis=0), atol=1e-4)


def test_rows_that_are_no_examples_have_no_noise():
    """Of noise alone, clipped: n long vectors, almost at right angles, have a sum of sqrt(n)."""
    x = np.zeros([40, 4], "float32")
    batches = tfdp.data.poisson_batches(
        (x, np.zeros(40)), expected_batch_size=10, padding="full", steps_per_epoch=1, seed=2
    )
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input([4]), layers.Dense(UNITS, use_bias=False)])
    rule = PerturbedClipping(1.0)
    optimizer = tfdp.DPSGD(
        0.5, 0.0, sampling=batches.sampling, learning_rate=1.0, clipping_rule=rule
    )
    model.compile(optimizer, lambda y, outputs: 0.0 * tf.reduce_sum(outputs, axis=-1))
    before = support.flat(model.get_weights())
    x, y, mask = next(iter(batches))
    model.train_on_batch(x, y, mask)
    moved = np.linalg.norm(support.flat(model.get_weights()) - before) * 10 / 0.5
    assert np.sum(mask) < len(mask)
    assert moved**2 == pytest.approx(np.sum(mask), rel=0.2)


@pytest.mark.slow
def test_an_optimizer_has_it_at_the_cost_of_flat_clipping():
    x, y = support.small_data(64)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=16)
    arguments = {"sampling": batches.sampling}
    made = tfdp.DPSGD(0.5, 1.1, clipping_rule=PerturbedClipping(0.2), **arguments)
    again = tfdp.DPSGD.from_config(made.get_config())
    assert again.clipping.clipping_rule == PerturbedClipping(0.2)
    flat = tfdp.DPSGD(0.5, 1.1, **arguments)
    assert (made.release, made.noise_stddev) == (flat.release, flat.noise_stddev)
    support.compiled(made).fit(batches, verbose=0)
    assert made.ledger.steps == 4


@pytest.mark.parametrize("stddev", [-0.1, math.inf, math.nan, "a"])
def test_what_is_refused(stddev):
    with pytest.raises(ValueError, match="`stddev` must be a number that is not negative"):
        PerturbedClipping(stddev)


def test_it_goes_with_no_two_term_loss():
    engine = OnePassEngine(1.0, None, PerturbedClipping(0.1))
    with pytest.raises(ValueError, match=r"`clipping_rule` must not be random.*Received"):
        check_two_term_arguments(engine, 1, None, None, None)
