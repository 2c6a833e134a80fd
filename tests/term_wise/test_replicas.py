"""Losses over batches on several replicas: groups of all replicas, shared out between them."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both
from tests.support import flat, mirrored
from tests.two_term_support import Codes, Pull, data
from tests.vae_support import X, Y, conditional, vae
from tests.vae_support import flat as weights_of
from tfdp.clipping import TermWiseAggregation, TwoTermLoss
from tfdp.clipping.batch_losses import example_groups
from tfdp.clipping.batch_losses.aggregations import split_noise
from tfdp.step import replicas
from tfdp.training.term_wise.training import TermWiseTraining

layers = tf.keras.layers
C1, C2, B, M, SEED = 0.5, 0.2, 30, 5, 3
ROWS = 48  # A multiple of each number of replicas.


def term_wise(**changes):
    return TermWiseAggregation(**{"batch_clip": C2, "num_groups": M, **changes})


class Step:
    """`Step(count, Model, ...)(x, y, mask)`: what one step adds to the weights, times B.

    Each replica has an equal share of the rows, in their order. The first replica draws the groups
    by the key that one replica has.
    """

    def __init__(self, count, make, aggregation=None, noise=0.0, regularizer=None):
        self.count = count
        self.strategy = mirrored(count) if count > 1 else tf.distribute.get_strategy()
        with self.strategy.scope():
            self.model = make()
            self.optimizer = tfdp.DPSGD(C1, noise, B, learning_rate=1.0, noise_seed=SEED)
        of_replica = aggregation if callable(aggregation) else lambda: aggregation or term_wise()
        public = None if regularizer is None else lambda: regularizer(self.model)

        def step(x, y, mask):
            model = self.model
            terms = model.sample_wise, model.batch_wise
            loss = TwoTermLoss(*terms, (x, y), of_replica(), mask, regularizer=public)
            self.optimizer.minimize(loss, model.trainable_variables)

        self.run = tf.function(lambda *batch: self.strategy.run(step, args=batch))
        self.start = self.model.get_weights()

    def shared(self, rows):
        parts = np.split(rows, self.count)
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    def __call__(self, x, y, mask):
        self.model.set_weights(self.start)
        if self.optimizer.iterations.numpy():
            self.optimizer.iterations.assign(0)  # The same groups again.
        self.run(*map(self.shared, (x, y, mask)))
        return B * (flat(self.model.get_weights()) - flat(self.start))


# The update.


def regularized(count):
    return Step(count, Codes, regularizer=lambda model: 0.1 * tf.reduce_sum(model.head.kernel**2))


@pytest.fixture(scope="module")
def alone():
    """The update of one replica."""
    return regularized(1)(*data(ROWS))


@pytest.mark.slow
def test_the_update_is_that_of_one_replica(alone):
    assert np.linalg.norm(alone) > 10 * C1
    np.testing.assert_allclose(regularized(3)(*data(ROWS)), alone, atol=1e-5)


def mixes_no_replicas(monkeypatch):
    """Each replica draws its own examples into m groups."""
    monkeypatch.setattr(
        "tfdp.clipping.batch_losses.aggregations.draw_groups_of_replica",
        example_groups.draw_groups,
    )


def shares_nothing_out(monkeypatch):
    """All replicas clip the groups of the first."""
    monkeypatch.setattr(example_groups.replica_sync, "index", lambda: 0)


def regularizes_on_each_replica(monkeypatch):
    """Each replica has the whole regularizer, not a share of it."""
    whole = TwoTermLoss.public_regularizer
    monkeypatch.setattr(TwoTermLoss, "public_regularizer", lambda loss: whole(loss) * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate", [mixes_no_replicas, shares_nothing_out, regularizes_on_each_replica]
)
def test_another_update_is_caught(alone, monkeypatch, mutate):
    """Mutants."""
    mutate(monkeypatch)
    assert np.max(np.abs(regularized(2)(*data(ROWS)) - alone)) > 0.01


# The sensitivity.


def pulled(step, row):
    """Returns how far an example moves a term that it reverses, in units of the term's weight."""
    x, mask = np.full([ROWS, 3], 0.5, "float32"), np.ones(ROWS, bool)
    x[row] = -1000.0
    absent = mask.copy()
    absent[row] = False
    return M / B * np.max(np.abs(step(x, x[:, 0], mask) - step(x, x[:, 0], absent)))


def test_an_example_moves_the_batch_wise_sum_by_twice_the_clip():
    """In whichever replica it is: it is in one group, and moves no other example to another."""
    step = Step(2, Pull)
    for row in range(0, ROWS, 5):
        assert pulled(step, row) == pytest.approx(2 * C2, rel=1e-4), row


