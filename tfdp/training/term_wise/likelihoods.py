"""Likelihoods: the decoder's distribution of an example, given its latent code."""

import abc
import dataclasses
import math

import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tfdp.base.named import Named
from tfdp.base.validation import error, is_integer, is_number


@dataclasses.dataclass(frozen=True)
class Likelihood(abc.ABC):
    """The distribution p(x|z) of an example, with independent values given the decoder's output."""

    def distribution(self, decoded: tf.Tensor, event_rank: int) -> tfd.Independent:
        """Returns the distribution of examples.

        Args:
          decoded: Output of the decoder, `[..., *event]`.
          event_rank: Number of the last dimensions that are one example: 3 for images.

        Returns:
          A distribution with the batch shape `[...]` and the event shape `event`.

        Raises:
          ValueError: `decoded` does not have that many dimensions.
        """
        decoded = tf.convert_to_tensor(decoded)
        rank = decoded.shape.rank
        if not (is_integer(event_rank) and 1 <= event_rank <= (rank or 0)):
            raise ValueError(
                "Argument `event_rank` must be an integer from 1 to the number of dimensions of "
                f"`decoded`. Received: event_rank={event_rank!r}, decoded of shape {decoded.shape}."
            )
        return tfd.Independent(self.values(decoded), event_rank)

    @abc.abstractmethod
    def values(self, decoded: tf.Tensor) -> tfd.Distribution:
        """Returns the distributions of the single values, with batch shape `[..., *event]`."""

    def mean(self, decoded: tf.Tensor) -> tf.Tensor:
        """Returns the expected example: the image to show, `[..., *event]`."""
        return tf.convert_to_tensor(decoded)


@dataclasses.dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Binary values; the decoder's output is their logits.

    Gray values x in [0, 1] are accepted, as is usual: their log-density is the negative
    cross-entropy x log(p) + (1 - x) log(1 - p), with its maximum at p = x. It is not normalized
    over [0, 1]: for gray values, do not compare it with other likelihoods.

    Example:
      >>> from tfdp import likelihoods
      >>> distribution = likelihoods.Bernoulli().distribution([[0.0, 0.0]], event_rank=1)
      >>> print(f"{distribution.log_prob([[1.0, 0.3]])[0]:.4f}")  # Two times -log(2).
      -1.3863
    """

    def values(self, decoded: tf.Tensor) -> tfd.Distribution:
        """See `Likelihood.values`."""
        return tfd.Bernoulli(logits=decoded, dtype=decoded.dtype)

    def mean(self, decoded: tf.Tensor) -> tf.Tensor:
        """See `Likelihood.mean`."""
        return tf.math.sigmoid(decoded)


@dataclasses.dataclass(frozen=True)
class Laplace(Likelihood):
    """Values with Laplace errors of one scale; the decoder's output is their location.

    Args:
      scale: Scale b of the density `exp(-|x - location| / b) / (2 b)`, positive.

    Raises:
      ValueError: `scale` is not positive and finite.

    Example:
      >>> from tfdp import likelihoods
      >>> distribution = likelihoods.Laplace(scale=0.5).distribution([[0.2, 0.4]], event_rank=1)
      >>> print(f"{distribution.log_prob([[0.2, 0.9]])[0]:.4f}")
      -1.0000
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def values(self, decoded: tf.Tensor) -> tfd.Distribution:
        """See `Likelihood.values`."""
        return tfd.Laplace(decoded, tf.constant(self.scale, decoded.dtype))


@dataclasses.dataclass(frozen=True)
class Normal(Likelihood):
    """Values with normal errors of one scale; the decoder's output is their location.

    Args:
      scale: Standard deviation, positive.

    Raises:
      ValueError: `scale` is not positive and finite.

    Example:
      >>> from tfdp import likelihoods
      >>> distribution = likelihoods.Normal(scale=1.0).distribution([[0.0, 0.0]], event_rank=1)
      >>> print(f"{distribution.log_prob([[0.0, 1.0]])[0]:.4f}")  # -log(2 pi) - 1/2
      -2.3379
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def values(self, decoded: tf.Tensor) -> tfd.Distribution:
        """See `Likelihood.values`."""
        return tfd.Normal(decoded, tf.constant(self.scale, decoded.dtype))


def _check_scale(scale: float) -> None:
    if not (is_number(scale) and 0 < scale < math.inf):
        raise error("scale", "a positive, finite number", scale)


_NAMED: dict[str, type[Likelihood]] = {
    "bernoulli": Bernoulli,
    "laplace": Laplace,
    "normal": Normal,
}


_LIKELIHOODS: Named[Likelihood] = Named(
    "likelihood",
    Likelihood,  # type: ignore[type-abstract]
    _NAMED,
    "a `Likelihood` of `tfdp.likelihoods` (in Keras 3: `tfdp.keras3.likelihoods`)",
)
get, serialize = _LIKELIHOODS.get, _LIKELIHOODS.serialize
