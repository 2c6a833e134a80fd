"""Private steps of Keras 3: the right sum and noise, by `fit` and by custom training steps."""

import inspect
import re
import types

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

import tfdp
from tests import support
from tests.keras3.support import (
    compiled,
    crossentropy,
    looped_clipped_sum,
    open_batches,
    small_model,
    update_of,
    weights,
)
from tests.support import small_data
from tfdp.step import private_step

pytestmark = pytest.mark.rewritten_graphs

layers = keras.layers
X, Y = small_data(64)


def private(cls="DPSGD", batch_size=32, **kwargs):
    return getattr(tfdp.keras3, cls)(1.0, 1.0, batch_size, **kwargs)


def poisson(n=64, batch_size=16, **kwargs):
    return tfdp.data.poisson_batches((X[:n], Y[:n]), expected_batch_size=batch_size, **kwargs)


# Without noise and clip it is the inner optimizer.

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "nesterov": lambda: keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.03, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.03, weight_decay=0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ema": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.3, clipnorm=0.01),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.1])
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", INNER)
def test_without_noise_and_clip_it_is_the_inner_optimizer(name):
    optimizer = tfdp.keras3.DPOptimizer(INNER[name](), float("inf"), 0.0, 32)
    ours, plain = compiled(optimizer), compiled(INNER[name]())
    for model in (ours, plain):
        model.fit(open_batches(X, Y, 32), epochs=3, verbose=0)
    np.testing.assert_allclose(weights(ours), weights(plain), rtol=1e-4, atol=1e-6)
    assert int(optimizer.iterations) == 6


# Clipped sums.

MODELS = {
    "dense": lambda: (small_model(), [4]),
    "convolutions": lambda: (
        keras.Sequential(
            [
                layers.Conv2D(3, 3, activation="relu"),
                layers.DepthwiseConv2D(2),
                layers.GroupNormalization(3),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        ),
        [8, 8, 2],
    ),
    "attention": lambda: (_attention(), [5, 4]),
    "lstm": lambda: (keras.Sequential([layers.LSTM(4), layers.Dense(3)]), [5, 3]),
    "gru": lambda: (keras.Sequential([layers.GRU(4), layers.Dense(3)]), [5, 3]),
    "frozen batch normalization": lambda: (_frozen(), [4]),
}


def _attention():
    inputs = keras.Input([5, 4])
    hidden = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 3)(inputs, inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)))


def _frozen():
    model = keras.Sequential(
        [keras.Input([4]), layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
    )
    model.layers[1].trainable = False
    return model


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "jit_compile"),
    [*((name, False) for name in MODELS), ("convolutions", True), ("attention", True)],
)
def test_a_step_of_fit_is_the_sum_of_clipped_gradients(name, jit_compile):
    keras.utils.set_random_seed(0)
    model, shape = MODELS[name]()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[6, *shape]).astype("float32"), rng.integers(0, 3, 6)
    model(x)
    expected = looped_clipped_sum(model, x, y, 0.1)
    actual = update_of(model, x, y, jit_compile=jit_compile)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_padding_does_not_count():
    model, other = small_model(), small_model()
    optimizer = tfdp.keras3.DPSGD(1.0, 0.0, 64, learning_rate=1.0)
    compiled(optimizer, model)
    mask = np.arange(64) < 10
    model.fit(tf.data.Dataset.from_tensors((X, Y, mask)), verbose=0)
    expected = weights(other) - looped_clipped_sum(other, X[:10], Y[:10], 1.0) / 64
    np.testing.assert_allclose(weights(model), expected, rtol=1e-4, atol=1e-6)


# Noise.


def _of_noise(noise_multiplier, l2_norm_clip=0.5):
    """Noise of one step of 3,003 weights, in units of what it should be."""
    model = keras.Sequential([keras.Input([1000]), layers.Dense(3)])
    optimizer = tfdp.keras3.DPSGD(l2_norm_clip, noise_multiplier, 10, learning_rate=1.0)
    compiled(optimizer, model)
    before = weights(model)
    x = np.zeros([1, 1000], np.float32)
    data = tf.data.Dataset.from_tensors((x, np.zeros([1]), np.zeros([1])))  # Padding alone.
    model.fit(data, verbose=0)
    return (weights(model) - before) * 10 / (l2_norm_clip * 3.0)


@pytest.mark.parametrize("sigma, right", [(3.0, True), (2.0, False), (4.5, False)])
def test_noise_has_the_stated_deviation(sigma, right):
    p = scipy.stats.kstest(_of_noise(sigma), "norm").pvalue
    assert p > 1e-9 if right else p < 1e-9


def test_mutant_without_noise_is_caught(monkeypatch):
    monkeypatch.setattr(private_step, "add_gaussian_noise", lambda sums, *_: sums)
    assert scipy.stats.kstest(_of_noise(3.0), "norm").pvalue < 1e-9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["DPSGD", "DPAdam", "DPSignSGD", "DPSignAdam"])
