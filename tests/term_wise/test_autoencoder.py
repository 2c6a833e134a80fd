"""What can be asked of an autoencoder, against closed forms."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests.front_ends import FRONT_ENDS, with_both
from tfdp.training.term_wise import autoencoder as source
from tfdp.training.term_wise import likelihoods, priors

KERAS_2 = FRONT_ENDS[0]
layers = tf.keras.layers

NOISE = 0.5  # Standard deviation of the linear model's examples, given their codes.
WEIGHTS = np.array([[1.0, 0.5, -1.0, 0.0], [1.0, -1.0, 0.5, 2.0]])  # Orthogonal rows.
OFFSET = np.array([0.3, -0.2, 0.1, 0.0])
DISTRIBUTION = scipy.stats.multivariate_normal(OFFSET, WEIGHTS.T @ WEIGHTS + NOISE**2 * np.eye(4))
X = DISTRIBUTION.rvs(30, random_state=0).astype("float32")


def dense(inputs, outputs, front=KERAS_2):
    layers = front.keras.layers
    return front.keras.Sequential([layers.Input([inputs]), layers.Dense(outputs)])


def autoencoder(encoder, decoder, prior, likelihood, num_classes, front=KERAS_2):
    """Makes a VAE that is not trained: these tests ask nothing of its training."""
    arguments = {"prior": prior, "likelihood": likelihood, "num_classes": num_classes}
    return front.tfdp.TermWiseVAE(encoder, decoder, aggregation="none", **arguments)


def linear(wrong=0.0, likelihood=None, prior=None, front=KERAS_2):
    """p(x) is `DISTRIBUTION`: x = z WEIGHTS + OFFSET + noise. `wrong` is the encoder's error.
    As the rows of WEIGHTS are orthogonal, the codes are independent given x.
    """
    variance = 1 / (1 + (WEIGHTS**2).sum(axis=1) / NOISE**2)
    encoder, decoder = dense(4, 4, front), dense(2, 4, front)
    decoder.set_weights([WEIGHTS, OFFSET])
    to_loc = WEIGHTS.T * variance / NOISE**2
    raw = np.log(np.expm1(np.sqrt(variance) - source._LEAST_SCALE))
    kernel = np.concatenate([to_loc, np.zeros([4, 2])], axis=1)
    encoder.set_weights([kernel, np.concatenate([-OFFSET @ to_loc + wrong, raw + wrong])])
    likelihood = likelihood or likelihoods.Normal(NOISE)
    prior = prior or priors.StandardNormal(2)
    return autoencoder(encoder, decoder, prior, likelihood, None, front)


def conditional(classes=3, front=KERAS_2):
    layers = front.keras.layers

    def network(inputs, outputs):
        both = [layers.Input([inputs]), layers.Input([classes])]
        return front.keras.Model(both, layers.Dense(outputs)(layers.Concatenate()(both)))

    front.keras.utils.set_random_seed(0)
    parts = priors.StandardNormal(2), likelihoods.Normal(NOISE), classes
    return autoencoder(network(4, 4), network(2, 4), *parts, front)


def for_class(model, label):
    """The plain autoencoder that a conditional one is for the examples of a class."""
    networks = [dense(4, 4), dense(2, 4)]
    for plain, given in zip(networks, (model.encoder, model.decoder), strict=True):
        kernel, bias = given.get_weights()
        inputs = plain.input_shape[1]
        plain.set_weights([kernel[:inputs], bias + kernel[inputs + label]])
    return autoencoder(*networks, model.prior, model.likelihood, None)


# Encoding and decoding.


def test_encode():
    model = linear(wrong=0.3)
    found = model.encode(X)
    kernel, bias = model.encoder.get_weights()
    loc, raw = np.split(X @ kernel + bias, 2, axis=1)
    np.testing.assert_allclose(found.mean(), loc, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.stddev(), np.log1p(np.exp(raw)) + 1e-4, rtol=1e-4)
    assert found.batch_shape == [30] and found.event_shape == [2]


def test_standard_deviations_stay_above_zero():
    model = linear()
    model.encoder.set_weights([np.zeros([4, 4]), np.full(4, -1e4)])
    assert np.all(model.encode(X).stddev().numpy() >= 1e-4)
    assert np.all(np.isfinite(model.encode(X).log_prob(np.zeros([30, 2]))))


@pytest.mark.parametrize("name", ["normal", "laplace", "bernoulli"])
def test_decode(name):
    model = linear(likelihood=name)
    z = np.random.default_rng(0).normal(size=[5, 2])
    found, decoded = model.decode(z), z @ WEIGHTS + OFFSET
    x = (X[:5] > 0).astype("float32")
    if name == "bernoulli":
        mean = 1 / (1 + np.exp(-decoded))
        expected = np.where(x == 1, np.log(mean), np.log(1 - mean))
    else:
        distribution = {"normal": scipy.stats.norm, "laplace": scipy.stats.laplace}[name]
        mean = decoded
        expected = distribution.logpdf(x, decoded, 0.1)
    np.testing.assert_allclose(found.mean(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.log_prob(x), expected.sum(1), rtol=1e-4, atol=1e-4)


def test_reconstruct():
    model = linear(wrong=0.3, likelihood="bernoulli")
    expected = 1 / (1 + np.exp(-(model.encode(X).mean().numpy() @ WEIGHTS + OFFSET)))
    np.testing.assert_allclose(model.reconstruct(X), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model(X), model.reconstruct(X))
    assert model.reconstruct(X[:0]).shape == (0, 4)


def test_images():
    tf.keras.utils.set_random_seed(0)
    encoder = [layers.Input([4, 4, 1]), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(4)]
    decoder = [layers.Input([2]), layers.Dense(16), layers.Reshape([4, 4, 1])]
    model = autoencoder(
        *map(tf.keras.Sequential, (encoder, decoder)), priors.SpikeAndSlab(2), "bernoulli", None
    )
    images = np.random.default_rng(0).integers(0, 2, [5, 4, 4, 1])
    assert model.generate(3).shape == model.generate(3, sample=True).shape == (3, 4, 4, 1)
    assert model.reconstruct(images).shape == images.shape
    assert model.log_likelihood(images, num_samples=3).shape == (5,)
    assert model.decode(np.zeros([3, 2])).event_shape == [4, 4, 1]


# The likelihood of examples.


@pytest.mark.parametrize("num_samples", [1, 70])
def test_with_the_exact_posterior_any_number_of_samples_is_exact(num_samples):
    """All importance weights are p(x) then: also where there are several parts."""
    found = linear().log_likelihood(X, num_samples=num_samples)
    np.testing.assert_allclose(found, DISTRIBUTION.logpdf(X), rtol=1e-3, atol=1e-3)


def test_work_in_parts_changes_nothing(monkeypatch):
    model = linear()
    whole, images = model.log_likelihood(X), model.reconstruct(X)
    monkeypatch.setattr(source, "_CODES_AT_A_TIME", 7)
    np.testing.assert_allclose(model.log_likelihood(X), whole, atol=1e-3)
    np.testing.assert_allclose(model.reconstruct(X), images, atol=1e-5)
    many = model.generate(16, seed=1)
    assert len(np.unique(many, axis=0)) == 16
    np.testing.assert_array_equal(model.generate(7, seed=1), many[:7])


@pytest.mark.slow
def test_it_converges_from_below():
    """Bounds are the tighter, the more samples: Burda et al., theorem 1."""
    model, exact = linear(wrong=0.5), DISTRIBUTION.logpdf(X).mean()
    bounds = [
        np.mean([model.log_likelihood(X, num_samples=k, seed=s).mean() for s in range(10)])
        for k in (1, 10, 1000)
    ]
    assert bounds[0] < bounds[1] - 0.1 < bounds[2] - 0.15
    assert bounds[0] < exact - 0.5
    assert bounds[2] == pytest.approx(exact, abs=0.02)


def test_other_priors_than_the_normal_one():
    """One component of variance 1 in the middle: the mixture is the standard normal."""
    model = linear(prior=priors.GaussianMixture([[0, 0]], variance=1.0))
    np.testing.assert_allclose(
        model.log_likelihood(X), DISTRIBUTION.logpdf(X), rtol=1e-3, atol=1e-3
    )


def test_seeds_of_the_likelihood():
    model = linear(wrong=0.5)
    one, same, other = (model.log_likelihood(X, num_samples=3, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.any(one == other)
    # By chance, each of 30 floats is the same in both once in 1e6, and three of them once in 1e14.
    # All are the same if both get one seed of 32 bits: once in 4e9.
    unseeded, again = (model.log_likelihood(X, num_samples=3) for _ in range(2))
    assert np.sum(unseeded == again) < 3
    assert model.log_likelihood(X[:0]).shape == (0,)


# Synthetic examples.


def test_means_are_of_codes_from_the_prior():
    """The mean of p(x|z) has the covariance W'W of the decoded prior, and no noise."""
    found = linear().generate(20_000, seed=1)
    np.testing.assert_allclose(found.mean(0), OFFSET, atol=0.1)
    np.testing.assert_allclose(np.cov(found.T), WEIGHTS.T @ WEIGHTS, atol=0.2)
    assert np.linalg.matrix_rank(found - OFFSET, tol=1e-2) == 2


