"""Training variational autoencoders: what a step computes, what it costs, what it shows."""

import json
import math
import os

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.two_term_support import clip
from tfdp import TermWiseVAE
from tfdp.clipping.groups import draw_groups
from tfdp.clipping.two_term_loss import fold_in_each
from tfdp.models import divergences, likelihoods, priors
from tfdp.models.autoencoder import Autoencoder
from tfdp.optimizers.noise import NoiseSource

layers = tf.keras.layers

N, SEED = 64, 3
C1, C2, B, M = 10.0, 0.8, 32, 4
X = np.random.default_rng(0).normal(size=(N, 6)).astype("float32")
MASK = np.random.default_rng(1).random(N) < 0.7
Y = np.arange(N) % 3
# Enough for what any test needs: the numbers of the first rows are always the same.
NOISE = np.random.default_rng(2).normal(size=(N, 20, 2)).astype("float32")
PRIOR = np.random.default_rng(3).normal(size=(N, 2)).astype("float32")


def network(inputs, outputs, hidden=None, **first):
    hidden = [layers.Dense(hidden, "tanh", **first)] if hidden else []
    return tf.keras.Sequential([layers.Input([inputs]), *hidden, layers.Dense(outputs)])


def vae(cls=TermWiseVAE, hidden=None, seed=0, **changes):
    """A small one, with a divergence that is traced quickly."""
    tf.keras.utils.set_random_seed(seed)
    arguments = {
        "encoder": network(6, 4, hidden),
        "decoder": network(2, 6, hidden),
        "prior": priors.StandardNormal(2),
        "likelihood": likelihoods.Normal(0.7),
        "divergence": divergences.RbfMMD([1.0]),
        "batch_clip": C2,
        "num_groups": M,
    }
    return cls(**{**arguments, **changes})


def conditional(**changes):
    def network(inputs, outputs):
        both = [layers.Input([inputs]), layers.Input([3])]
        return tf.keras.Model(both, layers.Dense(outputs)(layers.Concatenate()(both)))

    tf.keras.utils.set_random_seed(0)
    return vae(encoder=network(6, 4), decoder=network(2, 6), num_classes=3, **changes)


def batches(y=X, steps=2, first_step=0):
    return tfdp.data.poisson_batches(
        (X, y), expected_batch_size=16, steps_per_epoch=steps, seed=1, first_step=first_step
    )


def optimizer(cls=tfdp.DPSGD, **changes):
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1, "learning_rate": 0.01}
    return cls(**{**arguments, **batches().sampling.optimizer_arguments(), **changes})


def compiled(model, cls=tfdp.DPSGD, **changes):
    model.compile(optimizer(cls, **changes))
    return model


def not_private(model, optimizer="sgd", **kwargs):
    model.compile(optimizer, **kwargs)
    return model


def flat(model):
    return support.flat([*model.encoder.get_weights(), *model.decoder.get_weights()])


class Table:
    """In the place of a distribution: row i gets the numbers of row i."""

    def __init__(self, values):
        self.values = values

    def sample(self, rows, seed=None):
        return tf.constant(self.values)[:rows]


def tables(self):
    """As `TermWiseVAE._draws`."""
    return [Table(NOISE[:, : self.num_samples]), Table(PRIOR)]


@pytest.fixture
def fixed(monkeypatch):
    """The random numbers of a batch are those of the tables."""
    monkeypatch.setattr(TermWiseVAE, "_draws", tables)


def one_batch(x=X, y=X, mask=MASK):
    return tf.data.Dataset.from_tensors((x, y, mask))


# The loss, written down once more: for the standard normal and a normal likelihood.


def encoded(model, x):
    loc, raw = tf.split(model.encoder(x), 2, axis=1)
    return loc, tf.math.log(1 + tf.exp(raw)) + 1e-4


def negative_elbo(model, x, noise):
    """Of each row."""
    loc, scale = encoded(model, x)
    kl = 0.5 * tf.reduce_sum(loc**2 + scale**2 - 1 - 2 * tf.math.log(scale), axis=1)
    deviation = model.likelihood.scale
    terms = []
    for k in range(model.num_samples):
        error = (x - model.decoder(loc + scale * noise[:, k])) / deviation
        log_density = -0.5 * error**2 - math.log(deviation * math.sqrt(2 * math.pi))
        terms.append(-tf.reduce_sum(log_density, axis=1))
    return tf.add_n(terms) / model.num_samples + model.beta * kl


