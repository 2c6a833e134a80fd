"""The data sets of the classification experiments, as arrays in memory.

Nothing here is fitted to the training data: pixels are scaled by their public range, words are
hashed. Statistics of the training set (a mean image, a vocabulary of its frequent words) would be
releases of private data outside the privacy budget.
"""

import dataclasses
import hashlib
import os
import re
from typing import Any

import numpy as np

import tfdp

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "imdb_reviews")
IMAGES = {
    "digits": (8, 8, 1),
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
}
FEATURES = (
    "none",
    "scattering",
    "scattering+mirror",
    "scattering+standard",
    "scattering+mirror+standard",
    "scattering+white",
    "scattering+mirror+white",
    "patches",
    "patches+mirror",
)

VOCABULARY_SIZE = 20_000
REVIEW_TOKENS = 80

_TEST_FRACTION = 0.2  # Share of digits, which comes without a test set.
_SPLIT_SEED = 2020  # a constant: all runs and all methods see the same split
_ANGLES = 8  # Angles of the scattering transform.
_FILTERS, _GRID = 512, 4  # For `tfdp.data.patch_features`. For CIFAR-10:
_CIFAR_10_FILTERS, _CIFAR_10_GRID = 1024, 3
_NOISE_IMAGES = 500
_RIDGE = 0.1
_CHUNK = 1000  # Images whose features are averaged at a time.
_NOT_A_WORD = re.compile(r"[^a-z0-9' ]+")


class DataError(ValueError):
    """A data set that cannot be had as asked for; the message says why."""


class Rows:
    """Some rows of an array on disk, which are read when they are asked for.

    Args:
      array: The array, a memory map.
      rows: Their indices.
    """

    def __init__(self, array: np.memmap, rows: np.ndarray):
        self._array, self._rows = array, rows
        self.shape, self.dtype = (len(rows), *array.shape[1:]), array.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._array[self._rows[index]])

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples to train on and examples to evaluate on; they share none.

    Attributes:
      train_x: Images `[N, height, width, channels]` float32 in [0, 1], their features `[N,
        *features_shape]` float32, or token ids `[N, tokens]` int32. Features that are kept on disk
        are not read before they are used: a memory map, or `Rows` of one.
      train_y: Classes `[N]`, int64.
      eval_x: Like `train_x`.
      eval_y: Like `train_y`.
    """

    train_x: np.ndarray | Rows
    train_y: np.ndarray
    eval_x: np.ndarray
    eval_y: np.ndarray

    @property
    def size(self) -> int:
        """Number of training examples, N."""
        return len(self.train_y)


def load(
    name: str,
    *,
    data_dir: str | None = None,
    download: bool = False,
    eval_split: str = "test",
    validation_examples: int = 0,
    features: str = "none",
    features_dir: str | None = None,
) -> Data:
    """Loads a data set.

    Args:
      name: One of `DATASETS`. `digits` comes with scikit-learn; the others come through TensorFlow
        Datasets.
      data_dir: Folder of TensorFlow Datasets; None for its own default.
      download: Whether to download what is not in `data_dir`.
      eval_split: "test", or "validation" to hold out a fixed random part of the *training* set,
        train on the rest, and not touch the test set: for choosing hyperparameters.
      validation_examples: Number of training examples that are held out for "validation".
      features: "none", or "scattering" for the scattering transform of images, normalized example
        by example (`tfdp.data.scattering_features`): no function of the other examples;
        then "mirror" averages over an image and its mirror image (`mirrored`), and "standard"
        or "white" standardizes or whitens channels by constants (`normalization`). "patches" for
        `tfdp.data.patch_features`, which do both by themselves.
      features_dir: Folder in which features are kept for the next run; None: they are not.

    Returns:
      The training set and the evaluation set.

    Raises:
      DataError: The data set cannot be loaded, or `validation_examples` does not fit its size.
    """
    if name == "digits":
        train, test = _digits()
    elif name == "imdb_reviews":
        train, test = _imdb_reviews(data_dir, download)
    else:
        train, test = _images(name, data_dir, download)
    if features.startswith("patches"):
        options = {**patch_options(name, features), "cache_dir": features_dir}
        train, test = ((tfdp.data.patch_features(x, **options), y) for x, y in (train, test))
    elif features != "none":
        train, test = (
            (tfdp.data.scattering_features(x, cache_dir=features_dir), y) for x, y in (train, test)
        )
    if features.startswith("scattering+mirror"):
        train, test = ((mirrored(x), y) for x, y in (train, test))
    if features.endswith(("+standard", "+white")):
        constants = normalization(name, features.endswith("+white"))
        train, test = ((normalized(x, *constants), y) for x, y in (train, test))
    return split(name, train, test, eval_split, validation_examples)


def split(
    name: str,
    train: tuple[Any, np.ndarray],
    test: tuple[Any, np.ndarray],
    eval_split: str,
    validation_examples: int,
) -> Data:
    """Returns the examples to train on and to evaluate on; see `load`.

    Args:
      name: Name of the data set, for the error.
      train: Inputs and classes of all training examples.
      test: Those of the test set.
      eval_split: See `load`.
      validation_examples: See `load`.

    Raises:
      DataError: `validation_examples` does not fit the size of the training set.
    """
    if eval_split == "test":
        return Data(*train, *test)
    size = len(train[1])
    if not 0 < validation_examples < size:
        raise DataError(
            f"--validation_examples must be in [1, {size - 1}]: {name} has {size} training "
            f"examples. Received: --validation_examples={validation_examples}."
        )
    held_out, rest = _split(size, validation_examples)
    x, y = train
    train_x = Rows(x, rest) if isinstance(x, np.memmap) else x[rest]
    return Data(train_x, y[rest], x[held_out], y[held_out])


def features_shape(name: str, features: str) -> tuple[int, int, int]:
    """Returns the shape of an image's features, `(height, width, channels)`.

    Args:
      name: One of `IMAGES`.
      features: One of `FEATURES`.
    """
    height, width, channels = IMAGES[name]
    if features == "none":
        return height, width, channels
    if features.startswith("patches"):
        options = patch_options(name, features)
        grid = options["grid_size"]
        return grid, -(-grid // 2) if options["mirror"] else grid, options["num_filters"]
    width //= 4
    return height // 4, -(-width // 2) if "+mirror" in features else width, 81 * channels


def patch_options(name: str, features: str) -> dict[str, Any]:
    """Returns arguments of `tfdp.data.patch_features`."""
    large = name == "cifar10"
    return {
        "num_filters": _CIFAR_10_FILTERS if large else _FILTERS,
        "grid_size": _CIFAR_10_GRID if large else _GRID,
        "mirror": features.endswith("+mirror"),
    }


def normalization(name: str, whiten: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns what makes the channels of scattering features comparable, from images of noise.

    Channels of coarse and fine scales differ in size on every image, and neighbors are correlated,
    so that much of the norm of features, to which noise is relative, says little about the image.
    Statistics of the training set would be private; those over noise with the spectrum of natural
    images (amplitude 1/f) depend on no data.

    Args:
      name: One of `IMAGES`.
      whiten: Whether channels are also decorrelated, but for `_RIDGE` of their mean variance.

    Returns:
      The mean of each channel, and the matrix that differences from it are multiplied by.
    """
    features = tfdp.data.scattering_features(random_images(_NOISE_IMAGES, *IMAGES[name]))
    order = _mirrored_channels(features.shape[-1])
    rows = np.concatenate([features, features[..., order]]).reshape(-1, len(order))
    mean, covariance = rows.mean(axis=0), np.cov(rows.T)
    if not whiten:
        return mean, np.diag(np.diag(covariance) ** -0.5).astype(np.float32)
    variances, vectors = np.linalg.eigh(covariance)
    scales = (variances + _RIDGE * variances.mean()) ** -0.5
    return mean, ((vectors * scales) @ vectors.T).astype(np.float32)


