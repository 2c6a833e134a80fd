import math

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.two_term_support import (
    Codes,
    Pull,
    Sum,
    data,
    gradient,
    groups_of,
    looped_groups,
    looped_samples,
    noise_of_steps,
)
from tfdp.clipping import OnePassEngine, TermWiseAggregation
from tfdp.clipping.batch_losses.aggregations import Sensitivities, split_noise
from tfdp.contrib import BatchAggregation, MicroAggregation

M = 4
C1, C2, B = 0.5, 0.2, 32


def term_wise(**changes):
    return TermWiseAggregation(**{"batch_clip": C2, "num_groups": M, **changes})


# The sum.


def test_term_wise_is_the_sum_over_examples_and_groups():
    model, (x, y, mask) = Codes(), data()
    aggregation = term_wise()
    groups = groups_of(x, y, mask, M, aggregation.capacity(B))
    norms = [np.linalg.norm(gradient(model, lambda g=g: model.batch_wise(*g))) for g in groups]
    assert min(norms) < C2 < max(norms)
    expected = looped_samples(model, x, y, mask, C1) + B / M * looped_groups(model, groups, C2)
    np.testing.assert_allclose(Sum(model, aggregation)(x, y, mask), expected, atol=1e-5)


def test_without_clips_it_is_the_gradient_of_the_partitioned_loss():
    model, (x, y, mask) = Codes(), data()
    groups = groups_of(x, y, mask, M, 40)

    def partitioned():
        samples = tf.reduce_sum(tf.boolean_mask(model.sample_wise(x, y), mask)) / B
        return samples + tf.add_n([model.batch_wise(*g) for g in groups]) / M

    aggregation = term_wise(batch_clip=math.inf, group_capacity=40)
    found = Sum(model, aggregation, clip=math.inf)(x, y, mask) / B
    np.testing.assert_allclose(found, gradient(model, partitioned), atol=1e-5)


@pytest.mark.parametrize("aggregation", [term_wise(), MicroAggregation()])
def test_without_a_batch_wise_term_it_is_dp_sgd(aggregation):
    model, (x, y, mask) = Codes(), data()
    found = Sum(model, aggregation, batch_wise=None)
    np.testing.assert_allclose(found(x, y, mask), looped_samples(model, x, y, mask, C1), atol=1e-5)
    assert found.scales is None  # The engine's own sensitivity.


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", [term_wise(), MicroAggregation(), BatchAggregation()])
def test_a_regularizer_is_public(aggregation):
    model, (x, y, mask) = Codes(), data()
    regularizer = lambda: 100.0 * tf.reduce_sum(model.head.kernel**2)  # noqa: E731
    found = Sum(model, aggregation, regularizer=regularizer)
    with_it, public = found.run(x, y, mask)
    np.testing.assert_allclose(
        support.flat(with_it), Sum(model, aggregation)(x, y, mask), atol=1e-5
    )
    np.testing.assert_allclose(support.flat(public), gradient(model, regularizer), rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", [term_wise(), MicroAggregation(), BatchAggregation()])
def test_masked_rows_are_nothing(aggregation):
    model, (x, y, mask) = Codes(), data()
    found = Sum(model, aggregation)
    expected = found(x, y, mask)
    x[~mask], y[~mask] = 1e3, np.nan
    np.testing.assert_allclose(found(x, y, mask), expected, atol=1e-5)


def test_a_bad_example_takes_its_group_with_it_and_no_more():
    model, (x, y, mask) = Codes(), data()
    aggregation = term_wise()
    bad = np.flatnonzero(mask)[3]
    x[bad] = np.nan
    groups = groups_of(x, y, mask, M, aggregation.capacity(B))
    assert sum(np.isnan(g[0]).any() for g in groups) == 1
    expected = looped_samples(model, x, y, mask, C1) + B / M * looped_groups(model, groups, C2)
    np.testing.assert_allclose(Sum(model, aggregation)(x, y, mask), expected, atol=1e-5)


# Sensitivities.


@pytest.mark.parametrize(
    ("relation", "expected"),
    [
        ("zero_out", Sensitivities(C1, 2 * C2)),
        ("add_or_remove_one", Sensitivities(C1, 2 * C2)),
        ("replace_one", Sensitivities(2 * C1, 2 * C2)),
    ],
)
def test_sensitivities(relation, expected):
    assert term_wise().sensitivities(C1, relation) == expected


def neighbours(relation, rng):
    """Two batches that differ in the example of one row."""
    x, y, mask = data(seed=rng.integers(2**31))
    other_x, other_y, other_mask = x.copy(), y.copy(), mask.copy()
    row = rng.choice(np.flatnonzero(mask))
    if relation == "replace_one":
        other_x[row], other_y[row] = rng.normal(size=3) * 10, rng.normal() * 10
    else:
        other_mask[row] = False
    return (x, y, mask), (other_x, other_y, other_mask)


def parts(model, aggregation):
    """The two sums by themselves."""
    weight = B / aggregation.num_groups
    samples = Sum(model, aggregation, batch_wise=None)

    def groups(*batch):
        return (both(*batch) - samples(*batch)) / weight

    both = Sum(model, aggregation)
    return samples, groups


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_neighbours_are_no_farther_apart_than_the_sensitivities(relation):
    rng = np.random.default_rng(0)
    model, aggregation = Codes(), term_wise(batch_clip=1e-3, num_groups=12)
    samples, groups = parts(model, aggregation)
    moved = aggregation.sensitivities(C1, relation)
    farthest = 0.0
    for _ in range(40):
        one, other = neighbours(relation, rng)
        assert np.linalg.norm(samples(*one) - samples(*other)) <= moved.sample_wise * (1 + 1e-4)
        farthest = max(farthest, np.linalg.norm(groups(*one) - groups(*other)))
    assert farthest <= moved.batch_wise * 1.01
    # The mutant S2 = C2, as published, is caught by ordinary data.
    assert farthest > 1.1 * moved.batch_wise / 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_an_example_moves_the_batch_wise_sum_by_twice_the_clip(relation):
    x, mask = np.full([40, 3], 0.5, "float32"), np.ones(40, bool)
    found = Sum(Pull(), term_wise())
    if relation == "replace_one":
        with_it, without = x.copy(), x
        with_it[7] = -1000.0
        distance = found(with_it, x[:, 0], mask) - found(without, x[:, 0], mask)
    else:
        x[7] = -1000.0
        absent = mask.copy()
        absent[7] = False
        distance = found(x, x[:, 0], mask) - found(x, x[:, 0], absent)
    assert M / B * np.abs(distance) == pytest.approx(2 * C2, rel=1e-4)


# Noise.


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 1.0), (0.02, 5.0)])
def test_the_split_has_the_least_noise(a, b):
    sigma = 1.3
    shares = np.linspace(1e-4, 1 - 1e-4, 20_001)
    energies = sigma**2 * (a**2 / shares + b**2 / (1 - shares))
    of_samples, of_groups = split_noise(sigma, "least_noise", a, b)
    assert of_samples**-2 + of_groups**-2 == pytest.approx(sigma**-2)
    found = (a * of_samples) ** 2 + (b * of_groups) ** 2
    assert found == pytest.approx(energies.min(), rel=1e-6)
    assert found == pytest.approx((sigma * (a + b)) ** 2)