def penalty(model, x, noise, prior_samples, there):
    """The divergence with its weight, of the rows that are there."""
    loc, scale = encoded(model, x)
    codes = tf.boolean_mask(loc + scale * noise[:, 0], there)
    others, n = tf.boolean_mask(prior_samples, there), int(np.sum(there))
    if n < 2:
        return 0.0 * tf.reduce_sum(codes)

    def kernel(a, b):
        return tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, axis=2) / 4)

    within = tf.reduce_sum(kernel(codes, codes) + kernel(others, others)) - 2 * n
    return model.alpha * (within / (n * (n - 1)) - 2 * tf.reduce_sum(kernel(codes, others)) / n**2)


def gradient(model, function) -> np.ndarray:
    with tf.GradientTape() as tape:
        value = function()
    return support.flat(
        tape.gradient(value, model.trainable_variables, unconnected_gradients="zero")
    )


def gradients_of_examples(model):
    return [
        gradient(model, lambda i=i: negative_elbo(model, X[i : i + 1], NOISE[i : i + 1])[0])
        for i in np.flatnonzero(MASK)
    ]


def gradients_of_groups(model, capacity):
    """With the groups that an optimizer of noise seed `SEED` draws in its first step."""
    arrays = (X, NOISE, PRIOR)
    key = NoiseSource(SEED).step_key(tf.constant(-1, tf.int64))
    _, seed = fold_in_each(key, 2)  # The other is that of the random numbers of rows.
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
    own = tfdp.DPSGD(limit, 0.0, expected_batch_size, learning_rate=1.0, noise_seed=SEED)
    model.compile(own, **kwargs)
    model.fit(one_batch(), verbose=0)
    return before - flat(model)


# A step.


def test_a_step_is_that_of_clipped_examples_and_clipped_groups(fixed):
    model = vae(hidden=5, num_samples=2, alpha=3.0, beta=0.5)
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


@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"divergence": None, "batch_clip": None}])
def test_without_the_divergence_it_is_dp_sgd(changes, fixed):
    model = vae(**changes)
    expected = sum(clip(g, C1) for g in gradients_of_examples(model)) / B
    np.testing.assert_allclose(step(model), expected, atol=1e-5)


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


def test_weight_regularisers_are_neither_clipped_nor_noised(fixed):
    l2 = tf.keras.regularizers.L2(50.0)
    model = vae(divergence=None, encoder=network(6, 4, 5, kernel_regularizer=l2))
    kernel = model.encoder.trainable_variables[0].numpy()
    expected = sum(clip(g, 1e-6) for g in gradients_of_examples(model)) / B
    expected[: kernel.size] += 100.0 * kernel.ravel()
    np.testing.assert_allclose(step(model, limit=1e-6), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["term_wise", "batch"])
def test_activity_regularisers_are_refused(aggregation):
    """They are a loss of the data that no clip would see; to leave them out is no answer."""
    l2 = tf.keras.regularizers.L2(100.0)
    encoder = network(6, 4, 5, activity_regularizer=l2)
    model = vae(aggregation=aggregation, divergence=None, encoder=encoder)
    with pytest.raises(ValueError, match="regularizer"):
        compiled(model).fit(batches(), verbose=0)


def test_the_noise_of_a_step():
    """All that a step does where the noise is far larger than the gradients."""
    sigma, latent = 1e5, 100
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


def test_under_xla_it_is_the_same(fixed):
    """With the same groups, too."""
    plain, xla = (step(vae(), jit_compile=jit_compile) for jit_compile in (False, True))
    np.testing.assert_allclose(plain, xla, atol=1e-5)


def test_dropout_is_active_in_training_alone(fixed):
    encoder = tf.keras.Sequential([layers.Input([6]), layers.Dropout(0.5), layers.Dense(4)])
    model = vae(encoder=encoder, aggregation="none", non_private_diagnostics=True)
    not_private(model, tf.keras.optimizers.SGD(0.0))
    np.testing.assert_array_equal(model.reconstruct(X), model.reconstruct(X))
    one, other = (model.evaluate(one_batch(), verbose=0)[0] for _ in range(2))
    assert one == other
    losses = model.fit(one_batch(), epochs=3, verbose=0).history["non_private_loss"]
    assert len(set(losses)) == 3


# The sample-wise term.