def test_keras_2_and_3_make_the_same_update(name):
    """The same weights, data and noise key give the same weights, to rounding."""
    arguments = {"learning_rate": 0.02, "noise_seed": 3, "sampling": None}
    if name.endswith("SGD"):
        arguments |= {"momentum": 0.9, "nesterov": True}
    models = {}
    for module, make, loss in (
        (tfdp, support.compiled, support.crossentropy("auto")),
        (tfdp.keras3, compiled, crossentropy()),
    ):
        model = make(getattr(module, name)(0.5, 1.1, 32, **arguments), loss=loss)
        model.fit(open_batches(X, Y, 32), epochs=3, verbose=0)
        models[module] = weights(model)
    np.testing.assert_allclose(models[tfdp.keras3], models[tfdp], rtol=1e-4, atol=2e-6)
    assert np.abs(models[tfdp] - weights(small_model())).max() > 0.01


# The ledger.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"steps_per_execution": 3}, {"jit_compile": True, "padding": "buckets"}],
    ids=["plain", "several steps", "compiled"],
)
def test_fit_counts_its_steps(kwargs):
    batches = poisson(padding=kwargs.pop("padding", "none"))
    optimizer = tfdp.keras3.DPAdam(1.0, 1.1, sampling=batches.sampling)
    model = compiled(optimizer, **kwargs)
    model.fit(batches, epochs=2, verbose=0)
    assert optimizer.released_steps() == (8, 0)
    expected = tfdp.accounting.PrivacyLedger()
    (release,) = optimizer.ledger.releases
    expected.record(optimizer.release.event, 8, release.truncation_probability)
    assert optimizer.ledger.epsilon(1e-5).epsilon == expected.epsilon(1e-5).epsilon
    assert "8 " in str(tfdp.privacy_statement(model, delta=1e-5))


def test_other_batches_get_no_epsilon():
    optimizer = tfdp.keras3.DPAdam(1.0, 1.1, sampling=poisson().sampling)
    model = compiled(optimizer)
    before = weights(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(open_batches(X, Y, 16), verbose=0)
    np.testing.assert_array_equal(weights(model), before)


@pytest.mark.slow
def test_compiled_steps_on_other_batches_are_counted_and_named():
    """XLA drops assertions."""
    data = poisson(padding="full")
    optimizer = tfdp.keras3.DPSGD(1.0, 1.1, sampling=data.sampling)
    model = compiled(optimizer, jit_compile=True)
    weighted = tf.data.Dataset.from_tensor_slices((X, Y, np.ones(len(Y), "float32")))
    model.fit(weighted.batch(len(Y)), verbose=0)
    assert optimizer.released_steps() == (0, 1)
    with pytest.raises(dp_accounting.UnsupportedEventError, match="that were no unused draws"):
        tfdp.privacy_statement(model, delta=1e-5)


def test_a_new_optimizer_goes_on_with_the_ledger_of_the_weights():
    batches = poisson()
    model = compiled(tfdp.keras3.DPAdam(1.0, 1.1, sampling=batches.sampling))
    model.fit(batches, verbose=0)
    compiled(tfdp.keras3.DPSGD(1.0, 2.0, sampling=batches.sampling), model)
    model.fit(batches, verbose=0)
    assert model.optimizer.released_steps() == (8, 0)


def test_gradient_accumulation_is_one_step():
    batches = poisson(padding="full", chunk_size=8)
    optimizer = tfdp.keras3.DPSGD(1.0, 0.0, sampling=batches.sampling, learning_rate=1.0)
    assert optimizer.gradient_accumulation_steps > 1
    model = compiled(optimizer)
    model.fit(batches, verbose=0)
    assert optimizer.released_steps() == (4, 0) and int(optimizer.iterations) == 4


# What is refused.


def test_eager_execution_is_refused():
    model = compiled(private(), run_eagerly=True)
    with pytest.raises(ValueError, match=r"must run in a tf\.function"):
        model.fit(X, Y, verbose=0)


def test_mixed_float16_is_refused():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    model = keras.Sequential([keras.Input([4]), layers.Dense(3, dtype=policy)])
    model.dtype_policy = policy
    compiled(private(), model)
    with pytest.raises(ValueError, match=r"`keras\.mixed_precision.*mixed_bfloat16"):
        model.fit(open_batches(X, Y), verbose=0)


def test_only_a_loss_scale_optimizer_is_told_of_its_policy():
    optimizer = private()

    @tf.function
    def step(x):
        optimizer.apply([x], [keras.Variable([1.0])])

    with pytest.raises(ValueError, match="without a loss from `scale_loss`") as caught:
        step(tf.ones([1]))
    assert "float16" not in str(caught.value)


def test_batch_normalization_is_refused():
    model = keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(3)])
    with pytest.raises(ValueError, match="BatchNormalization"):
        compiled(private(), model).fit(open_batches(X, Y), verbose=0)


def test_unpadded_batches_are_refused_by_xla():
    model = compiled(private(sampling=poisson().sampling, batch_size=None), jit_compile=True)
    with pytest.raises(ValueError, match='padding="buckets"'):
        model.fit(poisson(), verbose=0)


