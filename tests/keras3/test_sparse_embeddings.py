"""Sparse updates of embedding tables in a training: noise, ledger, updates of rows, refusals."""

import math
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support import mirrored
from tfdp.clipping import AdaptiveQuantileClipping, TermWiseAggregation, TwoTermLoss
from tfdp.keras3 import row_updates
from tfdp.step.sparse_embeddings import SparseEmbeddings

N, BATCH, CLIP, Z, ROWS, WIDTH = 64, 8, 0.5, 1.5, 500, 40
# About half of the rows survive, most of them untouched.
LOW = tfdp.SparseEmbeddings(threshold=0.1, count_share=0.36, min_rows=100)
# Those that an example touches, and no others; nothing is noisy.
TOUCHED = tfdp.SparseEmbeddings(threshold=0.1, min_rows=100)
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, ROWS, [N, 3]).astype("int32"), RNG.integers(0, 2, [N]).astype("float32")
optimizers = keras.optimizers


def network(regularizer=None, constraint=None, sparse=True):
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(
        ROWS, WIDTH, embeddings_regularizer=regularizer, embeddings_constraint=constraint
    )
    return keras.Sequential(
        [keras.Input([3], dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def nothing(y, outputs):
    return 0.0 * tf.reduce_sum(outputs, axis=-1)


def batches_of(**kwargs):
    return tfdp.data.poisson_batches((X, Y), **{"expected_batch_size": BATCH, **kwargs})


def trained(model, optimizer, batches, loss=nothing, steps=1, **kwargs):
    model.compile(optimizer, loss, **kwargs)
    model.fit(batches, steps_per_epoch=steps, verbose=0)
    return model


def noise_of_step(padding="full", steps=1, batch_arguments=None, **kwargs):
    """Returns what the last step, without gradients, subtracts from table and other weights."""
    batches, model = batches_of(padding=padding, **(batch_arguments or {})), network()
    given = {"noise_multiplier": Z, "sampling": batches.sampling, **kwargs}
    optimizer = tfdp.keras3.DPSGD(CLIP, learning_rate=float(BATCH), sparse_embeddings=LOW, **given)
    model.compile(optimizer, nothing)
    before = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: before.append(model.get_weights())
    )
    model.fit(batches, steps_per_epoch=steps, callbacks=[callback], verbose=0)
    table, *others = (b - a for b, a in zip(before[-1], model.get_weights(), strict=True))
    return table, np.concatenate([np.ravel(o) for o in others]), optimizer


def assert_as_stated(stddev, noise=Z, **kwargs):
    """It fails by luck with probability below 1e-9: 10,000 numbers are known to 0.7%."""
    table, others, optimizer = noise_of_step(**kwargs)
    updated = np.any(table != 0, axis=1)
    p = LOW.false_positives(noise)
    assert abs(updated.sum() - ROWS * p) < 7 * math.sqrt(ROWS * p)
    kept = table[updated]
    assert np.all(kept != 0) and 100 < len(kept) < 400
    assert abs(kept.std() / stddev - 1) < 0.05
    assert abs(np.corrcoef(kept[::2].ravel()[:4000], kept[1::2].ravel()[:4000])[0, 1]) < 0.12
    assert abs(others.std() / stddev - 1) < 7 / math.sqrt(2 * len(others))
    assert optimizer.noise_stddev == pytest.approx(stddev)
    *_, release = optimizer.ledger.releases
    event = release.event
    assert getattr(event, "event", event).noise_multiplier == noise


def test_rows_that_survive_have_noise_of_the_raised_multiplier():
    assert_as_stated(Z / math.sqrt(1 - 0.36) * CLIP)


WITH = {
    "schedule": {
        "steps": 2,
        "noise_multiplier": tfdp.schedules.PiecewiseConstantNoise([1], [1.0, 2.0]),
        "noise": 2.0,
    },
    "cycles": {"batch_arguments": {"cycle_length": 4}},
    "users": {"batch_arguments": {"privacy_unit": np.arange(N) // 2, "examples_per_user": 2}},
    "augmentations": {"batch_arguments": {"augmentations": 2}},
    "epochs": {"batch_arguments": {"cycle_length": N // BATCH, "redraw_sets": True}},
    "buckets": {"padding": "buckets"},
    "per layer": {"clipping_rule": "per_layer"},
    "automatic": {"clipping_rule": "automatic"},
}


@pytest.mark.parametrize("name", WITH)
def test_with_another_option_the_noise_is_as_stated(name):
    noise = WITH[name].get("noise", Z)
    assert_as_stated(noise / math.sqrt(1 - 0.36) * CLIP, **WITH[name])


def test_noise_that_is_not_raised_is_caught():
    def noise(self, z, noise=SparseEmbeddings.noise):
        return noise(self, z)[0], z

    with mock.patch.object(SparseEmbeddings, "noise", noise), pytest.raises(AssertionError):
        assert_as_stated(Z / math.sqrt(1 - 0.36) * CLIP)


def test_an_adaptive_clip_shares_the_noise():
    rule = AdaptiveQuantileClipping(count_noise=4.0)
    table, _, optimizer = noise_of_step("none", clipping_rule=rule)
    sums, counts = optimizer._adaptive.sum_noises[0], LOW.noise(Z)[0]
    assert sums**-2 + counts**-2 + 8.0**-2 == pytest.approx(Z**-2)
    kept = table[np.any(table != 0, axis=1)]
    assert abs(kept.std() / (sums * CLIP) - 1) < 0.05
    assert optimizer.current_l2_norm_clip != CLIP


INNER = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
}


def assert_rows_move_as_in_keras(network, inner):
    """The same examples in each step: rows that are updated have the same moments as in Keras."""
    x, y = X[:4], Y[:4]
    loss = keras.losses.MeanSquaredError()
    weights, before = {}, network().get_weights()
    for sparse in (None, TOUCHED):
        optimizer = tfdp.keras3.DPOptimizer(inner(), 10.0, 0.0, 4, sparse_embeddings=sparse)
        model = trained(
            network(), optimizer, tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat(),
            loss, steps=3,
        )  # fmt: skip
        weights[sparse] = model.get_weights()
        assert int(optimizer.iterations) == 3
    for own, other in zip(weights[TOUCHED], weights[None], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    moved = np.any((weights[TOUCHED][0] != before[0]).reshape([ROWS, -1]), axis=1)
    assert set(np.flatnonzero(moved)) == set(x.ravel())


@pytest.mark.parametrize("name", INNER)
def test_rows_move_as_in_keras_and_others_stay(name):
    assert_rows_move_as_in_keras(network, INNER[name])


@pytest.mark.parametrize("width", [[], [2, 3]])
def test_rows_may_be_numbers_or_matrices(width):
    class Table(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=[ROWS, *width], initializer="normal")

        def call(self, ids):
            return keras.ops.take(self.table, ids, axis=0)

    def network():
        keras.utils.set_random_seed(0)
        layers = (Table(), keras.layers.Flatten(), keras.layers.Dense(1))
        return keras.Sequential([keras.Input([3], dtype="int32"), *layers])

    assert_rows_move_as_in_keras(network, INNER["momentum"])


def test_moments_of_rows_that_stay_do_not_decay():
    optimizer = optimizers.Adam(0.1)
    table = keras.Variable(np.ones([4, 2], "float32"), name="table")
    optimizer.build([table])
    momentum = optimizer._momentums[0]
    for rows in ([1, 3], [3]):
        gradient = tf.IndexedSlices(tf.ones([len(rows), 2]), tf.constant(rows, tf.int64))
        row_updates.apply(optimizer, [(gradient, table)])
    np.testing.assert_allclose(momentum[:, 0], [0, 0.1, 0, 0.19], rtol=1e-6)
    assert np.all(table.numpy()[[0, 2]] == 1)


def test_tables_alone_take_steps():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3], dtype="int32"), keras.layers.Embedding(ROWS, 1)])
    model.add(keras.layers.GlobalAveragePooling1D())
    optimizer = tfdp.keras3.DPSGD(1.0, 1.0, 8, learning_rate=0.1, sparse_embeddings=TOUCHED)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    trained(model, optimizer, data, keras.losses.MeanSquaredError(), steps=2)
    assert int(optimizer.iterations) == 2


def test_it_is_saved_with_a_model(tmp_path):
    batches = batches_of()
    optimizer = tfdp.keras3.DPAdam(1.0, 1.0, sampling=batches.sampling, sparse_embeddings=LOW)
    model = trained(network(), optimizer, batches, "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.sparse_embeddings == LOW
    assert loaded.optimizer.ledger.epsilon(1e-5) == optimizer.ledger.epsilon(1e-5)
    loaded.fit(batches, steps_per_epoch=1, verbose=0)


def test_make_private_passes_it_on():
    sparse = tfdp.SparseEmbeddings(threshold=20.0, min_rows=100)
    model = network()
    model.compile("adam", "mse")
    model, batches, budget = tfdp.keras3.make_private(
        model, (X, Y), epochs=1, target_epsilon=4.0, batch_size=8, verbose=False,
        sparse_embeddings=sparse,
    )  # fmt: skip
    model.fit(batches, callbacks=[budget], verbose=0)
    assert model.optimizer.sparse_embeddings == sparse
    assert 0 < model.optimizer.ledger.epsilon(budget.delta).epsilon <= 4.0


def make(cls=None, sampling=None, inner=None, **kwargs):
    sampling = sampling or batches_of().sampling
    given = {"sampling": sampling, "sparse_embeddings": LOW, **kwargs}
    if inner is not None:
        return tfdp.keras3.DPOptimizer(inner, CLIP, Z, **given)
    return getattr(tfdp.keras3, cls or "DPSGD")(CLIP, Z, **given)


REFUSED = {
    "secure noise": (
        lambda: make(sampling=batches_of(padding="full").sampling, secure_noise=True),
        "Received: secure_noise=True",
    ),
    "vectorized": (lambda: make(engine="vectorized"), "Received: engine='vectorized'"),
    "microbatches": (lambda: make(num_microbatches=2), "Received: num_microbatches=2"),
    "chunks": (
        lambda: make(sampling=batches_of(chunk_size=4).sampling),
        "Received: gradient_accumulation_steps",
    ),
    "correlated": (
        lambda: make(
            sampling=batches_of(cycle_length=2).sampling,
            noise_correlation=tfdp.BandedNoise([1.0, 0.5]),
        ),
        "Received: noise_correlation",
    ),
    "compression": (lambda: make(compression=tfdp.contrib.TopK(0.5)), "Received: compression"),
    "perturbed": (lambda: make(clipping_rule="perturbed"), "Received: clipping_rule"),
    "signs": (lambda: make("DPSignSGD"), "`inner_optimizer` must be a `keras.optimizers.SGD`"),
    "AdamBC": (lambda: make("DPAdamBC"), "`inner_optimizer` must be a `keras.optimizers.SGD`"),
    "amsgrad": (lambda: make("DPAdam", amsgrad=True), "Adam` without `amsgrad`"),
    "lion": (lambda: make(inner=optimizers.Lion()), "`inner_optimizer` must be"),
    "decay": (lambda: make("DPAdam", weight_decay=0.1), "`weight_decay` must not be given"),
    "averages": (lambda: make(use_ema=True), "`use_ema` must not be given"),
    "norms": (lambda: make(global_clipnorm=1.0), "`global_clipnorm` must not be given"),
    "selective": (
        lambda: make("DPSURSGD", validation_batch_size=8, validation_noise_multiplier=1.0),
        "`sparse_embeddings` must be None with selective release",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_fit_are_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        function()


class TwoTerms(keras.Model):
    def train_step(self, data):
        x, y, weights = data

        def batch_wise(x, y, mask):
            return tf.reduce_sum(tf.where(mask, nothing(y, self(x)), 0.0))

        groups = TermWiseAggregation(batch_clip=0.3, num_groups=2)
        mask = tf.cast(weights, tf.bool)
        own = lambda x, y: nothing(y, self(x))  # noqa: E731
        loss = TwoTermLoss(own, batch_wise, (x, y), groups, mask=mask)
        self.optimizer.minimize(loss, self.trainable_variables)
        return {"released": tf.constant(1.0)}


@pytest.mark.parametrize("why", ["XLA", "replicas", "regularizer", "constraint", "two terms"])
def test_steps_that_do_not_fit_are_refused(why):
    batches, kwargs, strategy = batches_of(padding="full"), {}, None
    message = "`sparse_embeddings` must be None where updates are not of the rows"
    if why == "XLA":
        kwargs = {"jit_compile": True}
    if why == "replicas":
        strategy = mirrored(2)
        batches = tfdp.data.distributed_poisson_batches(
            strategy,
            lambda part, count: (X[part::count], Y[part::count]),
            dataset_size=N,
            expected_batch_size=BATCH,
        )
    with (strategy or tf.distribute.get_strategy()).scope():
        model = network(
            "l2" if why == "regularizer" else None, "max_norm" if why == "constraint" else None
        )
        if why == "constraint":
            message = "`embeddings_constraint` must be None"
        if why == "two terms":
            inputs = keras.Input([3], dtype="int32")
            model = TwoTerms(inputs, network()(inputs))
            message = "`sparse_embeddings` must be None with a TwoTermLoss"
        optimizer = make(sampling=batches.sampling)
        loss = None if why == "two terms" else nothing
        with pytest.raises(ValueError, match=message):
            trained(model, optimizer, batches, loss, **kwargs)
