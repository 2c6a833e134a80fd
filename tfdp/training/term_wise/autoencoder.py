"""Autoencoders with a latent distribution, for every Keras: generation and evaluation."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tfdp.base.validation import error, is_integer
from tfdp.training.term_wise import likelihoods, priors
from tfdp.training.term_wise.front_end import FrontEnd
from tfdp.training.term_wise.likelihoods import Likelihood
from tfdp.training.term_wise.priors import Prior

if TYPE_CHECKING:
    from tensorflow.keras import Model as _Model
else:
    _Model = object

# Latent codes that are worked on at the same time.
_CODES_AT_A_TIME = 4096
_LEAST_SCALE = 1e-4


class Autoencoder(_Model):
    """Encoder q(z|x), prior p(z) and decoder p(x|z): a model of some Keras.

    Args:
      encoder: See `tfdp.TermWiseVAE`.
      decoder: Likewise.
      prior: Likewise.
      likelihood: Likewise.
      num_classes: Likewise.
      **kwargs: `name` and others, as in `keras.Model`.

    Raises:
      ValueError: An argument is not what it must be.
    """

    _front_end: ClassVar[FrontEnd]

    def __init__(
        self,
        encoder: Any,
        decoder: Any,
        prior: Prior,
        likelihood: Likelihood | str,
        num_classes: int | None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, network in (("encoder", encoder), ("decoder", decoder)):
            if not (isinstance(network, self._front_end.package.Model) and network.built):
                raise self._not_built(name, network)
        if not (num_classes is None or (is_integer(num_classes) and num_classes >= 1)):
            raise error("num_classes", "a positive integer or None", num_classes)
        self.encoder = encoder
        self.decoder = decoder
        self.prior = priors.get(prior)
        self.likelihood = likelihoods.get(likelihood)
        self.num_classes = num_classes
        self._event_shape = self._checked_event_shape()
        self.built = True
        self._make_saveable()

    def _make_saveable(self) -> None:
        """Does what the Keras needs to save a model that has not been called."""

    def encode(self, x: Any, y: Any = None) -> tfd.Distribution:
        """Returns the approximate posterior q(z|x).

        Args:
          x: Examples, `[n, ...]`.
          y: Their labels, int `[n]`, for a conditional VAE.

        Returns:
          Independent normals, batch shape `[n]`, event shape `[latent_dim]`.
        """
        loc, scale = self._encode(tf.convert_to_tensor(x), self._checked_condition(y))
        return tfd.Independent(tfd.Normal(loc, scale), 1)

    def decode(self, z: Any, y: Any = None) -> tfd.Distribution:
        """Returns the distribution p(x|z) of examples.

        Args:
          z: Codes, `[n, latent_dim]`.
          y: Labels, int `[n]`, for a conditional VAE.

        Returns:
          A distribution with batch shape `[n]`, event shape that of an example.
        """
        decoded = self._decode(tf.convert_to_tensor(z, tf.float32), self._checked_condition(y))
        return self.likelihood.distribution(decoded, len(self._event_shape))

    def call(self, inputs: Any, training: Any = None) -> tf.Tensor:
        """Reconstructs examples: the means of p(x|z) at the means of q(z|x)."""
        conditional = self.num_classes is not None
        if conditional and not (isinstance(inputs, tuple | list) and len(inputs) == 2):
            raise error("inputs", "[examples, one-hot labels] for a conditional VAE", inputs)
        x, condition = inputs if conditional else (inputs, None)
        loc, _ = self._encode(x, condition)
        return self.likelihood.mean(self._decode(loc, condition))

    def _condition(self, y: Any) -> tf.Tensor | None:
        if (y is None) != (self.num_classes is None):
            raise ValueError(
                "Argument `y` must be labels for a conditional VAE, and None for another. "
                f"Received: {'no labels' if y is None else 'labels'}, with num_classes="
                f"{self.num_classes}."
            )
        return None if y is None else tf.one_hot(tf.cast(y, tf.int32), self.num_classes)

    def _checked_condition(self, y: Any) -> tf.Tensor | None:
        """Checks labels that are not tensors of a graph, and computes their `_condition`."""
        if y is not None and self.num_classes is not None:
            wrong = set(np.unique(y)) - set(range(self.num_classes))
            if wrong or np.ndim(y) != 1:
                raise ValueError(
                    f"Argument `y` must be labels in [0, {self.num_classes}), int [n]. Received: "
                    f"{wrong or f'labels of shape {np.shape(y)}'}."
                )
        return self._condition(y)

    def _encode(
        self, x: tf.Tensor, condition: tf.Tensor | None, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns locations and standard deviations of q(z|x), `[rows, latent_dim]` each."""
        encoded = self.encoder(x if condition is None else [x, condition], training=training)
        encoded = _of_full_precision(encoded)
        loc, raw = tf.split(encoded, 2, axis=-1)
        return loc, tf.nn.softplus(raw) + _LEAST_SCALE

    def _decode(
        self, z: tf.Tensor, condition: tf.Tensor | None, training: bool = False
    ) -> tf.Tensor:
        decoded = self.decoder(z if condition is None else [z, condition], training=training)
        return _of_full_precision(decoded)

    def _log_likelihood_at(
        self, x: tf.Tensor, condition: tf.Tensor | None, codes: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        """Computes log p(x|z) for codes `[rows, samples, latent_dim]`: `[rows, samples]`."""
        count = tf.shape(codes)[1] if codes.shape[1] is None else codes.shape[1]
        if condition is not None:
            condition = tf.tile(condition[:, tf.newaxis], [1, count, 1])
            condition = tf.reshape(condition, [-1, self.num_classes])
        decoded = self._decode(tf.reshape(codes, [-1, self.prior.latent_dim]), condition, training)
        decoded = tf.reshape(decoded, [-1, count, *self._event_shape])
        distribution = self.likelihood.distribution(decoded, len(self._event_shape))
        return distribution.log_prob(tf.cast(x, decoded.dtype)[:, tf.newaxis])

    def generate(
        self, n: int, y: Any = None, *, sample: bool = False, seed: int | None = None
    ) -> np.ndarray:
        """Generates synthetic examples: codes from the prior, decoded.

        Generation reads no data, so any number of examples costs no epsilon.

        Args:
          n: Number of examples.
          y: Their labels, int `[n]` or one for all, for a conditional VAE.
          sample: Whether to draw from p(x|z) instead of taking its mean.
          seed: Makes the draws reproducible.

        Returns:
          Examples, `[n, ...]`.
        """
        if not (is_integer(n) and n >= 0):
            raise error("n", "a non-negative integer", n)
        condition = None if y is None else np.broadcast_to(np.asarray(y), [n])
        self._checked_condition(condition)
        seeds = np.random.SeedSequence(seed)
        found = [np.zeros([0, *self._event_shape], np.float32)]
        for start in range(0, n, _CODES_AT_A_TIME):
            count = min(_CODES_AT_A_TIME, n - start)
            code_seed, value_seed = (
                tf.constant(s.generate_state(2).astype(np.int64) % 2**31, tf.int32)
                for s in seeds.spawn(2)
            )
            z = self.prior.distribution().sample(count, seed=code_seed)
            labels = None if condition is None else condition[start : start + count]
            decoded = self._decode(z, self._condition(labels))
            if sample:
                distribution = self.likelihood.distribution(decoded, len(self._event_shape))
                found.append(distribution.sample(seed=value_seed).numpy())
            else:
                found.append(self.likelihood.mean(decoded).numpy())
        return np.concatenate(found)

    def reconstruct(self, x: Any, y: Any = None) -> np.ndarray:
        """Returns the means of p(x|z) at the means of q(z|x).

        Args:
          x: Examples, `[n, ...]`.
          y: Their labels, int `[n]`, for a conditional VAE.

        Returns:
          Reconstructions, as `x`.
        """
        found = [np.zeros([0, *self._event_shape], np.float32)]
        for rows, labels in _parts(x, y, _CODES_AT_A_TIME):
            condition = self._checked_condition(labels)
            found.append(self(rows if condition is None else [rows, condition]).numpy())
        return np.concatenate(found)

    def log_likelihood(
        self, x: Any, y: Any = None, *, num_samples: int = 1000, seed: int | None = None
    ) -> np.ndarray:
        """Estimates log p(x) by importance weighting: a lower bound on average.

            log (1/K) sum_k p(x|z_k) p(z_k) / q(z_k|x),   z_k ~ q(z|x)

        Args:
          x: Held-out examples, `[n, ...]`. (Of training data, the result is not private.)
          y: Their labels, int `[n]`, for a conditional VAE: log p(x|y) then.
          num_samples: K.
          seed: Makes the draws reproducible.

        Returns:
          One number for each example, `[n]`, in nats.
        """
        if not (is_integer(num_samples) and num_samples >= 1):
            raise error("num_samples", "a positive integer", num_samples)
        draws = tf.random.Generator.from_seed(
            np.random.SeedSequence(seed).generate_state(1)[0], alg="philox"
        )
        log_weights = tf.function(self._log_weights, reduce_retracing=True)
        at_a_time = min(num_samples, 64)
        found = [np.zeros([0], np.float32)]
        for rows, labels in _parts(x, y, max(1, _CODES_AT_A_TIME // at_a_time)):
            weights = []
            for start in range(0, num_samples, at_a_time):
                count = min(at_a_time, num_samples - start)
                noise = draws.normal([len(rows), count, self.prior.latent_dim])
                weights.append(log_weights(rows, self._checked_condition(labels), noise))
            total = tf.reduce_logsumexp(tf.concat(weights, axis=1), axis=1)
            found.append((total - np.log(num_samples)).numpy())
        return np.concatenate(found)

    def _log_weights(
        self, x: tf.Tensor, condition: tf.Tensor | None, noise: tf.Tensor
    ) -> tf.Tensor:
        """Computes the logarithms of the importance weights of codes, `[rows, samples]`."""
        loc, scale = self._encode(x, condition)
        loc, scale = loc[:, tf.newaxis], scale[:, tf.newaxis]
        codes = loc + scale * noise
        posterior = tfd.Independent(tfd.Normal(loc, scale), 1)
        weight = self.prior.distribution().log_prob(codes) - posterior.log_prob(codes)
        return self._log_likelihood_at(x, condition, codes) + weight

    def _checked_event_shape(self) -> list[int]:
        """Returns the shape of an example; makes sure that the networks fit together."""
        latent_dim = self.prior.latent_dim
        x, encoded = self._signature("encoder", self.encoder)
        z, decoded = self._signature("decoder", self.decoder)
        if encoded.rank != 2 or encoded[1] != 2 * latent_dim:
            raise ValueError(
                "Argument `encoder` must return [rows, 2 * latent_dim], "
                f"[rows, {2 * latent_dim}] for this prior. Received an encoder that returns "
                f"{encoded}."
            )
        if z.rank != 2 or z[1] not in (None, latent_dim):
            raise ValueError(
                f"Argument `decoder` must take codes, [rows, {latent_dim}] for this prior. "
                f"Received a decoder that takes {z}."
            )
        if not decoded[1:].is_fully_defined() or not decoded[1:].is_compatible_with(x[1:]):
            raise ValueError(
                "Argument `decoder` must return tensors of the shape of examples, which the "
                f"encoder takes as {x}. Received a decoder that returns {decoded}."
            )
        return decoded[1:].as_list()

    def _signature(self, name: str, network: Any) -> tuple[tf.TensorShape, tf.TensorShape]:
        """Returns the shapes of what a network takes first, and of what it returns."""
        taken = self._front_end.takes(network)
        if taken is None:
            raise self._not_built(name, network)
        with tf.init_scope():
            returned = tf.function(network).get_concrete_function(taken)
        return tf.nest.flatten(taken)[0].shape, tf.nest.flatten(returned.output_shapes)[0]

    def _not_built(self, name: str, network: Any) -> ValueError:
        how = "that is built (give it an Input layer, or call it once)"
        return error(name, f"a model of {self._front_end.title} {how}", network)


def _of_full_precision(output: tf.Tensor) -> tf.Tensor:
    """Returns what a network returned in float32, if it is bfloat16 or float16."""
    return tf.cast(output, tf.float32) if output.dtype.size < 4 else output


def _parts(x: Any, y: Any, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields rows of examples and of labels, some at a time."""
    x = np.asarray(x, np.float32)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        yield x[part], None if y is None else np.asarray(y)[part]
