"""Several replicas take one step: the update, its sensitivity, its noise, and who may."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.support import mirrored
from tfdp.clipping.loss_graph import data_flow, reductions
from tfdp.step import replicas

layers = tf.keras.layers
CLIP, BATCH = 1.0, 30
X, Y = support.small_data(BATCH * 4)


def network():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential(
        [
            layers.Input([4]),
            layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(3),
        ]
    )


def built(strategy, optimizer, reduction="sum_over_batch_size", model=network):
    with strategy.scope():
        return support.compiled(optimizer(), model(), loss=support.crossentropy(reduction))


def chunks(count):
    """Batches in parts, of which each replica of a strategy takes an equal share."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH // count).with_options(options)


def trained(strategy, optimizer, parts=1, reduction="sum_over_batch_size"):
    model = built(strategy, optimizer, reduction)
    model.fit(chunks(parts), epochs=2, verbose=0)
    return support.flat(model.get_weights())


def sgd(cls=tfdp.DPSGD, noise=0.0, **kwargs):
    return lambda: cls(CLIP, noise, BATCH, **{"learning_rate": 0.3, **kwargs})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "parts", "reduction", "counts"),
    [
        (sgd(momentum=0.9), 1, "sum_over_batch_size", (3,)),
        (sgd(engine="vectorized"), 1, "sum", (3,)),
        (sgd(gradient_accumulation_steps=5), 5, "sum_over_batch_size", (2,)),
        (sgd(clipping_rule="adaptive_quantile"), 1, "sum_over_batch_size", (2,)),
    ],
    ids=["momentum", "vectorized", "chunks", "adaptive"],
)
def test_the_update_is_that_of_one_replica(optimizer, parts, reduction, counts):
    alone = trained(tf.distribute.get_strategy(), optimizer, parts, reduction)
    assert np.all(np.isfinite(alone))
    for count in counts:
        together = trained(mirrored(count), optimizer, parts, reduction)
        np.testing.assert_allclose(together, alone, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum])
def test_functions_that_return_a_scalar(reduce):
    """Keras divides what they return by the number of replicas."""

    def loss(y, prediction):
        return reduce(support.crossentropy("none")(y, prediction))

    def update(strategy):
        with strategy.scope():
            model = support.compiled(sgd()(), network(), loss=loss)
        model.fit(chunks(1), verbose=0)
        return support.flat(model.get_weights())

    alone, together = (update(s) for s in (tf.distribute.get_strategy(), mirrored(2)))
    np.testing.assert_allclose(together, alone, atol=2e-6)


@pytest.mark.slow
def test_losses_that_are_divided_by_the_number_of_replicas_are_caught(monkeypatch):
    """Mutant: Keras's share of the mean is taken for the loss of an example."""
    monkeypatch.setattr(reductions.Reduction, "of_all_replicas", lambda own: own.losses)
    alone, together = (trained(s, sgd()) for s in (tf.distribute.get_strategy(), mirrored(3)))
    assert np.max(np.abs(alone - together)) > 1e-3


@pytest.mark.slow
def test_secure_noise_is_added_to_the_sum_of_one_replica():
    optimizer = sgd(noise=1e-6, secure_noise=True, gradient_accumulation_steps=5)
    alone = trained(tf.distribute.get_strategy(), optimizer, 5)
    np.testing.assert_allclose(trained(mirrored(2), optimizer, 5), alone, atol=1e-5)


def test_an_example_moves_the_sum_by_at_most_the_clip():
    """Each replica of two has one half of the rows; the example stands in one of them."""
    x = np.concatenate([X[: BATCH - 1], 100 * X[-1:]])
    model = built(mirrored(2), sgd(), "none", support.small_model)
    start = model.get_weights()
    for row in (0, 1, BATCH - 1):
        order = [*range(row), BATCH - 1, *range(row, BATCH - 1)]
        ends = []
        for keep in (True, False):
            mask = np.array([keep or i != BATCH - 1 for i in order])
            data = tf.data.Dataset.from_tensors((x[order], Y[:BATCH][order], mask))
            model.set_weights(start)
            model.fit(data.unbatch().batch(BATCH), verbose=0)
            ends.append(support.flat(model.get_weights()) * BATCH / 0.3)
        norm = np.linalg.norm(ends[0] - ends[1])
        assert 0.5 * CLIP < norm <= CLIP * (1 + 1e-4), row


