"""Image features that depend on no data set: nothing in them is learned."""

import dataclasses
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdp.base import validation
from tfdp.base.validation import error, integer
from tfdp.data import cached_features

_BATCH_SIZE = 64  # larger batches exceed the processor's cache and are not faster
_EPSILON = 1e-5  # GroupNorm adds it to the variance.
# Images have sides of at least 2^num_scales; and the time grows with the square of the angles.
_MOST_SCALES, _MOST_ANGLES = 16, 256
_FORMAT_VERSION = 1  # Version of cached files. A change of what is computed needs a new one.


@dataclasses.dataclass(frozen=True)
class _Parameters:
    num_scales: int
    num_angles: int
    max_order: int
    num_groups: int | None


def scattering_features(
    images: Any,
    *,
    num_scales: int = 2,
    num_angles: int = 8,
    max_order: int = 2,
    num_groups: int | None = 27,
    cache_dir: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Computes scattering coefficients of images, normalized within each image.

    A scattering network is a convolutional network of fixed wavelets. Its coefficients of order
    0, 1 and 2 are `x * phi`, `|x * psi_1| * phi` and `||x * psi_1| * psi_2| * phi`, where `*` is
    the convolution, psi_1 and psi_2 are Morlet wavelets of J = `num_scales` scales and L =
    `num_angles` angles, psi_2 of a coarser scale than psi_1, and phi is a Gaussian low-pass filter
    of width 2^J pixels; the results are subsampled by 2^J. Linear models and small networks on top
    of them are more accurate under differential privacy than networks that learn their first
    layers from noisy gradients.

    Every input channel is transformed on its own into K = 1 + J L + L^2 J (J - 1) / 2 channels (81
    by default; the last term falls away at `max_order=1`), that is by default 7x7x81 numbers for
    28x28x1 pixels and 8x8x243 for 32x32x3. Borders are continued by reflection. Then comes a group
    normalization without trainable parameters: of each image, each of `num_groups` groups of
    successive channels has its mean subtracted and is divided by sqrt(variance + 1e-5), mean and
    variance being over the group's channels and all its positions.

    Privacy: the features of an example are a function of that example alone, bit for bit, and no
    parameter of it comes from data. Training on them has the same epsilon as training on the
    images, so they are free of privacy cost, under any neighboring relation. The other
    normalization in the literature is not offered. It subtracts the mean and divides by the
    variance of each channel over the training set. Both would have to be released with noise, which
    takes part of the budget, and the literature clips that release by a median of the private data.

    The first of the output channels are those of the first input channel, and so on: with C input
    channels, output channel c K + k is coefficient k of input channel c. Coefficients are ordered
    by their order, then by scale and angle of psi_1, finest scale first, then by those of psi_2.

    The transform is Kymatio's, on one core: about 1,500 images of 28x28 pixels a second.

    Args:
      images: Images `[N, height, width, channels]`, floating-point numbers in [0, 1], height and
        width at least 2^J.
      num_scales: Number of scales J, from 1 to 16.
      num_angles: Number of angles L, from 1 to 256.
      max_order: Highest order of the coefficients, 1 or 2.
      num_groups: Number of groups of the normalization, a divisor of the number of output
        channels; None for no normalization.
      cache_dir: Folder that stores the result; it is made if it does not exist. A later call with
        the same arguments and images reads it, and resumes an interrupted one. The array is a
        read-only memory map of a `.npy` file, so processes share its memory. The files hold private
        data, as the images do. None stores nothing.

    Returns:
      Features `[N, height // 2^J, width // 2^J, channels * K]`, float32. 60,000 images of 28x28x1
      pixels are 0.95 GB.

    Raises:
      ValueError: An argument is not as described.
      ImportError: Kymatio is not installed.

    References:
      - Bruna & Mallat, [Invariant Scattering Convolution Networks](https://arxiv.org/abs/1203.1513),
        2013.
      - Oyallon & Mallat, [Deep Roto-Translation Scattering for Object
        Classification](https://arxiv.org/abs/1412.8659), 2015.
      - Andreux et al., [Kymatio: Scattering Transforms in
        Python](https://arxiv.org/abs/1812.11214), 2020.
      - Tramèr & Boneh, [Differentially Private Learning Needs Better Features (or Much More
        Data)](https://arxiv.org/abs/2011.11660), 2021.

    Example:
      >>> import numpy as np, tfdp
      >>> images = np.random.default_rng(0).random([100, 28, 28, 1], "float32")
      >>> tfdp.data.scattering_features(images).shape
      (100, 7, 7, 81)
    """
    num_scales = integer("num_scales", num_scales, 1, _MOST_SCALES)
    num_angles = integer("num_angles", num_angles, 1, _MOST_ANGLES)
    if not (_is_positive_integer(max_order) and max_order <= 2):
        raise error("max_order", "1 or 2", max_order)
    images = cached_features.checked_images(images, 2**num_scales, "2**num_scales")
    _, height, width, channels = images.shape
    depth = channels * _num_coefficients(num_scales, num_angles, max_order)
    if num_groups is not None and (not _is_positive_integer(num_groups) or depth % num_groups):
        raise error(
            "num_groups",
            f"None or a positive divisor of {depth}, the number of output channels",
            num_groups,
        )
    shape = (height >> num_scales, width >> num_scales, depth)
    parameters = _Parameters(
        int(num_scales),
        int(num_angles),
        int(max_order),
        None if num_groups is None else int(num_groups),
    )
    path = None
    if cache_dir is not None:
        validation.path("cache_dir", cache_dir)
        path = pathlib.Path(cache_dir) / f"scattering-{_key(images, parameters)}.npy"
    return cached_features.features_of(
        images,
        shape,
        lambda done: _batches_of_features(images, parameters, done),
        _BATCH_SIZE,
        path,
    )


def _batches_of_features(
    images: np.ndarray, parameters: _Parameters, done: int
) -> Iterator[np.ndarray]:
    """Returns the features of successive batches of images `[N, height, width, channels]`."""
    _, height, width, channels = images.shape
    transform = _transform(height, width, parameters)
    num_groups = parameters.num_groups
    with cached_features.progress_bar("scattering", len(images), done) as advance:
        for start in range(done, len(images), _BATCH_SIZE):
            batch = images[start : start + _BATCH_SIZE]
            planes = np.ascontiguousarray(np.moveaxis(batch, 3, 1)).reshape(-1, height, width)
            coefficients = transform(planes)  # [n * channels, K, height / 2^J, width / 2^J]
            depth = channels * coefficients.shape[1]
            features = coefficients.reshape(len(batch), depth, *coefficients.shape[2:])
            if num_groups is not None:
                features = _normalize(features, num_groups)
            yield np.moveaxis(features, 1, 3)
            advance(len(batch))


def _transform(
    height: int, width: int, parameters: _Parameters
) -> Callable[[np.ndarray], np.ndarray]:
    """Transforms images `[n, height, width]` to `[n, K, height // 2^J, width // 2^J]`."""
    # `kymatio.Scattering2D` becomes the same class, but sets up the root logger on its way there.
    frontend = _kymatio("scattering2d.frontend.numpy_frontend")
    return frontend.ScatteringNumPy2D(
        parameters.num_scales,
        (height, width),
        L=parameters.num_angles,
        max_order=parameters.max_order,
    )


def _normalize(features: np.ndarray, num_groups: int) -> np.ndarray:
    """Applies group normalization to `[n, depth, height, width]`, without affine parameters."""
    # One row for each group of each example: its sums do not depend on how many rows there are.
    rows = features.reshape(len(features) * num_groups, -1)
    rows = rows - rows.mean(axis=1, keepdims=True)
    variance = np.square(rows).mean(axis=1, keepdims=True)
    return (rows / np.sqrt(variance + np.float32(_EPSILON))).reshape(features.shape)


def _num_coefficients(num_scales: int, num_angles: int, max_order: int) -> int:
    """Returns number of coefficients K of one channel."""
    second = num_angles**2 * num_scales * (num_scales - 1) // 2
    return 1 + num_angles * num_scales + (second if max_order == 2 else 0)


def _key(images: np.ndarray, parameters: _Parameters) -> str:
    """Returns a fingerprint of all that the features depend on."""
    description = {
        "format": _FORMAT_VERSION,
        "kymatio": _kymatio("version").version,
        "dtype": "float32",
        "epsilon": _EPSILON,
        **dataclasses.asdict(parameters),
    }
    return cached_features.key(images, description)


def _kymatio(module: str) -> Any:
    """Returns a module of Kymatio, which only this function of tfdp needs."""
    try:
        return importlib.import_module(f"kymatio.{module}")
    except ImportError as error:
        raise ImportError(
            "`tfdp.data.scattering_features` needs Kymatio: pip install 'tfdp[experiments]'."
        ) from error


def _is_positive_integer(value: Any) -> bool:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_integer and value > 0
