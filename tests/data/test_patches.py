import numpy as np
import pytest

import tfdp
from tfdp.data import patches as module

RNG = np.random.default_rng(0)
IMAGES = RNG.random([5, 9, 10, 3], "float32")
LEAF = [0.35385591, 0.42613542, 0.2804296]  # A pixel of a random image.


@pytest.fixture(autouse=True)
def few_random_images(monkeypatch):
    monkeypatch.setattr(module, "_LEAVES", 24)
    monkeypatch.setattr(module, "_PATCHES", 2000)


def features_of(images=IMAGES, **kwargs):
    return tfdp.data.patch_features(images, **{"num_filters": 6, **kwargs})


@pytest.mark.parametrize(
    ("shape", "kwargs", "expected"),
    [
        ([2, 28, 28, 1], {"num_filters": 512}, (2, 3, 3, 512)),
        ([1, 32, 32, 3], {"num_filters": 10, "mirror": True}, (1, 3, 2, 10)),
        ([1, 32, 32, 3], {"num_filters": 2, "mirror": True, "grid_size": 4}, (1, 4, 2, 2)),
        ([40, 7, 9, 2], {"num_filters": 1}, (40, 3, 3, 1)),
        ([1, 2, 5, 1], {"patch_size": 2, "grid_size": 1}, (1, 1, 1, 6)),
    ],
)
def test_shapes(shape, kwargs, expected):
    found = features_of(RNG.random(shape), **kwargs)
    assert found.shape == expected and found.dtype == np.float32
    assert np.isfinite(found).all()


def by_definition(image, constants, size, grid):
    """Features of one image, in float64 and patch by patch, without mirror images."""
    height, width = (side - size + 1 for side in image.shape[:2])
    flat = constants.filters.reshape(-1, constants.filters.shape[-1]).astype(float)
    found = np.zeros([grid, grid, flat.shape[1]])
    for y in range(height):
        for x in range(width):
            patch = image[y : y + size, x : x + size].astype(float).ravel()
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + 0.003)
            active = np.maximum(patch @ flat - 0.25, 0)
            for row in range(grid):
                for column in range(grid):
                    share = 1.0
                    for at, cell, side in ((y, row, height), (x, column, width)):
                        first, last = cell * side / grid, (cell + 1) * side / grid
                        share *= max(0.0, min(last, at + 1) - max(first, at)) * grid / side
                    found[row, column] += share * active
    return (found - constants.mean) @ constants.whitening


@pytest.mark.parametrize(("size", "grid"), [(3, 2), (4, 3)])
def test_agrees_with_the_definition(size, grid):
    constants = module._constants(9, 10, 3, module.Parameters(6, size, grid, mirror=False))
    found = features_of(patch_size=size, grid_size=grid)
    expected = [by_definition(image, constants, size, grid) for image in IMAGES]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.std(expected) > 0.05


@pytest.mark.parametrize("grid", [2, 3])
def test_left_is_right_where_asked_for(grid):
    other = IMAGES[:, :, ::-1]
    found, same = (features_of(x, mirror=True, grid_size=grid) for x in (IMAGES, other))
    np.testing.assert_allclose(found, same, atol=1e-5)
    found, not_same = (features_of(x, grid_size=grid) for x in (IMAGES, other))
    assert np.abs(found - not_same).max() > 0.01


def test_mirrored_features_are_means_of_both():
    """Patterns come in pairs: those of a mirror image are those of the image, at the other side."""
    filters = module._filters(
        module.dead_leaves(24, 9, 10, 3, 0), module.Parameters(6, 3, 3, mirror=True)
    )
    np.testing.assert_array_equal(filters[..., 3:], filters[:, ::-1, :, :3])
    cells, others = (module._responses(x, filters, 3).numpy() for x in (IMAGES, IMAGES[:, :, ::-1]))
    expected = ((cells + others) / 2)[:, :, :2]
    np.testing.assert_allclose(module._with_mirror_image(cells), expected, atol=1e-6)


