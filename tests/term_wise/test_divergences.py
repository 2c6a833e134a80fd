import json
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import tensorflow as tf

from tfdp.training.term_wise import divergences, priors
from tfdp.training.term_wise.divergences import (
    DimensionwiseMMD,
    Divergence,
    PriorToAggregateKL,
    RbfMMD,
)

tfd = divergences.tfd  # TensorFlow Probability must not be imported before tfdp.

DIVERGENCES = [DimensionwiseMMD(), RbfMMD(), PriorToAggregateKL()]
PRIOR = priors.SpikeAndSlab(3, spike_scale=0.4, spike_weight=0.5)
NAMES = ("loc", "scale", "samples", "prior_samples")


def make_rows(n, d=3, groups=(), seed=0):
    """The parameters of a posterior, samples, and prior samples: `[*groups, n, d]` each."""
    rng = np.random.default_rng(seed)
    rows = {name: rng.normal(size=[*groups, n, d]).astype("float32") for name in NAMES}
    rows["scale"] = np.exp(0.3 * rows["scale"])
    return rows


def independent(loc, scale):
    return tfd.Independent(tfd.Normal(loc, scale), 1)


def value_of(divergence, rows, mask=None, prior=PRIOR, posterior=independent):
    mask = tf.ones(rows["samples"].shape[:1], tf.bool) if mask is None else mask
    posterior, prior = posterior(rows["loc"], rows["scale"]), prior.distribution()
    return divergence(posterior, rows["samples"], prior, rows["prior_samples"], mask)


def value_and_gradients(divergence, rows, mask=None, posterior=independent):
    rows = {name: tf.convert_to_tensor(values) for name, values in rows.items()}
    with tf.GradientTape() as tape:
        tape.watch(rows)
        value = value_of(divergence, rows, mask, posterior=posterior)
    return value, tape.gradient(value, rows, unconnected_gradients="zero")


def in_groups(divergence, rows, prior=PRIOR):
    """The values of groups `[groups, n, d]`."""
    one = tf.function(lambda group: value_of(divergence, group, prior=prior))
    rows = tf.nest.map_structure(tf.convert_to_tensor, rows)
    return tf.vectorized_map(one, rows, fallback_to_while_loop=False).numpy()


