import os
from pathlib import Path

import numpy as np
import pytest

import tfdp
from experiments import datasets


def rows(x):
    return {row.tobytes() for row in x}


def prepared_data():
    """The folder of prepared TFDS data sets; skips the test when there is none."""
    beside = Path(__file__).absolute().parents[3] / "shared" / "tfds"
    folder = Path(os.environ.get("TFDP_TEST_DATA_DIR") or beside)
    if not folder.is_dir():
        pytest.skip(f"no prepared data sets: TFDP_TEST_DATA_DIR is not set, and no {beside}")
    return str(folder)


def test_digits_are_split_80_to_20():
    data = datasets.load("digits")
    assert data.train_x.shape == (1438, 8, 8, 1) and data.eval_x.shape == (359, 8, 8, 1)
    assert data.size == len(data.train_y) == 1438 and len(data.eval_y) == 359
    assert data.train_x.dtype == np.float32 and data.train_y.dtype == np.int64
    assert data.train_x.min() == 0 and data.train_x.max() == 1
    assert not rows(data.train_x) & rows(data.eval_x)
    assert set(data.eval_y) == set(range(10))


def test_the_split_never_changes():
    first, second = datasets.load("digits"), datasets.load("digits")
    np.testing.assert_array_equal(first.eval_x, second.eval_x)
    np.testing.assert_array_equal(first.train_y, second.train_y)


def test_validation_is_held_out_of_the_training_set():
    whole = datasets.load("digits")
    data = datasets.load("digits", eval_split="validation", validation_examples=200)
    assert data.size == 1238 and len(data.eval_y) == 200
    assert not rows(data.train_x) & rows(data.eval_x)
    assert rows(data.train_x) | rows(data.eval_x) == rows(whole.train_x)
    assert not rows(data.eval_x) & rows(whole.eval_x)


@pytest.mark.parametrize("examples", [0, 1438, 5000])
def test_validation_set_must_leave_something_to_train_on(examples):
    with pytest.raises(datasets.DataError, match=r"\[1, 1437\]"):
        datasets.load("digits", eval_split="validation", validation_examples=examples)


def held_out(**options):
    return datasets.load("digits", eval_split="validation", validation_examples=200, **options)


def test_features_of_examples_are_those_of_each_alone():
    """Also of those that are held out: nothing is fitted to the others."""
    images, data = held_out(), held_out(features="scattering")
    assert data.eval_x.shape == (200, 2, 2, 81) and data.eval_x.dtype == np.float32
    assert data.train_x.shape == (1238, 2, 2, 81)
    np.testing.assert_array_equal(data.eval_y, images.eval_y)
    np.testing.assert_array_equal(data.train_y, images.train_y)
    for features, pixels in ((data.eval_x, images.eval_x), (data.train_x, images.train_x)):
        alone = [tfdp.data.scattering_features(pixels[i : i + 1]) for i in (0, 7, 199)]
        np.testing.assert_array_equal(features[[0, 7, 199]], np.concatenate(alone))


@pytest.mark.slow
def test_features_are_kept_for_the_next_run(tmp_path, monkeypatch):
    folder = tmp_path / "features"
    first = held_out(features="scattering", features_dir=str(folder))
    assert len(list(folder.iterdir())) == 2  # One for the training set, one for the test set.
    # Neither is computed again, for whatever part of them.
    monkeypatch.setattr(tfdp.data.features, "_batches_of_features", None)
    again = held_out(features="scattering", features_dir=str(folder))
    np.testing.assert_array_equal(first.train_x, again.train_x)
    np.testing.assert_array_equal(first.eval_x, again.eval_x)
    whole = datasets.load("digits", features="scattering", features_dir=str(folder))
    assert whole.train_x.shape == (1438, 2, 2, 81) and whole.eval_x.shape == (359, 2, 2, 81)
    with pytest.raises(TypeError):  # The mutant: without the folder it is computed.
        held_out(features="scattering")


def drawing():
    """Lines on black, far from the borders of an image, and not symmetric."""
    image = np.zeros([1, 32, 32, 1], np.float32)
    image[0, 12:20, 14:16] = 1.0
    image[0, 13, 12:17] = 0.6
    for i in range(6):
        image[0, 12 + i, 13 + i] = 0.8
    return image


def mirrored_channels_but_not(angle):
    """A mutant of `datasets._mirrored_channels`: it mirrors angles otherwise."""
    first = 1 + np.concatenate([angle, 8 + angle])
    second = 17 + (8 * angle[:, np.newaxis] + angle).ravel()
    return np.concatenate([[0], first, second])