@pytest.mark.parametrize("mirror", [False, True])
def test_features_are_centered_and_uncorrelated_on_random_images(mirror, monkeypatch):
    monkeypatch.setattr(module, "_LEAVES", 200)
    leaves = module.dead_leaves(200, 10, 10, 1, module._SEED)

    def moments():
        found = features_of(leaves, mirror=mirror, grid_size=2)
        norms = np.linalg.norm(found.reshape(len(found), -1), axis=1)
        np.testing.assert_allclose(norms.mean(), 1, rtol=1e-4)
        rows = found.reshape(-1, 6)
        np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-4)
        covariance = np.cov(rows.T)
        return covariance / np.trace(covariance) * 6

    monkeypatch.setattr(module, "_SHRINKAGE_OF_FEATURES", 1e-9)
    np.testing.assert_allclose(moments(), np.eye(6), atol=1e-2)
    monkeypatch.setattr(module, "_SHRINKAGE_OF_FEATURES", 0.1)
    assert 0.05 < np.abs(moments() - np.eye(6)).max() < 0.9


def test_patterns_show_something():
    """Of large leaves, most patches are of one color: their filters would be zero."""
    leaves = module.dead_leaves(24, 28, 28, 1, 0)
    filters = module._filters(leaves, module.Parameters(64, 5, 3, mirror=False))
    np.testing.assert_allclose(filters.sum(axis=(0, 1, 2)), 0, atol=1e-5)
    rows = filters.reshape(-1, 64).T
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.isfinite(rows).all()
    assert np.triu(rows @ rows.T, 1).max() < 0.999  # No two are the same.


def test_random_images():
    leaves = module.dead_leaves(3, 16, 20, 3, 7)
    assert leaves.shape == (3, 16, 20, 3) and leaves.dtype == np.float32
    assert 0 <= leaves.min() < 0.2 < 0.8 < leaves.max() <= 1
    np.testing.assert_array_equal(leaves, module.dead_leaves(3, 16, 20, 3, 7))
    assert np.abs(leaves - module.dead_leaves(3, 16, 20, 3, 8)).mean() > 0.1
    # All of an image is covered, and many neighbors are of one leaf.
    assert (np.abs(np.diff(leaves, axis=2)).max(axis=3) < 1e-6).mean() > 0.3
    # Constants must not change with NumPy's version: old features are of the same filters.
    np.testing.assert_allclose(leaves[0, 3, 5], LEAF, atol=1e-5)


def test_large_images_are_done_one_by_one(monkeypatch):
    """Filter responses of 32 images of 224 x 224 pixels would be 3 GB."""
    images = RNG.random([3, 30, 30, 1], "float32")
    expected = features_of(images)
    monkeypatch.setattr(module, "_BATCH_FLOATS", 2 * 30 * 30 * 6)
    assert module._batch_size(images, module.Parameters(6)) == 2
    np.testing.assert_allclose(features_of(images), expected, atol=1e-6)
    monkeypatch.setattr(module, "_BATCH_FLOATS", 1)
    assert module._batch_size(images, module.Parameters(6)) == 1
    large = np.zeros([9, 224, 224, 3], np.uint8)
    monkeypatch.undo()
    assert module._batch_size(large, module.Parameters(512)) == 1


# Privacy.


def assert_examples_are_independent():
    images = RNG.random([11, 9, 10, 3], "float32")
    whole, order = features_of(images), RNG.permutation(11)
    np.testing.assert_array_equal(features_of(images[order]), whole[order])
    for start in (0, 3, 10):
        np.testing.assert_array_equal(features_of(images[start : start + 1]), whole[[start]])
    images[4] = 0
    changed = (features_of(images) != whole).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(np.flatnonzero(changed), [4])


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(module, "_BATCH_SIZE", 4)