# The noise.


def wide():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([layers.Input([4]), layers.Dense(2001), layers.Dense(3)])


def noise_of_one_step(count, **kwargs):
    """Noise in the sum of clipped gradients, from a step without examples."""
    model = built(mirrored(count), sgd(noise=1.3, learning_rate=1.0, **kwargs), "none", wide)
    before = support.flat(model.get_weights())
    data = tf.data.Dataset.from_tensors((X[:BATCH], Y[:BATCH], np.zeros(BATCH, bool)))
    model.fit(data.unbatch().batch(BATCH), verbose=0)
    return (before - support.flat(model.get_weights())) * BATCH


def p_value(sample, stddev):
    return scipy.stats.kstest(sample, scipy.stats.norm(0, stddev).cdf).pvalue


def correlation_of_slices(sample, count):
    """z-scores of the correlations between the slices of replicas."""
    length = -(-len(sample) // count)
    short = len(sample) - (count - 1) * length
    slices = [sample[i * length :][:short] for i in range(count)]
    pairs = [(a, b) for i, a in enumerate(slices) for b in slices[:i]]
    return [abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(short) for a, b in pairs]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("count", "kwargs"), [(2, {}), (3, {"noise_seed": 3, "secure_noise": True})]
)
def test_the_noise_of_all_replicas_is_that_of_one(count, kwargs):
    sample = noise_of_one_step(count, **kwargs)
    assert p_value(sample, 1.3 * CLIP) > 1e-6
    for wrong in (np.sqrt(count), 1 / np.sqrt(count), count, 1 / count):
        assert p_value(sample, 1.3 * CLIP * wrong) < 1e-9
    assert max(correlation_of_slices(sample, count)) < 5


@pytest.mark.slow
def test_full_noise_of_each_replica_is_caught(monkeypatch):
    """Mutant."""
    monkeypatch.setattr(replicas, "own_share", lambda draw, size: draw(size))
    assert p_value(noise_of_one_step(2), 1.3 * CLIP) < 1e-9


@pytest.mark.slow
def test_one_key_for_the_slices_of_all_replicas_is_caught(monkeypatch):
    """Mutant."""
    monkeypatch.setattr(
        tfdp.DPSGD, "_position", lambda self: tf.cast(self.iterations, tf.int64) * 1
    )
    assert max(correlation_of_slices(noise_of_one_step(2, noise_seed=3), 2)) > 20


@pytest.mark.slow
def test_the_count_of_the_adaptive_clip_gets_noise_once(monkeypatch):
    added = []

    def count_of(draw, size):
        added.append(size)
        return own_share(draw, size)

    own_share = replicas.own_share
    monkeypatch.setattr(replicas, "own_share", count_of)
    noise_of_one_step(2, clipping_rule="adaptive_quantile")
    parameters = 5 * 2001 + 3 * 2002
    assert set(added) == {parameters + 1}  # One vector, of the sums and the count.


# Sampling.

N = 200


def parts_of(sizes):
    """Disjoint parts: the label of an example says which it is."""
    ends = np.cumsum([0, *sizes])
    x = np.arange(ends[-1] * 4, dtype="float32").reshape([-1, 4]) / N

    def open_shard(index, count):
        assert count == len(sizes)
        rows = slice(ends[index], ends[index + 1])
        return x[rows], np.arange(ends[-1])[rows]

    return open_shard


def distributed(strategy, sizes=(120, 80), expected=40, **kwargs):
    return tfdp.data.distributed_poisson_batches(
        strategy, parts_of(sizes), dataset_size=sum(sizes), expected_batch_size=expected, **kwargs
    )


