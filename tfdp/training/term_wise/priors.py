"""Priors: the distributions that latent codes of a variational autoencoder should have."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tfdp.base.named import Named
from tfdp.base.validation import error, is_number, positive, positive_integer


class Prior(abc.ABC):
    """The distribution p(z) of a latent code z.

    Attributes:
      latent_dim: Number of dimensions of z.
    """

    latent_dim: int

    @abc.abstractmethod
    def distribution(self) -> tfd.Distribution:
        """Returns the distribution, in float32: event shape `[latent_dim]`, batch shape `[]`."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as plain values."""


@dataclasses.dataclass(frozen=True)
class StandardNormal(Prior):
    """Independent normal dimensions: p(z) = N(z; 0, I).

    Args:
      latent_dim: Number of dimensions, positive.

    Raises:
      ValueError: `latent_dim` is not a positive integer.

    Example:
      >>> from tfdp import priors
      >>> priors.StandardNormal(3).distribution().event_shape
      TensorShape([3])

    References:
      - Kingma and Welling, 2014, Auto-Encoding Variational Bayes
        (https://arxiv.org/abs/1312.6114).
    """

    latent_dim: int

    def __post_init__(self) -> None:
        positive_integer("latent_dim", self.latent_dim)

    def distribution(self) -> tfd.Distribution:
        """See `Prior.distribution`."""
        loc = tf.zeros([self.latent_dim])
        return tfd.Independent(tfd.Normal(loc, tf.ones_like(loc)), 1)

    def get_config(self) -> dict[str, Any]:
        """See `Prior.get_config`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class SpikeAndSlab(Prior):
    """Sparse codes: each dimension is close to zero (the spike) or standard normal (the slab).

    With the spike's weight gamma and scale s, p(z) = prod_d [gamma N(z_d; 0, s^2) + (1 - gamma)
    N(z_d; 0, 1)]: dimensions are independent.

    Args:
      latent_dim: Number of dimensions, positive.
      spike_scale: Standard deviation s of the spike, positive.
      spike_weight: Share gamma of the dimensions that are off, in (0, 1).

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> from tfdp import priors
      >>> prior = priors.SpikeAndSlab(2)
      >>> density = prior.distribution().prob([0.0, 0.0])  # (0.8 / 0.05 + 0.2)^2 / (2 pi)
      >>> print(f"{density:.1f}")
      41.8

    References:
      - Mathieu et al., 2019, Disentangling Disentanglement in Variational Autoencoders
        (https://arxiv.org/abs/1812.02833).
    """

    latent_dim: int
    spike_scale: float = 0.05
    spike_weight: float = 0.8

    def __post_init__(self) -> None:
        positive_integer("latent_dim", self.latent_dim)
        positive("spike_scale", self.spike_scale)
        if not (is_number(self.spike_weight) and 0 < self.spike_weight < 1):
            raise error("spike_weight", "a number in (0, 1)", self.spike_weight)

    def distribution(self) -> tfd.Distribution:
        """See `Prior.distribution`."""
        each = [self.latent_dim, 1]
        weights = tf.tile([[self.spike_weight, 1 - self.spike_weight]], each)
        scales = tf.tile([[self.spike_scale, 1.0]], each)
        dimensions = tfd.MixtureSameFamily(
            tfd.Categorical(probs=weights), tfd.Normal(tf.zeros_like(scales), scales)
        )
        return tfd.Independent(dimensions, 1)

    def get_config(self) -> dict[str, Any]:
        """See `Prior.get_config`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GaussianMixture(Prior):
    """Clustered codes: K Gaussians of equal weights, p(z) = (1/K) sum_k N(z; locs[k], variance I).

    Args:
      locs: Centers of the components, `[components, latent_dim]`.
      variance: Variance of each dimension within a component, positive.

    Raises:
      ValueError: `locs` is not a matrix of finite numbers, or `variance` is not positive.

    Example:
      >>> from tfdp import priors
      >>> prior = priors.GaussianMixture([[0, 1], [0, -1], [1, 0], [-1, 0]], variance=0.03)
      >>> prior.latent_dim
      2

    References:
      - Mathieu et al., 2019, Disentangling Disentanglement in Variational Autoencoders
        (https://arxiv.org/abs/1812.02833).
    """

    locs: Sequence[Sequence[float]]
    variance: float
    latent_dim: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        positive("variance", self.variance)
        locs = _matrix(self.locs)
        object.__setattr__(self, "locs", locs)
        object.__setattr__(self, "latent_dim", len(locs[0]))

    def distribution(self) -> tfd.Distribution:
        """See `Prior.distribution`."""
        locs = tf.constant(self.locs, tf.float32)
        normal = tfd.Normal(locs, tf.fill(tf.shape(locs), math.sqrt(self.variance)))
        weights = tfd.Categorical(logits=tf.zeros([len(self.locs)]))
        return tfd.MixtureSameFamily(weights, tfd.Independent(normal, 1))

    def get_config(self) -> dict[str, Any]:
        """See `Prior.get_config`."""
        return {"locs": [list(loc) for loc in self.locs], "variance": self.variance}


def _matrix(locs: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Returns the same numbers as tuples of floats."""
    try:
        rows = tuple(tuple(loc) for loc in locs)
    except TypeError:
        rows = ()
    widths = {len(row) for row in rows}
    finite = all(is_number(value) and math.isfinite(value) for row in rows for value in row)
    if len(widths) != 1 or 0 in widths or not finite:
        raise error("locs", "a list of points, each a list of as many finite numbers", locs)
    return tuple(tuple(float(value) for value in row) for row in rows)


_NAMED: dict[str, type[Prior]] = {
    "standard_normal": StandardNormal,
    "spike_and_slab": SpikeAndSlab,
    "gaussian_mixture": GaussianMixture,
}


_PRIORS: Named[Prior] = Named(
    "prior",
    Prior,  # type: ignore[type-abstract]
    _NAMED,
    "a `Prior` of `tfdp.priors` (in Keras 3: `tfdp.keras3.priors`)",
    by_name=False,
)
get, serialize = _PRIORS.get, _PRIORS.serialize
