import math
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tests.clipping.models import FAST, N, Y, built
from tfdp.base import devices
from tfdp.base.random import key_streams
from tfdp.clipping import FlatClipping, OnePassEngine, VectorizedEngine, step_check
from tfdp.contrib import ImportanceSamplingClipping
from tfdp.step.arguments import check_two_term_arguments

pytestmark = pytest.mark.rewritten_graphs

# The rule by itself.


def uniforms(count, seed=0):
    return tf.random.stateless_uniform([count], [7, seed])


def rounded(rule, norms, numbers, clip=1.0):
    """Factors for gradients of these norms, with these random numbers, `[n]`."""
    norms = tf.constant(norms, tf.float32)[:, tf.newaxis]
    return rule.random_factors(norms, clip, numbers)[:, 0].numpy()


DRAWS = 40_000


def assert_rounds_without_bias(rule, clip=2.0):
    """The norm becomes 0 or C, its mean that of flat clipping, its variance ||c|| (C - ||c||)."""
    norms = np.array([0.02, 0.3, 0.5, 0.9, 0.99, 1.0, 1.7]) * clip
    every = np.repeat(norms, DRAWS).astype("float32")
    left = rounded(rule, every, uniforms(len(every)), clip) * every
    assert np.all((left == 0) | np.isclose(left, clip, rtol=1e-6))
    left = left.reshape(len(norms), DRAWS)
    clipped = np.minimum(norms, clip)
    variance = clipped * (clip - clipped)
    error = np.abs(left.mean(axis=1) - clipped)
    assert np.all(error <= 4.5 * np.sqrt(variance / DRAWS) + 1e-6)
    # The fourth moment of a number that is 0 or C says how well its variance is known.
    spread = clip * np.abs(clip - 2 * clipped) * np.sqrt(variance / DRAWS)
    assert np.all(np.abs(left.var(axis=1) - variance) <= 4.5 * spread + 1e-3 * clip**2)


def test_norms_are_rounded_without_bias():
    assert_rounds_without_bias(ImportanceSamplingClipping())


class Thinned(ImportanceSamplingClipping):
    """Mutant: those that are kept are clipped, but not lengthened to C."""

    def random_factors(self, norms, clip, uniforms):
        kept = super().random_factors(norms, clip, uniforms) > 0
        return tf.where(kept, self.factors(norms, clip), 0.0)


class KeptBySquare(ImportanceSamplingClipping):
    """Mutant: kept with the square of the probability."""

    def random_factors(self, norms, clip, uniforms):
        return super().random_factors(norms, clip, 1 - tf.sqrt(1 - uniforms))


class Normalised(ImportanceSamplingClipping):
    """Mutant: everything is kept."""

    def random_factors(self, norms, clip, uniforms):
        return clip / norms


class InverseOfUnclipped(ImportanceSamplingClipping):
    """Mutant: kept as if the clip was a tenth larger, weighted by the inverse."""

    def random_factors(self, norms, clip, uniforms):
        return super().random_factors(norms, 1.1 * clip, uniforms)


@pytest.mark.parametrize(
    "rule", [Thinned, KeptBySquare, Normalised, InverseOfUnclipped, FlatClipping]
)
def test_biased_rounding_is_caught(rule):
    with pytest.raises(AssertionError):
        assert_rounds_without_bias(rule())


def test_rounding_at_its_limits():
    rule = ImportanceSamplingClipping()
    numbers = tf.constant([0.0, 0.5, 1 - 2.0**-23])
    for norm in (0.0, 1e-45, 1e-30, 1e-16, math.nan):
        assert not np.any(rounded(rule, [norm] * 3, numbers))
    # With a tiny clip, a norm whose square vanishes must not be scaled up to it.
    assert not np.any(rounded(rule, [5e-16] * 3, numbers, clip=1e-15))
    assert np.all(rounded(rule, [1.0] * 3, numbers) == 1)
    np.testing.assert_allclose(rounded(rule, [1e15] * 3, numbers), 1e-15, rtol=1e-6)
    np.testing.assert_array_equal(rounded(rule, [0.5] * 3, numbers), [0, 2, 2])
    assert np.all(rounded(rule, [0.0, 0.5, 1e9], numbers, clip=math.inf) == 1)
    np.testing.assert_array_equal(rounded(rule, [0.5] * 3, numbers, tf.constant(1.0)), [0, 2, 2])