def test_samples_are_of_the_distribution_of_examples():
    found = linear().generate(20_000, seed=1, sample=True)
    np.testing.assert_allclose(np.cov(found.T), DISTRIBUTION.cov, atol=0.2)


@pytest.mark.parametrize(
    ("likelihood", "distribution"),
    [
        (likelihoods.Normal(NOISE), scipy.stats.norm),
        (likelihoods.Laplace(NOISE), scipy.stats.laplace),
    ],
)
def test_samples_have_the_spread_of_the_likelihood(likelihood, distribution):
    model = linear(likelihood=likelihood)
    errors = (model.generate(1000, seed=1, sample=True) - model.generate(1000, seed=1)).ravel()
    assert scipy.stats.kstest(errors, distribution(0, NOISE).cdf).pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert scipy.stats.kstest(errors, distribution(0, wrong * NOISE).cdf).pvalue < 1e-9


def test_samples_of_binary_values():
    model = linear(likelihood="bernoulli")
    samples, means = model.generate(5000, seed=1, sample=True), model.generate(5000, seed=1)
    assert set(np.unique(samples)) == {0.0, 1.0}
    for low, high in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0)):
        within = (low < means) & (means < high)
        assert samples[within].mean() == pytest.approx(means[within].mean(), abs=0.03)


