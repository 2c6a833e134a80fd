import json
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

from tfdp.training.term_wise import priors
from tfdp.training.term_wise.priors import GaussianMixture, SpikeAndSlab, StandardNormal

tfd = priors.tfd  # TensorFlow Probability must not be imported before tfdp.

DRAWS = 10_000
LOCS = [[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]]
PRIORS = [
    StandardNormal(3),
    SpikeAndSlab(3),
    SpikeAndSlab(2, 0.3, 0.4),
    GaussianMixture(LOCS, 0.03),
]


def draws(distribution, seed=(1, 2)):
    return distribution.sample(DRAWS, seed=seed).numpy().astype(np.float64)


def spike_and_slab_cdf(scale, weight):
    return lambda x: (
        weight * scipy.stats.norm.cdf(x / scale) + (1 - weight) * scipy.stats.norm.cdf(x)
    )


def expected_log_density(prior, points):
    norm = scipy.stats.norm
    if isinstance(prior, StandardNormal):
        return norm.logpdf(points).sum(-1)
    if isinstance(prior, SpikeAndSlab):
        weight, scale = prior.spike_weight, prior.spike_scale
        return np.log(weight * norm.pdf(points, 0, scale) + (1 - weight) * norm.pdf(points)).sum(-1)
    scale = math.sqrt(prior.variance)
    terms = [norm.logpdf(points, loc, scale).sum(-1) for loc in prior.locs]
    return scipy.special.logsumexp(terms, axis=0) - math.log(len(terms))


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_shapes_and_types(prior):
    distribution = prior.distribution()
    assert distribution.event_shape == [prior.latent_dim]
    assert distribution.batch_shape == []
    assert distribution.dtype == tf.float32
    assert distribution.sample(5).shape == [5, prior.latent_dim]


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_log_density(prior):
    points = np.random.default_rng(0).normal(size=[7, 5, prior.latent_dim]).astype("float32")
    points[0, 0] = 0.0
    log_density = prior.distribution().log_prob(points)
    expected = expected_log_density(prior, points.astype(np.float64))
    np.testing.assert_allclose(log_density, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_gradients_of_the_log_density_vectorize(prior):
    def gradient(point):
        with tf.GradientTape() as tape:
            tape.watch(point)
            log_density = prior.distribution().log_prob(point)
        return tape.gradient(log_density, point)

    points = tf.random.stateless_normal([6, prior.latent_dim], seed=[0, 1])
    together = tf.vectorized_map(gradient, points, fallback_to_while_loop=False)
    np.testing.assert_allclose(together, tf.map_fn(gradient, points), rtol=1e-4, atol=1e-4)


def test_distribution_of_the_standard_normal():
    z = draws(StandardNormal(4).distribution())
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 1e-6
    correlations = np.corrcoef(z.T) - np.eye(4)
    assert np.abs(correlations).max() < 5 / math.sqrt(DRAWS)


@pytest.mark.parametrize(("scale", "weight"), [(0.05, 0.8), (0.3, 0.4)])
def test_distribution_of_a_dimension_of_spike_and_slab(scale, weight):
    """40,000 draws tell the mutants apart: their distribution functions differ by at least 0.02.

    A sample's own differs by 0.004 on average.
    """
    z = draws(SpikeAndSlab(4, scale, weight).distribution()).ravel()
    p_value = {
        (s, w): scipy.stats.kstest(z, spike_and_slab_cdf(s * scale, w)).pvalue
        for s, w in ((1, weight), (1.5, weight), (1 / 1.5, weight), (1, weight + 0.1))
    }
    assert p_value.pop((1, weight)) > 1e-6
    assert max(p_value.values()) < 1e-9


def correlation_of_magnitudes(distribution):
    return np.corrcoef(np.abs(draws(distribution)).T)[0, 1]


def test_each_dimension_of_spike_and_slab_has_a_coin_of_its_own():
    """Magnitudes of different dimensions do not correlate: standard error 0.01."""
    prior = SpikeAndSlab(2)
    one_coin_for_all = tfd.MixtureSameFamily(
        tfd.Categorical(probs=[prior.spike_weight, 1 - prior.spike_weight]),
        tfd.MultivariateNormalDiag(tf.zeros([2, 2]), [[prior.spike_scale] * 2, [1.0] * 2]),
    )
    assert abs(correlation_of_magnitudes(prior.distribution())) < 0.05
    assert correlation_of_magnitudes(one_coin_for_all) > 0.3


def test_moments_of_spike_and_slab():
    distribution = SpikeAndSlab(3).distribution()
    variance = 0.8 * 0.05**2 + 0.2
    fourth = 3 * (0.8 * 0.05**4 + 0.2)
    np.testing.assert_allclose(distribution.mean(), np.zeros(3), atol=1e-7)
    np.testing.assert_allclose(distribution.variance(), np.full(3, variance), rtol=1e-5)
    z = draws(distribution)
    standard_error = math.sqrt((fourth - variance**2) / z.size)
    assert abs(np.mean(z**2) - variance) < 5 * standard_error
    assert 5 * standard_error < 0.15 * variance


def test_distribution_of_the_gaussian_mixture():
    """Components are told apart without error: their centers are 14 standard deviations away."""
    z, locs = draws(GaussianMixture(LOCS, 0.01).distribution()), np.array(LOCS)
    component = np.argmin(((z[:, None] - locs) ** 2).sum(-1), axis=1)
    counts = np.bincount(component, minlength=4)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
    residuals = (z - locs[component]).ravel()
    for factor, accepted in ((1, True), (2 / 3, False), (3 / 2, False)):
        p_value = scipy.stats.kstest(residuals, scipy.stats.norm(0, factor * 0.1).cdf).pvalue
        assert p_value > 1e-6 if accepted else p_value < 1e-9


def test_moments_of_the_gaussian_mixture():
    distribution = GaussianMixture([[1.0, 2.0], [3.0, 2.0]], 0.5).distribution()
    np.testing.assert_allclose(distribution.mean(), [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(distribution.variance(), [1.5, 0.5], rtol=1e-5)


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_configs_round_trip(prior):
    config = json.loads(json.dumps(priors.serialize(prior)))
    assert priors.get(config) == prior
    assert "name" in config  # It is not used up.
    assert priors.get(prior) is prior
    assert type(prior)(**prior.get_config()) == prior


def test_arrays_are_accepted_and_equal():
    assert GaussianMixture(np.array(LOCS, "float32"), 0.03) == GaussianMixture(LOCS, 0.03)
    assert GaussianMixture([[1, 2, 3]], 1).latent_dim == 3


class Cauchy(StandardNormal):
    """A prior that tfdp does not have."""


def test_unknown_priors_are_refused():
    for unknown in ({"name": "ghost"}, {}, "standard_normal", None, 3):
        with pytest.raises(ValueError, match=r"`prior` must be .*spike_and_slab.*Received: prior="):
            priors.get(unknown)
    assert isinstance(priors.get(Cauchy(2)), Cauchy)
    with pytest.raises(ValueError, match=r"one of tfdp's, \[.*\], to be saved"):
        priors.serialize(Cauchy(2))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: StandardNormal(0), "latent_dim"),
        (lambda: StandardNormal(2.0), "latent_dim"),
        (lambda: SpikeAndSlab(True), "latent_dim"),
        (lambda: SpikeAndSlab(2, spike_scale=0.0), "spike_scale"),
        (lambda: SpikeAndSlab(2, spike_scale=math.inf), "spike_scale"),
        (lambda: SpikeAndSlab(2, spike_scale=math.nan), "spike_scale"),
        (lambda: SpikeAndSlab(2, spike_weight=0.0), "spike_weight"),
        (lambda: SpikeAndSlab(2, spike_weight=1), "spike_weight"),
        (lambda: SpikeAndSlab(2, spike_weight="most"), "spike_weight"),
        (lambda: GaussianMixture(LOCS, 0), "variance"),
        (lambda: GaussianMixture(LOCS, None), "variance"),
        (lambda: GaussianMixture([], 1.0), "locs"),
        (lambda: GaussianMixture([[]], 1.0), "locs"),
        (lambda: GaussianMixture([1.0, 2.0], 1.0), "locs"),
        (lambda: GaussianMixture([[1.0, 2.0], [3.0]], 1.0), "locs"),
        (lambda: GaussianMixture([[math.nan]], 1.0), "locs"),
        (lambda: GaussianMixture(["ab"], 1.0), "locs"),
        (lambda: GaussianMixture(None, 1.0), "locs"),
    ],
)
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must .*Received: {argument}="):
        make()