def sample_wise(model, x=X, y=X):
    return model._negative_elbo(
        model._drawn_rows((tf.constant(x), y, None))[0], training=True
    ).numpy()


def kl_of_normals(model, x=X):
    law = model.encode(x)
    loc, scale = law.mean().numpy(), law.stddev().numpy()
    return 0.5 * np.sum(loc**2 + scale**2 - 1 - 2 * np.log(scale), axis=1)


def linear_gaussian(prior):
    """A model of x = z W + c + N(0, 0.7^2), the exact posterior, and the law of x."""
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
    model, law = linear_gaussian(priors.GaussianMixture([[0, 0]], variance=1.0))
    np.testing.assert_allclose(sample_wise(model), -law.logpdf(X), rtol=1e-3, atol=1e-3)
    found = model.log_likelihood(X, num_samples=5)
    np.testing.assert_allclose(found, law.logpdf(X), rtol=1e-3, atol=1e-3)


def test_with_an_analytic_kl_it_is_so_on_average():
    model, law = linear_gaussian(priors.StandardNormal(2))
    model.num_samples = 20_000
    np.testing.assert_allclose(sample_wise(model), -law.logpdf(X), rtol=0.01, atol=0.05)
    model.encoder.set_weights([w + 0.2 for w in model.encoder.get_weights()])
    elbo = -sample_wise(model)
    assert np.all(elbo < law.logpdf(X) + 0.05)  # A bound.
    assert elbo.mean() < model.log_likelihood(X, num_samples=100).mean() - 0.1


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
    # Of each row and each code its own.
    assert len(np.unique(one["noise"])) == N * 4
    drawn = np.concatenate([model._drawn_rows((tf.constant(X), X))[0]["noise"] for _ in range(10)])
    assert scipy.stats.kstest(drawn.ravel(), "norm").pvalue > 1e-4


# Private training.