def normalized(features: np.ndarray, mean: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Returns normalized features; see `normalization`."""
    found = np.empty(features.shape, np.float32)
    for start in range(0, len(features), _CHUNK):
        found[start : start + _CHUNK] = (features[start : start + _CHUNK] - mean) @ matrix
    return found


def random_images(size: int, height: int, width: int, channels: int) -> np.ndarray:
    """Returns Gaussian noise with amplitude 1/f, in [0, 1]; its colors are correlated."""
    random = np.random.default_rng(_SPLIT_SEED)
    frequency = np.hypot(np.fft.fftfreq(height)[:, np.newaxis], np.fft.fftfreq(width))
    frequency[0, 0] = 1 / max(height, width)

    def fields(count: int) -> np.ndarray:
        spectra = np.fft.fft2(random.normal(size=[count, size, height, width])) / frequency
        found = np.real(np.fft.ifft2(spectra))
        return found / found.std(axis=(2, 3), keepdims=True)

    light = fields(1) + (0.4 * fields(channels) if channels > 1 else 0.0)
    images = np.clip(0.5 + 0.2 * np.moveaxis(light, 0, 3), 0, 1)
    return images.astype(np.float32)


def mirrored(features: np.ndarray) -> np.ndarray:
    """Averages the scattering features of images with those of their mirror images.

    A linear classifier then cannot tell left from right, has half the weights, and so has noise in
    half as many directions. Each row is a function of one example: it costs no privacy.

    The transform of a mirror image is that of the image with its columns in reverse and its angles
    mirrored: nothing is computed again. That is exact but for the borders, the groups of the
    normalization, and a shift by three pixels: columns are those of every fourth pixel from the
    first.

    Args:
      features: Features of `tfdp.data.scattering_features` `[N, height, width, 81 channels]`.

    Returns:
      Features `[N, height, (width + 1) // 2, 81 channels]`: the others are the same, mirrored.
    """
    size, height, width, depth = features.shape
    half, order = -(-width // 2), _mirrored_channels(depth)
    found = np.empty([size, height, half, depth], features.dtype)
    for start in range(0, size, _CHUNK):
        rows = features[start : start + _CHUNK]
        other = rows[:, :, ::-1][:, :, :half, order]
        found[start : start + _CHUNK] = (rows[:, :, :half] + other) / 2
    return found


def _mirrored_channels(depth: int) -> np.ndarray:
    """Returns the channel of each channel's mirror image.

    Kymatio's angle t is (3 - t) pi / 8 of the horizontal: -(3 - t) is that of 6 - t, modulo 8.
    """
    angle = (6 - np.arange(_ANGLES)) % _ANGLES
    first = 1 + np.concatenate([angle, _ANGLES + angle])
    second = 1 + 2 * _ANGLES + (_ANGLES * angle[:, np.newaxis] + angle).ravel()
    one = np.concatenate([[0], first, second])
    return (np.arange(0, depth, len(one))[:, np.newaxis] + one).ravel()


def hash_tokens(text: str) -> np.ndarray:
    """Token ids of the last words of a text, int32 `[REVIEW_TOKENS]`; 0 is padding.

    Reviews end with their verdict; Keras's `pad_sequences` keeps the end of a text and pads its
    front, too.

    Every word goes to one of `VOCABULARY_SIZE - 1` buckets by a hash of its letters. The usual
    vocabulary, the most frequent words of the training texts, is itself a function of private data:
    whether a rare word is in it tells whether someone wrote it, and no epsilon would cover that.
    A hash depends on no data. Its price is that words share buckets.

    Args:
      text: Any text; case, HTML line breaks and punctuation are dropped.

    Returns:
      The ids of the last words, padded with zeros in front.
    """
    text = text.lower().replace("<br />", " ")
    words = _NOT_A_WORD.sub(" ", text).split()[-REVIEW_TOKENS:]
    ids = np.zeros(REVIEW_TOKENS, np.int32)
    ids[REVIEW_TOKENS - len(words) :] = [_bucket(word) for word in words]
    return ids


def _bucket(word: str) -> int:
    fingerprint = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(fingerprint, "little") % (VOCABULARY_SIZE - 1)


def _split(size: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts `range(size)`, in a fixed random order, into `first` indices and the rest."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(size)
    return np.sort(order[:first]), np.sort(order[first:])


def _digits():
    from sklearn.datasets import load_digits  # here: other data sets do without scikit-learn

    digits = load_digits()
    x = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    y = digits.target.astype(np.int64)
    test, train = _split(len(y), round(_TEST_FRACTION * len(y)))
    return (x[train], y[train]), (x[test], y[test])


def _images(name: str, data_dir: str | None, download: bool):
    def convert(split):
        x, y = split
        return (x / np.float32(255)).astype(np.float32, copy=False), y.astype(np.int64)

    train, test = _from_tfds(name, data_dir, download)
    return convert(train), convert(test)


def _imdb_reviews(data_dir: str | None, download: bool):
    def convert(split):
        texts, y = split
        return np.stack([hash_tokens(text.decode()) for text in texts]), y.astype(np.int64)

    train, test = reviews(data_dir, download)
    return convert(train), convert(test)


def reviews(data_dir: str | None, download: bool = False) -> Any:
    """Returns the training set and the test set of IMDB, each as texts in UTF-8 and classes."""
    return _from_tfds("imdb_reviews/plain_text", data_dir, download)


def _from_tfds(name: str, data_dir: str | None, download: bool):
    """Returns the splits `train` and `test` of a TFDS data set, each `(x, y)`."""
    if data_dir is not None and not os.path.isdir(data_dir) and not download:
        raise DataError(
            f"--data_dir must be a folder of TensorFlow Datasets. Received: --data_dir={data_dir}, "
            "which does not exist. Correct it, or add --download to make it."
        )
    import tensorflow_datasets as tfds  # here: it takes seconds, and digits does without

    try:
        return tfds.as_numpy(
            tfds.load(
                name,
                split=["train", "test"],
                data_dir=data_dir,
                batch_size=-1,
                download=download,
                as_supervised=True,
            )
        )
    except Exception as error:  # TFDS raises whatever its downloads and file systems raise
        where = "TensorFlow Datasets' own folder" if data_dir is None else f"--data_dir={data_dir}"
        raise DataError(
            f"{name} is not in {where}{' and cannot be downloaded to it' if download else ''} "
            f"({type(error).__name__}: {[*str(error).strip().splitlines(), ''][0][:200]}). "
            "Give the folder of a prepared copy with --data_dir, "
            f"{'' if download else 'download it with `experiments.classify --download`, '}"
            "or use --dataset=digits."
        ) from error
