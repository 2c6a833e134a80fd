"""Measures of a variational autoencoder, on held-out examples.

A run with non-finite codes or images has diverged: every measure of it is NaN, so that it can
neither be taken for a good run nor left out of a mean unnoticed.
"""

import numpy as np
import scipy.spatial.distance

from tfdp import divergences


def hoyer_sparsity(codes: np.ndarray) -> float:
    """Mean Hoyer sparsity of codes: 0 where all dimensions are used alike, 1 where one is.

    Equation 17: every dimension is divided by its standard deviation over the data set, so that
    one that is merely small does not count as unused; then the mean over the examples of
    `(sqrt(D) - |z|_1 / |z|_2) / (sqrt(D) - 1)`.

    A dimension that is constant over the data set says nothing of an example, and counts as unused.
    An example with nothing but zeros has no sparsity, and is left out of the mean.

    Args:
      codes: Locations of q(z|x), `[N, D]`, D at least 2.

    Returns:
      The sparsity, in [0, 1]; NaN where a code is non-finite or all dimensions are constant.

    Raises:
      ValueError: `codes` has no two dimensions.
    """
    codes = _matrix("codes", codes)
    dimensions = codes.shape[1]
    if dimensions < 2:
        raise ValueError(
            f"Argument `codes` must have at least two columns. Received shape: {codes.shape}."
        )
    if not np.isfinite(codes).all():
        return np.nan
    deviations = codes.std(axis=0)
    # Rounding leaves a constant dimension with a deviation of some units in its last place.
    used = deviations > 1e-6 * np.abs(codes).max(axis=0)
    scaled = np.where(used, codes, 0.0) / np.where(used, deviations, 1.0)
    norms = np.linalg.norm(scaled, axis=1)
    if not norms.any():
        return np.nan
    ratios = np.abs(scaled).sum(axis=1)[norms > 0] / norms[norms > 0]
    return float((np.sqrt(dimensions) - ratios.mean()) / (np.sqrt(dimensions) - 1))


def nearest(codes: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Index of the center `[K, D]` that each of `codes` `[N, D]` is nearest to, `[N]`."""
    return scipy.spatial.distance.cdist(codes, centres).argmin(axis=1)


def cluster_purity(codes: np.ndarray, centres: np.ndarray, labels: np.ndarray) -> float:
    """Measures how well the components of the prior tell the true clusters apart.

    Every code goes to the nearest center; purity is the part of all examples whose label is the
    most frequent one at their center. Nothing but chance: the largest part of a label.

    Args:
      codes: Locations of q(z|x), `[N, D]`.
      centers: Centers of the components of the prior, `[K, D]`; these must be of one weight and
        variance.
      labels: True clusters `[N]`, integers of at least 0.

    Returns:
      The purity, in (0, 1]; NaN where a code is non-finite.

    Raises:
      ValueError: The shapes do not fit.
    """
    codes, centres = _matrix("codes", codes), _matrix("centres", centres)
    if codes.shape[1] != centres.shape[1] or len(codes) != len(labels):
        raise ValueError(
            "Arguments `codes`, `centres` and `labels` must be [N, D], [K, D] and [N]. Received "
            f"shapes: {codes.shape}, {centres.shape}, {np.shape(labels)}."
        )
    if not np.isfinite(codes).all():
        return np.nan
    counts = np.zeros([len(centres), int(np.max(labels)) + 1], int)
    np.add.at(counts, (nearest(codes, centres), labels), 1)
    return float(counts.max(axis=1).sum() / len(labels))


def dimensionwise_mmd(codes: np.ndarray, prior_samples: np.ndarray) -> float:
    """Squared MMD of q(z) and p(z), summed over the dimensions, as `divergences.DimensionwiseMMD`.

    The estimator is unbiased: where both distributions are equal, it is zero on average.

    Args:
      codes: One draw of q(z|x) for each example, `[N, D]`.
      prior_samples: Draws of p(z), `[N, D]`.

    Returns:
      The estimate; NaN where a draw is non-finite.

    Raises:
      ValueError: The shapes do not fit, or N is below 2.
    """
    codes, prior_samples = _matrix("codes", codes), _matrix("prior_samples", prior_samples)
    if codes.shape != prior_samples.shape or len(codes) < 2:
        raise ValueError(
            "Arguments `codes` and `prior_samples` must be [N, D], N at least 2. Received shapes: "
            f"{codes.shape}, {prior_samples.shape}."
        )
    if not (np.isfinite(codes).all() and np.isfinite(prior_samples).all()):
        return np.nan
    mmd, exist = divergences.DimensionwiseMMD(), np.ones(len(codes), bool)
    # A dimension at a time: all distances of all of them would not fit in memory.
    return sum(
        float(mmd(None, q[:, np.newaxis], None, p[:, np.newaxis], exist))
        for q, p in zip(codes.T, prior_samples.T, strict=True)
    )


def downstream_accuracy(
    train_x: np.ndarray, train_y: np.ndarray, eval_x: np.ndarray, eval_y: np.ndarray
) -> float:
    """Accuracy on real images of a classifier that was trained on generated ones.

    Args:
      train_x: Generated images `[N, ...]`.
      train_y: The classes that they were generated for, `[N]`.
      eval_x: Real images `[M, ...]`.
      eval_y: Their classes, `[M]`.

    Returns:
      The part of the real images that is classified correctly; NaN where a generated image is
      not finite.
    """
    from sklearn.linear_model import LogisticRegression  # here: the other tasks do without

    if not np.isfinite(train_x).all():
        return np.nan
    classifier = LogisticRegression(C=1.0, max_iter=2000)
    classifier.fit(train_x.reshape(len(train_x), -1), train_y)
    return float(classifier.score(eval_x.reshape(len(eval_x), -1), eval_y))


def kl_from_standard_normal(means: np.ndarray, deviations: np.ndarray) -> float:
    """Mean KL divergence of normal codes from the standard normal prior, in nats.

    Args:
      means: Means of q(z|x), `[N, D]`.
      deviations: Standard deviations of q(z|x), `[N, D]`.

    Returns:
      The mean over N of the sum over D; NaN where a code is not finite.
    """
    means, deviations = _matrix("means", means), _matrix("deviations", deviations)
    of_each = (means**2 + deviations**2 - 1) / 2 - np.log(deviations)
    return float(of_each.sum(axis=1).mean())


def variance_within(images: np.ndarray, labels: np.ndarray) -> float:
    """Variance of images within their classes, summed over pixels; the mean over the classes.

    Args:
      images: Images `[N, ...]`.
      labels: Their classes, `[N]`.

    Returns:
      The variance; NaN where an image is not finite.
    """
    flat = np.asarray(images, np.float64).reshape(len(images), -1)
    found = [flat[labels == label].var(axis=0).sum() for label in np.unique(labels)]
    return float(np.mean(found))


def _matrix(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or not len(values):
        raise ValueError(
            f"Argument `{name}` must be a matrix with at least one row. Received shape: "
            f"{values.shape}."
        )
    return values