@pytest.mark.usefixtures("small_batches")
def test_examples_are_independent():
    assert_examples_are_independent()


@pytest.mark.usefixtures("small_batches")
def test_dependent_examples_are_noticed(monkeypatch):
    original = module._responses

    def centered(images, *args):
        return original(images - tf_mean(images), *args)

    def tf_mean(images):
        return sum(images[i] for i in range(images.shape[0])) / images.shape[0]

    monkeypatch.setattr(module, "_responses", centered)
    with pytest.raises(AssertionError):
        assert_examples_are_independent()


# The cache.


def not_computed(*_):
    raise RuntimeError("computed")


def test_cache_is_used(tmp_path, monkeypatch):
    first = features_of(cache_dir=tmp_path)
    np.testing.assert_array_equal(features_of(), first)
    monkeypatch.setattr(module, "_constants", not_computed)
    second = features_of(cache_dir=str(tmp_path))
    assert isinstance(second, np.memmap) and not second.flags.writeable
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"num_filters": 4},
        {"patch_size": 4},
        {"grid_size": 2},
        {"mirror": True},
        {"images": IMAGES[:4]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_cache_tells_calls_apart(change, tmp_path, monkeypatch):
    features_of(cache_dir=tmp_path)
    monkeypatch.setattr(module, "_constants", not_computed)
    with pytest.raises(RuntimeError, match="computed"):
        features_of(cache_dir=tmp_path, **change)


def test_cache_tells_versions_apart(tmp_path, monkeypatch):
    features_of(cache_dir=tmp_path)
    monkeypatch.setattr(module, "_constants", not_computed)
    monkeypatch.setattr(module, "_FORMAT_VERSION", 2)
    with pytest.raises(RuntimeError, match="computed"):
        features_of(cache_dir=tmp_path)


@pytest.mark.usefixtures("small_batches")
def test_interrupted_computation_is_resumed(tmp_path, monkeypatch):
    images = RNG.random([11, 9, 10, 3], "float32")
    original = module._batches_of_features
    asked = []

    def interrupted(images, parameters, done):
        asked.append(done)
        for i, batch in enumerate(original(images, parameters, done)):
            if len(asked) == 1 and i == 2:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(module, "_batches_of_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        features_of(images, cache_dir=tmp_path)
    found = features_of(images, cache_dir=tmp_path)
    assert asked == [0, 8]
    np.testing.assert_array_equal(found, features_of(images))


@pytest.mark.parametrize(
    ("name", "kwargs", "requirement", "received"),
    [
        ("images", {"images": IMAGES[0]}, "images [N, ", "shape: [9, 10, 3]"),
        ("images", {"patch_size": 8}, "patch_size + grid_size - 1 = 10", "shape: [5, 9, 10, 3]"),
        ("images", {"images": IMAGES.astype("uint8")}, "floating-point", "dtype: uint8"),
        ("images", {"images": IMAGES * 255}, "floating-point numbers in [0, 1]", "values in [0.0"),
        ("num_filters", {"num_filters": 0}, "a positive integer", "num_filters=0"),
        ("num_filters", {"num_filters": 10**6}, "at most 10000", "num_filters=1000000"),
        ("num_filters", {"num_filters": 5, "mirror": True}, "even with mirror", "num_filters=5"),
        ("patch_size", {"patch_size": 1}, "at least 2", "patch_size=1"),
        ("patch_size", {"patch_size": 3.0}, "a positive integer", "patch_size=3.0"),
        ("grid_size", {"grid_size": True}, "a positive integer", "grid_size=True"),
        ("mirror", {"mirror": 1}, "True or False", "mirror=1"),
    ],
)
def test_errors(name, kwargs, requirement, received):
    with pytest.raises(ValueError, match=f"^Argument `{name}` must be ") as error:
        features_of(**kwargs)
    assert requirement in str(error.value) and received in str(error.value)
