"""What is measured of a variational autoencoder."""

import numpy as np
import pytest
from tensorflow_probability import distributions as tfd

from experiments.vae import metrics

RANDOM = np.random.default_rng(0)
CENTRES = [[0, 1], [1, 0], [0, -1], [-1, 0]]


# Sparsity.


def test_codes_that_use_all_dimensions_alike_are_dense():
    signs = RANDOM.choice([-1.0, 1.0], size=[1000, 20])
    assert metrics.hoyer_sparsity(signs) == pytest.approx(0, abs=0.01)


def test_codes_that_use_one_dimension_each_are_sparse():
    codes = np.eye(20)[np.arange(1000) % 20] * RANDOM.uniform(1, 2, [1000, 1])
    assert metrics.hoyer_sparsity(codes) == pytest.approx(1, abs=1e-12)


def test_sparsity_follows_its_formula():
    codes = RANDOM.normal([0, 1, 2, 3], size=[50, 4])
    total = 0.0
    for code in codes:
        z = [code[d] / codes[:, d].std() for d in range(4)]
        total += (2 - sum(map(abs, z)) / sum(v**2 for v in z) ** 0.5) / (2 - 1)
    assert metrics.hoyer_sparsity(codes) == pytest.approx(total / 50)


def test_sparsity_of_normal_codes_is_that_of_the_distribution():
    codes = RANDOM.normal(size=[20_000, 50])
    # E |z|_1 / E |z|_2 to 1/D: sqrt(2 / pi) sqrt(D) (1 + 1 / (4 D)); Hoyer's measure of it.
    ratio = np.sqrt(2 / np.pi * 50) * (1 + 1 / 200)
    expected = (np.sqrt(50) - ratio) / (np.sqrt(50) - 1)
    assert metrics.hoyer_sparsity(codes) == pytest.approx(expected, abs=2e-3)


def test_sparsity_does_not_see_the_scale_of_a_dimension():
    codes = RANDOM.normal(size=[200, 5])
    scaled = codes * [1e-3, 1, 10, 1e4, 0.5]
    assert metrics.hoyer_sparsity(scaled) == pytest.approx(metrics.hoyer_sparsity(codes))
    # Without the division by the standard deviations, it would.
    ratios = np.abs(scaled).sum(axis=1) / np.linalg.norm(scaled, axis=1)
    mutant = (np.sqrt(5) - ratios.mean()) / (np.sqrt(5) - 1)
    assert abs(mutant - metrics.hoyer_sparsity(codes)) > 0.3


def test_a_constant_dimension_is_unused():
    codes = RANDOM.normal(size=[200, 1]) + 5
    for constant in (0.0, 0.1, -1e6):
        with_constant = np.concatenate([codes, np.full([200, 3], constant)], axis=1)
        assert metrics.hoyer_sparsity(with_constant) == pytest.approx(1)


def test_codes_that_say_nothing_have_no_sparsity():
    assert np.isnan(metrics.hoyer_sparsity(np.ones([10, 3])))
    assert np.isnan(metrics.hoyer_sparsity(np.zeros([10, 3])))


@pytest.mark.parametrize("shape", [[10], [10, 1], [0, 3], [2, 3, 4]])
def test_sparsity_needs_a_matrix_of_two_columns(shape):
    with pytest.raises(ValueError, match="codes"):
        metrics.hoyer_sparsity(np.ones(shape))


# Purity.


def test_purity_is_one_where_the_components_are_the_clusters():
    labels = np.repeat([2, 0, 3, 1], 25)  # Which cluster is at which component does not matter.
    codes = np.repeat(np.array(CENTRES, float), 25, axis=0) + RANDOM.normal(0, 0.1, [100, 2])
    assert metrics.cluster_purity(codes, CENTRES, labels) == 1


def test_purity_counts_the_most_frequent_label_of_each_component():
    codes = [[0, 2]] * 5 + [[2, 0]] * 4 + [[0, -2]]
    labels = np.array([0, 0, 0, 1, 2, 1, 1, 2, 2, 0])
    assert metrics.cluster_purity(codes, CENTRES, labels) == pytest.approx((3 + 2 + 1) / 10)


def test_purity_is_the_largest_cluster_where_all_codes_are_one():
    labels = np.arange(100) % 4
    assert metrics.cluster_purity(np.zeros([100, 2]), CENTRES, labels) == 0.25


