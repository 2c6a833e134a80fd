import logging
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.data import cached_features
from tfdp.data import features as module

RNG = np.random.default_rng(0)
IMAGES = RNG.random([5, 12, 16, 2], "float32")
ONE_PIXEL_LESS = np.where(
    np.arange(IMAGES.size).reshape(IMAGES.shape) == IMAGES.size - 1, 0, IMAGES
)


def scattering(images=IMAGES, **kwargs):
    """Features of small images, by default not normalized."""
    return tfdp.data.scattering_features(images, **{"num_groups": None, **kwargs})


@pytest.mark.parametrize(
    ("shape", "kwargs", "expected"),
    [
        ([2, 28, 28, 1], {}, (2, 7, 7, 81)),
        ([1, 32, 32, 3], {}, (1, 8, 8, 243)),
        ([1, 8, 8, 1], {}, (1, 2, 2, 81)),
        ([1, 4, 4, 1], {}, (1, 1, 1, 81)),  # as many pixels as the filter is wide
        ([1, 30, 27, 1], {"max_order": 1, "num_groups": 17}, (1, 7, 6, 17)),
        ([1, 12, 12, 1], {"num_scales": 1, "num_groups": 3}, (1, 6, 6, 9)),
        ([1, 16, 24, 2], {"num_scales": 3, "num_angles": 4, "num_groups": 1}, (1, 2, 3, 122)),
        ([1, 16, 17, 1], {"num_scales": 4, "num_angles": 1, "num_groups": 11}, (1, 1, 1, 11)),
    ],
)
def test_shapes(shape, kwargs, expected):
    features = tfdp.data.scattering_features(RNG.random(shape), **kwargs)
    assert features.shape == expected
    assert features.dtype == np.float32 and features.flags.c_contiguous
    assert np.isfinite(features).all()


def gaussian(padded, sigma, slant=1.0, angle=0.0, frequency=0.0):
    """A Gabor filter on a torus of these sides, in space: a Gaussian times a wave."""
    total = np.zeros(padded, complex)
    for wrap_y in range(-2, 3):
        for wrap_x in range(-2, 3):
            y = (np.arange(padded[0]) + wrap_y * padded[0])[:, None]
            x = (np.arange(padded[1]) + wrap_x * padded[1])[None, :]
            along = y * np.cos(angle) + x * np.sin(angle)
            across = -y * np.sin(angle) + x * np.cos(angle)
            envelope = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
            total += envelope * np.exp(1j * frequency * along)
    return total * slant / (2 * np.pi * sigma**2)