# In the engines.

X = FAST["dense"][1]


class Sums:
    """The clipped sum of an engine, `Sums(engine)(x, y, mask, seed)`."""

    def __init__(self, engine, name="dense", jit_compile=False):
        make, x = FAST[name]
        self.model = built(make, x)

        def run(x, y, mask, seed):
            losses = support.crossentropy()(y, self.model(x, training=True), sample_weight=mask)
            return engine.clipped_sum(losses, self.model.trainable_variables, seed).gradients

        types = [(Y, tf.int64), (np.ones(N), tf.bool)]
        specs = [tf.TensorSpec([None, *np.shape(v)[1:]], t) for v, t in types]
        specs = (support.open_spec(x), *specs, tf.TensorSpec([2], tf.int64))
        self._run = tf.function(run, jit_compile=jit_compile, input_signature=specs)

    def __call__(self, seed, x=X, y=Y, mask=None):
        mask = np.ones(len(y), bool) if mask is None else mask
        return support.flat(self._run(x, y, mask, [3, seed]))


def gradients_of(model, x=X):
    one_by_one = [
        support.looped_clipped_sum(model, x[i : i + 1], Y[i : i + 1], np.inf) for i in range(N)
    ]
    return np.stack(one_by_one)


def clip_for(name="dense"):
    """A clip that some gradients are longer than."""
    make, x = FAST[name]
    return 1.2 * float(np.median(np.linalg.norm(gradients_of(built(make, x), x), axis=1)))


CLIP = clip_for()
ENGINES = {
    "one pass": lambda clip: OnePassEngine(clip, clipping_rule="importance_sampling"),
    "one pass, chunks": lambda clip: OnePassEngine(
        clip, clipping_rule="importance_sampling", rows_per_pass=3
    ),
    "vectorized": lambda clip: VectorizedEngine(clip, clipping_rule="importance_sampling"),
    "vectorized, chunks": lambda clip: VectorizedEngine(
        clip, clipping_rule="importance_sampling", rows_per_pass=3
    ),
}


def kept_rows(engine, jit_compile, steps=250):
    """Which rows were kept in each step, `[steps, N]`, told from the sums.

    A sum of C or 0 times each row's normalized gradient, the same for all variables, is told apart
    by least squares: gradients have more parameters than there are rows.
    """
    sums = Sums(engine, jit_compile=jit_compile)
    gradients = gradients_of(sums.model)
    units = CLIP * gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    found = np.stack([sums(seed) for seed in range(steps)])
    weights, _, rank, _ = np.linalg.lstsq(units.T, found.T, rcond=None)
    assert rank == N
    np.testing.assert_allclose(units.T @ weights, found.T, atol=1e-4 * CLIP)
    kept = weights.T.round()
    np.testing.assert_allclose(weights.T, kept, atol=1e-2)
    assert set(np.unique(kept)) == {0, 1}
    return kept, np.minimum(1, np.linalg.norm(gradients, axis=1) / CLIP)