@pytest.mark.slow
def test_groups_that_two_replicas_clip_are_caught(monkeypatch):
    """Mutant."""
    shares_nothing_out(monkeypatch)
    step = Step(2, Pull)
    assert max(pulled(step, row) for row in range(0, ROWS, 5)) > 3.9 * C2


@pytest.mark.slow
def test_neighbours_are_no_farther_apart_than_the_sensitivities():
    rng = np.random.default_rng(0)
    step = Step(3, Codes, term_wise(batch_clip=1e-3, num_groups=12))
    moved = term_wise(batch_clip=1e-3).sensitivities(C1)
    most = moved.sample_wise + B / 12 * moved.batch_wise
    distances = []
    for seed in range(20):
        x, y, mask = data(ROWS, seed)
        absent = mask.copy()
        absent[rng.choice(np.flatnonzero(mask))] = False
        distances.append(np.linalg.norm(step(x, y, mask) - step(x, y, absent)))
    assert 0.5 * most < max(distances) <= most * (1 + 1e-3)


class Counts(tf.keras.Model):
    """The gradients of the two terms are the numbers of examples that they see."""

    def __init__(self):
        super().__init__()
        self.of_samples = self.add_weight("of_samples", [], initializer="zeros")
        self.of_groups = self.add_weight("of_groups", [], initializer="zeros")

    def call(self, x):
        return x

    def train_step(self, data):
        x, y, *mask = data
        loss = TwoTermLoss(
            lambda x, y: self.of_samples * tf.ones_like(x[:, 0]),
            lambda x, y, mask: self.of_groups * tf.math.count_nonzero(mask, dtype=tf.float32),
            (x, y),
            TermWiseAggregation(1e6, num_groups=2, group_capacity=200),
            mask=mask[0] if mask else None,
        )
        self.optimizer.minimize(loss, self.trainable_variables)
        return {}


def draws_of(strategy, padding):
    """Of two parts, the second is empty in nearly every draw."""
    sizes = (399, 1)
    return tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (np.ones([sizes[index], 1], "float32"), np.ones(sizes[index])),
        dataset_size=400,
        expected_batch_size=4,
        padding=padding,
        seed=1,
    )


def counted(padding):
    """Numbers of examples that the terms saw in some steps, and of those that were drawn."""
    strategy = mirrored(2)
    drawn = 0
    batches = iter(draws_of(strategy, padding))
    for _ in range(10):
        drawn += sum(np.sum(x) for x in strategy.experimental_local_results(next(batches)[0]))
    again = draws_of(strategy, padding)
    with strategy.scope():
        model = Counts()
        model.compile(tfdp.DPSGD(1.0, 0.0, sampling=again.sampling, learning_rate=4.0))
    model.fit(again, steps_per_epoch=10, verbose=0)
    assert model.optimizer.released_steps() == (10, 0)
    samples, groups = (-v.numpy() for v in (model.of_samples, model.of_groups))
    return samples, 2 / 4 * groups, drawn


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "full"])
def test_the_row_of_an_empty_draw_is_in_no_group(padding):
    samples, groups, drawn = counted(padding)
    assert drawn > 10
    assert samples == pytest.approx(drawn) and groups == pytest.approx(drawn)


@pytest.mark.slow
def test_the_row_of_an_empty_draw_in_a_group_is_caught(monkeypatch):
    """Mutant."""
    summed = TwoTermLoss.clipped_sum

    def with_all_rows(*args, empty=None, **kwargs):
        return summed(*args, **kwargs)

    monkeypatch.setattr(TwoTermLoss, "clipped_sum", with_all_rows)
    _, groups, drawn = counted("none")
    assert groups > drawn + 5


# The noise.


class Wide(Codes):
    """Codes in both terms and a head in one, with many weights and no gradients."""

    def __init__(self):
        super().__init__()
        self.codes, self.head = layers.Dense(801), layers.Dense(3)
        self(tf.zeros([1, 3]))

    def sample_wise(self, x, y):
        return 0.0 * super().sample_wise(x, y)

    def batch_wise(self, x, y, mask):
        return 0.0 * tf.reduce_sum(self.codes(x))


def noises(count, sigma=1.5):
    """The noise of a step, of weights in both terms and in one, with their standard deviations."""
    step = Step(count, Wide, noise=sigma)
    noise = step(*data(ROWS))
    shared, alone = 4 * 801, 3 * 802
    a, b = C1 * math.sqrt(shared + alone), B / M * 2 * C2 * math.sqrt(shared)
    of_samples, of_groups = split_noise(sigma, "least_noise", a, b)
    both = math.hypot(of_samples * C1, of_groups * B / M * 2 * C2)
    assert len(noise) == shared + alone
    return [(noise[:shared], both), (noise[shared:], of_samples * C1)]