@pytest.fixture
def keras_sees_a_gpu(monkeypatch):
    """Keras compiles each training step by XLA then, unless it is told not to."""
    found = [*tf.config.list_physical_devices(), types.SimpleNamespace(device_type="GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda: found)
    assert compiled(keras.optimizers.SGD()).jit_compile


def test_unpadded_batches_are_not_compiled_where_keras_compiles_by_default(keras_sees_a_gpu):
    batches = poisson()
    model = compiled(private(sampling=batches.sampling, batch_size=None))
    assert not model.jit_compile
    model.fit(batches, verbose=0)
    assert model.optimizer.released_steps() == (4, 0)


def test_other_batches_are_compiled_as_keras_chooses(keras_sees_a_gpu):
    padded = private(sampling=poisson(padding="buckets").sampling, batch_size=None)
    assert compiled(padded).jit_compile and compiled(private()).jit_compile


def test_steps_whose_rows_vary_are_not_compiled(keras_sees_a_gpu):
    assert not compiled(private(sparse_embeddings=tfdp.SparseEmbeddings(3.0))).jit_compile


def test_that_keras_asks_is_needed(keras_sees_a_gpu, monkeypatch):
    """The mutant that does not say what is not to be compiled."""
    resolve = inspect.getclosurevars(Trainer._resolve_auto_jit_compile).nonlocals["resolve"]
    monkeypatch.setattr(Trainer, "_resolve_auto_jit_compile", resolve)
    batches = poisson()
    model = compiled(private(sampling=batches.sampling, batch_size=None))
    with pytest.raises(ValueError, match=r"compile\(jit_compile=False\)"):
        model.fit(batches, verbose=0)


@pytest.mark.parametrize(
    "inner, message",
    [
        (lambda: "adam", "an optimizer of Keras 3"),
        (lambda: tf.keras.optimizers.legacy.SGD(), "an optimizer of Keras 3"),
        (lambda: private(), "changes no losses"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "changes no losses"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=2.0), "loss_scale_factor"),
        (lambda: _has_trained(), "taken no steps"),
    ],
)
def test_inner_optimizers_that_cannot_be_private(inner, message):
    with pytest.raises(ValueError, match=message):
        tfdp.keras3.DPOptimizer(inner(), 1.0, 1.0, 32)


def _has_trained():
    model = compiled(keras.optimizers.Adam())
    model.train_on_batch(X, Y)
    return model.optimizer


def test_what_the_inner_optimizer_does_is_set_by_either():
    inner = keras.optimizers.AdamW(weight_decay=0.2, use_ema=True)
    optimizer = tfdp.keras3.DPOptimizer(inner, 1.0, 1.0, 32)
    assert (optimizer.weight_decay, optimizer.use_ema, optimizer.clipnorm) == (0.2, True, None)
    optimizer.weight_decay = 0.5
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    optimizer.build(small_model().trainable_variables)
    assert inner.weight_decay == 0.5
    assert [inner._use_weight_decay(v) for v in inner._trainable_variables] == [False, True] * 2
    with pytest.raises(AttributeError, match="cannot be changed"):
        optimizer.gradient_accumulation_steps = 2


@pytest.mark.slow
def test_an_inner_optimizer_that_reads_the_weights_needs_some():
    """ScheduleFreeAdamW begins with a copy of them; after the error, the same model can train."""

    def private(inner, *first):
        optimizer = tfdp.keras3.DPOptimizer(inner, float("inf"), 0.0, 32)
        return compiled(optimizer, keras.Sequential([*first, layers.Dense(3)]))

    inner = keras.optimizers.ScheduleFreeAdamW
    model = private(inner(0.1))
    with pytest.raises(ValueError, match=r"The model must have weights before .* `keras\.Input`"):
        model.fit(open_batches(X, Y, 32), verbose=0)
    expected = private(inner(0.1), keras.Input([4]))
    model.build([None, 4])
    model.set_weights(expected.get_weights())
    compiled(model.optimizer, model)  # After any failure in a first step, Keras needs it.
    for one in (model, expected):
        one.fit(open_batches(X, Y, 32), epochs=2, verbose=0)
    np.testing.assert_allclose(weights(model), weights(expected), rtol=1e-5)


def test_each_keras_names_the_other():
    with pytest.raises(ValueError, match=r"models of Keras 3 \(`import keras`\)"):
        support.compiled(private())
    with pytest.raises(ValueError, match="models of Keras 2"):
        compiled(tfdp.DPSGD(1.0, 1.0, 32))


def test_arguments_are_aligned_in_the_docstring():
    """Python 3.13 takes the indentation from docstrings, and not from what is put into them."""
    documented = re.findall(r"^  (\w+): ", inspect.getdoc(tfdp.keras3.DPOptimizer), re.MULTILINE)
    assert {"inner_optimizer", "l2_norm_clip", "noise_multiplier", "sampling"} <= {*documented}


def test_a_refused_training_is_refused_alike_again():
    """Keras lost the error where the optimizer's state was made in the function that it ended."""
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=4)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input([4]), *layers])
    compiled(tfdp.keras3.DPAdam(1.0, 1.0, sampling=data.sampling), model)
    for _ in range(2):
        with pytest.raises(ValueError, match="moving_mean"):
            model.fit(data, verbose=0)