def morlet(padded, scale, angle_index, num_angles):
    """psi: zero mean, envelope 0.8 2^j wide, frequency 3/4 pi 2^-j, angles from near pi/2 down."""
    angle = (num_angles // 2 - 1 - angle_index) * np.pi / num_angles
    shape = (padded, 0.8 * 2**scale, 4 / num_angles, angle)
    wave, envelope = gaussian(*shape, 3 / 4 * np.pi / 2**scale), gaussian(*shape)
    return wave - wave.sum() / envelope.sum() * envelope


def convolve(layer, kernel):
    """Convolution on the torus; of a coarser layer, with the low frequencies of the kernel."""
    spectrum = np.fft.fftshift(np.fft.fft2(kernel))
    (top, bottom), (left, right) = (
        ((long - short) // 2, (long + short) // 2)
        for long, short in zip(kernel.shape, layer.shape, strict=True)
    )
    spectrum = np.fft.ifftshift(spectrum[top:bottom, left:right])
    return np.fft.ifft2(np.fft.fft2(layer) * spectrum)


def reference(image, num_scales, num_angles):
    """All coefficients of one image `[height, width]`, by their definition."""
    step = 2**num_scales
    add_y, add_x = ((side // step + 2) * step - side for side in image.shape)
    border = ((add_y // 2, add_y - add_y // 2), (add_x // 2, add_x - add_x // 2))
    padded = np.pad(image.astype(np.float64), border, mode="reflect")
    phi = gaussian(padded.shape, 0.8 * 2 ** (num_scales - 1))
    paths = [(scale, angle) for scale in range(num_scales) for angle in range(num_angles)]
    psi = {path: morlet(padded.shape, *path, num_angles) for path in paths}

    def layer_of(path, below, scale_below):
        every = 2 ** (path[0] - scale_below)
        return np.abs(convolve(below, psi[path]))[::every, ::every]

    first = {path: layer_of(path, padded, 0) for path in paths}
    second = {
        (path, finer): layer_of(path, first[finer], finer[0])
        for finer in paths
        for path in paths
        if path[0] > finer[0]
    }
    coefficients = []
    for layer in (padded, *first.values(), *second.values()):
        every = step * len(layer) // len(padded)
        coefficients.append(convolve(layer, phi).real[::every, ::every])
    return np.stack(coefficients, -1)[1:-1, 1:-1]


@pytest.mark.parametrize(("num_scales", "num_angles"), [(2, 8), (2, 4), (1, 8), (3, 2)])
def test_agrees_with_the_definition(num_scales, num_angles):
    features = scattering(num_scales=num_scales, num_angles=num_angles)
    depth = features.shape[3] // 2
    for channel in (0, 1):
        expected = reference(IMAGES[3, :, :, channel], num_scales, num_angles)
        received = features[3, :, :, channel * depth : (channel + 1) * depth]
        # Kymatio takes pi = 3.1415 in the norm of every filter.
        np.testing.assert_allclose(received, expected, rtol=2e-4, atol=1e-6)


def test_orders_are_prefixes():
    first, both = scattering(IMAGES[..., :1], max_order=1), scattering(IMAGES[..., :1])
    np.testing.assert_array_equal(first, both[..., :17])


def test_translation_by_four_pixels_is_one_position():
    image = np.zeros([1, 32, 32, 1], "float32")
    image[0, 12:18, 11:17, 0] = RNG.random([6, 6])
    shifted = np.roll(image, (4, -4), axis=(1, 2))
    moved = np.roll(scattering(image), (1, -1), axis=(1, 2))
    largest = np.abs(moved).max()
    np.testing.assert_allclose(scattering(shifted)[:, 2:6, 2:6], moved[:, 2:6, 2:6], atol=1e-3)
    assert np.abs(moved - scattering(image)).max() > 0.2 * largest


def test_constant_image_has_a_mean_alone():
    features = scattering(np.full([1, 28, 28, 1], 0.7, "float32"))
    np.testing.assert_allclose(features[..., 0], 0.7, rtol=1e-3)
    np.testing.assert_allclose(features[..., 1:], 0, atol=1e-6)


# An example's features depend on that example alone: this is why they cost no privacy.


def over_the_batch(features, num_groups):
    """Mutant: the published normalization, by each channel's mean and variance over the batch."""
    mean = features.mean(axis=(0, 2, 3), keepdims=True)
    return (features - mean) / np.sqrt(features.var(axis=(0, 2, 3), keepdims=True) + 1e-5)


def over_groups_and_batch(features, num_groups):
    """Mutant: the right groups, but a variance over all examples."""
    rows = features.reshape(len(features), num_groups, -1)
    rows = rows - rows.mean(axis=2, keepdims=True)
    deviation = np.sqrt(rows.var(axis=(0, 2), keepdims=True) + 1e-5)
    return (rows / deviation).reshape(features.shape)


def assert_examples_are_independent(num_groups):
    images = RNG.random([23, 8, 8, 1], "float32")
    features = scattering(images, num_groups=num_groups)
    for i in (0, 10, 22):
        alone = scattering(images[i : i + 1], num_groups=num_groups)
        np.testing.assert_array_equal(alone[0], features[i])
    kept = np.delete(np.arange(len(images)), 3)  # the neighboring data set
    np.testing.assert_array_equal(scattering(images[kept], num_groups=num_groups), features[kept])
    other = images.copy()
    other[3] = 0
    np.testing.assert_array_equal(scattering(other, num_groups=num_groups)[kept], features[kept])


@pytest.fixture
def small_batches(monkeypatch):
    """Makes a handful of images more than one batch, the last of them not full."""
    monkeypatch.setattr(module, "_BATCH_SIZE", 8)


@pytest.mark.quick_cases(2)
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("num_groups", [None, 1, 27, 81])
def test_examples_are_independent(num_groups):
    assert_examples_are_independent(num_groups)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("mutant", [over_the_batch, over_groups_and_batch])
def test_dependent_examples_are_noticed(mutant, monkeypatch):
    monkeypatch.setattr(module, "_normalize", mutant)
    with pytest.raises(AssertionError):
        assert_examples_are_independent(27)


@pytest.mark.usefixtures("small_batches")
def test_dependence_within_a_batch_of_the_transform_is_noticed(monkeypatch):
    original = module._transform

    def centred(*args):
        transform = original(*args)
        return lambda planes: transform(planes - planes.mean(axis=0))

    monkeypatch.setattr(module, "_transform", centred)
    with pytest.raises(AssertionError):
        assert_examples_are_independent(None)


@pytest.mark.parametrize("num_groups", [1, 6, 27, 162])
def test_group_normalization(num_groups):
    raw = scattering()
    features = scattering(num_groups=num_groups)
    groups = features.reshape(5, -1, num_groups, 162 // num_groups).astype(np.float64)
    variance = raw.reshape(groups.shape).astype(np.float64).var(axis=(1, 3))
    np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(groups.var(axis=(1, 3)), variance / (variance + 1e-5), rtol=1e-4)
    layer = tf.keras.layers.GroupNormalization(num_groups, epsilon=1e-5, center=False, scale=False)
    np.testing.assert_allclose(features, layer(raw), atol=2e-4)


def test_default_groups():
    images = RNG.random([2, 8, 8, 1], "float32")
    np.testing.assert_array_equal(
        tfdp.data.scattering_features(images), scattering(images, num_groups=27)
    )


def test_black_image_has_zero_features():
    black = np.zeros([1, 8, 8, 1], "float32")
    np.testing.assert_array_equal(scattering(black, num_groups=27), 0)


# Cache.


def no_transform(*_):
    raise RuntimeError("computed")


def test_cache_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    first = scattering(num_groups=27, cache_dir=folder)
    monkeypatch.setattr(module, "_transform", no_transform)
    second = scattering(num_groups=27, cache_dir=str(folder))
    monkeypatch.undo()
    for features in (first, second):
        assert isinstance(features, np.memmap) and not features.flags.writeable
        assert features.dtype == np.float32
        np.testing.assert_array_equal(features, scattering(num_groups=27))
    (file,) = folder.iterdir()
    assert file.suffix == ".npy"
    np.testing.assert_array_equal(np.load(file), first)


@pytest.mark.parametrize(
    "change",
    [
        {"num_scales": 1},
        {"num_angles": 4},
        {"max_order": 1},
        {"num_groups": 2},
        {"images": ONE_PIXEL_LESS},
        {"images": IMAGES[:4]},
        {"images": IMAGES.reshape(5, 16, 12, 2)},
        {"images": IMAGES.reshape(10, 12, 16, 1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_cache_tells_calls_apart(change, tmp_path, monkeypatch):
    scattering(cache_dir=tmp_path)
    monkeypatch.setattr(module, "_transform", no_transform)
    with pytest.raises(RuntimeError, match="computed"):
        scattering(cache_dir=tmp_path, **change)


@pytest.mark.parametrize("name", ["_FORMAT_VERSION", "_EPSILON"])
def test_cache_tells_versions_apart(name, tmp_path, monkeypatch):
    scattering(cache_dir=tmp_path)
    monkeypatch.setattr(module, "_transform", no_transform)
    scattering(cache_dir=tmp_path)
    monkeypatch.setattr(module, name, 2)
    with pytest.raises(RuntimeError, match="computed"):
        scattering(cache_dir=tmp_path)


def test_cache_tells_versions_of_kymatio_apart(tmp_path, monkeypatch):
    scattering(cache_dir=tmp_path)
    monkeypatch.setattr("kymatio.version.version", "0.3.1")
    scattering(cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_cache_takes_other_types_for_the_same_images(tmp_path):
    strided = np.asfortranarray(IMAGES.astype(np.float64))
    for images in (IMAGES, strided, tf.constant(IMAGES)):
        scattering(images, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def save(array):
    return lambda path: np.save(path, array)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no array"),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"descr", b"'d'(r")),
        save(np.zeros([5, 3, 4, 161], "float32")),
        save(np.zeros([5, 3, 4, 162], "float64")),
        save(np.array([None])),
    ],
    ids=["empty", "text", "short", "header", "garbled", "shape", "dtype", "pickle"],
)
def test_damaged_cache_is_computed_again(damage, tmp_path):
    expected = np.array(scattering(cache_dir=tmp_path))
    (file,) = tmp_path.iterdir()
    damage(file)
    with pytest.warns(UserWarning, match=file.name) as caught:
        features = scattering(cache_dir=tmp_path)
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(features, expected)
    np.testing.assert_array_equal(scattering(cache_dir=tmp_path), expected)  # without a warning
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def pairs(monkeypatch):
    """Makes nine images five batches, the last of them not full."""
    monkeypatch.setattr(module, "_BATCH_SIZE", 2)


@pytest.mark.usefixtures("pairs")
def test_interrupted_computation_is_resumed(tmp_path, monkeypatch):
    original = module._normalize
    calls = []

    def interrupted(*args):
        calls.append(list(tmp_path.glob("*.npy")))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    images = RNG.random([9, 8, 8, 1], "float32")
    monkeypatch.setattr(module, "_normalize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scattering(images, num_groups=27, cache_dir=tmp_path)
    (partial,) = tmp_path.iterdir()
    assert partial.suffix == ".partial"
    found = scattering(images, num_groups=27, cache_dir=tmp_path)
    assert calls == [[]] * 6  # Nobody could see half of it; batches 1 and 2 of 5 were kept.
    np.testing.assert_array_equal(found, scattering(images, num_groups=27))
    assert [file.suffix for file in tmp_path.iterdir()] == [".npy"]


KILLED = """
import os, signal, sys
import numpy as np, tfdp
from tfdp.data import features
features._BATCH_SIZE = 2
original, calls = features._normalize, []
def killed(*args):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
features._normalize = killed
images = np.random.default_rng(5).random([9, 8, 8, 1], "float32")
tfdp.data.scattering_features(images, cache_dir=sys.argv[1])
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A file of features that a process, killed with SIGKILL, has written in part."""
    folder = tmp_path_factory.mktemp("killed")
    process = subprocess.run([sys.executable, "-c", KILLED, folder], timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL
    (partial,) = folder.iterdir()
    return partial


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("torn", [0, 1, 17])
def test_killed_computation_is_resumed(torn, killed, tmp_path, monkeypatch):
    assert_is_resumed(torn, killed, tmp_path, monkeypatch)


def assert_is_resumed(torn, killed, tmp_path, monkeypatch):
    images = np.random.default_rng(5).random([9, 8, 8, 1], "float32")  # Those of the process.
    with open(shutil.copy(killed, tmp_path), "ab") as file:
        file.write(bytes(torn))  # Bytes of an incomplete write.
    original, calls = module._normalize, []
    monkeypatch.setattr(module, "_normalize", lambda *args: calls.append(1) or original(*args))
    found = scattering(images, num_groups=27, cache_dir=tmp_path)
    assert len(calls) == 2  # Three of five batches were kept.
    np.testing.assert_array_equal(found, scattering(images, num_groups=27))


@pytest.mark.slow
@pytest.mark.usefixtures("pairs")
def test_a_torn_batch_that_is_kept_is_caught(killed, tmp_path, monkeypatch):
    """Mutant: what was written is kept whole, batches that are not complete included."""
    monkeypatch.setattr(cached_features, "_whole_batches", lambda size, batch: -(-size // batch))
    with pytest.raises(AssertionError):
        assert_is_resumed(17, killed, tmp_path, monkeypatch)


def test_two_computations_at_once(tmp_path, monkeypatch):
    # Both have found nothing in the cache when either of them writes.
    original, barrier, results = cached_features._locked, threading.Barrier(2, timeout=300), []

    def together(*args):
        barrier.wait()
        return original(*args)

    monkeypatch.setattr(cached_features, "_locked", together)
    work = lambda: results.append(scattering(cache_dir=tmp_path))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(results) == 2 and len(list(tmp_path.iterdir())) == 1
    for features in results:
        np.testing.assert_array_equal(features, scattering())


# Surroundings.


def make_unimportable(package, monkeypatch):
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in [package, *loaded]:
        monkeypatch.setitem(sys.modules, name, None)


def test_says_how_to_install_kymatio(monkeypatch):
    make_unimportable("kymatio", monkeypatch)
    with pytest.raises(ImportError, match=r"pip install 'tfdp\[experiments\]'"):
        scattering()


def test_needs_no_tqdm(monkeypatch):
    make_unimportable("tqdm", monkeypatch)
    assert scattering().shape == (5, 3, 4, 162)


def test_is_silent(capfd):
    handlers = list(logging.getLogger().handlers)
    scattering()
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers


DIVISOR = "None or a positive divisor of 162"


@pytest.mark.parametrize(
    ("name", "kwargs", "requirement", "received"),
    [
        ("images", {"images": IMAGES[0]}, "images [N, ", "shape: [12, 16, 2]"),
        ("images", {"images": IMAGES[:0]}, "images [N, ", "shape: [0, 12, 16, 2]"),
        ("images", {"images": IMAGES[:, :3]}, "images [N, ", "shape: [5, 3, 16, 2]"),
        ("images", {"num_scales": 4}, "images [N, ", "shape: [5, 12, 16, 2]"),
        ("images", {"images": IMAGES.astype("uint8")}, "floating-point", "dtype: uint8"),
        ("images", {"images": IMAGES * 255}, "floating-point numbers in [0, 1]", "values in [0.0"),
        ("images", {"images": -IMAGES}, "floating-point numbers in [0, 1]", "values in [-0.9"),
        ("images", {"images": IMAGES * np.nan}, "floating-point", "values in [nan, nan]"),
        ("num_scales", {"num_scales": 0}, "a positive integer", "num_scales=0"),
        ("num_scales", {"num_scales": 2.0}, "a positive integer", "num_scales=2.0"),
        ("num_angles", {"num_angles": True}, "a positive integer", "num_angles=True"),
        ("max_order", {"max_order": 3}, "1 or 2", "max_order=3"),
        ("max_order", {"max_order": 0}, "1 or 2", "max_order=0"),
        ("num_groups", {"num_groups": 0}, DIVISOR, "num_groups=0"),
        ("num_groups", {"num_groups": 5}, DIVISOR, "num_groups=5"),
    ],
)
def test_errors(name, kwargs, requirement, received):
    with pytest.raises(ValueError, match=f"^Argument `{name}` must be ") as error:
        scattering(**kwargs)
    message, _, received_part = str(error.value).partition(" Received")
    assert f"must be {requirement}" in message and received in received_part