def test_features_of_a_mirror_image_are_the_same_in_another_order():
    image = drawing()
    # Columns are those of pixels 0, 4, ..., 28: pixel 31 - 4 i comes to 28 - 4 i by a shift.
    other = np.roll(image[:, :, ::-1], -3, axis=2)
    raw, expected = (tfdp.data.scattering_features(x, num_groups=None) for x in (image, other))
    error = {
        name: np.abs(raw[:, :, ::-1][..., order] - expected).max()
        for name, order in (
            ("right", datasets._mirrored_channels(81)),
            ("reversed", mirrored_channels_but_not(np.arange(8)[::-1])),
            ("kept", mirrored_channels_but_not(np.arange(8))),
        )
    }
    assert error["right"] < 1e-3 < 3e-2 < min(error["reversed"], error["kept"])


@pytest.mark.parametrize(("width", "depth"), [(7, 81), (8, 243)])
def test_mirrored_features_are_means_of_both(monkeypatch, width, depth):
    monkeypatch.setattr(datasets, "_CHUNK", 2)  # The last is not full.
    x = np.random.default_rng(0).normal(size=[5, 3, width, depth]).astype(np.float32)
    found, half = datasets.mirrored(x), (width + 1) // 2
    assert found.shape == (5, 3, half, depth) and found.dtype == np.float32
    order = datasets._mirrored_channels(depth)
    assert sorted(order) == list(range(depth)) and (order[order] == np.arange(depth)).all()
    np.testing.assert_array_equal(order // 81, np.arange(depth) // 81)  # The same color.
    other = x[:, :, ::-1][..., order]
    np.testing.assert_allclose(found, (x + other)[:, :, :half] / 2, rtol=1e-6)
    np.testing.assert_array_equal(datasets.mirrored(other), found)  # Left is right.


@pytest.mark.parametrize("name", datasets.IMAGES)
def test_shapes_of_features_are_declared(name):
    image = np.zeros([1, *datasets.IMAGES[name]], np.float32)
    found = tfdp.data.scattering_features(image)
    for features in datasets.FEATURES[1:]:
        if features.startswith("scattering"):
            same = datasets.mirrored(found) if "+mirror" in features else found
            assert datasets.features_shape(name, features) == same.shape[1:]
    assert datasets.features_shape(name, "none") == image.shape[1:]


@pytest.mark.parametrize("name", ["patches", "patches+mirror"])
def test_patches(name, monkeypatch, tmp_path):
    monkeypatch.setattr(tfdp.data.patches, "_LEAVES", 20)
    monkeypatch.setattr(datasets, "_FILTERS", 6)
    data = held_out(features=name, features_dir=str(tmp_path))
    mirror = name == "patches+mirror"
    assert data.eval_x.shape[1:] == datasets.features_shape("digits", name)
    assert data.eval_x.shape[1:] == (4, 2 if mirror else 4, 6)
    pixels = held_out().eval_x[:3]
    expected = tfdp.data.patch_features(pixels, num_filters=6, grid_size=4, mirror=mirror)
    np.testing.assert_array_equal(data.eval_x[:3], expected)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("name", "count"), [("digits", 60), ("cifar10", 8)])
def test_constants_of_the_normalization_depend_on_no_data(name, count, monkeypatch):
    monkeypatch.setattr(datasets, "_NOISE_IMAGES", count)
    monkeypatch.setattr(datasets, "_images", None)  # Data would be read by it.
    images = datasets.random_images(count, *datasets.IMAGES[name])
    assert images.shape[1:] == datasets.IMAGES[name] and 0 <= images.min() < images.max() <= 1
    x = tfdp.data.scattering_features(images)
    order = datasets._mirrored_channels(x.shape[-1])
    x = np.concatenate([x, x[..., order]])  # A channel has the constants of its mirror image.

    def moments(whiten):
        found = datasets.normalized(x, *datasets.normalization(name, whiten))
        found = found.reshape(-1, len(order))
        return found.mean(axis=0), np.cov(found.T)

    for whiten in (False, True):
        mean, covariance = moments(whiten)
        np.testing.assert_allclose(mean, 0, atol=1e-3)
        np.testing.assert_allclose(covariance[order][:, order], covariance, atol=1e-3)
    _, standard = moments(whiten=False)
    np.testing.assert_allclose(np.diag(standard), 1, rtol=1e-3)
    monkeypatch.setattr(datasets, "_RIDGE", 1e-7)
    _, white = moments(whiten=True)
    np.testing.assert_allclose(white, np.eye(len(order)), atol=0.05)
    assert np.abs(standard - np.eye(len(order))).max() > 0.5


def test_steps_of_features_are_applied_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "_CHUNK", 150)  # The last is not full.
    monkeypatch.setattr(datasets, "_NOISE_IMAGES", 40)
    kept = {"features_dir": str(tmp_path)}
    plain = held_out(features="scattering", **kept).eval_x
    for name, whiten in (("standard", False), ("white", True)):
        mean, matrix = datasets.normalization("digits", whiten)
        for features, x in (
            (f"scattering+{name}", plain),
            (f"scattering+mirror+{name}", datasets.mirrored(plain)),
        ):
            found = held_out(features=features, **kept).eval_x
            np.testing.assert_allclose(found, (x - mean) @ matrix, rtol=1e-3, atol=1e-3)
    found = held_out(features="scattering+mirror", **kept).eval_x
    np.testing.assert_array_equal(found, datasets.mirrored(plain))