def private_model(strategy, batches, cls=tfdp.DPSGD, **kwargs):
    def classifier():
        return tf.keras.Sequential([layers.Input([4]), layers.Dense(N)])

    return built(
        strategy,
        lambda: cls(CLIP, kwargs.pop("noise", 1.0), sampling=batches.sampling, **kwargs),
        model=classifier,
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kwargs", [{}, {"padding": "full"}, {"chunk_size": 7}])
def test_every_replica_samples_its_own_part(kwargs):
    strategy = mirrored(2)
    batches = distributed(strategy, **kwargs)
    chunks = batches.sampling.gradient_accumulation_steps
    drawn = np.zeros([2, N])
    steps = 300
    iterator = iter(batches)
    for _ in range(steps * chunks):
        for replica, labels in enumerate(strategy.experimental_local_results(next(iterator)[1])):
            np.add.at(drawn[replica], labels.numpy(), 1)
    drawn[:, 0] = drawn[:, 120] = drawn[:, 121]  # Padding and empty draws have label 0, too.
    assert not drawn[0, 121:].any() and not drawn[1, 1:120].any()
    counts = drawn.sum(axis=0)[1:]
    z = (counts - steps * 0.2) / np.sqrt(steps * 0.2 * 0.8)
    assert np.all(np.abs(z) < 6) and abs(z.mean()) * np.sqrt(N) < 6


def test_rows_of_a_part_are_exceeded_no_more_often_than_those_of_the_whole():
    whole = tfdp.accounting.sampling.PoissonSampling(N, 40)
    for sizes in [(100, 100), (150, 50), (199, 1), (10,) * 20]:
        parts = tfdp.accounting.sampling.PoissonSampling(
            N, 40, parts=len(sizes), largest_part=max(sizes)
        )
        one = scipy.stats.binom.sf(parts.padded_batch_size, np.array(sizes) + 1, 0.2)
        assert one.sum() <= parts.truncation_probability <= whole.truncation_probability
        assert parts.padded_batch_size <= max(sizes) + 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kwargs", [{}, {"padding": "full"}, {"chunk_size": 30}])
def test_steps_are_counted_once_for_all_replicas(kwargs):
    strategy = mirrored(2)
    batches = distributed(strategy, **kwargs)
    model = private_model(strategy, batches)
    model.fit(batches, steps_per_epoch=batches.steps_per_epoch, epochs=2, verbose=0)
    assert model.optimizer.released_steps() == (10, 0)
    alone = tfdp.accounting.PrivacyLedger()
    whole = tfdp.accounting.sampling.PoissonSampling(N, 40, padding=kwargs.get("padding", "none"))
    release = tfdp.DPSGD(CLIP, 1.0, sampling=whole).release
    alone.record(release.event, 10, release.truncation_probability)
    assert model.optimizer.ledger.epsilon(1e-5).epsilon == alone.epsilon(1e-5).epsilon


@pytest.mark.slow
def test_replicas_whose_draws_are_empty_take_part():
    strategy = mirrored(3)
    batches = distributed(strategy, (190, 5, 5), expected=2, steps_per_epoch=20)
    model = private_model(strategy, batches)
    model.fit(batches, steps_per_epoch=20, verbose=0)
    assert model.optimizer.released_steps() == (20, 0)
    assert np.all(np.isfinite(support.flat(model.get_weights())))


@pytest.mark.slow
def test_a_batch_of_another_replicas_part_is_refused(monkeypatch):
    """Two replicas with samples of one part: an example could be in both."""
    strategy = mirrored(2)
    choose = tf.data.Dataset.choose_from_datasets
    monkeypatch.setattr(
        tf.data.Dataset,
        "choose_from_datasets",
        lambda parts, order: choose(parts, order.map(lambda _: tf.constant(0, tf.int64))),
    )
    batches = distributed(strategy)
    model = private_model(strategy, batches)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(batches, steps_per_epoch=2, verbose=0)


def test_parts_must_be_of_the_size_that_is_accounted_for():
    with pytest.raises(ValueError, match=r"`dataset_size` must be .* 200, of 2 parts"):
        tfdp.data.distributed_poisson_batches(
            mirrored(2), parts_of((120, 80)), dataset_size=400, expected_batch_size=40
        )


# Who may not.


def test_batches_of_one_replica_are_refused():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=BATCH)
    model = built(mirrored(2), lambda: tfdp.DPSGD(CLIP, 1.0, sampling=batches.sampling))
    with pytest.raises((ValueError, TypeError), match="distributed_poisson_batches"):
        model.fit(batches, verbose=0)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (sgd(num_microbatches=4), "num_microbatches"),
        (
            lambda: tfdp.DPSURSGD(
                CLIP, 1.0, BATCH, validation_batch_size=4, validation_noise_multiplier=1.0
            ),
            "one replica",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_refused(optimizer, message):
    model = built(mirrored(2), optimizer)
    with pytest.raises(ValueError, match=message):
        model.fit(chunks(1), verbose=0)


def test_xla_is_refused():
    with mirrored(2).scope():
        model = support.compiled(sgd()(), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        model.fit(chunks(1), verbose=0)


def test_other_strategies_are_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0")
    model = built(strategy, sgd())
    with pytest.raises(ValueError, match="MirroredStrategy or MultiWorkerMirroredStrategy"):
        model.fit(chunks(1), verbose=0)


def test_a_statistic_of_all_replicas_in_the_loss_is_refused():
    class Centered(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, inputs):
            mean = tf.reduce_mean(inputs, axis=0)
            context = tf.distribute.get_replica_context()
            if context is not None:
                mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, mean)
            return self.dense(inputs - mean)

    model = built(mirrored(2), sgd(), model=Centered)
    with pytest.raises(ValueError, match="example"):
        model.fit(chunks(1), verbose=0)


def sum_of_workers(values, key):
    """The operation that strategies of several workers use; it never runs here."""
    return tf.raw_ops.CollectiveReduce(
        input=values,
        group_size=2,
        group_key=key,
        instance_key=key,
        merge_op="Add",
        final_op="Id",
        subdiv_offsets=[0],
    )


def traced(model):
    """Traces a training step, and does not run it."""
    model = support.compiled(sgd()(), model)
    model(X[:2])
    step = tf.function(lambda x, y: model.train_step((x, y)))
    step.get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))