def test_seeds_of_synthetic_examples():
    model = linear()
    for sample in (False, True):
        one, same, other, unseeded, again = (
            model.generate(5, sample=sample, seed=s) for s in (1, 1, 2, None, None)
        )
        np.testing.assert_array_equal(one, same)
        assert not np.any(one == other)
        # By chance, each of 20 floats is the same in both once in 1e6, and three once in 1e14 runs.
        assert np.sum(unseeded == again) < 3


def test_none_at_all():
    for model, y in ((linear(), None), (conditional(), 1), (conditional(), [])):
        assert model.generate(0, y).shape == model.generate(0, y, sample=True).shape == (0, 4)


@pytest.mark.parametrize("cls", [priors.StandardNormal, priors.SpikeAndSlab])
def test_codes_have_the_distribution_of_the_prior(cls):
    """With a decoder that returns the code itself."""
    model = autoencoder(dense(2, 4), dense(2, 2), cls(2), likelihoods.Normal(NOISE), None)
    model.decoder.set_weights([np.eye(2), np.zeros(2)])
    codes = model.generate(4000, seed=1).ravel()
    spikes = scipy.stats.kstest(codes, "norm").pvalue
    assert spikes > 1e-4 if cls is priors.StandardNormal else spikes < 1e-9
    errors = model.generate(4000, seed=1, sample=True).ravel() - codes
    assert abs(np.corrcoef(codes, errors)[0, 1]) < 0.06  # Standard error 0.011.
    assert np.mean(codes**2) == pytest.approx(model.prior.distribution().variance()[0], rel=0.1)


# Conditional ones.


def test_each_class_has_networks_of_its_own():
    model, labels = conditional(), np.arange(30) % 3
    likelihood = model.log_likelihood(X, labels, num_samples=3, seed=1)
    for label in range(3):
        plain, rows = for_class(model, label), labels == label
        x, y = X[rows], labels[rows]
        np.testing.assert_allclose(model.encode(x, y).mean(), plain.encode(x).mean(), atol=1e-5)
        np.testing.assert_allclose(model.reconstruct(X, labels)[rows], plain.reconstruct(x), 1e-4)
        z = X[:10, :2]
        np.testing.assert_allclose(model.decode(z, y).mean(), plain.decode(z).mean(), atol=1e-5)
        np.testing.assert_allclose(
            model.generate(7, label, seed=1), plain.generate(7, seed=1), atol=1e-5
        )
        expected = plain.log_likelihood(X, num_samples=3, seed=1)[rows]
        np.testing.assert_allclose(likelihood[rows], expected, rtol=1e-3)