def p_value(sample, stddev):
    return scipy.stats.kstest(sample, scipy.stats.norm(0, stddev).cdf).pvalue


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("count", [2, 3])
def test_the_noise_of_all_replicas_is_that_of_one(count):
    for sample, stddev in noises(count):
        assert p_value(sample, stddev) > 1e-6
        for wrong in (np.sqrt(count), 1 / np.sqrt(count), count, 1 / count):
            assert p_value(sample, stddev * wrong) < 1e-9


@pytest.mark.slow
def test_full_noise_of_each_replica_is_caught(monkeypatch):
    """Mutant."""
    monkeypatch.setattr(replicas, "own_share", lambda draw, size: draw(size))
    assert all(p_value(sample, stddev) < 1e-9 for sample, stddev in noises(2))


# Who may not.


@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        (tfdp.contrib.MicroAggregation(), "`aggregation` must be a TermWiseAggregation under a"),
        (tfdp.contrib.BatchAggregation(), "`aggregation` must be a TermWiseAggregation under a"),
        (term_wise(num_groups=1), "`num_groups` must be at least the number of replicas, 2"),
        (lambda: term_wise(batch_clip=0.1 + replicas.index()), "losses with the same aggregation"),
    ],
    ids=["micro", "batch", "too few groups", "another in each replica"],
)
def test_what_cannot_be_shared_is_refused(aggregation, message):
    with pytest.raises(ValueError, match=message):
        Step(2, Codes, aggregation)(*data(ROWS))


def test_several_workers_are_refused(monkeypatch):
    monkeypatch.setattr(replicas, "several_workers", lambda: True)
    with pytest.raises(ValueError, match="must be trained in one process"):
        Step(2, Codes)(*data(ROWS))


# The autoencoder.


class Same:
    """In the place of a distribution: all rows get the same number."""

    def __init__(self, shape, value):
        self.tensor = tf.fill(shape, value)

    def sample(self, rows, seed=None):
        return tf.repeat(self.tensor[tf.newaxis], rows, axis=0)


@pytest.mark.slow
@with_both
def test_the_update_of_an_autoencoder_is_that_of_one_replica(front, monkeypatch):
    monkeypatch.setattr(
        TermWiseTraining, "_draws", lambda self: [Same([1, 2], 0.3), Same([2], -0.2)]
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    ends = []
    for count in (1, 2):
        strategy = mirrored(count) if count > 1 else tf.distribute.get_strategy()
        with strategy.scope():
            model = vae(front, batch_clip=0.1, num_groups=5, alpha=10.0)
            optimizer = front.tfdp.DPSGD(1.0, 0.0, 60, learning_rate=1.0, noise_seed=SEED)
            model.compile(optimizer)
        rows = tf.data.Dataset.from_tensor_slices((X[:60], X[:60])).batch(60)
        start = weights_of(model)
        model.fit(rows.with_options(options), steps_per_epoch=1, verbose=0)
        ends.append(weights_of(model))
    assert np.max(np.abs(ends[0] - start)) > 0.01
    np.testing.assert_allclose(*ends, atol=2e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("front", "padding"), [(FRONT_ENDS[0], "none"), (FRONT_ENDS[-1], "full")])
def test_an_autoencoder_learns_from_the_draws_of_all_replicas(front, padding, tmp_path):
    strategy = mirrored(2)
    batches = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (X[index::count], Y[index::count]),
        dataset_size=len(X),
        expected_batch_size=16,
        padding=padding,
    )
    with strategy.scope():
        model = conditional(front, batch_clip=0.1, num_groups=3, non_private_diagnostics=True)
        model.compile(front.tfdp.DPAdam(1.0, 1.1, sampling=batches.sampling))
    history = model.fit(
        batches,
        steps_per_epoch=batches.steps_per_epoch,
        epochs=2,
        verbose=0,
        validation_data=tf.data.Dataset.from_tensors((X, Y)),
    ).history
    assert history["updates"] == [4, 8] and np.all(np.isfinite(history["val_loss"]))
    assert np.all(np.isfinite(history["non_private_loss"]))
    assert model.optimizer.released_steps() == (8, 0)
    whole = tfdp.accounting.PrivacyLedger()
    alone = tfdp.data.poisson_batches((X, X), expected_batch_size=16, padding=padding)
    release = tfdp.DPSGD(1.0, 1.1, sampling=alone.sampling).release
    whole.record(release.event, 8, release.truncation_probability)
    assert model.optimizer.ledger.epsilon(1e-5).epsilon == whole.epsilon(1e-5).epsilon
    assert model.generate(3, y=[0, 1, 2]).shape == (3, 6)
    model.save(tmp_path / "model.keras")
    loaded = front.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.released_steps() == (8, 0)
