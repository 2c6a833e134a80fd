"""Several replicas take one step with Keras 3, too; tests/step/test_replicas.py has more."""

import itertools

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests.support import flat, mirrored, small_data
from tfdp.clipping import step_check
from tfdp.keras3 import dp_optimizer

pytestmark = pytest.mark.rewritten_graphs

CLIP, BATCH = 1.0, 30
X, Y = small_data(BATCH * 4)
layers = keras.layers


def network(units=6, regularizer="l2"):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input([4]),
            layers.Dense(units, activation="tanh", kernel_regularizer=regularizer),
            layers.Dense(3),
        ]
    )


def built(strategy, optimizer, model=network, reduction="sum_over_batch_size", **kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    with strategy.scope():
        made = model()
        made.compile(optimizer(), loss, jit_compile=False, **kwargs)
    return made


def chunks(count):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH // count).with_options(options)


def private(cls=tfdp.keras3.DPSGD, noise=0.0, **kwargs):
    return lambda: cls(CLIP, noise, BATCH, **{"learning_rate": 0.3, **kwargs})


def around_adamw():
    inner = keras.optimizers.AdamW(0.01, use_ema=True, clipnorm=0.5)
    return tfdp.keras3.DPOptimizer(inner, CLIP, 0.0, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "parts", "reduction"),
    [
        (private(gradient_accumulation_steps=5), 5, "sum"),
        (around_adamw, 1, "sum_over_batch_size"),
    ],
)
def test_the_update_is_that_of_one_replica(optimizer, parts, reduction):
    ends = []
    for strategy in (tf.distribute.get_strategy(), mirrored(2)):
        model = built(strategy, optimizer, reduction=reduction)
        model.fit(chunks(parts), epochs=2, verbose=0)
        ends.append(flat(model.get_weights()))
    np.testing.assert_allclose(*ends, atol=2e-6)
    start = flat(network().get_weights())
    assert np.max(np.abs(ends[0] - start)) > 0.01


def noise_of_one_step(optimizer):
    model = built(mirrored(2), optimizer, lambda: network(2001, None), "sum")
    before = flat(model.get_weights())
    rows = X[:BATCH], Y[:BATCH], np.zeros(BATCH, "float32")
    model.fit(tf.data.Dataset.from_tensors(rows).unbatch().batch(BATCH), verbose=0)
    return (before - flat(model.get_weights())) * BATCH


def p_value(sample, stddev):
    return scipy.stats.kstest(sample, scipy.stats.norm(0, stddev).cdf).pvalue


@pytest.mark.slow
def test_the_noise_of_all_replicas_is_that_of_one():
    sample = noise_of_one_step(private(noise=1.3, learning_rate=1.0))
    assert p_value(sample, 1.3 * CLIP) > 1e-9
    for wrong in (2, np.sqrt(2), 1 / np.sqrt(2), 0.5):
        assert p_value(sample, 1.3 * CLIP * wrong) < 1e-9


@pytest.mark.slow
def test_sums_that_keras_adds_up_again_are_caught(monkeypatch):
    """Mutant: the gradients, which are sums of all replicas, are added up over the replicas."""

    def build(self, variables):
        self.inner_optimizer.build(variables)

    monkeypatch.setattr(tfdp.keras3.DPOptimizer, "_build_inner", build)
    with pytest.raises(ImportError, match="adds up the gradients of all replicas once more"):
        noise_of_one_step(private(noise=1.3, learning_rate=1.0))
    counts = itertools.count()
    kept = type("Calls", (), {"kept": property(lambda self: next(counts))})()
    monkeypatch.setattr(dp_optimizer, "_calls", kept)
    with pytest.raises(ValueError, match="update must be made of the noisy gradient"):
        noise_of_one_step(private(noise=1.3, learning_rate=1.0))
    monkeypatch.setattr(step_check, "check_graph", lambda graph: None)
    assert p_value(noise_of_one_step(private(noise=1.3, learning_rate=1.0)), 1.3 * CLIP) < 1e-9


def batches_of(strategy, **kwargs):
    return tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (X[index::count], Y[index::count]),
        dataset_size=len(X),
        expected_batch_size=BATCH,
        **kwargs,
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kwargs", [{}, {"padding": "full", "chunk_size": 12}])
def test_fit_takes_the_draws_of_all_replicas(kwargs, tmp_path):
    strategy = mirrored(2)
    batches = batches_of(strategy, **kwargs)

    def make():
        return tfdp.keras3.DPSGD(CLIP, 1.0, sampling=batches.sampling, learning_rate=0.1)

    model = built(strategy, make, weighted_metrics=["accuracy"])
    history = model.fit(
        batches,
        steps_per_epoch=batches.steps_per_epoch,
        epochs=2,
        verbose=0,
        callbacks=[tfdp.keras3.PrivacyBudget(50.0, 1e-3)],
    ).history
    assert model.optimizer.released_steps() == (8, 0)
    assert 0 <= history["accuracy"][0] <= 1 and history["epsilon"][0] < history["epsilon"][1]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.released_steps() == (8, 0)


def test_batches_of_one_replica_are_refused():
    strategy = mirrored(2)
    alone = tfdp.data.poisson_batches((X, Y), expected_batch_size=BATCH)
    model = built(strategy, lambda: tfdp.keras3.DPSGD(CLIP, 1.0, sampling=alone.sampling))
    (finding,) = [f for f in tfdp.keras3.validate(model).findings if f.refused]
    assert "2 replicas, and batches are sampled of 1 parts" in str(finding)
    with pytest.raises((TypeError, ValueError), match="distributed_poisson_batches"):
        model.fit(alone, verbose=0)


def test_selective_release_is_refused():
    strategy = mirrored(2)
    kwargs = {"validation_batch_size": 5, "validation_noise_multiplier": 1.0}
    with strategy.scope():
        model = tfdp.keras3.SelectiveModel(network())
        model.compile(
            tfdp.keras3.DPSURSGD(CLIP, 1.0, BATCH, **kwargs),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    with pytest.raises((TypeError, ValueError), match=r"replica|poisson_batches"):
        model.fit(chunks(1), verbose=0)


def test_mutant_a_keras_that_adds_up_gradients_elsewhere_is_refused(monkeypatch):
    """It would add up the sums of all replicas once more: updates would double."""
    cls = next(c for c in keras.optimizers.SGD.__mro__ if "_backend_update_step" in vars(c))

    def update(self, gradients, variables, learning_rate):
        for gradient, variable in zip(gradients, variables, strict=True):
            self.update_step(gradient, variable, learning_rate)

    monkeypatch.setattr(cls, "_backend_update_step", update)
    model = built(mirrored(2), private())
    with pytest.raises(ImportError, match="adds up the gradients of all replicas once more"):
        model.fit(chunks(1), epochs=1, verbose=0)
