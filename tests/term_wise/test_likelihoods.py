import json
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

from tfdp.training.term_wise import likelihoods
from tfdp.training.term_wise.likelihoods import Bernoulli, Laplace, Likelihood, Normal

tfd = likelihoods.tfd  # TensorFlow Probability must not be imported before tfdp.

LIKELIHOODS = [Bernoulli(), Laplace(), Laplace(0.7), Normal(), Normal(0.4)]
RNG = np.random.default_rng(0)
DECODED = RNG.normal(size=[5, 6, 4, 3, 2]).astype("float32")
BINARY = RNG.integers(0, 2, [6, 4, 3, 2]).astype("float32")
GRAY = RNG.uniform(size=[6, 4, 3, 2]).astype("float32")
GRAY[0, 0, 0] = [0.0, 1.0]


def expected_log_densities(likelihood, decoded, x):
    decoded, x = decoded.astype(np.float64), x.astype(np.float64)
    if isinstance(likelihood, Laplace):
        return scipy.stats.laplace.logpdf(x, decoded, likelihood.scale)
    if isinstance(likelihood, Normal):
        return scipy.stats.norm.logpdf(x, decoded, likelihood.scale)
    p = scipy.special.expit(decoded)
    return x * np.log(p) + (1 - x) * np.log1p(-p)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
@pytest.mark.parametrize("x", [BINARY, GRAY], ids=["binary", "gray"])
def test_log_density_of_images(likelihood, x):
    distribution = likelihood.distribution(DECODED, event_rank=3)
    assert isinstance(distribution, tfd.Independent)
    assert distribution.batch_shape == [5, 6] and distribution.event_shape == [4, 3, 2]
    expected = expected_log_densities(likelihood, DECODED, x).sum((-1, -2, -3))
    np.testing.assert_allclose(distribution.log_prob(x), expected, rtol=1e-4)


@pytest.mark.parametrize("event_rank", [1, 2, 4, 5])
def test_events_are_the_last_dimensions(event_rank):
    distribution = Normal(1.0).distribution(DECODED, event_rank)
    assert distribution.event_shape == DECODED.shape[5 - event_rank :]
    assert distribution.log_prob(DECODED).shape == DECODED.shape[: 5 - event_rank]


def test_gray_values_are_most_likely_as_they_are():
    logits = np.linspace(-4, 4, 801, dtype="float32")[:, None]
    for gray in (0.1, 0.5, 0.83):
        log_density = Bernoulli().distribution(logits, 1).log_prob([gray]).numpy()
        assert scipy.special.expit(logits[np.argmax(log_density), 0]) == pytest.approx(
            gray, abs=3e-3
        )


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_extreme_outputs_have_finite_gradients(likelihood):
    decoded = tf.constant([[1e4, -1e4, 0.0, 1e4, -1e4, 0.5]])
    x = tf.constant([[1.0, 0.0, 0.5, 0.0, 1.0, 0.5]])
    with tf.GradientTape() as tape:
        tape.watch(decoded)
        log_density = likelihood.distribution(decoded, 1).log_prob(x)
    gradient = tape.gradient(log_density, decoded)
    assert np.all(np.isfinite(log_density)) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_gradients_of_the_log_density_vectorize(likelihood):
    def gradient(rows):
        decoded, x = rows
        with tf.GradientTape() as tape:
            tape.watch(decoded)
            log_density = likelihood.distribution(decoded, 3).log_prob(x)
        return tape.gradient(log_density, decoded)

    rows = tf.constant(DECODED[0]), tf.constant(GRAY)
    together = tf.vectorized_map(gradient, rows, fallback_to_while_loop=False)
    alone = [gradient((decoded, x)) for decoded, x in zip(*rows, strict=True)]
    np.testing.assert_allclose(together, tf.stack(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_the_image_to_show_is_the_mean_of_the_distribution(likelihood):
    mean = likelihood.mean(DECODED)
    np.testing.assert_allclose(mean, likelihood.distribution(DECODED, 3).mean(), rtol=1e-5)
    expected = scipy.special.expit(DECODED) if isinstance(likelihood, Bernoulli) else DECODED
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "likelihood"),
    [("bernoulli", Bernoulli()), ("laplace", Laplace(0.1)), ("normal", Normal(0.1))],
)
def test_names(name, likelihood):
    assert likelihoods.get(name) == likelihood
    assert likelihoods.serialize(likelihood)["name"] == name


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_configs_round_trip(likelihood):
    config = json.loads(json.dumps(likelihoods.serialize(likelihood)))
    assert likelihoods.get(config) == likelihood
    assert "name" in config  # It is not used up.
    assert likelihoods.get(likelihood) is likelihood


class Cauchy(Likelihood):
    """A likelihood that tfdp does not have."""

    def values(self, decoded):
        return tfd.Cauchy(decoded, 1.0)


def test_other_likelihoods():
    for unknown in ("ghost", {"name": "ghost"}, {}, None, 3):
        with pytest.raises(ValueError, match=r"`likelihood` must be .*Received: likelihood="):
            likelihoods.get(unknown)
    assert likelihoods.get(Cauchy()).distribution(DECODED, 3).batch_shape == [5, 6]
    with pytest.raises(ValueError, match=r"one of tfdp's, \[.*\], to be saved"):
        likelihoods.serialize(Cauchy())


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Laplace(0.0), "scale"),
        (lambda: Laplace(math.inf), "scale"),
        (lambda: Normal(-0.1), "scale"),
        (lambda: Normal(math.nan), "scale"),
        (lambda: Normal(None), "scale"),
        (lambda: Bernoulli().distribution(DECODED, 0), "event_rank"),
        (lambda: Bernoulli().distribution(DECODED, 6), "event_rank"),
        (lambda: Laplace().distribution(DECODED, 1.0), "event_rank"),
        (lambda: Laplace().distribution(1.0, 1), "event_rank"),
    ],
)
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must .*Received: {argument}="):
        make()