class Logs(tf.keras.callbacks.Callback):
    """Everything that callbacks get to see of the training."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs or {}))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(dict(logs or {}))


@pytest.fixture(scope="module", params=support.OPTIMIZERS, ids=lambda cls: cls.__name__)
def trained(request):
    """A model that was trained for four steps, and what was shown."""
    logs, model = Logs(), compiled(vae(), request.param)
    history = model.fit(batches(), epochs=2, verbose=0, callbacks=[logs])
    return model, history, logs


@pytest.fixture(scope="module")
def without_divergence():
    """The ledger of `tfdp.DPSGD` after as many steps."""
    model = compiled(vae(divergence=None))
    model.fit(batches(), epochs=2, verbose=0)
    return model.optimizer.ledger


def test_the_divergence_costs_no_epsilon(trained, without_divergence):
    """Whichever the optimizer: it is one Gaussian mechanism with its noise multiplier."""
    own = trained[0].optimizer.ledger
    assert own.steps == without_divergence.steps == 4
    assert own.event == without_divergence.event
    assert own.epsilon(1e-5).epsilon == without_divergence.epsilon(1e-5).epsilon
    sampling = batches().sampling
    priced = tfdp.accounting.PrivacyLedger()
    gaussian = dp_accounting.GaussianDpEvent(1.1)
    priced.record(
        dp_accounting.PoissonSampledDpEvent(16 / N, gaussian),
        4,
        truncation_probability=sampling.truncation_probability,
    )
    assert own.epsilon(1e-5).epsilon == priced.epsilon(1e-5).epsilon


def test_it_was_trained(trained):
    model, _, _ = trained
    assert np.all(np.isfinite(flat(model)))
    assert np.mean(flat(model) == flat(vae())) < 0.7


def shows_nothing(history, logs, model):
    values = [m.result().numpy() for m in model.metrics]
    public = [history.history, *logs.seen]
    return all(set(shown) <= {"updates"} for shown in public) and not any(values)


def test_training_shows_nothing(trained):
    model, history, logs = trained
    assert len(logs.seen) > 0 and shows_nothing(history, logs, model)
    assert [m.name for m in model.metrics] == ["loss", "negative_elbo", "divergence"]


class ShowsTheLoss(TermWiseVAE):
    """Mutant: the loss of the batch is returned."""

    def train_step(self, data):
        return {**super().train_step(data), "loss": self._terms(*self._drawn_rows(data), True)[0]}


class CountsTheLoss(TermWiseVAE):
    """Mutant: the metrics of evaluation see the training batches."""

    def train_step(self, data):
        self.test_step(data)
        return super().train_step(data)


@pytest.mark.parametrize("mutant", [ShowsTheLoss, CountsTheLoss])
def test_a_step_that_shows_something_would_be_seen(mutant):
    logs, model = Logs(), not_private(vae(mutant, aggregation="none"))
    history = model.fit(X, verbose=0, callbacks=[logs])
    assert not shows_nothing(history, logs, model)


def test_generating_uses_the_weights_alone(trained):
    """What sees no data costs no epsilon: a model that never saw any says the same."""
    model, _, _ = trained
    other = vae(seed=5)
    other.set_weights(model.get_weights())
    for sample in (False, True):
        np.testing.assert_array_equal(
            model.generate(9, seed=1, sample=sample), other.generate(9, seed=1, sample=sample)
        )
    steps = model.optimizer.ledger.steps
    model.generate(9)
    assert model.optimizer.ledger.steps == steps


def test_diagnostics_are_the_loss_of_the_batch(fixed):
    model = vae(aggregation="none", non_private_diagnostics=True, alpha=3.0)
    samples = tf.boolean_mask(negative_elbo(model, X, NOISE), MASK)
    expected = tf.reduce_mean(samples) + penalty(model, X, NOISE, PRIOR, MASK)
    history = not_private(model, tf.keras.optimizers.SGD(0.0)).fit(one_batch(), verbose=0)
    assert list(history.history) == ["updates", "non_private_loss"]
    assert history.history["non_private_loss"][0] == pytest.approx(float(expected), rel=1e-4)


def test_diagnostics_of_private_training():
    model = compiled(vae(divergence=None, non_private_diagnostics=True))
    history = model.fit(batches(), verbose=0, epochs=2, validation_data=(X, X)).history
    names = ["updates", "non_private_loss", "val_loss", "val_negative_elbo", "val_divergence"]
    assert list(history) == names
    assert np.all(np.isfinite(history["non_private_loss"]))


def test_other_batches_show_nothing_and_get_no_epsilon():
    model = compiled(vae(divergence=None))
    assert list(model.fit(X, X, batch_size=16, verbose=0).history) == ["updates"]
    model.train_on_batch(X[:16], X[:16])
    assert list(model.train_on_batch(X[:16], X[:16], return_dict=True)) == ["updates"]
    assert model.optimizer.released_steps() == (0, 6)
    with pytest.raises(Exception, match="UnsupportedDpEvent"):
        model.optimizer.ledger.epsilon(1e-5)


def test_weights_are_those_of_the_networks():
    """And not the sums of the last evaluation, which files would otherwise show."""
    model = not_private(vae(aggregation="none"))
    model.evaluate(X, verbose=0)
    assert len(model.weights) == len(model.encoder.weights) + len(model.decoder.weights)


# Evaluation.


def test_validation_is_evaluation(fixed):
    model, held_out = not_private(vae(aggregation="none", alpha=3.0)), (X + 1, X + 1)
    history = model.fit(X, verbose=0, validation_data=held_out).history
    found = model.evaluate(*held_out, verbose=0, return_dict=True)
    expected = {f"val_{name}": [value] for name, value in found.items()}
    assert {"updates": history["updates"], **expected} == history
    assert list(expected) == ["val_loss", "val_negative_elbo", "val_divergence"]


def test_evaluation_is_the_loss_of_the_rows_that_exist(fixed):
    model = not_private(vae(aggregation="none", alpha=3.0))
    found = model.evaluate(one_batch(), verbose=0, return_dict=True)
    samples = float(tf.reduce_mean(tf.boolean_mask(negative_elbo(model, X, NOISE), MASK)))
    weighted = float(penalty(model, X, NOISE, PRIOR, MASK))
    assert found["loss"] == pytest.approx(samples + weighted, rel=1e-4)
    assert found["negative_elbo"] == pytest.approx(samples, rel=1e-4)
    assert found["divergence"] == pytest.approx(weighted / 3, rel=1e-4)
    padded = np.where(MASK[:, None], X, 1e3).astype("float32")
    assert found == model.evaluate(one_batch(padded, padded), verbose=0, return_dict=True)
    absent = np.where(MASK[:, None], X, np.nan).astype("float32")
    assert found == model.evaluate(one_batch(absent, absent), verbose=0, return_dict=True)


def test_batches_count_by_their_examples(fixed):
    """Also those without any, which say nothing."""
    model = not_private(vae(aggregation="none", alpha=3.0))
    parts = [(10, 10), (10, 2), (10, 0)]
    arrays = [(X[:n], X[:n], np.arange(n) < k) for n, k in parts]
    data = tf.data.Dataset.from_generator(
        lambda: arrays, output_signature=support.open_spec(arrays[0])
    )
    found = model.evaluate(data, verbose=0, return_dict=True)
    elbo = negative_elbo(model, X, NOISE).numpy()
    distance = [float(penalty(model, X, NOISE, PRIOR, np.arange(N) < k)) / 3 for _, k in parts]
    expected = (elbo[:10].sum() + elbo[:2].sum()) / 12
    assert found["negative_elbo"] == pytest.approx(expected, rel=1e-4)
    of_divergence = (10 * distance[0] + 2 * distance[1]) / 12
    assert found["divergence"] == pytest.approx(of_divergence, rel=1e-3)
    assert found["loss"] == pytest.approx(expected + 3 * of_divergence, rel=1e-4)


def test_the_divergence_is_shown_without_its_weight(fixed):
    """Also where the weight is zero: to see how far codes are from the prior without it."""
    shown = [
        not_private(vae(aggregation="none", alpha=alpha)).evaluate(one_batch(), verbose=0)[2]
        for alpha in (1.0, 4.0, 0.0)
    ]
    assert shown[0] != 0
    assert shown == pytest.approx([shown[0]] * 3, rel=1e-5)


def test_masks_of_evaluation_are_no_reason_for_a_warning(caplog, capfd):
    not_private(vae(aggregation="none")).evaluate(batches(), verbose=0)
    assert "weighted_metrics" not in caplog.text + "".join(capfd.readouterr())


# Conditional ones.


def test_a_conditional_one_is_trained_with_labels(tmp_path):
    model = compiled(conditional(divergence="kl"))
    held_out = (X[:16], Y[:16])
    history = model.fit(batches(Y), verbose=0, validation_data=held_out).history
    assert model.optimizer.ledger.steps == 2
    assert np.isfinite(history["val_loss"][0])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.num_classes == 3
    np.testing.assert_array_equal(loaded.reconstruct(X, Y), model.reconstruct(X, Y))
    np.testing.assert_array_equal(loaded.generate(5, 1, seed=2), model.generate(5, 1, seed=2))


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


def test_a_conditional_one_needs_labels():
    model = not_private(conditional(aggregation="none"))
    with pytest.raises(ValueError, match="`y` must be labels for a conditional VAE"):
        model.fit(X, verbose=0)
    with pytest.raises(ValueError, match="`y` must be labels for a conditional VAE"):
        model.evaluate(X, verbose=0)


# Saving.


def train(model, first_step=0):
    model.fit(batches(first_step=first_step), verbose=0)
    return flat(model)


def seeded():
    return compiled(vae(), momentum=0.9, noise_seed=SEED)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model saved in every form after two steps, and its weights after two more."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TermWiseVAE, "_draws", tables)
        model = seeded()
        train(model)
        predicted = model.predict(X, verbose=0)
        model.save(folder / "model.keras")
        model.save(folder / "model", save_format="tf")
        model.save_weights(folder / "weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
        return folder, model.get_config(), predicted, train(model, first_step=2)


def restored(form, folder):
    if form in ("keras", "tf"):
        return tf.keras.models.load_model(
            os.path.join(folder, "model.keras" if form == "keras" else "model")
        )
    model = seeded()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.restore(tf.train.latest_checkpoint(folder))
    return model


@pytest.mark.parametrize("form", ["keras", "tf", "checkpoint"])
def test_training_goes_on_bit_for_bit(form, saved, fixed):
    folder, _, predicted, expected = saved
    model = restored(form, folder)
    np.testing.assert_array_equal(model.predict(X, verbose=0), predicted)
    assert type(model.optimizer) is tfdp.DPSGD
    np.testing.assert_array_equal(train(model, first_step=2), expected)
    assert model.optimizer.ledger.steps == 4


@pytest.mark.parametrize("form", ["keras", "tf"])
def test_a_loaded_model_is_the_same_one(form, saved):
    folder, config, predicted, _ = saved
    model = restored(form, folder)
    assert type(model) is TermWiseVAE
    assert model.get_config() == config
    np.testing.assert_array_equal(model.reconstruct(X), predicted)
    assert model.log_likelihood(X[:3], num_samples=2).shape == (3,)
    assert model.generate(3).shape == (3, 6)
    assert model.optimizer is not None
    assert model.optimizer.ledger.steps == 2  # Known as soon as it is loaded.


def test_weights_alone(saved):
    folder, _, predicted, _ = saved
    model = vae(seed=5)
    model.load_weights(folder / "weights.h5")
    np.testing.assert_array_equal(model.reconstruct(X), predicted)


def test_it_is_saved_before_it_is_called(tmp_path):
    model, inputs = conditional(), [X, tf.one_hot(Y, 3)]
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    assert type(loaded) is TermWiseVAE
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )


PRIORS = [
    priors.StandardNormal(2),
    priors.SpikeAndSlab(2, 0.1, 0.7),
    priors.GaussianMixture([[0, 1], [1, 0]], 0.3),
]
LIKELIHOODS = ["bernoulli", likelihoods.Laplace(0.3), likelihoods.Normal(0.4)]
DIVERGENCES = [
    None,
    "kl",
    divergences.DimensionwiseMMD([0.1, 3]),
    divergences.RbfMMD([2.0]),
]


@pytest.mark.parametrize(
    "changes",
    [
        *({"prior": prior} for prior in PRIORS),
        *({"likelihood": likelihood} for likelihood in LIKELIHOODS),
        *({"divergence": divergence} for divergence in DIVERGENCES),
        {
            "alpha": 2.0,
            "beta": 0.5,
            "num_samples": 3,
            "batch_clip": 0.3,
            "num_groups": 5,
            "split": 0.3,
            "group_capacity": 7,
            "non_private_diagnostics": True,
            "name": "mine",
        },
        {"aggregation": "micro", "batch_clip": None},
        {"aggregation": "batch", "batch_clip": None},
        {"aggregation": "none", "batch_clip": None},
    ],
    ids=str,
)
def test_the_config_makes_the_model_again(changes):
    model = vae(**changes)
    config = json.loads(json.dumps(model.get_config()))
    copy = TermWiseVAE.from_config(config)
    copy.set_weights(model.get_weights())
    assert copy.get_config() == model.get_config()
    for name, value in changes.items():
        if name in ("prior", "likelihood", "divergence") and not isinstance(value, str):
            assert getattr(copy, name) == value
        elif name in config and name not in ("likelihood", "divergence"):
            assert config[name] == value
    assert copy.aggregation == model.aggregation
    np.testing.assert_array_equal(copy.generate(3, seed=1), model.generate(3, seed=1))


def test_the_config_of_a_conditional_one():
    model = conditional()
    copy = TermWiseVAE.from_config(json.loads(json.dumps(model.get_config())))
    assert copy.num_classes == 3 and copy.generate(3, 1).shape == (3, 6)


# Arguments.


def selective():
    return tfdp.DPSURSGD(
        1.0,
        1.1,
        validation_batch_size=8,
        validation_noise_multiplier=1.0,
        threshold=0.0,
        **batches().sampling.optimizer_arguments(),
    )


PRIVATE = r"`optimizer` must be tfdp.DPSGD, DPAdam, DPSignSGD or DPSignAdam with aggregation='"


@pytest.mark.parametrize(
    ("aggregation", "make", "message"),
    [
        ("term_wise", selective, PRIVATE + "term_wise'. Received: .*DPSURSGD"),
        ("batch", selective, PRIVATE + "batch'. Received: .*DPSURSGD"),
        ("term_wise", lambda: "sgd", PRIVATE + "term_wise'. Received: .*SGD"),
        ("micro", tf.keras.optimizers.Adam, PRIVATE + "micro'. Received: .*Adam"),
        ("batch", tf.keras.optimizers.legacy.SGD, PRIVATE + "batch'. Received: .*SGD"),
        ("none", optimizer, "`optimizer` must be an ordinary Keras .*='none'. Received: .*DPSGD"),
        ("none", selective, "`optimizer` must be an ordinary Keras .* Received: .*DPSURSGD"),
    ],
)
def test_optimizers_that_do_not_go_with_the_aggregation(aggregation, make, message):
    with pytest.raises(ValueError, match=message):
        vae(aggregation=aggregation).compile(make())


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "mse"},
        {"metrics": ["mse"]},
        {"weighted_metrics": ["mse"]},
        {"loss": "mse", "loss_weights": [1.0]},
    ],
    ids=str,
)
def test_it_has_a_loss_of_its_own(given):
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"`{name}` must not be given: .*Received: {name}="):
        vae().compile(optimizer(), **given)
    vae().compile(optimizer(), **dict.fromkeys(given))  # None is nothing.


def test_there_are_no_private_steps_in_eager_training():
    model = vae(divergence=None)
    model.compile(optimizer(), run_eagerly=True)
    with pytest.raises(ValueError, match=r"must run in a tf\.function"):
        model.fit(batches(), verbose=0)


REFUSED = [
    ({"alpha": -1.0}, "`alpha` must be a non-negative, finite number. Received: alpha=-1.0"),
    ({"alpha": math.inf}, "`alpha` must be a non-negative, finite number. Received: alpha=inf"),
    ({"alpha": "1"}, "`alpha` must be a non-negative, finite number. Received: alpha='1'"),
    ({"beta": -1.0}, "`beta` must be a non-negative, finite number. Received: beta=-1.0"),
    ({"beta": math.nan}, "`beta` must be a non-negative, finite number. Received: beta=nan"),
    ({"beta": True}, "`beta` must be a non-negative, finite number. Received: beta=True"),
    ({"num_samples": 0}, "`num_samples` must be a positive integer. Received: num_samples=0"),
    ({"num_samples": 1.5}, "`num_samples` must be a positive integer. Received: num_samples=1.5"),
    (
        {"aggregation": "mean"},
        "`aggregation` must be one of 'term_wise', 'micro', 'batch', 'none'. Received: .*='mean'",
    ),
    ({"aggregation": None}, "`aggregation` must be one of .* Received: aggregation=None"),
    (
        {"non_private_diagnostics": "False"},
        "`non_private_diagnostics` must be True or False. Received: .*='False'",
    ),
    ({"batch_clip": None}, "`batch_clip` must be a positive number with a divergence.*=None"),
    (
        {"batch_clip": 0.0},
        "`batch_clip` must be a positive number, at least 1e-15. Received: batch_clip=0.0",
    ),
    ({"num_groups": 0}, "`num_groups` must be a positive integer. Received: num_groups=0"),
    ({"split": 1.5}, "`split` must be 'least_noise' or a number.* Received: split=1.5"),
    ({"group_capacity": 0}, "`group_capacity` must be a positive integer. Received: .*=0"),
    ({"num_classes": 0}, "`num_classes` must be a positive integer or None. Received: .*=0"),
    ({"prior": "normal"}, "`prior` must be a .*spike_and_slab.* Received: prior='normal'"),
    ({"likelihood": "gauss"}, "`likelihood` must be one of .*laplace.* Received: .*='gauss'"),
    ({"divergence": "js"}, "`divergence` must be None, one of .*mmd.* Received: .*='js'"),
    ({"encoder": None}, "`encoder` must be a Keras model that is built.* Received: encoder=None"),
    ({"decoder": "x"}, "`decoder` must be a Keras model that is built.* Received: decoder='x'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        vae(**changes)


@pytest.mark.parametrize("aggregation", ["micro", "batch", "none"])
def test_arguments_of_another_aggregation_are_checked_too(aggregation):
    with pytest.raises(ValueError, match="batch_clip"):
        vae(aggregation=aggregation, batch_clip=-1.0)


def test_numbers_of_numpy_are_numbers(fixed):
    model = vae(
        alpha=np.float32(2), beta=np.float64(0.5), num_samples=np.int64(2), batch_clip=np.float32(1)
    )
    assert model.aggregation.batch_clip == 1
    assert vae(num_groups=np.int64(8)).aggregation.num_groups == 8


def test_a_clip_without_a_divergence_does_not_matter():
    for clips in ({"batch_clip": None}, {"batch_clip": 0.3}):
        assert vae(divergence=None, **clips).divergence is None


def test_an_infinite_clip_goes_with_no_noise():
    with pytest.raises(ValueError, match="`batch_clip` must be finite when there is noise"):
        compiled(vae(batch_clip=math.inf)).fit(batches(), verbose=0)


def test_it_is_an_autoencoder():
    assert issubclass(TermWiseVAE, Autoencoder) and tfdp.models.TermWiseVAE is TermWiseVAE