def test_labels_of_synthetic_examples():
    model = conditional()
    one_for_all = model.generate(6, 2, seed=1, sample=True)
    np.testing.assert_array_equal(model.generate(6, [2] * 6, seed=1, sample=True), one_for_all)
    mixed = model.generate(6, [2, 2, 2, 0, 1, 0], seed=1, sample=True)
    np.testing.assert_allclose(mixed[:3], one_for_all[:3], atol=1e-6)
    assert not np.any(np.isclose(mixed[3:], one_for_all[3:]))


def test_labels_are_cut_as_the_examples_are(monkeypatch):
    model, labels = conditional(), np.arange(30) % 3
    whole = model.reconstruct(X, labels)
    monkeypatch.setattr(source, "_CODES_AT_A_TIME", 7)
    np.testing.assert_allclose(model.reconstruct(X, labels), whole, atol=1e-5)
    found = model.generate(30, labels, seed=1)
    for label in range(3):
        of_class = labels == label
        expected = model.generate(30, label, seed=1)[of_class]
        np.testing.assert_allclose(found[of_class], expected, atol=1e-5)
    assert model.log_likelihood(X, labels, num_samples=2).shape == (30,)


ASKED = {
    "encode": lambda model, *y: model.encode(X, *y),
    "decode": lambda model, *y: model.decode(X[:, :2], *y),
    "reconstruct": lambda model, *y: model.reconstruct(X, *y),
    "log_likelihood": lambda model, *y: model.log_likelihood(X, *y, num_samples=2),
    "generate": lambda model, *y: model.generate(30, *y),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_labels_are_for_conditional_ones(ask):
    with pytest.raises(
        ValueError, match=r"`y` must be labels .* Received: no labels.*num_classes=3"
    ):
        ask(conditional())
    with pytest.raises(ValueError, match=r"(?s)`y` must be .*None .*Received.*num_classes=None"):
        ask(linear(), np.zeros(30, int))


@pytest.mark.parametrize("label", [3, -1])
def test_labels_that_are_no_class_are_refused(label):
    """Their one-hot code would be zeros: examples of no class at all, without a word."""
    model, accepted = conditional(), []
    for name, ask in ASKED.items():
        try:
            ask(model, np.full(30, label))
        except ValueError as error:
            assert "`y`" in str(error)
        else:
            accepted.append(name)
    assert not accepted


# Arguments.


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.generate(-1), "`n` must be a non-negative integer. Received: n=-1"),
        (lambda m: m.generate(2.5), "`n` must be a non-negative integer. Received: n=2.5"),
        (lambda m: m.generate(True), "`n` must be a non-negative integer. Received: n=True"),
        (
            lambda m: m.log_likelihood(X, num_samples=0),
            "`num_samples` must be a positive integer. Received: num_samples=0",
        ),
        (lambda m: m.log_likelihood(X, num_samples=1.0), "`num_samples` must be a positive"),
    ],
)
def test_questions_are_checked(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(linear())


def test_numbers_of_numpy_are_numbers():
    model = linear()
    assert model.generate(np.int64(2)).shape == (2, 4)
    assert model.log_likelihood(X, num_samples=np.int32(2)).shape == (30,)


def made(front=KERAS_2, **changes):
    arguments = {
        "encoder": dense(4, 4, front),
        "decoder": dense(2, 4, front),
        "prior": priors.StandardNormal(2),
        "likelihood": "normal",
        "num_classes": None,
        "front": front,
    }
    return autoencoder(**{**arguments, **changes})


def subclassed(front, units):
    class Subclassed(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = front.keras.layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

    return Subclassed()


def unbuilt(front):
    return front.keras.Sequential([front.keras.layers.Dense(4)])


def of_the_other(front):
    """A network of the other Keras; None, if there is none."""
    return next((dense(4, 4, other) for other in FRONT_ENDS if other is not front), None)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "make",
    [
        unbuilt,
        lambda front: subclassed(front, 4),
        lambda front: front.keras.layers.Dense(4),
        of_the_other,
        lambda front: None,
    ],
    ids=["unbuilt", "never called", "layer", "other Keras", "none"],
)
@with_both
def test_networks_that_are_no_built_models_are_refused(front, make, name):
    message = f"`{name}` must be a model of Keras [23] that is built .*Received: {name}"
    with pytest.raises(ValueError, match=message):
        made(front, **{name: make(front)})


@with_both
def test_encoders_that_do_not_fit_the_prior_are_refused(front):
    message = r"`encoder` must return .*\[rows, 4\] for this prior. Received .*\(None, 6\)"
    with pytest.raises(ValueError, match=message):
        made(front, encoder=dense(4, 6, front))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prior": "normal"}, "`prior` must be a .*Received: prior='normal'"),
        ({"likelihood": "poisson"}, "`likelihood` must be .*Received: likelihood='poisson'"),
        ({"num_classes": 0}, "`num_classes` must be a positive integer or None. Received: .*=0"),
        ({"num_classes": 2.0}, "`num_classes` must be a positive integer or None"),
    ],
)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        made(**changes)