@pytest.mark.slow
def test_features_on_disk_are_read_when_they_are_asked_for(tmp_path):
    """Those of CIFAR-10 take 3 GB."""
    in_memory = held_out(features="scattering").train_x
    rows = held_out(features="scattering", features_dir=str(tmp_path)).train_x
    assert not isinstance(rows, np.ndarray) and isinstance(rows._array, np.memmap)
    assert (rows.shape, rows.dtype, len(rows)) == (in_memory.shape, in_memory.dtype, 1238)
    for index in (np.array([3, 700, 1237]), slice(5, 50, 7), 0, -1):
        np.testing.assert_array_equal(rows[index], in_memory[index])
    np.testing.assert_array_equal(np.asarray(rows), in_memory)
    assert np.asarray(rows, np.float64).dtype == np.float64
    # Batches are those of the same rows in memory.
    batches = (
        tfdp.data.poisson_batches((x, np.arange(1238)), expected_batch_size=100, seed=1)
        for x in (rows, in_memory)
    )
    for one, other in zip(*batches, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_without_features_there_are_images():
    assert held_out(features="none").eval_x.shape == (200, 8, 8, 1)


def test_shapes_of_images_are_declared():
    assert datasets.load("digits").eval_x.shape[1:] == datasets.IMAGES["digits"]
    assert set(datasets.IMAGES) == set(datasets.DATASETS) - {"imdb_reviews"}


def test_tokens_do_not_depend_on_data():
    # Written down, so that no change of the hash goes unnoticed: saved models depend on it.
    ids = datasets.hash_tokens("A great, GREAT film!<br /><br />It's great.")
    assert ids.tolist()[-6:] == [2665, 4589, 4589, 5338, 10456, 4589]
    assert ids.dtype == np.int32 and ids.shape == (80,)
    assert not ids[:-6].any()


def test_tokens_are_cut_and_padded_in_front():
    long = datasets.hash_tokens(" ".join(f"word{i}" for i in range(200)))
    assert long.all() and (long[-3:] == datasets.hash_tokens("word197 word198 word199")[-3:]).all()
    exact = datasets.hash_tokens(" ".join(f"word{i}" for i in range(120, 200)))
    assert (long == exact).all()
    assert not datasets.hash_tokens("").any()


def test_tokens_spread_over_the_vocabulary():
    ids = np.array([datasets.hash_tokens(f"w{i}")[-1] for i in range(20_000)])
    assert ids.min() >= 1 and ids.max() < datasets.VOCABULARY_SIZE
    # 1 - 1/e of the buckets are hit by as many random words as there are buckets.
    assert abs(len(set(ids)) / 20_000 - (1 - np.exp(-1))) < 0.01


@pytest.mark.slow
def test_missing_data_is_refused_with_a_way_out(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def no_network(*args, **kwargs):
        raise OSError("no network\nmore lines")

    monkeypatch.setattr(tfds, "load", no_network)
    with pytest.raises(datasets.DataError, match=r"mnist .*OSError: no network\).*--data_dir"):
        datasets.load("mnist", data_dir=str(tmp_path))


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_image_data_sets(name):
    data = datasets.load(name, data_dir=prepared_data())
    assert data.train_x.shape == (60_000, 28, 28, 1) and data.eval_x.shape == (10_000, 28, 28, 1)
    assert data.train_x.dtype == np.float32 and data.train_x.max() == 1
    assert np.bincount(data.eval_y).min() > 800


@pytest.mark.slow
@pytest.mark.data
def test_reviews():
    data = datasets.load(
        "imdb_reviews",
        data_dir=prepared_data(),
        eval_split="validation",
        validation_examples=5_000,
    )
    assert data.train_x.shape == (20_000, 80) and data.eval_x.shape == (5_000, 80)
    assert data.train_x.dtype == np.int32
    assert data.train_x.min() >= 0 and data.train_x.max() < datasets.VOCABULARY_SIZE
    assert abs(data.train_y.mean() - 0.5) < 0.02


def test_a_folder_that_does_not_exist_is_refused_before_anything_is_downloaded(tmp_path):
    missing = tmp_path / "mistyped"
    with pytest.raises(datasets.DataError, match=r"Received: --data_dir=.*mistyped, which does"):
        datasets.load("mnist", data_dir=str(missing))
    assert not missing.exists()


@pytest.mark.slow
def test_nothing_is_downloaded_unless_it_is_asked_for(tmp_path):
    with pytest.raises(datasets.DataError, match=r"download it with `experiments.classify --down"):
        datasets.load("mnist", data_dir=str(tmp_path))
    assert not any(tmp_path.iterdir())
