"""Model inversion (white box): images that a classifier takes for a class.

The attack descends on the input until the model is sure of the class. It shows what the model knows
of the class. That is what the model was meant to learn: no epsilon is about it, unless all examples
of a class are one person's. Whether it shows members as well is measured.

A network takes many images for a class that look like nothing. So the attacker has a prior, from
examples of the same distribution that are not the target's: a Gaussian, by principal components.
(GMI has a generative network there.) And the model must take noisy copies of the image for the
class, too: networks that have learned their members by heart are sure of any image, without noise.
"""

import base64
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier

from experiments import datasets
from experiments.attacks import attackers
from experiments.datasets import Data
from tfdp import auditing
from tfdp.data import patches

STARTS = 5  # Reconstructions of each class.
_COMPONENTS = 50
_STEPS = 300
_STEP = 0.05
_PRIOR = 0.1  # The weight of the prior beside the model's cross-entropy.
_COPIES, _NOISE = 4, 0.5  # Noisy copies of each image, and the noise's standard deviation.


@dataclasses.dataclass(frozen=True)
class Prior:
    """Images `mean + z components`, where z has independent standard normal entries.

    Attributes:
      mean: `[height, width, channels]`.
      components: `[numbers, height, width, channels]`.
    """

    mean: np.ndarray
    components: np.ndarray

    @classmethod
    def of(cls, images: np.ndarray, seed: int) -> "Prior":
        """Returns the Gaussian along the first 50 principal components of images."""
        size = min(_COMPONENTS, *_flat(images).shape)
        found = PCA(size, svd_solver="randomized", random_state=seed).fit(_flat(images))
        components = found.components_ * np.sqrt(found.explained_variance_)[:, np.newaxis]
        shape = images.shape[1:]
        return cls(
            found.mean_.reshape(shape).astype(np.float32),
            components.reshape(-1, *shape).astype(np.float32),
        )