def reference(divergence, rows):
    """The same number pair by pair, with the precision of doubles."""
    rows = {name: values.astype(np.float64) for name, values in rows.items()}
    x, y, n = rows["samples"], rows["prior_samples"], len(rows["samples"])
    if isinstance(divergence, PriorToAggregateKL):
        q = [scipy.stats.norm.logpdf(z, rows["loc"], rows["scale"]).sum(-1) for z in y]
        spike = scipy.stats.norm.pdf(y, 0, PRIOR.spike_scale)
        p = np.log(0.5 * spike + 0.5 * scipy.stats.norm.pdf(y)).sum(-1)
        return np.mean(p - scipy.special.logsumexp(q, axis=1) + math.log(n))

    def kernel(a, b):
        squared = (a - b) ** 2
        if isinstance(divergence, DimensionwiseMMD):
            return sum(np.sum(scale / (scale + squared)) for scale in divergence.scales)
        bandwidths = np.array(divergence.bandwidths) * len(squared)
        return np.sum(np.exp(-np.sum(squared) / (2 * bandwidths)))

    different = [(i, j) for i in range(n) for j in range(n) if i != j]
    within = np.mean([kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in different])
    return within - 2 * np.mean([kernel(a, b) for a in x for b in y])


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("rows", [make_rows(2), make_rows(7)])
def test_values_pair_by_pair(divergence, rows):
    value = value_of(divergence, rows)
    assert float(value) == float(value_of(divergence, rows))  # Nothing is drawn.
    assert value.shape == [] and value.dtype == tf.float32
    assert float(value) == pytest.approx(reference(divergence, rows), rel=1e-4, abs=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_gradients_are_slopes(divergence):
    """Against central differences of the reference."""
    rows = make_rows(5)
    _, gradients = value_and_gradients(divergence, rows)
    for name in NAMES[:2] if isinstance(divergence, PriorToAggregateKL) else NAMES[2:]:
        slopes = np.zeros(rows[name].shape)
        for index in np.ndindex(slopes.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = {key: values.astype(np.float64) for key, values in rows.items()}
                moved[name][index] += step
                sides.append(reference(divergence, moved))
            slopes[index] = (sides[0] - sides[1]) / 2e-5
        assert np.abs(slopes).max() > 0.01
        np.testing.assert_allclose(gradients[name], slopes, rtol=1e-3, atol=1e-4)


# The distribution of the estimates: thousands of groups of few rows, in which a bias cannot hide.
GROUPS, ROWS = 8000, 5
LOC, SCALE = np.array([0.4, 0.0, -0.2]), np.array([0.7, 1.0, 1.6])


def gaussian_rows(shift=LOC, scale=SCALE):
    """Samples of N(shift, scale^2), and prior samples of N(0, 1)."""
    rows = make_rows(ROWS, 3, (GROUPS,))
    rows["samples"] = (rows["samples"] * scale + shift).astype("float32")
    return rows


def rbf_truth(divergence):
    """Gaussian integrals: E exp(-t^2 / 2c), t of N(m, v), is sqrt(c/(c+v)) exp(-m^2 / 2(c+v))."""

    def expected(mean, variance, c):
        return np.prod(np.sqrt(c / (c + variance)) * np.exp(-(mean**2) / (2 * (c + variance))))

    total = 0.0
    for c in 3 * np.array(divergence.bandwidths):
        q, p = expected(0, 2 * SCALE**2, c), expected(0, 2 * np.ones(3), c)
        total += q + p - 2 * expected(LOC, SCALE**2 + 1, c)
    return total


def cauchy_truth(divergence):
    """By numerical integration over the difference of two draws, a normal."""

    def expected(mean, variance, scale):
        distribution = scipy.stats.norm(mean, math.sqrt(variance))
        kernel = lambda t: scale / (scale + t**2) * distribution.pdf(t)  # noqa: E731
        return scipy.integrate.quad(kernel, -20, 20, points=[0.0], epsabs=1e-10, limit=200)[0]

    return sum(
        expected(0, 2 * s**2, scale) + expected(0, 2, scale) - 2 * expected(m, s**2 + 1, scale)
        for scale in divergence.scales
        for m, s in zip(LOC, SCALE, strict=True)
    )


TRUTHS = [
    (DimensionwiseMMD(), cauchy_truth),
    (DimensionwiseMMD([0.5]), cauchy_truth),
    (RbfMMD(), rbf_truth),
    (RbfMMD([0.7]), rbf_truth),
]


def deviation(values, truth):
    """How many standard errors the mean of the values is off."""
    return abs(np.mean(values) - truth) / (np.std(values) / math.sqrt(len(values)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("divergence", "truth"), TRUTHS, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_mmds_are_unbiased(divergence, truth):
    """Within four standard errors, of which the truth is more than twenty: mutants that estimate 0,
    or the mean over dimensions, would be off by more."""
    values, truth = in_groups(divergence, gaussian_rows()), truth(divergence)
    assert deviation(values, truth) < 4
    assert deviation(values, 0.0) > 20 and deviation(values, truth / 3) > 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divergence", "truth"), TRUTHS, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_pairs_of_a_row_with_itself_are_caught(divergence, truth, monkeypatch):
    """Mutant: the V-statistic, whose bias is 2/n of what the kernel falls off."""
    monkeypatch.setattr(divergences, "_distinct_pairs", divergences._pairs)
    assert deviation(in_groups(divergence, gaussian_rows()), truth(divergence)) > 50


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("divergence", [DimensionwiseMMD(), RbfMMD()], ids=str)
def test_mmds_of_equal_distributions_are_zero_in_the_mean(divergence):
    values = in_groups(divergence, gaussian_rows(0.0, 1.0))
    assert deviation(values, 0.0) < 4
    assert np.mean(values < 0) > 0.3


def test_rbf_mmd_sees_dependence_and_the_dimensionwise_does_not():
    rows = make_rows(ROWS, 2, (GROUPS,))
    rows["samples"][..., 1] = rows["samples"][..., 0]
    assert deviation(in_groups(RbfMMD(), rows, priors.StandardNormal(2)), 0.0) > 10
    assert deviation(in_groups(DimensionwiseMMD(), rows, priors.StandardNormal(2)), 0.0) < 4


def gaussian_kl(loc_p, scale_p, loc_q, scale_q):
    ratio = scale_p / scale_q
    return np.sum(0.5 * (ratio**2 + ((loc_p - loc_q) / scale_q) ** 2 - 1) - np.log(ratio))


def test_kl_to_one_gaussian_is_that_of_the_closed_form():
    """All posteriors are the same, and with them, their mixture: 40,000 draws of the prior. The
    divergence the other way round is more than 50 standard errors away."""
    rows, scale = make_rows(ROWS, 3, (GROUPS,)), SCALE / 2
    rows["loc"] = np.broadcast_to(LOC, rows["loc"].shape).astype("float32")
    rows["scale"] = np.broadcast_to(scale, rows["scale"].shape).astype("float32")
    values = in_groups(PriorToAggregateKL(), rows, priors.StandardNormal(3))
    assert deviation(values, gaussian_kl(0, 1, LOC, scale)) < 4
    assert deviation(values, gaussian_kl(LOC, scale, 0, 1)) > 50


def test_kl_to_the_prior_itself_is_zero():
    """The components of a mixture as the posteriors of as many examples."""
    locs = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]], "float32")
    prior = priors.GaussianMixture(locs, 0.03)
    z = prior.distribution().sample(4, seed=[1, 2])
    rows = {"loc": locs, "scale": np.full([4, 2], math.sqrt(0.03), "float32")}
    rows |= {"samples": locs, "prior_samples": z}
    assert float(value_of(PriorToAggregateKL(), rows, prior=prior)) == pytest.approx(0, abs=1e-5)


def test_kl_is_stable_where_densities_are_too_small_for_floats():
    rows = make_rows(4)
    rows["loc"] += 500.0
    value, gradients = value_and_gradients(PriorToAggregateKL(), rows)
    assert float(value) == pytest.approx(reference(PriorToAggregateKL(), rows), rel=1e-4)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize(
    ("garbage", "posterior"),
    [
        *((value, independent) for value in (math.nan, math.inf, -math.inf, 3e38, 1e-45, 0.0)),
        (math.nan, tfd.MultivariateNormalDiag),
    ],
)
def test_rows_that_do_not_exist_change_nothing(divergence, garbage, posterior):
    rows, mask = make_rows(6), np.array([True, False, True, True, False, True])
    expected, expected_gradients = value_and_gradients(
        divergence, {name: values[mask] for name, values in rows.items()}
    )
    for values in rows.values():
        values[~mask] = garbage
    value, gradients = value_and_gradients(divergence, rows, mask, posterior)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for name in NAMES:
        gradient = gradients[name].numpy()
        assert np.all(gradient[~mask] == 0)
        np.testing.assert_allclose(gradient[mask], expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_masks_that_come_too_late_are_caught(monkeypatch):
    """Mutant: rows that do not exist are left as they are, and only weighted by 0."""
    monkeypatch.setattr(divergences, "_existing", lambda rows, mask, otherwise=0.0: rows)
    rows, mask = make_rows(4), np.array([True, True, True, False])
    for values in rows.values():
        values[~mask] = math.nan
    for divergence in DIVERGENCES:
        _, gradients = value_and_gradients(divergence, rows, mask)
        assert not all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("existing", [0, 1])
def test_too_few_rows_have_no_divergence(divergence, existing):
    assert float(value_of(divergence, make_rows(0))) == 0
    rows, mask = make_rows(3), np.arange(3) < existing
    value, gradients = value_and_gradients(divergence, rows, mask)
    if existing == 1 and isinstance(divergence, PriorToAggregateKL):
        assert float(value) != 0 and np.any(gradients["loc"][0] != 0)
        return
    assert float(value) == 0
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, np.zeros([3, 3]))


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_the_order_of_rows_does_not_matter(divergence):
    """Neither that of all rows, nor which prior sample comes with which example."""
    rows, order = make_rows(6), np.array([3, 0, 5, 1, 2, 4])
    shuffled = {name: values[order] for name, values in rows.items()}
    repaired = shuffled | {"prior_samples": rows["prior_samples"]}
    for other in (shuffled, repaired):
        value = float(value_of(divergence, other))
        assert value == pytest.approx(float(value_of(divergence, rows)), rel=1e-4, abs=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_groups_vectorize(divergence, jit_compile):
    """Values and gradients of stacked groups, some of them with missing rows, or with none."""
    rows = make_rows(5, 3, (4,))
    rows = {name: tf.constant(values) for name, values in rows.items()}
    masks = tf.constant(np.arange(5) < np.array([[5], [3], [1], [0]]))

    @tf.function(jit_compile=jit_compile)
    def together(rows, masks):
        return tf.vectorized_map(
            lambda group: value_and_gradients(divergence, *group),
            (rows, masks),
            fallback_to_while_loop=False,
        )

    values, gradients = together(rows, masks)
    for j in range(4):
        group = {name: stacked[j] for name, stacked in rows.items()}
        value, gradient = value_and_gradients(divergence, group, masks[j])
        assert float(values[j]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)
        for name in NAMES:
            np.testing.assert_allclose(gradients[name][j], gradient[name], rtol=1e-3, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_the_gradient_of_vectorised_groups(divergence):
    """As above, but the tape is around the map."""
    rows = {name: tf.constant(values) for name, values in make_rows(5, 3, (4,)).items()}
    with tf.GradientTape() as tape:
        tape.watch(rows)
        values = tf.vectorized_map(
            lambda group: value_of(divergence, group), rows, fallback_to_while_loop=False
        )
        total = tf.reduce_sum(values)
    gradients = tape.gradient(total, rows, unconnected_gradients="zero")
    for j in range(4):
        group = {name: stacked[j] for name, stacked in rows.items()}
        _, gradient = value_and_gradients(divergence, group)
        for name in NAMES:
            np.testing.assert_allclose(gradients[name][j], gradient[name], rtol=1e-3, atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
def test_batches_of_open_size_and_lower_precision(divergence):
    rows, mask = make_rows(4), np.array([True, True, True, False])
    spec = {name: tf.TensorSpec([None, 3], tf.float16) for name in NAMES}
    graph = tf.function(
        lambda rows, mask: value_of(divergence, rows, mask),
        input_signature=(spec, tf.TensorSpec([None], tf.bool)),
    )
    value = graph({name: tf.cast(rows[name], tf.float16) for name in NAMES}, mask)
    assert value.dtype == tf.float32
    assert float(value) == pytest.approx(float(value_of(divergence, rows, mask)), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [("mmd", DimensionwiseMMD()), ("rbf_mmd", RbfMMD()), ("kl", PriorToAggregateKL())],
)
def test_names(name, divergence):
    assert divergences.get(name) == divergence
    assert divergences.serialize(divergence)["name"] == name


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES, RbfMMD([1]), DimensionwiseMMD([3, 1])])
def test_configs_round_trip(divergence):
    config = json.loads(json.dumps(divergences.serialize(divergence)))
    assert divergences.get(config) == divergence
    assert config is None or "name" in config  # It is not used up.
    assert divergences.get(divergence) is divergence


class Distance(Divergence):
    """A divergence that tfdp does not have: how far the mean is from 0."""

    def estimate(self, posterior, samples, prior, prior_samples, mask):
        return tf.norm(tf.reduce_sum(samples, axis=0))


def test_other_divergences():
    for unknown in ("ghost", {"name": "ghost"}, {}, 3):
        with pytest.raises(ValueError, match=r"`divergence` must be .*Received: divergence="):
            divergences.get(unknown)
    rows = make_rows(2)
    rows["samples"][:] = [[3.0, 4.0, 0.0], [math.nan] * 3]
    assert float(value_of(divergences.get(Distance()), rows, np.array([True, False]))) == 5
    with pytest.raises(ValueError, match=r"one of tfdp's, \[.*\], to be saved"):
        divergences.serialize(Distance())


ZEROS = np.zeros([4, 3], "float32")


def kl_with(posterior):
    return PriorToAggregateKL()(posterior, ZEROS, PRIOR.distribution(), ZEROS, np.ones(4, bool))


def called_with(mask=None, **changes):
    return value_of(RbfMMD(), make_rows(4) | changes, mask)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: DimensionwiseMMD([]), "scales"),
        (lambda: DimensionwiseMMD([1.0, 0.0]), "scales"),
        (lambda: DimensionwiseMMD(3.0), "scales"),
        (lambda: DimensionwiseMMD("abc"), "scales"),
        (lambda: RbfMMD([math.inf]), "bandwidths"),
        (lambda: RbfMMD([-1.0]), "bandwidths"),
        (lambda: RbfMMD([math.nan]), "bandwidths"),
        (lambda: RbfMMD(None), "bandwidths"),
        (lambda: called_with(samples=ZEROS[0]), "samples"),
        (lambda: called_with(prior_samples=ZEROS[:2]), "prior_samples"),
        (lambda: called_with(prior_samples=ZEROS[0]), "prior_samples"),
        (lambda: called_with(mask=np.ones(4, "float32")), "mask"),
        (lambda: called_with(mask=np.ones([4, 1], bool)), "mask"),
        (lambda: called_with(mask=np.ones(3, bool)), "mask"),
        (lambda: kl_with(tfd.Normal(ZEROS, 1.0)), "posterior"),
        (lambda: kl_with(tfd.Independent(tfd.Laplace(ZEROS, 1.0), 1)), "posterior"),
    ],
)
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must .*Received: {argument}[= ]"):
        make()