@with_both
def test_decoders_of_unknown_shape_are_refused(front):
    class Shortens(front.keras.layers.Layer):
        def call(self, z):
            return tf.boolean_mask(z, z[0] > 0, 1)

        def compute_output_shape(self, shape):
            return (shape[0], None)

    length = front.keras.Sequential([front.keras.layers.Input([2]), Shortens()])
    with pytest.raises(ValueError, match=r"`decoder` must return .*Received .*\(None, None\)"):
        made(front, decoder=length)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2, 1), (2, 5), (3, 4)], ids=["broadcast", "wider", "codes"]
)
@with_both
def test_a_decoder_that_does_not_fit_is_refused(front, inputs, outputs):
    """One value would otherwise stand for all of an example, without a word."""
    with pytest.raises(ValueError, match="`decoder`"):
        made(front, decoder=dense(inputs, outputs, front))


@with_both
def test_networks_may_be_built_in_any_way(front):
    called, built, own = unbuilt(front), unbuilt(front), subclassed(front, 4)
    called(tf.zeros([1, 4]))
    built.build([None, 4])
    own(tf.zeros([1, 4]))
    for encoder in (called, built, own):
        assert made(front, encoder=encoder).reconstruct(X).shape == (30, 4)


def test_inputs_of_any_number_type():
    model = linear()
    for x in (X.astype("float64"), X.tolist(), tf.constant(X)):
        np.testing.assert_allclose(model.reconstruct(x), model.reconstruct(X), atol=1e-5)
        np.testing.assert_allclose(model.encode(x).mean(), model.encode(X).mean(), atol=1e-5)
    gray = np.ones([2, 4], "uint8")
    np.testing.assert_allclose(model.reconstruct(gray), model.reconstruct(gray.astype(float)))


def test_predictions_are_reconstructions():
    model, labels = conditional(), np.arange(30) % 3
    found = model.predict([X, tf.one_hot(labels, 3)], verbose=0)
    np.testing.assert_allclose(found, model.reconstruct(X, labels), atol=1e-5)
    np.testing.assert_allclose(linear().predict(X, verbose=0), linear().reconstruct(X), atol=1e-5)


def test_the_entropy_of_the_exact_model_is_that_of_its_examples():
    """Of its own samples, the mean log-likelihood is minus the entropy of the distribution."""
    model = linear()
    found = model.log_likelihood(model.generate(4000, sample=True, seed=3), num_samples=1).mean()
    assert found == pytest.approx(-DISTRIBUTION.entropy(), abs=5 * math.sqrt(2 / 4000))


def answers(model, *y):
    """Everything that can be asked of a model, with seeds."""
    return [
        *(model.encode(X, *y).mean(), model.encode(X, *y).stddev()),
        model.decode(X[:, :2], *y).mean(),
        model.reconstruct(X, *y),
        model.log_likelihood(X, *y, num_samples=3, seed=1),
        *(model.generate(30, *y, sample=sample, seed=1) for sample in (False, True)),
        model.predict([X, tf.one_hot(y[0], 3)] if y else X, verbose=0),
    ]


@pytest.mark.parametrize(("make", "y"), [(linear, ()), (conditional, (np.arange(30) % 3,))])
def test_every_keras_answers_the_same(make, y):
    """So that what is shown of one above is true of all."""
    model = make()
    for front in FRONT_ENDS:
        other = make(front=front)
        other.set_weights(model.get_weights())
        for one, same in zip(answers(model, *y), answers(other, *y), strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-5)