def test_a_split_by_share_and_of_one_term_alone():
    assert split_noise(1.0, 0.5, 3.0, 1.0) == pytest.approx((math.sqrt(2), math.sqrt(2)))
    assert split_noise(1.0, 0.2, 3.0, 1.0) == pytest.approx((math.sqrt(5), math.sqrt(1.25)))
    assert split_noise(2.0, 0.2, 3.0, 0.0) == (2.0, math.inf)
    assert split_noise(2.0, 0.2, 0.0, 1.0) == (math.inf, 2.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("split", ["least_noise", 0.3])
def test_noise_scales(split):
    model, (x, y, mask) = Codes(), data()
    found = Sum(model, term_wise(split=split))
    found(x, y, mask)
    a, b = C1 * math.sqrt(11), B / M * 2 * C2 * math.sqrt(8)  # 8 of the 11 numbers are in g.
    of_samples, of_groups = split_noise(1.0, split, a, b)
    both = math.hypot(of_samples * C1, of_groups * B / M * 2 * C2)
    assert found.scales == pytest.approx([both, both, of_samples * C1, of_samples * C1])


def subsampled_rdp(order, q, shifts, sigmas):
    """Renyi divergence of a Poisson-sampled pair of Gaussian sums, integrated in the plane."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    weights = weights / weights.sum()
    exponents = [
        s / sigma * nodes - s**2 / (2 * sigma**2) for s, sigma in zip(shifts, sigmas, strict=True)
    ]
    ratio = np.exp(exponents[0][:, None] + exponents[1][None, :])
    moment = np.sum(weights[:, None] * weights[None, :] * (1 - q + q * ratio) ** order)
    return math.log(moment) / (order - 1)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_two_sums_cost_what_one_gaussian_mechanism_does(share, order):
    sigma, q = 1.4, 0.05
    sensitivities = (C1, 2 * C2)
    multipliers = split_noise(sigma, share, 1.0, 1.0)
    sigmas = [m * s for m, s in zip(multipliers, sensitivities, strict=True)]
    accountant = tfdp.accounting.RdpAccountant([order])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
    priced = accountant._rdp[0] if hasattr(accountant, "_rdp") else None
    assert subsampled_rdp(order, q, sensitivities, sigmas) == pytest.approx(priced, rel=1e-6)
    # Mutants: each multiplier as if the other sum were not released; S2 = C2.
    assert (
        subsampled_rdp(order, q, sensitivities, [sigma * s for s in sensitivities]) > 1.5 * priced
    )
    halved = [sigmas[0], sigmas[1] / 2]
    assert subsampled_rdp(order, q, sensitivities, halved) > 1.2 * priced


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["term_wise", "micro", "batch"])
def test_the_noise_of_a_step(kind):
    aggregation = {
        "term_wise": term_wise(),
        "micro": MicroAggregation(),
        "batch": BatchAggregation(),
    }[kind]
    sigma = 1.5
    optimizer = tfdp.DPSGD(C1, sigma, expected_batch_size=B, learning_rate=1.0)
    codes, head = noise_of_steps(optimizer, aggregation, 600)
    if kind == "term_wise":
        a, b = C1 * math.sqrt(11), B / M * 2 * C2 * math.sqrt(8)
        of_samples, of_groups = split_noise(sigma, "least_noise", a, b)
        of_head = of_samples * C1 / B
        of_codes = math.hypot(of_head, of_groups * 2 * C2 / M)
    elif kind == "micro":
        of_codes = of_head = sigma * (2 * 40 - 1) * C1 / B
    else:
        of_codes = of_head = sigma * 2 * C1
    for noise, stddev in ((codes, of_codes), (head, of_head)):
        test = scipy.stats.kstest
        assert test(noise, scipy.stats.norm(0, stddev).cdf).pvalue > 1e-4
        for wrong in (2 / 3, 3 / 2):
            assert test(noise, scipy.stats.norm(0, wrong * stddev).cdf).pvalue < 1e-6


def test_the_ledger_has_one_gaussian_mechanism():
    x, y, _ = data(200)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=B)
    optimizer = tfdp.DPSGD(C1, 1.5, sampling=batches.sampling)
    assert optimizer.event == dp_accounting.GaussianDpEvent(1.5)


# Arguments.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_clip": 0},
            "`batch_clip` must be a positive number, at least 1e-15. Received: batch_clip=0",
        ),
        ({"batch_clip": math.nan}, "`batch_clip` must be a positive number"),
        ({"num_groups": 0}, "`num_groups` must be a positive integer. Received: num_groups=0"),
        ({"num_groups": 2.0}, "`num_groups` must be a positive integer"),
        ({"group_capacity": 0}, "`group_capacity` must be a positive integer"),
        ({"split": 1.0}, r"`split` must be 'least_noise' or .* Received: split=1.0"),
        ({"split": "equal"}, "`split` must be 'least_noise' or"),
    ],
)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        term_wise(**changes)


def test_an_infinite_clip_goes_with_no_noise():
    for changes, aggregation in (({}, term_wise(batch_clip=math.inf)),):
        optimizer = tfdp.DPSGD(C1, 1.0, expected_batch_size=B, **changes)
        with pytest.raises(ValueError, match="`batch_clip` must be finite when there is noise"):
            noise_of_steps(optimizer, aggregation, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 4}, "`num_microbatches` must be None with a TwoTermLoss"),
        ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps` must be 1 with a Two"),
        ({"clipping_rule": "adaptive_quantile"}, "`clipping_rule` must have a fixed clip with a"),
    ],
)
def test_optimizers_that_cannot_have_two_terms(changes, message):
    optimizer = tfdp.DPSGD(C1, 1.0, expected_batch_size=B, **changes)
    with pytest.raises(ValueError, match=message):
        noise_of_steps(optimizer, term_wise(), 1)


def test_capacity():
    assert term_wise(num_groups=8).capacity(128) == 28
    assert term_wise(group_capacity=5).capacity(128) == 5


@pytest.mark.slow
def test_the_engine_is_that_of_one_pass():
    engine = OnePassEngine(C1)
    model, (x, y, mask) = Codes(), data()

    @tf.function
    def run(x, y, mask):
        loss = tfdp.clipping.TwoTermLoss(
            model.sample_wise, model.batch_wise, (x, y), term_wise(), mask
        )
        variables = model.trainable_variables
        found = loss.clipped_sum(engine, variables, tf.constant([1, 2], tf.int64), B)
        return found.gradients

    run(x, y, mask)
    assert all(entry.how != "vectorized" for entry in engine.report().entries)
