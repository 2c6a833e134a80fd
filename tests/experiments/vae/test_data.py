"""The data sets of the experiments on variational autoencoders."""

import numpy as np
import pytest

from experiments import datasets
from experiments.vae import data as vae_data
from tests.experiments.test_datasets import prepared_data

RADIAL, TANGENTIAL, RATE = 0.3, 0.1, 0.25
MANY = 200_000


def deviations(sample):
    """How far moments of a sample are from those of the pinwheel, in standard errors."""
    points, arms = sample(3, MANY)
    a, b = RADIAL**2, TANGENTIAL**2
    squares = (points.astype(float) ** 2).sum(axis=1)
    expected = {
        "second": (squares, 1 + a + b),
        "fourth": (squares**2, 1 + 6 * a + 3 * a**2 + 2 * (1 + a) * b + 3 * b**2),
        "x": (points[:, 0], 0.0),
        "y": (points[:, 1], 0.0),
        "xx - yy": (points[:, 0] ** 2 - points[:, 1] ** 2, 0.0),
        "xy": (points[:, 0] * points[:, 1], 0.0),
    }
    # The center of an arm by quadrature: E (1 + a u) exp(i rate exp(1 + a u)), u standard normal.
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    along = 1 + RADIAL * nodes
    centre = weights @ (along * np.exp(1j * RATE * np.exp(along))) / np.sqrt(2 * np.pi)
    for arm in range(4):
        turned = centre * np.exp(0.5j * np.pi * arm)
        expected[f"x of arm {arm}"] = (points[arms == arm, 0], turned.real)
        expected[f"y of arm {arm}"] = (points[arms == arm, 1], turned.imag)
    return {
        name: abs(values.mean() - mean) / (values.std() / np.sqrt(len(values)))
        for name, (values, mean) in expected.items()
    }


def test_the_pinwheel_has_its_moments():
    found = deviations(vae_data.pinwheel)
    assert max(found.values()) < 5, found


@pytest.mark.parametrize(
    ("mutant", "moment"),
    [
        ({"radial_std": TANGENTIAL, "tangential_std": RADIAL}, "fourth"),  # the two exchanged
        ({"radial_std": 0.32}, "second"),
        ({"tangential_std": 0.2}, "second"),
        ({"rate": 0.24}, "x of arm 0"),
        ({"rate": -RATE}, "y of arm 0"),  # turned the other way
    ],
)
def test_another_distribution_is_told_from_it(mutant, moment):
    found = deviations(lambda seed, points: vae_data.pinwheel(seed, points, **mutant))
    assert found[moment] > 8, found


def test_the_pinwheel_has_as_many_points_in_each_arm_in_random_order():
    points, arms = vae_data.pinwheel(0)
    assert points.shape == (400, 2) and points.dtype == np.float32 and arms.dtype == np.int64
    assert np.bincount(arms).tolist() == [100] * 4
    assert 50 < (np.diff(arms) == 0).sum() < 150  # 99.75 in the mean
    again, _ = vae_data.pinwheel(0)
    np.testing.assert_array_equal(points, again)


@pytest.mark.parametrize("points", [0, 2, 401, -4])
def test_the_pinwheel_must_have_as_many_points_in_each_arm(points):
    with pytest.raises(ValueError, match="multiple of 4"):
        vae_data.pinwheel(0, points)


def test_the_sets_of_the_pinwheel_are_independent():
    test = vae_data.load("pinwheel")
    validation = vae_data.load("pinwheel", eval_split="validation")
    np.testing.assert_array_equal(test.train_x, validation.train_x)
    sets = [test.train_x, test.eval_x, validation.eval_x]
    assert len(np.unique(np.concatenate(sets), axis=0)) == 1200
    assert test.size == 400 and len(test.eval_y) == 400


def test_digits_are_those_of_the_other_experiments():
    for split in ("test", "validation"):
        found = vae_data.load("digits", eval_split=split)
        expected = datasets.load("digits", eval_split=split, validation_examples=287)
        np.testing.assert_array_equal(found.train_x, expected.train_x)
        np.testing.assert_array_equal(found.eval_y, expected.eval_y)


def test_padding_puts_black_around_an_image():
    images = np.random.default_rng(0).uniform(0.1, 1, [3, 28, 28, 1]).astype("float32")
    padded = vae_data.pad(images)
    assert padded.shape == (3, 32, 32, 1) and padded.dtype == np.float32
    np.testing.assert_array_equal(padded[:, 2:30, 2:30], images)
    assert np.count_nonzero(padded) == images.size


@pytest.mark.slow
@pytest.mark.data
def test_fashion_mnist_is_padded():
    data = vae_data.load("sparsity", data_dir=prepared_data(), eval_split="validation")
    assert data.train_x.shape == (50_000, 32, 32, 1) and data.eval_x.shape == (10_000, 32, 32, 1)
    assert data.train_x.max() == 1 and not data.train_x[:, :2].any()
