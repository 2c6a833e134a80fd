"""Divergences between the codes of a group of examples and the prior."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tfdp.base.named import Named
from tfdp.base.validation import elements, error, is_number


@dataclasses.dataclass(frozen=True)
class Divergence(abc.ABC):
    """D(q(z), p(z)) between the aggregate posterior q(z) = (1/n) sum_i q(z|x_i) and the prior p(z).

    It is one number for n examples, not a sum over them: one example changes what all the others
    contribute. The caller must therefore clip the gradient of the whole group. Subclasses implement
    `estimate`.
    """

    # Least number of rows for an estimate. With fewer rows the estimate is 0.
    least_rows: ClassVar[int] = 1

    def __call__(
        self,
        posterior: tfd.Distribution,
        samples: tf.Tensor,
        prior: tfd.Distribution,
        prior_samples: tf.Tensor,
        mask: tf.Tensor,
    ) -> tf.Tensor:
        """Estimates the divergence, from nothing but the arguments: nothing is drawn.

        Args:
          posterior: The diagonal normals q(z|x_i): batch shape `[n]`, event shape `[d]`. Only
            `PriorToAggregateKL` looks at it.
          samples: One draw from each, `[n, d]`.
          prior: The distribution p(z), with event shape `[d]`.
          prior_samples: Independent draws from it, one per row: `[n, d]`.
          mask: Mask of the rows that exist, bool `[n]`. Others may hold anything, NaN included, and
            change neither the value nor a gradient.

        Returns:
          The estimate, a scalar of type float32; 0 without gradient where too few rows exist.

        Raises:
          ValueError: The shapes or types do not go together.
        """
        samples, prior_samples = (
            tf.cast(tf.convert_to_tensor(rows), tf.float32) for rows in (samples, prior_samples)
        )
        mask = tf.convert_to_tensor(mask)
        _check_rows(samples, prior_samples, mask)
        # Before anything is computed with them: a gradient of NaN times zero is NaN.
        estimate = self.estimate(
            posterior, _existing(samples, mask), prior, _existing(prior_samples, mask), mask
        )
        rows = tf.math.count_nonzero(mask, dtype=tf.int32)
        return tf.where(rows >= self.least_rows, estimate, tf.zeros_like(estimate))

    @abc.abstractmethod
    def estimate(
        self,
        posterior: tfd.Distribution,
        samples: tf.Tensor,
        prior: tfd.Distribution,
        prior_samples: tf.Tensor,
        mask: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the estimate, as `__call__` does, but rows that do not exist hold zeros.

        Only the parameters of the posterior's rows keep their values. The gradient must be finite,
        even if few rows exist.
        """