def test_purity_needs_codes_in_the_space_of_the_centres():
    with pytest.raises(ValueError, match=r"\[N, D\], \[K, D\]"):
        metrics.cluster_purity(np.zeros([5, 3]), CENTRES, np.zeros(5, int))
    with pytest.raises(ValueError, match=r"\[N, D\], \[K, D\]"):
        metrics.cluster_purity(np.zeros([5, 2]), CENTRES, np.zeros(4, int))


# MMD.


def brute_force(q, p):
    def kernel(x, y):
        return sum(s / (s + (x - y) ** 2) for s in (0.2, 0.4, 1.0, 2.0, 4.0, 10.0))

    total, n = 0.0, len(q)
    for d in range(q.shape[1]):
        for i in range(n):
            for j in range(n):
                own = kernel(q[i, d], q[j, d]) + kernel(p[i, d], p[j, d])
                total += own / (n * (n - 1)) if i != j else 0
                total -= 2 * kernel(q[i, d], p[j, d]) / n**2
    return total


def test_mmd_follows_its_formula():
    q, p = RANDOM.normal(size=[12, 3]), RANDOM.normal(size=[12, 3]) + 1
    assert metrics.dimensionwise_mmd(q, p) == pytest.approx(brute_force(q, p), rel=1e-4)


def test_mmd_tells_distributions_apart():
    q, p = RANDOM.normal(size=[500, 4]), RANDOM.normal(size=[500, 4])
    assert abs(metrics.dimensionwise_mmd(q, p)) < 0.05
    assert metrics.dimensionwise_mmd(q * 2, p) > 0.3
    assert metrics.dimensionwise_mmd(q + 1, p) > 0.3


@pytest.mark.parametrize("shapes", [([5, 2], [4, 2]), ([5, 2], [5, 3]), ([1, 2], [1, 2])])
def test_mmd_needs_samples_of_one_shape(shapes):
    with pytest.raises(ValueError, match="prior_samples"):
        metrics.dimensionwise_mmd(*(np.zeros(shape) for shape in shapes))


# Downstream.


def test_downstream_accuracy_is_that_on_the_real_images():
    y = np.arange(300) % 3
    x = RANDOM.normal(0, 0.3, [300, 2, 2, 1])
    x[np.arange(300), 0, 0, 0] += 3 * y
    assert metrics.downstream_accuracy(x, y, x, y) > 0.95
    # Generated for other classes than they show: wrong, though the classifier fits them well.
    assert metrics.downstream_accuracy(x, (y + 1) % 3, x, y) < 0.05


# Codes and images of a class.


def test_kl_is_that_of_normal_distributions():
    means, deviations = RANDOM.normal(size=[30, 4]), RANDOM.uniform(0.1, 2, [30, 4])
    own = tfd.MultivariateNormalDiag(means, deviations)
    expected = tfd.kl_divergence(own, tfd.MultivariateNormalDiag(np.zeros(4), np.ones(4)))
    found = metrics.kl_from_standard_normal(means, deviations)
    assert found == pytest.approx(np.mean(expected.numpy()))
    assert metrics.kl_from_standard_normal(np.zeros([2, 4]), np.ones([2, 4])) == 0


def test_variance_within_does_not_see_what_differs_between_classes():
    labels = np.arange(3000) % 3
    images = 5.0 * labels[:, np.newaxis] + RANDOM.normal(0, 0.5, [3000, 4])
    assert metrics.variance_within(images, labels) == pytest.approx(4 * 0.25, rel=0.15)
    assert metrics.variance_within(images, np.zeros(3000)) > 60


# Divergence of a training.


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_run_that_diverged_has_no_measure(value):
    codes = RANDOM.normal(size=[20, 2])
    codes[3, 1] = value
    fine, labels = RANDOM.normal(size=[20, 2]), np.arange(20) % 4
    assert np.isnan(metrics.hoyer_sparsity(codes))
    assert np.isnan(metrics.cluster_purity(codes, CENTRES, labels))
    assert np.isnan(metrics.dimensionwise_mmd(codes, fine))
    assert np.isnan(metrics.dimensionwise_mmd(fine, codes))
    assert np.isnan(metrics.downstream_accuracy(codes, labels, fine, labels))
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(metrics.variance_within(codes, labels))
        assert not np.isfinite(metrics.kl_from_standard_normal(codes, np.ones_like(codes)))