def assert_kept_independently(engine, jit_compile=False):
    kept, probability = kept_rows(engine, jit_compile)
    assert np.all(kept[:, probability == 1] == 1)
    random = probability < 1
    assert 2 <= random.sum() < N
    kept, p = kept[:, random], probability[random]
    scores = (kept - p) / np.sqrt(p * (1 - p))
    limit = 4.5 / math.sqrt(len(kept))
    assert np.all(np.abs(scores.mean(axis=0)) < limit)
    between_rows = scores.T @ scores / len(scores)
    between_steps = scores[1:].T @ scores[:-1] / len(scores)
    assert np.all(np.abs(between_rows - np.diag(np.diag(between_rows))) < limit * 1.5)
    assert np.all(np.abs(between_steps) < limit * 1.5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_rows_and_steps_are_rounded_independently(jit_compile):
    assert_kept_independently(ENGINES["one pass"](CLIP), jit_compile)


class OneNumberForAll(OnePassEngine):
    """Mutant: all rows of a batch have the same number."""

    def _draw_uniforms(self, count, seed):
        return tf.fill([count], super()._draw_uniforms(1, seed)[0])


class SameInEveryStep(OnePassEngine):
    """Mutant: the seed of the step is not used."""

    def _draw_uniforms(self, count, seed):
        return super()._draw_uniforms(count, tf.zeros_like(seed))


class NumberForEachVariable(OnePassEngine):
    """Mutant: variables have numbers of their own."""

    def _blocks(self, variables):
        return [i % 2 for i in range(len(variables))]

    def _factors(self, squares, block_of, keep, clip, uniforms):
        together = [0] * len(block_of)
        factors = super()._factors(squares, together, keep, clip, uniforms)
        other = super()._factors(squares, together, keep, clip, tf.reverse(uniforms, [0]))
        by_block = tf.concat([factors.by_block, other.by_block], axis=1)
        return type(factors)(by_block, factors.bad, factors.within_clip, list(block_of))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mutant", [OneNumberForAll, SameInEveryStep, NumberForEachVariable])
def test_numbers_that_are_not_the_examples_own_are_caught(mutant):
    with pytest.raises(AssertionError):
        assert_kept_independently(mutant(CLIP, clipping_rule="importance_sampling"))


@pytest.mark.slow
def test_engines_agree_in_parts(monkeypatch):
    x, clip = FAST["conv2d"][1], clip_for("conv2d")
    vectorized = Sums(ENGINES["vectorized, chunks"](clip), "conv2d")
    expected = [vectorized(seed, x) for seed in range(3)]
    assert not all(np.allclose(expected[0], other, atol=1e-2 * clip) for other in expected[1:])
    monkeypatch.setattr(devices, "working_set_bytes", lambda: 1)  # One row after the other.
    for key in ("one pass", "one pass, chunks"):
        sums = Sums(ENGINES[key](clip), "conv2d")
        for seed, total in enumerate(expected):
            np.testing.assert_allclose(sums(seed, x), total, atol=1e-4 * clip, err_msg=key)


def test_an_example_moves_the_sum_by_no_more_than_the_clip():
    sums = Sums(ENGINES["one pass"](CLIP))
    moved, shifted = [], []
    for seed in range(40):
        others = np.arange(N) != seed % N
        whole = sums(seed)
        moved.append(np.linalg.norm(whole - sums(seed, mask=others)))
        # Why the numbers must be secret: other examples come to other rows, and get theirs.
        shifted.append(np.linalg.norm(whole - sums(seed, X[others], Y[others])))
    moved = np.array(moved)
    assert np.all((moved < 1e-4 * CLIP) | np.isclose(moved, CLIP, rtol=1e-4))
    assert np.max(shifted) > 1.2 * CLIP


@pytest.mark.parametrize("engine", ["one pass", "vectorized"])
def test_bad_examples_are_dropped(engine):
    sums = Sums(ENGINES[engine](CLIP))
    for bad, most in ((np.nan, 0), (np.inf, 0), (1e30, CLIP)):
        broken = X.copy()
        broken[2] = bad
        for seed in range(3):
            moved = sums(seed, broken) - sums(seed, mask=np.arange(N) != 2)
            assert np.linalg.norm(moved) <= most + 1e-4 * CLIP


def test_means_of_microbatches_are_rounded():
    sums = Sums(OnePassEngine(CLIP, num_microbatches=1, clipping_rule="importance_sampling"))
    lengths = np.array([np.linalg.norm(sums(seed)) for seed in range(30)])
    assert np.all((lengths == 0) | np.isclose(lengths, CLIP, rtol=1e-4))
    assert 0 < np.count_nonzero(lengths) < 30


def test_without_a_clip_nothing_is_rounded():
    sums = Sums(ENGINES["one pass"](math.inf))
    np.testing.assert_allclose(sums(1), gradients_of(sums.model).sum(axis=0), atol=1e-5)


@pytest.mark.slow
def test_both_engines_use_the_same_random_numbers(monkeypatch):
    engine = support.ComparedClipping(CLIP, clipping_rule="importance_sampling")
    Sums(engine)(0)
    draw = VectorizedEngine._draw_uniforms
    monkeypatch.setattr(VectorizedEngine, "_draw_uniforms", lambda *args: 1 - draw(*args))
    with pytest.raises(tf.errors.InvalidArgumentError, match="sums differ"):
        Sums(engine)(0)


# In the optimizers.


class Recording(ImportanceSamplingClipping):
    """Remembers the first random numbers of each batch: four, as one in float32 has 23 bits."""

    numbers: ClassVar[list] = []

    def note(self, uniforms):
        self.numbers.append(tuple(uniforms))

    def random_factors(self, norms, clip, uniforms):
        with step_check.own_operations():  # Python code is refused elsewhere.
            remember = tf.numpy_function(self.note, [uniforms[:4]], [])
        with tf.control_dependencies([remember]):
            return super().random_factors(norms, clip, tf.identity(uniforms))


@pytest.fixture
def numbers():
    Recording.numbers.clear()
    return Recording.numbers


def poisson(chunk_size=None):
    x, y = support.small_data(64)
    return tfdp.data.poisson_batches((x, y), expected_batch_size=16, chunk_size=chunk_size)


def test_an_optimizer_has_it_at_the_cost_of_flat_clipping():
    arguments = {"sampling": poisson().sampling}
    made = tfdp.DPSGD(0.5, 1.1, clipping_rule="importance_sampling", **arguments)
    again = tfdp.DPSGD.from_config(made.get_config())
    assert again.clipping.clipping_rule == ImportanceSamplingClipping()
    flat = tfdp.DPSGD(0.5, 1.1, **arguments)
    assert (made.release, made.noise_stddev) == (flat.release, flat.noise_stddev)


@pytest.mark.slow
def test_every_batch_draws_new_numbers(numbers):
    data = poisson(chunk_size=20)
    # What a global seed fixes, it must not fix.
    arguments = {"sampling": data.sampling}
    for _ in range(2):
        model = support.small_model()
        optimizer = tfdp.DPSGD(0.5, 1.1, clipping_rule=Recording(), **arguments)
        support.compiled(optimizer, model).fit(data, epochs=1, verbose=0)
        assert np.all(np.isfinite(support.flat(model.get_weights())))
    batches = 2 * 4 * data.sampling.gradient_accumulation_steps
    assert len(numbers) == len(set(numbers)) == batches


def rejected(attempts):
    """Makes attempts that are all rejected, whatever is drawn."""
    data = selective_support.batches()
    optimizer = selective_support.optimizer(
        data=data,
        clipping_rule=Recording(),
        noise_seed=None,
        threshold=selective_support.NEVER,
        max_attempts=attempts,
    )
    model = selective_support.compiled(optimizer)
    with pytest.raises(tfdp.TooManyAttemptsError):
        model.fit(data, epochs=1, steps_per_epoch=1, verbose=0)


def test_rejected_attempts_draw_new_numbers(numbers):
    """Attempts are alike only if none uses the numbers of a rejected one again.

    Of 12 attempts, two have the same first four numbers by chance once in 1e25 runs.
    """
    rejected(12)
    assert len(numbers) == 12
    assert len(set(numbers)) == 12


@pytest.mark.slow
def test_numbers_that_are_rolled_back_with_a_rejected_attempt_are_caught(numbers, monkeypatch):
    """Mutant: the counter of the numbers is set back with the rest."""
    monkeypatch.setattr(tfdp.DPSURSGD, "kept_variables", lambda self: [])
    monkeypatch.setattr(key_streams, "all_variables", lambda: [])
    rejected(12)
    assert len(numbers) == 12 > len(set(numbers))


def test_it_goes_with_no_two_term_loss():
    engine = OnePassEngine(1.0, None, ImportanceSamplingClipping())
    with pytest.raises(ValueError, match=r"`clipping_rule` must not be random.*Received"):
        check_two_term_arguments(engine, 1, None, None, None)