@dataclasses.dataclass(frozen=True)
class _MaximumMeanDiscrepancy(Divergence):
    """MMD^2 = E k(x, x') + E k(y, y') - 2 E k(x, y), from samples x of q and y of p.

    Estimated without bias: pairs of a row with itself, whose kernel is the largest there is, do not
    count. The estimate can therefore be negative. With fewer than two rows it is 0.
    """

    least_rows: ClassVar[int] = 2

    @abc.abstractmethod
    def kernel(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Computes k(x_i, y_j) for the rows of `x` and `y`, both `[n, d]`: `[n, n]`."""

    def estimate(
        self,
        posterior: tfd.Distribution,
        samples: tf.Tensor,
        prior: tfd.Distribution,
        prior_samples: tf.Tensor,
        mask: tf.Tensor,
    ) -> tf.Tensor:
        """Computes `Divergence.estimate` by equation 3 of Gretton et al., 2012."""
        within = self.kernel(samples, samples) + self.kernel(prior_samples, prior_samples)
        between = self.kernel(samples, prior_samples)
        return _mean(within, _distinct_pairs(mask)) - 2 * _mean(between, _pairs(mask))


@dataclasses.dataclass(frozen=True)
class DimensionwiseMMD(_MaximumMeanDiscrepancy):
    """The squared maximum mean discrepancies of the single dimensions, summed over them.

    Each dimension is compared with the kernel k(x, y) = sum_l l / (l + (x - y)^2), a sum of Cauchy
    kernels. It measures the distribution of each dimension, but not dependences between dimensions,
    which suits a sparse prior. It takes O(n^2 d) operations per scale. The estimator is unbiased,
    and may be negative.

    Args:
      scales: The numbers l, positive, in squared units of the latent space.

    Raises:
      ValueError: `scales` is empty, or not all of it is positive and finite.

    Example:
      >>> import tensorflow as tf
      >>> from tfdp import divergences
      >>> mmd = divergences.DimensionwiseMMD(scales=[1])
      >>> rows = tf.constant([[0.0], [1.0]])
      >>> exists = tf.constant([True, True])
      >>> float(mmd(None, rows, None, rows, exists))  # 2 * 1/2 - 2 * (1 + 1/2) / 2
      -0.5

    References:
      - Mathieu et al., 2019, Disentangling Disentanglement in Variational Autoencoders
        (https://arxiv.org/abs/1812.02833).
      - Gretton et al., 2012, A Kernel Two-Sample Test, JMLR 13.
    """

    scales: Sequence[float] = (0.2, 0.4, 1.0, 2.0, 4.0, 10.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", _positive_numbers("scales", self.scales))

    def kernel(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns the sum over scales and dimensions, `[n, n]`."""
        distances = _squared_differences(x, y)
        kernels = tf.zeros_like(distances)
        for scale in self.scales:
            kernels += tf.math.reciprocal(1 + distances / scale)
        return tf.reduce_sum(kernels, axis=-1)


@dataclasses.dataclass(frozen=True)
class RbfMMD(_MaximumMeanDiscrepancy):
    """The squared maximum mean discrepancy of whole codes, with a sum of Gaussian kernels.

    k(x, y) = sum_b exp(-||x - y||^2 / (2 b d)), where d is the number of dimensions: the squared
    length of a kernel is b per dimension. Two draws from a standard normal prior have a mean
    squared distance of 2 d, where the kernel of b = 1 is 1/e. The default bandwidths are 1 and
    smaller and larger ones, for codes that are much too close or much too far. It also measures
    dependences between dimensions. The estimator is unbiased, and may be negative.

    Args:
      bandwidths: The numbers b, positive, in squared units of the latent space, per dimension.

    Raises:
      ValueError: `bandwidths` is empty, or not all of it is positive and finite.

    Example:
      >>> import tensorflow as tf
      >>> from tfdp import divergences
      >>> far = tf.constant([[1e3, 0.0], [-1e3, 0.0]])
      >>> rows, exists = tf.zeros([2, 2]), tf.constant([True, True])
      >>> float(divergences.RbfMMD(bandwidths=[1])(None, far, None, rows, exists))
      1.0

    References:
      - Gretton et al., 2012, A Kernel Two-Sample Test, JMLR 13, equation 3.
      - Li et al., 2015, Generative Moment Matching Networks: sums of bandwidths
        (https://arxiv.org/abs/1502.02761).
    """

    bandwidths: Sequence[float] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidths", _positive_numbers("bandwidths", self.bandwidths))

    def kernel(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns the sum over bandwidths, `[n, n]`."""
        distances = tf.reduce_mean(_squared_differences(x, y), axis=-1)
        kernels = tf.zeros_like(distances)
        for bandwidth in self.bandwidths:
            kernels += tf.exp(-distances / (2 * bandwidth))
        return kernels


@dataclasses.dataclass(frozen=True)
class PriorToAggregateKL(Divergence):
    """KL(p(z) || q(z)) from the prior to the aggregate posterior.

    Estimated from n draws z_j of the prior: the mean over j of log p(z_j) - log((1/n) sum_i
    q(z_j|x_i)). By Jensen's inequality, it overestimates the KL from the prior to the average
    posterior of *all* examples, and more so for smaller n. It is large where the prior has mass
    that no example's posterior covers, as clustered priors need. The posterior's samples are not
    used.

    Example:
      >>> import tensorflow as tf
      >>> from tensorflow_probability import distributions as tfd
      >>> from tfdp import divergences, priors
      >>> prior = priors.StandardNormal(2).distribution()
      >>> posterior = tfd.MultivariateNormalDiag(tf.zeros([3, 2]), tf.ones([3, 2]))
      >>> kl, z = divergences.PriorToAggregateKL(), prior.sample(3)
      >>> abs(float(kl(posterior, z, prior, z, tf.constant([True, True, False])))) < 1e-5
      True

    References:
      - Mathieu et al., 2019, Disentangling Disentanglement in Variational Autoencoders
        (https://arxiv.org/abs/1812.02833).
    """

    def estimate(
        self,
        posterior: tfd.Distribution,
        samples: tf.Tensor,
        prior: tfd.Distribution,
        prior_samples: tf.Tensor,
        mask: tf.Tensor,
    ) -> tf.Tensor:
        """Computes `Divergence.estimate`."""
        densities = _log_densities(posterior, prior_samples, mask)
        # Also where no row exists, no gradient gets past this.
        densities = tf.where(mask, densities, tf.constant(-math.inf))
        rows = tf.reduce_sum(tf.cast(mask, tf.float32))
        aggregate = tf.reduce_logsumexp(densities, axis=1) - tf.math.log(rows)
        return _mean(prior.log_prob(prior_samples) - aggregate, mask)


def _log_densities(posterior: tfd.Distribution, points: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns log q(points_j | x_i), `[n, n]` by j and i; finite where row i does not exist."""
    loc, scale = (
        tf.broadcast_to(tf.cast(parameter, tf.float32), tf.shape(points))
        for parameter in _location_and_scale(posterior)
    )
    loc, scale = _existing(loc, mask), _existing(scale, mask, otherwise=1.0)
    scaled = _squared_differences(points, loc) * tf.math.reciprocal(tf.square(scale))
    volumes = tf.reduce_sum(tf.math.log(scale) + 0.5 * math.log(2 * math.pi), axis=-1)
    return -0.5 * tf.reduce_sum(scaled, axis=-1) - volumes


def _location_and_scale(posterior: tfd.Distribution) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the parameters themselves: NaNs in the gradient of a density could not be masked."""
    if isinstance(posterior, tfd.Independent) and isinstance(posterior.distribution, tfd.Normal):
        return posterior.distribution.loc, posterior.distribution.scale
    if isinstance(posterior, tfd.MultivariateNormalDiag) and posterior.loc is not None:
        return posterior.loc, posterior.scale.diag_part()
    raise error(
        "posterior",
        "a diagonal normal: a `tfd.MultivariateNormalDiag` or a `tfd.Independent` of `tfd.Normal`",
        posterior,
    )


def _squared_differences(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Computes (x_i - y_j)^2 by dimension, `[n, n, d]`."""
    return tf.math.squared_difference(x[:, tf.newaxis], y[tf.newaxis])


def _existing(rows: tf.Tensor, mask: tf.Tensor, otherwise: float = 0.0) -> tf.Tensor:
    """Returns the rows that exist; in all others, a constant."""
    return tf.where(mask[:, tf.newaxis], rows, tf.constant(otherwise, rows.dtype))


def _pairs(mask: tf.Tensor) -> tf.Tensor:
    """Returns which pairs of rows exist, bool `[n, n]`."""
    return tf.logical_and(mask[:, tf.newaxis], mask[tf.newaxis])


def _distinct_pairs(mask: tf.Tensor) -> tf.Tensor:
    """Returns which pairs of two different rows exist, bool `[n, n]`."""
    same = tf.eye(tf.shape(mask)[0], dtype=tf.bool)
    return tf.logical_and(_pairs(mask), tf.logical_not(same))


def _mean(values: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the values that count; 0 if none does."""
    total = tf.reduce_sum(tf.where(counted, values, tf.zeros_like(values)))
    return total / tf.maximum(tf.reduce_sum(tf.cast(counted, values.dtype)), 1.0)


def _check_rows(samples: tf.Tensor, prior_samples: tf.Tensor, mask: tf.Tensor) -> None:
    if samples.shape.rank != 2:
        raise ValueError(
            f"Argument `samples` must have the shape [n, d]. Received: samples of {samples.shape}."
        )
    if prior_samples.shape.rank != 2 or not prior_samples.shape.is_compatible_with(samples.shape):
        raise ValueError(
            "Argument `prior_samples` must have the shape of `samples`. Received: prior_samples of "
            f"{prior_samples.shape}, samples of {samples.shape}."
        )
    if (
        mask.dtype != tf.bool
        or mask.shape.rank != 1
        or not mask.shape.is_compatible_with(samples.shape[:1])
    ):
        raise ValueError(
            "Argument `mask` must be a bool for each row of `samples`. Received: mask of "
            f"{mask.shape}, {mask.dtype.name}; samples of {samples.shape}."
        )


def _positive_numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Returns the same numbers as a tuple of floats."""
    requirement = "a list of positive, finite numbers, at least one"
    numbers = elements(name, values, requirement)
    if not numbers or not all(is_number(value) and 0 < value < math.inf for value in numbers):
        raise error(name, requirement, values)
    return tuple(float(value) for value in numbers)


_NAMED: dict[str, type[Divergence]] = {
    "mmd": DimensionwiseMMD,
    "rbf_mmd": RbfMMD,
    "kl": PriorToAggregateKL,
}


_DIVERGENCES: Named[Divergence] = Named(
    "divergence",
    Divergence,  # type: ignore[type-abstract]
    _NAMED,
    "None, or a `Divergence` of `tfdp.divergences` (in Keras 3: `tfdp.keras3.divergences`)",
)


def get(divergence: Divergence | str | dict[str, Any] | None) -> Divergence | None:
    """Returns a divergence from its name, from what `serialize` returned, or itself; or None.

    Raises:
      ValueError: There is no such divergence.
    """
    return None if divergence is None else _DIVERGENCES.get(divergence)


def serialize(divergence: Divergence | None) -> dict[str, Any] | None:
    """Returns plain values from which `get` makes the same divergence, or None.

    Raises:
      ValueError: It is not one of tfdp's divergences.
    """
    return None if divergence is None else _DIVERGENCES.serialize(divergence)