def reconstruct(
    model: Any,
    labels: np.ndarray,
    prior: Prior,
    seed: int,
    features: Callable[[Any], Any] | None = None,
) -> np.ndarray:
    """Computes images that a classifier takes for given classes, and that are likely.

    Minimizes the cross-entropy of the class, the mean over noisy copies, plus a tenth of the
    prior's energy |z|^2 / 2, by Adam, from z at random.

    Args:
      model: A classifier that returns logits.
      labels: The classes, `[n]`.
      prior: The distribution of images.
      seed: Fixes the starts.
      features: What the classifier gets of images, a differentiable function; None: the images.

    Returns:
      Images in [0, 1], `[n, height, width, channels]`.

    References:
      - Fredrikson et al., 2015, Model Inversion Attacks that Exploit Confidence Information,
        algorithm 1 (MI-Face), with its auxiliary term.
      - Zhang et al., 2020, The Secret Revealer (GMI; a prior from other examples).
    """
    starts = np.random.default_rng(seed).normal(size=(len(labels), len(prior.components)))
    z, of_copies = tf.Variable(starts.astype(np.float32)), np.repeat(labels, _COPIES)
    noise = tf.random.Generator.from_seed(seed)
    optimizer = tf.keras.optimizers.legacy.Adam(_STEP)

    def images() -> Any:
        return tf.clip_by_value(prior.mean + tf.tensordot(z, prior.components, 1), 0.0, 1.0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            x = tf.repeat(images(), _COPIES, axis=0)
            x += _NOISE * noise.normal(tf.shape(x))
            logits = model(x if features is None else features(x), training=False)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(of_copies, logits)
            energy = tf.reduce_sum(tf.square(z)) / 2
            objective = tf.reduce_sum(losses) / _COPIES + _PRIOR * energy
        optimizer.apply_gradients([(tape.gradient(objective, z), z)])

    # The scattering transform casts complex numbers that are real; TensorFlow warns of each.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        for _ in range(_STEPS):
            step()
    finally:
        logger.setLevel(level)
    return images().numpy()


def measure(
    images: np.ndarray, labels: np.ndarray, target: Data, judge: Any, prior: Prior
) -> dict[str, float]:
    """Measures what reconstructions show.

    Args:
      images: Reconstructions, `[n, height, width, channels]`.
      labels: Their classes, `[n]`.
      target: The images that the model was trained on, and others.
      judge: A classifier of flat images that was trained apart; see `judge_of`.
      prior: The attacker's prior.

    Returns:
      `recognised`: the share of reconstructions that the judge takes for their class; `members`
      and `others`: the distance to the mean of the members and of the others of the class, the
      root of the mean square over pixels; `prior`: such a distance of the prior's mean to the mean
      of the others; `auc`: that of an attack that takes an example for a member if a reconstruction
      of its class is near.
    """
    flat = _flat(images)
    means = {
        name: np.stack([_flat(x[y == label]).mean(axis=0) for label in labels])
        for name, x, y in (
            ("members", target.train_x, target.train_y),
            ("others", target.eval_x, target.eval_y),
        )
    }
    near = [
        -_nearest(_flat(x), y, flat, labels)
        for x, y in ((target.train_x, target.train_y), (target.eval_x, target.eval_y))
    ]
    return {
        "recognised": float((judge.predict(flat) == labels).mean()),
        **{name: float(_distance(flat, mean).mean()) for name, mean in means.items()},
        "prior": float(_distance(_flat(prior.mean[np.newaxis]), means["others"]).mean()),
        "auc": auditing.auc(*near),
    }


def judge_of(data: Data, seed: int) -> RandomForestClassifier:
    """Grows a random forest on the training set: reconstructions of networks do not aim at it."""
    forest = RandomForestClassifier(100, min_samples_leaf=5, random_state=seed)
    return attackers.grown(forest, _flat(data.train_x), data.train_y)


def differentiable_scattering(shape: tuple[int, int, int]) -> Callable[[Any], Any]:
    """Returns `tfdp.data.scattering_features` of images `[n, *shape]`, with a gradient."""
    from kymatio.scattering2d.frontend.tensorflow_frontend import ScatteringTensorFlow2D

    height, width, channels = shape
    transform = ScatteringTensorFlow2D(2, (height, width), L=8, max_order=2)

    def features(images: Any) -> Any:
        planes = tf.reshape(tf.transpose(images, [0, 3, 1, 2]), [-1, height, width])
        found = transform(planes)
        depth = channels * found.shape[1]
        groups = tf.reshape(found, [-1, 27, depth // 27 * found.shape[2] * found.shape[3]])
        mean, variance = tf.nn.moments(groups, axes=[2], keepdims=True)
        groups = (groups - mean) / tf.sqrt(variance + 1e-5)
        rows = tf.reshape(groups, [-1, depth, found.shape[2], found.shape[3]])
        return tf.transpose(rows, [0, 2, 3, 1])

    return features


def differentiable_patches(name: str, features: str) -> Callable[[Any], Any]:
    """Returns the features `features` of the images of a data set, with a gradient."""
    options = datasets.patch_options(name, features)
    return patches.transform(*datasets.IMAGES[name], patches.Parameters(**options))


def packed(images: np.ndarray) -> dict[str, Any]:
    """Returns images in [0, 1] in the form that a record keeps: a byte for each number."""
    pixels = np.rint(255 * images).astype(np.uint8)
    text = base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode()
    return {"shape": list(images.shape), "bytes": text}


def unpacked(found: dict[str, Any]) -> np.ndarray:
    """Returns the images that `packed` was given, rounded."""
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(found["bytes"])), np.uint8)
    return pixels.reshape(found["shape"]) / 255


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(a - b).mean(axis=1))


def _nearest(x: np.ndarray, y: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the distance of each example to the nearest reconstruction of its class."""
    found = np.full(len(y), np.inf)
    for image, label in zip(images, labels, strict=True):
        of_class = np.flatnonzero(y == label)
        found[of_class] = np.minimum(found[of_class], _distance(x[of_class], image[np.newaxis]))
    return found
