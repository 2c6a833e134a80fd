"""Masks before the clip, the largest noisy coordinates, their memory, and what both cost."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tests.clipping.models import FAST, N, Y, built
from tests.front_ends import FRONT_ENDS, with_both
from tfdp.clipping import (
    AdaptiveQuantileClipping,
    OnePassEngine,
    PerLayerClipping,
    VectorizedEngine,
)
from tfdp.clipping.one_pass import one_pass_engine as one_pass
from tfdp.contrib import RandomMask, TopK
from tfdp.step import compression

# Masks, in the engines.

NAME = "dense"
X = FAST[NAME][1]


def gradients_of(model):
    """The gradient of each example, `[N, ...]` for each variable."""
    return [np.stack(own) for own in zip(*(_gradient(model, i) for i in range(N)), strict=True)]


def _gradient(model, i):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(support.crossentropy()(Y[i : i + 1], model(X[i : i + 1])))
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


class MaskedSums:
    """Clipped sums by an engine: `MaskedSums(engine)(masks, rows)`, masks as in `clipped_sum`."""

    def __init__(self, engine, coordinates=False):
        self.engine = engine
        self.model = built(FAST[NAME][0], X)
        self.gradients = gradients_of(self.model)
        variables = self.model.trainable_variables
        self.shapes = [v.shape if coordinates else [] for v in variables]

        @tf.function(
            input_signature=[
                [tf.TensorSpec(shape, tf.bool) for shape in self.shapes],
                tf.TensorSpec([None], tf.bool),
                tf.TensorSpec([None, *X.shape[1:]]),
                tf.TensorSpec([None], tf.int64),
            ]
        )
        def run(masks, rows, x, y):
            losses = support.crossentropy()(y, self.model(x, training=True), sample_weight=rows)
            seed = tf.constant([1, 2])
            found = engine.clipped_sum(losses, variables, seed, masks=masks)
            return found.gradients, found.within_clip

        self.run = run

    def some_masks(self, seed):
        rng = np.random.default_rng(seed)
        masks = [rng.random(shape) < 0.5 for shape in self.shapes]
        masks[seed % len(masks)] = np.ones(self.shapes[seed % len(masks)], bool)
        return masks

    def __call__(self, masks, rows=None, x=X):
        rows = np.ones(N, bool) if rows is None else rows
        return support.flat(self.run(masks, rows, x, Y)[0])

    def expected(self, masks, clip):
        """The sum of what is left of the gradients, clipped."""
        rows = [
            np.concatenate([np.ravel(g[i] * m) for g, m in zip(self.gradients, masks, strict=True)])
            for i in range(N)
        ]
        norms = [np.linalg.norm(row) for row in rows]
        return sum(row / max(1.0, norm / clip) for row, norm in zip(rows, norms, strict=True))


def clip_for():
    """A clip that most masked gradients are longer than."""
    return 0.3 * float(
        np.median([np.linalg.norm(support.flat(_gradient(MODEL, i))) for i in range(N)])
    )


MODEL = built(FAST[NAME][0], X)
CLIP = clip_for()


def assert_masked_before_the_clip(sums):
    moved = []
    for seed in range(4):
        masks = sums.some_masks(seed)
        whole = sums(masks)
        np.testing.assert_allclose(whole, sums.expected(masks, CLIP), atol=2e-5 * CLIP)
        others = np.arange(N) != seed
        moved.append(np.linalg.norm(whole - sums(masks, others)))
    assert max(moved) <= CLIP * (1 + 1e-4)  # The sensitivity.
    assert max(moved) >= CLIP * (1 - 1e-3)  # All of the clip goes to what is trained.
    broken = X.copy()
    broken[1] = np.inf
    moved = sums(masks, x=broken) - sums(masks, np.arange(N) != 1)
    assert np.linalg.norm(moved) <= 1e-5 * CLIP


ENGINES = {
    "one pass": lambda: OnePassEngine(CLIP),
    "one pass, chunks": lambda: OnePassEngine(CLIP, rows_per_pass=3),
    "vectorized": lambda: VectorizedEngine(CLIP, rows_per_pass=3),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_masked_before_the_clip(engine):
    assert_masked_before_the_clip(MaskedSums(ENGINES[engine]()))


def test_coordinates_are_masked_before_the_clip():
    sums = MaskedSums(OnePassEngine(CLIP), coordinates=True)
    assert_masked_before_the_clip(sums)
    assert "Masks of coordinates" in str(sums.engine.report())


def norms_alone(factors, block_of, masks):
    """Mutant: masks are in the norms, and not in the sum."""
    return ORIGINAL(factors, block_of, [tf.ones_like(m) for m in masks])


ORIGINAL = one_pass._by_variable


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mutant", ["norms alone", "clip first"])
def test_masks_in_other_places_are_caught(mutant, monkeypatch):
    sums = MaskedSums(OnePassEngine(CLIP))
    if mutant == "norms alone":
        monkeypatch.setattr(one_pass, "_by_variable", norms_alone)
    else:
        run = OnePassEngine._clipped_sums

        def clip_first(self, problem, contributions, block_of, masks):
            found, within = run(self, problem, contributions, block_of, None)
            return [f * tf.cast(m, f.dtype) for f, m in zip(found, masks, strict=True)], within

        monkeypatch.setattr(OnePassEngine, "_clipped_sums", clip_first)
    with pytest.raises(AssertionError):
        assert_masked_before_the_clip(sums)


@pytest.mark.slow
def test_masks_with_other_rules_and_sums():
    for engine in (
        OnePassEngine(CLIP, clipping_rule=PerLayerClipping()),
        OnePassEngine(CLIP, clipping_rule="automatic"),
        OnePassEngine(CLIP, num_microbatches=1),
    ):
        sums = MaskedSums(engine)
        masks = sums.some_masks(1)
        whole, others = sums(masks), sums(masks, np.arange(N) != 2)
        limit = engine.sensitivity()
        assert np.linalg.norm(whole - others) <= limit * (1 + 1e-4)
        places = np.concatenate(
            [
                np.full(v.shape.num_elements(), m)
                for v, m in zip(MODEL.trainable_variables, masks, strict=True)
            ]
        )
        assert np.all(whole[~places] == 0) and np.any(whole[places] != 0)
    wide = OnePassEngine(CLIP)
    wide.wide_sums = True
    sums = MaskedSums(wide)
    masks = sums.some_masks(2)
    np.testing.assert_allclose(sums(masks), sums.expected(masks, CLIP), atol=2e-5 * CLIP)


def test_an_adaptive_clip_counts_masked_gradients():
    sums = MaskedSums(OnePassEngine(CLIP, clipping_rule=AdaptiveQuantileClipping()))
    for seed in range(3):
        masks = sums.some_masks(seed)
        norms = np.sqrt(
            sum(
                np.sum(np.square(g * m).reshape(N, -1), axis=1)
                for g, m in zip(sums.gradients, masks, strict=True)
            )
        )
        _, within = sums.run(masks, np.ones(N, bool), X, Y)
        assert float(within) == np.sum(norms <= CLIP) - N / 2


# The masks themselves.


def drawn(mask, steps=200):
    variables = MODEL.trainable_variables
    return [[m.numpy() for m in mask.masks(variables, tf.constant(step))] for step in range(steps)]


def test_random_layers():
    masks = drawn(RandomMask(0.5))
    layers = PerLayerClipping().blocks([v.name for v in MODEL.trainable_variables])
    count = max(layers) + 1
    assert count > 1
    trained = np.array([[m[layers.index(layer)] for layer in range(count)] for m in masks])
    for m, of_layer in zip(masks, trained, strict=True):
        assert [of_layer[layer] for layer in layers] == m
    assert np.all(trained.sum(axis=1) == max(1, round(count / 2)))
    assert scipy.stats.binomtest(int(trained[:, 0].sum()), 200, 1 / count).pvalue > 1e-10 or (
        count != 2
    )
    changes = np.any(trained[1:] != trained[:-1], axis=1)
    assert 0 < changes.mean() < 1  # Drawn anew, and not in turns.
    assert np.all(np.array(drawn(RandomMask(1.0), 3)))


def test_random_coordinates():
    first, second = (support.flat(m) for m in drawn(RandomMask(0.3, "coordinate"), 2))
    other = support.flat(drawn(RandomMask(0.3, "coordinate", seed=1), 1)[0])
    for mask in (first, second, other):
        assert scipy.stats.binomtest(int(mask.sum()), len(mask), 0.3).pvalue > 1e-10
    for pair in ((first, second), (first, other)):
        assert not np.array_equal(*pair)
    frozen = drawn(RandomMask(0.3, "coordinate", redraw=False), 2)
    np.testing.assert_array_equal(*(support.flat(m) for m in frozen))


# In a training.

SIGMA, BATCH, SIZE, UNITS = 1.5, 10, 40, 2000


def batches_of(**kwargs):
    x = np.random.default_rng(0).normal(size=[SIZE, 4]).astype("float32")
    return tfdp.data.poisson_batches(
        (x, np.zeros(SIZE, "int64")), expected_batch_size=BATCH, steps_per_epoch=4, seed=1, **kwargs
    )


def updates_of(front, kind, clip=0.5, jit_compile=False, **kwargs):
    """The updates of 4 steps that are noise alone, in units of the noisy sum; and the model."""
    layers = front.keras.layers
    model = front.keras.Sequential(
        [
            layers.Input([4]),
            layers.Dense(UNITS, kernel_initializer="zeros"),
            layers.Dense(2, kernel_initializer="zeros"),
        ]
    )

    def loss(y, outputs):
        return 0.0 * tf.reduce_sum(tf.cast(outputs, tf.float32), axis=-1)

    batches = batches_of(**kwargs)
    optimizer = front.tfdp.DPSGD(
        clip, SIGMA, sampling=batches.sampling, learning_rate=1.0, noise_seed=3, compression=kind
    )
    model.compile(optimizer, loss, jit_compile=jit_compile)
    weights = [support.flat(model.get_weights())]

    def remember(batch, logs=None):
        weights.append(support.flat(model.get_weights()))

    callback = front.keras.callbacks.LambdaCallback(on_train_batch_end=remember)
    model.fit(batches, verbose=0, callbacks=[callback])
    updates = -np.diff(np.array(weights), axis=0) * BATCH
    return updates[np.any(updates != 0, axis=1)], model


@pytest.fixture(scope="module")
def noise():
    """The noise of the same steps without compression, and their model."""
    return updates_of(FRONT_ENDS[0], None)


def top_k(noise, fraction, memory):
    """Top-k by NumPy."""
    left, expected = np.zeros_like(noise[0]), []
    for one in noise:
        total = one + (left if memory else 0)
        chosen = np.argsort(-np.abs(total))[: round(fraction * len(total))]
        update = np.zeros_like(total)
        update[chosen] = total[chosen]
        left = total - update
        expected.append(update)
    return np.array(expected)


def assert_top_k(updates, noise, memory):
    np.testing.assert_allclose(updates, top_k(noise, 0.1, memory), atol=1e-4)


@with_both
def test_the_largest_noisy_coordinates_are_kept(front, noise):
    updates, model = updates_of(front, TopK(0.1))
    assert_top_k(updates, noise[0], memory=True)
    with pytest.raises(AssertionError):
        assert_top_k(updates, noise[0], memory=False)
    release, plain = model.optimizer.release, noise[1].optimizer
    assert (release, model.optimizer.noise_stddev) == (plain.release, plain.noise_stddev)
    assert model.optimizer.ledger.epsilon(1e-5) == plain.ledger.epsilon(1e-5)


def test_without_memory_nothing_is_added_later(noise):
    updates, model = updates_of(FRONT_ENDS[0], TopK(0.1, error_memory=False))
    assert_top_k(updates, noise[0], memory=False)
    assert not any("compression" in v.name for v in model.optimizer.weights)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["xla", "chunks"])
def test_the_largest_are_kept_however_batches_come(how, noise):
    kwargs = {"chunk_size": 20} if how == "chunks" else {"padding": "buckets"}
    updates, _ = updates_of(FRONT_ENDS[0], TopK(0.1), jit_compile=how == "xla", **kwargs)
    assert_top_k(updates, noise[0], memory=True)


def assert_noise(updates, stddev):
    present = updates[updates != 0]
    assert scipy.stats.kstest(present, scipy.stats.norm(0, stddev).cdf).pvalue > 1e-11


@with_both
def test_noise_of_the_whole_clip_where_the_mask_is_and_zeros_elsewhere(front, noise):
    updates, model = updates_of(front, RandomMask(0.5))
    sizes = {5 * UNITS, 2 * (UNITS + 1)}
    assert set(np.count_nonzero(updates, axis=1)) <= sizes
    where = updates != 0
    np.testing.assert_allclose(updates[where], noise[0][where], atol=1e-5)
    assert_noise(updates, 0.5 * SIGMA)
    for mutant in (2 / 3, 3 / 2):
        with pytest.raises(AssertionError):
            assert_noise(updates, 0.5 * SIGMA * mutant)
    optimizer, plain = model.optimizer, noise[1].optimizer
    assert (optimizer.release, optimizer.noise_stddev) == (plain.release, plain.noise_stddev)


class Leaking(TopK):
    """Mutant: chooses by something else than the gradients it gets."""

    def keep(self, gradients):
        return super().keep([tf.random.stateless_normal(g.shape, [1, 2]) for g in gradients])


def test_other_coordinates_are_caught(noise, monkeypatch):
    monkeypatch.setitem(compression.NAMED, "leaking", Leaking)
    updates, _ = updates_of(FRONT_ENDS[0], Leaking(0.1))
    with pytest.raises(AssertionError):
        assert_top_k(updates, noise[0], memory=True)


# State, copies, and what goes together.


def small(front, kind, **kwargs):
    x, y = support.small_data(64)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=16, seed=1, **kwargs)
    optimizer = front.tfdp.DPSGD(
        0.5, 1.1, sampling=batches.sampling, learning_rate=0.3, noise_seed=2, compression=kind
    )
    layers = front.keras.layers
    front.keras.utils.set_random_seed(0)
    model = front.keras.Sequential([layers.Input([4]), layers.Dense(5, "tanh"), layers.Dense(3)])
    model.compile(optimizer, front.crossentropy("none"))
    return model, batches


def resumed(front, tmp_path):
    """Weights after 8 steps: at once, and with a file in the middle."""
    model, _ = small(front, TopK(0.2))
    whole = tfdp.data.poisson_batches(
        support.small_data(64), expected_batch_size=16, seed=1, steps_per_epoch=4
    )
    model.fit(whole, epochs=2, verbose=0)
    first, batches = small(front, TopK(0.2))
    first.fit(batches, verbose=0)
    first.save(tmp_path / "model.keras")
    again = front.keras.models.load_model(tmp_path / "model.keras")
    later = small(front, TopK(0.2), first_step=4)[1]
    again.fit(later, verbose=0)
    return support.flat(model.get_weights()), support.flat(again.get_weights()), again


@pytest.mark.quick_cases(1)
@with_both
def test_the_memory_is_saved_with_the_optimizer(front, tmp_path):
    expected, found, model = resumed(front, tmp_path)
    np.testing.assert_array_equal(found, expected)
    assert model.optimizer.compression == TopK(0.2)


@pytest.mark.slow
def test_a_memory_that_is_not_saved_is_caught(tmp_path, monkeypatch):
    create = compression.Compressor.create

    def untracked(self, add_weight, variables):
        create(self, lambda name, shape, dtype, **_: tf.Variable(tf.zeros(shape, dtype)), variables)
        return []

    monkeypatch.setattr(compression.Compressor, "create", untracked)
    expected, found, _ = resumed(FRONT_ENDS[0], tmp_path)
    assert not np.array_equal(found, expected)


def memory_of(model):
    return support.flat(model.optimizer._compressor._memories.values())


def rejected():
    """The memory of a selective model before and after updates that are all rejected."""
    data = selective_support.batches()
    optimizer = selective_support.optimizer(
        data=data, threshold=selective_support.NEVER, compression=TopK(0.2)
    )
    model = selective_support.compiled(optimizer)
    optimizer.build(model.trainable_variables)
    for memory in optimizer._compressor._memories.values():
        memory.assign(tf.ones_like(memory))
    with pytest.raises(tfdp.TooManyAttemptsError):
        model.fit(data, epochs=1, steps_per_epoch=1, verbose=0)
    return memory_of(model)


def test_a_rejected_update_leaves_nothing_in_the_memory():
    np.testing.assert_array_equal(rejected(), 1.0)


@pytest.mark.slow
def test_a_memory_that_is_not_rolled_back_is_caught(monkeypatch):
    kept = tfdp.DPSURSGD.kept_variables
    monkeypatch.setattr(
        tfdp.DPSURSGD,
        "kept_variables",
        lambda self: [*kept(self), *self._compressor._memories.values()],
    )
    assert not np.all(rejected() == 1.0)


@pytest.mark.slow
def test_a_copy_has_the_memory_and_a_life_of_its_own():
    model, batches = small(FRONT_ENDS[0], TopK(0.2))
    model.fit(batches, verbose=0)
    optimizer, before = model.optimizer, memory_of(model)
    model.compile(copy.deepcopy(optimizer), support.crossentropy())
    np.testing.assert_array_equal(memory_of(model), before)
    model.fit(small(FRONT_ENDS[0], None, first_step=4)[1], verbose=0)
    assert not np.array_equal(memory_of(model), before)
    assert len(model.optimizer.weights) == len(optimizer.weights)
    model.compile(optimizer, support.crossentropy())
    np.testing.assert_array_equal(memory_of(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TopK(0.2), RandomMask(0.5), RandomMask(0.5, "coordinate")])
def test_replicas_take_the_step_of_one(kind):
    x, y = support.small_data(120)

    def trained(strategy):
        with strategy.scope():
            optimizer = tfdp.DPSGD(0.5, 0.0, 30, learning_rate=0.3, compression=kind)
            model = support.compiled(optimizer)
        options = tf.data.Options()
        off = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = off
        chunks = tf.data.Dataset.from_tensor_slices((x, y)).batch(30).with_options(options)
        model.fit(chunks, epochs=2, verbose=0)
        return support.flat(model.get_weights())

    alone = trained(tf.distribute.get_strategy())
    np.testing.assert_allclose(trained(support.mirrored(2)), alone, atol=2e-6)


TOGETHER = [
    (RandomMask(0.5), {"secure_noise": True}, {"padding": "full"}),
    (RandomMask(0.5), {}, {"privacy_unit": np.arange(64) // 2, "examples_per_user": 2}),
    (RandomMask(0.5), {"cls": tfdp.DPSignAdam, "clipping_rule": "adaptive_quantile"}, {}),
    (RandomMask(0.5, "coordinate"), {"secure_noise": True}, {"padding": "full"}),
    (TopK(0.2), {"secure_noise": True}, {"padding": "full"}),
    (
        TopK(0.2),
        {"noise_correlation": tfdp.BandedNoise([2.0, 1.0]), "clipping_rule": "per_layer"},
        {"cycle_length": 2},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arguments", "sampled"), TOGETHER)
def test_what_goes_together(kind, arguments, sampled):
    data = support.small_data(64)
    batches = tfdp.data.poisson_batches(data, expected_batch_size=8, steps_per_epoch=1, **sampled)
    cls = arguments.get("cls", tfdp.DPSGD)
    rest = {name: value for name, value in arguments.items() if name != "cls"}
    schedule = tfdp.schedules.PiecewiseConstantNoise([1], [2.0, 1.5])
    noise = 1.5 if "noise_correlation" in rest or "secure_noise" in rest else schedule
    model = support.compiled(
        cls(0.5, noise, sampling=batches.sampling, learning_rate=0.1, compression=kind, **rest)
    )
    steps = []
    for _ in range(3):
        before = model.get_weights()
        model.fit(batches, verbose=0)
        steps.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
    assert model.optimizer.released_steps()[1] == 0
    assert np.all(np.isfinite([support.flat(step) for step in steps]))
    moved = [[np.any(change != 0) for change in step] for step in steps]
    if kind == RandomMask(0.5):  # A layer moves as a whole. (Adam moves others later, too.)
        assert moved[0] in ([True, True, False, False], [False, False, True, True])
    elif isinstance(kind, TopK):
        assert all(np.count_nonzero(support.flat(step)) == 9 for step in steps)


@with_both
@pytest.mark.parametrize(
    "kind", [TopK(0.2, error_memory=False), RandomMask(0.5, "coordinate", False, 7), None]
)
def test_config_round_trip(front, kind):
    optimizer = front.tfdp.DPSGD(0.5, 1.1, 16, compression=kind)
    config = optimizer.get_config()
    again = type(optimizer).from_config(config)
    assert again.compression == kind and again.get_config() == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), r"`fraction` must be a number in \(0, 1\].*Received"),
        (lambda: TopK(math.nan), "`fraction`"),
        (lambda: RandomMask(1.5), "`fraction`"),
        (lambda: TopK(0.5, 1), "`error_memory` must be True or False"),
        (lambda: RandomMask(0.5, "row"), r"`by` must be one of \['layer', 'coordinate'\]"),
        (lambda: RandomMask(0.5, redraw=None), "`redraw` must be True or False"),
        (lambda: RandomMask(0.5, seed=-1), "`seed` must be an integer in"),
        (lambda: tfdp.DPSGD(1.0, 1.0, 8, compression="top_k"), "`compression` must be .*TopK"),
        (lambda: tfdp.DPSGD(1.0, 1.0, 8, compression=0.1), "`compression` must be"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_masks_go_with_no_correlated_noise():
    batches = batches_of(cycle_length=2)
    arguments = {
        "sampling": batches.sampling,
        "noise_correlation": tfdp.BandedNoise([2.0, 1.0]),
    }
    with pytest.raises(ValueError, match="`noise_correlation` must be None where each step"):
        tfdp.DPSGD(0.5, 1.0, compression=RandomMask(0.5), **arguments)
    assert tfdp.DPSGD(0.5, 1.0, compression=TopK(0.5), **arguments).compression == TopK(0.5)


def test_masks_go_with_no_two_term_loss():
    x, weights = tf.zeros([4, 2]), tf.Variable(tf.zeros([2]))
    optimizer = tfdp.DPSGD(1.0, 1.0, 10, learning_rate=1.0, compression=RandomMask(0.5))

    @tf.function
    def step(x):
        loss = tfdp.clipping.TwoTermLoss(
            lambda x: tf.linalg.matvec(x, weights),
            None,
            batch=(x,),
            mask=tf.ones([4], tf.bool),
            aggregation=tfdp.clipping.TermWiseAggregation(1.0, 2),
        )
        optimizer.minimize(loss, [weights])

    with pytest.raises(ValueError, match="must be trained without masks"):
        step(x)
