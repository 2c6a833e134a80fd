"""Training variational autoencoders: the loss, and what a step makes of it."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.front_ends import FRONT_ENDS, with_both
from tests.two_term_support import clip, gradient
from tests.vae_support import (
    C1,
    C2,
    MASK,
    NOISE,
    PRIOR,
    SEED,
    B,
    M,
    N,
    X,
    Y,
    batches,
    compiled,
    conditional,
    flat,
    front_of,
    negative_elbo,
    network,
    not_private,
    one_batch,
    penalty,
    tables,
    vae,
)
from tfdp import priors
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping.batch_losses.example_groups import draw_groups
from tfdp.clipping.batch_losses.two_term_loss import split_key
from tfdp.training.term_wise.training import TermWiseTraining

pytestmark = pytest.mark.rewritten_graphs

layers = tf.keras.layers


@pytest.fixture
def fixed(monkeypatch):
    """The random numbers of a batch are those of the tables."""
    monkeypatch.setattr(TermWiseTraining, "_draws", tables)


def gradients_of_examples(model):
    return [
        gradient(model, lambda i=i: negative_elbo(model, X[i : i + 1], NOISE[i : i + 1])[0])
        for i in np.flatnonzero(MASK)
    ]


def gradients_of_groups(model, capacity):
    """With the groups that an optimizer of noise seed `SEED` draws in its first step."""
    arrays = (X, NOISE, PRIOR)
    key = KeyStream(SEED, "noise").next_key(tf.constant(-1, tf.int64))
    _, seed, _ = split_key(key, 3)  # The first is that of the random numbers of rows.
    rows, there = draw_groups(tuple(map(tf.constant, arrays)), tf.constant(MASK), seed, M, capacity)
    return [
        gradient(model, lambda j=j: penalty(model, *(r[j] for r in rows), there[j].numpy()))
        for j in range(M)
    ]


def gradient_of_whole(model):
    def whole():
        samples = tf.reduce_sum(tf.boolean_mask(negative_elbo(model, X, NOISE), MASK))
        return samples / np.sum(MASK) + penalty(model, X, NOISE, PRIOR, MASK)

    return gradient(model, whole)


def step(model, limit=C1, expected_batch_size=B, **kwargs):
    """What one step without noise subtracts from the weights."""
    before = flat(model)
    cls = front_of(model).tfdp.DPSGD
    own = cls(limit, 0.0, expected_batch_size, learning_rate=1.0, noise_seed=SEED)
    model.compile(own, **kwargs)
    model.fit(one_batch(), verbose=0)
    return before - flat(model)


# A step.


@pytest.mark.quick_cases(1)
@with_both
def test_a_step_is_that_of_clipped_examples_and_clipped_groups(front, fixed):
    model = vae(front, hidden=5, num_samples=2, alpha=3.0, beta=0.5)
    samples, groups = gradients_of_examples(model), gradients_of_groups(model, 17)
    for gradients, limit in ((samples, C1), (groups, C2)):
        norms = np.linalg.norm(gradients, axis=1)
        assert min(norms) < limit < max(norms)

    def expected(c1, c2, m):
        return sum(clip(g, c1) for g in samples) / B + sum(clip(g, c2) for g in groups) / m

    found = step(model)
    np.testing.assert_allclose(found, expected(C1, C2, M), atol=1e-5)
    # Mutants: a clip is skipped or another one, the groups are not averaged, one term is left out.
    for mutant in ((1e9, C2, M), (C1, 1e9, M), (C1, C1, M), (C1, C2, 1), (C1, C2, 1e9)):
        assert np.abs(found - expected(*mutant)).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"divergence": None, "batch_clip": None}])
def test_without_the_divergence_it_is_dp_sgd(changes, fixed):
    model = vae(**changes)
    expected = sum(clip(g, C1) for g in gradients_of_examples(model)) / B
    np.testing.assert_allclose(step(model), expected, atol=1e-5)


@pytest.mark.slow
def test_without_clips_and_with_one_group_it_is_the_plain_gradient(fixed):
    arguments = {"num_samples": 2, "alpha": 3.0, "beta": 0.5}
    model = vae(num_groups=1, group_capacity=N, batch_clip=math.inf, **arguments)
    expected = gradient_of_whole(model)
    found = step(model, limit=math.inf, expected_batch_size=int(MASK.sum()))
    np.testing.assert_allclose(found, expected, atol=1e-5)

    plain = not_private(vae(aggregation="none", **arguments), tf.keras.optimizers.SGD(1.0))
    before = flat(plain)
    plain.fit(one_batch(), verbose=0)
    np.testing.assert_allclose(before - flat(plain), expected, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", ["micro", "batch"])
def test_baselines(aggregation, fixed):
    model = vae(aggregation=aggregation, alpha=3.0)
    common = gradient(model, lambda: penalty(model, X, NOISE, PRIOR, MASK))
    samples = gradients_of_examples(model)
    if aggregation == "micro":
        expected = sum(clip(g + common, C1) for g in samples) / B
    else:
        expected = clip(sum(samples) / B + common, C1)
    np.testing.assert_allclose(step(model), expected, atol=1e-5)


@pytest.mark.slow
def test_without_privacy_it_is_plain_keras(fixed):
    class Plain(tf.keras.Model):
        def __init__(self, vae):
            super().__init__()
            self.vae, self.encoder, self.decoder = vae, vae.encoder, vae.decoder

        def call(self, x):
            there = np.ones(N, bool)
            self.add_loss(tf.reduce_mean(negative_elbo(self.vae, x, NOISE)))
            self.add_loss(penalty(self.vae, x, NOISE, PRIOR, there))
            return x

    ours, same = (vae(hidden=5, aggregation="none", alpha=3.0) for _ in range(2))
    not_private(ours, "adam").fit(X, batch_size=N, shuffle=False, epochs=5, verbose=0)
    not_private(Plain(same), "adam").fit(X, batch_size=N, shuffle=False, epochs=5, verbose=0)
    assert np.abs(flat(ours) - flat(vae(hidden=5))).max() > 1e-3
    np.testing.assert_allclose(flat(ours), flat(same), atol=1e-4)


@with_both
def test_weight_regularisers_are_neither_clipped_nor_noised(front, fixed):
    l2 = front.keras.regularizers.L2(50.0)
    model = vae(front, divergence=None, encoder=network(6, 4, 5, front, kernel_regularizer=l2))
    kernel = model.encoder.trainable_variables[0].numpy()
    expected = sum(clip(g, 1e-6) for g in gradients_of_examples(model)) / B
    expected[: kernel.size] += 100.0 * kernel.ravel()
    np.testing.assert_allclose(step(model, limit=1e-6), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("aggregation", ["term_wise", "batch"])
@with_both
def test_activity_regularisers_are_refused(front, aggregation):
    """They are a loss of the data that no clip would see; leaving them out does not help."""
    l2 = front.keras.regularizers.L2(100.0)
    encoder = network(6, 4, 5, front, activity_regularizer=l2)
    model = vae(front, aggregation=aggregation, divergence=None, encoder=encoder)
    with pytest.raises(ValueError, match="regularizer"):
        compiled(model).fit(batches(), verbose=0)


def test_the_noise_of_a_step():
    """All that a step does where the noise is far larger than the gradients."""
    sigma, latent = 1e5, 300
    networks = {"encoder": network(6, 2 * latent), "decoder": network(latent, 6)}
    model = vae(prior=priors.StandardNormal(latent), **networks)
    compiled(model, learning_rate=1.0, noise_seed=SEED, noise_multiplier=sigma)
    before = flat(model)
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    size = model.encoder.count_params()
    moved = np.split(flat(model) - before, [size])
    # Sensitivities 1 and 2 C2, weights 1 / 16 and 1 / M; the divergence is of the encoder alone.
    a, b = math.sqrt(len(before)) / 16, math.sqrt(size) * 2 * C2 / M
    of_samples = sigma * math.sqrt((a + b) / a) / 16
    of_groups = sigma * math.sqrt((a + b) / b) * 2 * C2 / M
    for noise, stddev in zip(moved, (math.hypot(of_samples, of_groups), of_samples), strict=True):
        assert scipy.stats.kstest(noise, scipy.stats.norm(0, stddev).cdf).pvalue > 1e-4
        for wrong in (2 / 3, 3 / 2):
            assert scipy.stats.kstest(noise, scipy.stats.norm(0, wrong * stddev).cdf).pvalue < 1e-4


@pytest.mark.slow
def test_under_xla_it_is_the_same(fixed):
    """With the same groups, too."""
    plain, xla = (step(vae(), jit_compile=jit_compile) for jit_compile in (False, True))
    np.testing.assert_allclose(plain, xla, atol=1e-5)


@with_both
def test_dropout_is_active_in_training_alone(front, fixed):
    layers = front.keras.layers
    encoder = front.keras.Sequential([layers.Input([6]), layers.Dropout(0.5), layers.Dense(4)])
    model = vae(front, encoder=encoder, aggregation="none", non_private_diagnostics=True)
    not_private(model, front.keras.optimizers.SGD(0.0))
    np.testing.assert_array_equal(model.reconstruct(X), model.reconstruct(X))
    one, other = (model.evaluate(one_batch(), verbose=0)[0] for _ in range(2))
    assert one == other
    losses = model.fit(one_batch(), epochs=3, verbose=0).history["non_private_loss"]
    assert len(set(losses)) == 3


# Every Keras.


def trained_alike(front, **changes):
    """Weights after two noisy steps on two batches, with the weights and keys of Keras 2."""
    model = compiled(vae(front, **changes), "DPAdam", noise_seed=SEED)
    model.set_weights(vae(**changes).get_weights())
    model.fit(batches(), verbose=0)
    return flat(model)


@pytest.mark.slow
def test_every_keras_makes_the_same_updates():
    """Groups, random numbers of codes, clipped sums, the noise of each variable, and Adam."""
    first, *others = (trained_alike(front, num_samples=2) for front in FRONT_ENDS)
    for found in others:
        np.testing.assert_allclose(found, first, rtol=1e-4, atol=1e-5)


# The sample-wise term.


def sample_wise(model, x=X, y=X):
    return model._negative_elbo(
        model._drawn_rows((tf.constant(x), y, None))[0], training=True
    ).numpy()


def kl_of_normals(model, x=X):
    distribution = model.encode(x)
    loc, scale = distribution.mean().numpy(), distribution.stddev().numpy()
    return 0.5 * np.sum(loc**2 + scale**2 - 1 - 2 * np.log(scale), axis=1)


def linear_gaussian(prior):
    """A model of x = z W + c + N(0, 0.7^2), the exact posterior, and the distribution of x."""
    scale = 0.7
    weights = np.array([[1.0, 0, 0.5, 0, 0, 2.0], [0, 1.0, 0, 0.3, 1.0, 0]])  # Orthogonal rows.
    offset = np.arange(6) / 6
    model = vae(prior=prior)
    variance = 1 / (1 + (weights**2).sum(axis=1) / scale**2)
    to_loc = weights.T * variance / scale**2
    raw = np.log(np.expm1(np.sqrt(variance) - 1e-4))
    model.decoder.set_weights([weights, offset])
    model.encoder.set_weights(
        [np.concatenate([to_loc, np.zeros([6, 2])], 1), np.concatenate([-offset @ to_loc, raw])]
    )
    covariance = weights.T @ weights + scale**2 * np.eye(6)
    return model, scipy.stats.multivariate_normal(offset, covariance)


def test_with_the_exact_posterior_the_elbo_is_the_likelihood():
    """Of every code, where the KL is estimated from the code that the likelihood gets."""
    model, distribution = linear_gaussian(priors.GaussianMixture([[0, 0]], variance=1.0))
    np.testing.assert_allclose(sample_wise(model), -distribution.logpdf(X), rtol=1e-3, atol=1e-3)
    found = model.log_likelihood(X, num_samples=5)
    np.testing.assert_allclose(found, distribution.logpdf(X), rtol=1e-3, atol=1e-3)


def test_with_an_analytic_kl_it_is_so_on_average():
    model, distribution = linear_gaussian(priors.StandardNormal(2))
    model.num_samples = 20_000
    np.testing.assert_allclose(sample_wise(model), -distribution.logpdf(X), rtol=0.01, atol=0.05)
    model.encoder.set_weights([w + 0.2 for w in model.encoder.get_weights()])
    elbo = -sample_wise(model)
    assert np.all(elbo < distribution.logpdf(X) + 0.05)  # A bound.
    assert elbo.mean() < model.log_likelihood(X, num_samples=100, seed=1).mean() - 0.1


def test_beta_is_the_weight_of_the_kl_alone(fixed):
    without, one, two = (sample_wise(vae(beta=beta)) for beta in (0.0, 1.0, 2.5))
    np.testing.assert_allclose(one - without, kl_of_normals(vae()), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(two - without, 2.5 * kl_of_normals(vae()), rtol=1e-3, atol=1e-4)


def test_beta_is_so_for_other_priors_too(fixed):
    def found(beta):
        return sample_wise(vae(prior=priors.SpikeAndSlab(2), num_samples=3, beta=beta))

    np.testing.assert_allclose(found(3.0) - found(0.0), 3 * (found(1.0) - found(0.0)), rtol=1e-3)


@pytest.mark.parametrize("prior", [priors.StandardNormal(2), priors.SpikeAndSlab(2)], ids=str)
def test_more_codes_keep_the_mean_and_reduce_the_variance(prior):
    same = np.repeat(X[:1], 4000, axis=0)
    one, many = (sample_wise(vae(prior=prior, num_samples=n), same, same) for n in (1, 8))
    error = math.sqrt((one.var() + many.var()) / 4000)
    assert many.mean() == pytest.approx(one.mean(), abs=5 * error)
    assert many.var() == pytest.approx(one.var() / 8, rel=0.25)
    assert 5 * error < 0.1 * abs(one.mean())


def test_the_divergence_is_of_one_code_per_example(fixed):
    model = vae(num_samples=3, alpha=3.0)
    rows, mask = model._drawn_rows((tf.constant(X), X, tf.constant(MASK)))
    found = model.alpha * model._distance(rows, mask, training=True)
    assert float(found) == pytest.approx(float(penalty(model, X, NOISE, PRIOR, MASK)), rel=1e-4)


def test_random_numbers_are_new_in_every_batch():
    model = vae(num_samples=2)
    one, other = (model._drawn_rows((tf.constant(X), X, None))[0] for _ in range(2))
    for name, shape in (("noise", (N, 2, 2)), ("prior", (N, 2))):
        assert one[name].shape == shape
        assert not np.any(one[name] == other[name])
    _, mask = model._drawn_rows((tf.constant(X), X, tf.constant(MASK.astype("float32"))))
    np.testing.assert_array_equal(mask, MASK)
    # Each row and each code has noise of its own.
    assert len(np.unique(one["noise"])) == N * 4
    drawn = np.concatenate([model._drawn_rows((tf.constant(X), X))[0]["noise"] for _ in range(10)])
    assert scipy.stats.kstest(drawn.ravel(), "norm").pvalue > 1e-4


def test_the_loss_of_a_conditional_one_is_that_of_its_class(fixed):
    model, label = conditional(), 2
    plain = vae()
    for given, own in ((model.encoder, plain.encoder), (model.decoder, plain.decoder)):
        kernel, bias = given.get_weights()
        rows = own.input_shape[1]
        own.set_weights([kernel[:rows], bias + kernel[rows + label]])
    found = sample_wise(model, y=tf.constant(Y))
    of_class = label == Y
    np.testing.assert_allclose(found[of_class], sample_wise(plain)[of_class], rtol=1e-4)
    assert not np.any(np.isclose(found[~of_class], sample_wise(plain)[~of_class], rtol=1e-4))

    rows, mask = model._drawn_rows((tf.constant(X), tf.constant(Y), tf.constant(of_class)))
    distance = float(penalty(plain, X, NOISE, PRIOR, of_class))
    assert float(model._distance(rows, mask, training=True)) == pytest.approx(distance, rel=1e-4)