def test_a_sum_over_workers_in_the_loss_is_refused():
    class Centered(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, inputs, training=False):
            mean = tf.reduce_mean(inputs, axis=0)
            return self.dense(inputs - (sum_of_workers(mean, 91) if training else mean))

    with pytest.raises(ValueError, match="example"):
        traced(Centered())


class KeepsSums(tf.keras.Model):
    """Keeps what other workers give, which may be data."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.kept = tf.Variable(tf.zeros([4]), trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.kept.assign(sum_of_workers(tf.ones([4]), 92))
        return self.dense(inputs)


def test_a_sum_over_workers_that_is_kept_is_refused():
    with pytest.raises(ValueError, match="statistic of the batch"):
        traced(KeepsSums())


def test_taking_a_sum_over_workers_for_public_is_caught(monkeypatch):
    """Mutant."""
    known = tuple(kind for kind in data_flow._FROM_DATA if kind != "Collective")
    monkeypatch.setattr(data_flow, "_FROM_DATA", known)
    traced(KeepsSums())


def test_a_check_before_training_knows_the_parts():
    strategy = mirrored(2)
    alone = tfdp.data.poisson_batches((X, Y), expected_batch_size=BATCH)
    model = built(strategy, lambda: tfdp.DPSGD(CLIP, 1.0, sampling=alone.sampling))
    (finding,) = [f for f in tfdp.validate(model).findings if f.refused]
    assert "2 replicas, and batches are sampled of 1 parts" in str(finding)
    batches = distributed(strategy)
    assert tfdp.validate(private_model(strategy, batches)).ok


def test_a_step_outside_of_the_replicas_is_refused():
    strategy = mirrored(2)
    model = built(strategy, sgd())

    @tf.function
    def step(x, y):
        with strategy.scope(), tf.GradientTape() as tape:
            loss = support.crossentropy()(y, model(x, training=True))
        with strategy.scope():
            model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    with pytest.raises(ValueError, match=r"strategy\.run"):
        step(X[:BATCH], Y[:BATCH])


@pytest.mark.slow
def test_own_loops_take_steps_in_replicas():
    strategy = mirrored(2)
    batches = distributed(strategy)
    model = private_model(strategy, batches)
    per_example = support.crossentropy("none")

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = per_example(y, model(x, training=True))
        model.optimizer.minimize(losses, model.trainable_variables, tape=tape)

    @tf.function
    def train(iterator):
        for _ in tf.range(5):
            strategy.run(step, args=next(iterator))

    train(iter(batches))
    assert model.optimizer.released_steps() == (5, 0)
