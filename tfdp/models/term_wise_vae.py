"""A variational autoencoder whose divergence between batches and prior is trained privately."""

from typing import Any

import tensorflow as tf
from tensorflow_probability import distributions as tfd

from tfdp.clipping import (
    Aggregation,
    BatchAggregation,
    MicroAggregation,
    TermWiseAggregation,
    TwoTermLoss,
)
from tfdp.clipping.aggregations import LEAST_NOISE
from tfdp.models import divergences, likelihoods, priors
from tfdp.models.autoencoder import Autoencoder
from tfdp.models.divergences import Divergence
from tfdp.models.likelihoods import Likelihood
from tfdp.models.priors import Prior
from tfdp.optimizers.arguments import is_integer, is_number
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.selective import SelectiveUpdateMixin

AGGREGATIONS = ("term_wise", "micro", "batch", "none")


@tf.keras.utils.register_keras_serializable(package="tfdp")
class TermWiseVAE(Autoencoder):
    """A variational autoencoder (VAE), trained with differential privacy (PriVAE).

    It minimises, over batches X of examples x_i,

        (1/B) sum_i [ -E log p(x_i|z) + beta KL(q(z|x_i) || p(z)) ]  +  alpha D(q(z), p(z)).

    The first term is sample-wise: each example's gradient is clipped (C1, the `l2_norm_clip` of the
    optimizer). D, between the codes of many examples and the prior, is batch-wise: the batch is
    split into random groups, and each group's gradient is clipped (C2, `batch_clip`). See
    `tfdp.clipping.TermWiseAggregation` for the mechanism; its cost in epsilon is that of the same
    optimizer without D.

    Compile it with any of `tfdp.DPSGD`, `DPAdam`, `DPSignSGD`, `DPSignAdam`, and fit it on what
    `tfdp.data.poisson_batches` returns. A step shows nothing about the training data; evaluate on
    held-out data, with `validation_data`.

    Args:
      encoder: Maps examples to `[rows, 2 * latent_dim]`: the locations of q(z|x), then what
        softplus makes its standard deviations.
      decoder: Maps codes `[rows, latent_dim]` to tensors of the shape of examples, the parameters
        of p(x|z).
      prior: p(z), a `tfdp.models.priors.Prior`.
      likelihood: p(x|z): "bernoulli" (the decoder returns logits), "laplace", "normal", or a
        `tfdp.models.likelihoods.Likelihood`.
      divergence: D: "mmd" (dimension-wise), "rbf_mmd", "kl" (KL(p(z)||q(z))), a
        `tfdp.models.divergences.Divergence`, or None for no such term.
      alpha: Weight of D.
      beta: Weight of the sample-wise KL term.
      num_samples: Codes L drawn for each example, for the expectation over q(z|x). More cost time
        and no privacy: an example's mean gradient is clipped.
      aggregation: "term_wise"; the baselines "micro" and "batch", at the noise that they need; or
        "none", without privacy and with an ordinary Keras optimizer.
      batch_clip: C2, in gradient units: needed for "term_wise" with a divergence.
      num_groups: Groups m of a batch, see `TermWiseAggregation`.
      split: How the noise is split, see `TermWiseAggregation`.
      group_capacity: See `TermWiseAggregation`.
      num_classes: For a conditional VAE, the number of classes: labels are integers below it, and
        both networks get `[input, one-hot label]`.
      non_private_diagnostics: Whether training shows `non_private_loss`, the loss of the batch, for
        which it is computed once more. Epsilon does not cover that.
      **kwargs: `name` and others, as in `tf.keras.Model`.

    Raises:
      ValueError: An argument is out of its range, or does not go with another.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x = np.random.rand(500, 8).astype("float32")
      >>> batches = tfdp.data.poisson_batches((x, x), expected_batch_size=50)
      >>> dense = tf.keras.layers.Dense
      >>> model = tfdp.TermWiseVAE(
      ...     encoder=tf.keras.Sequential([dense(16, "relu", input_shape=[8]), dense(4)]),
      ...     decoder=tf.keras.Sequential([dense(16, "relu", input_shape=[2]), dense(8)]),
      ...     prior=tfdp.models.priors.SpikeAndSlab(latent_dim=2),
      ...     divergence="mmd",
      ...     alpha=10.0,
      ...     batch_clip=0.1,
      ...     num_groups=5,
      ... )
      >>> model.compile(tfdp.DPAdam(1.0, 1.1, **batches.sampling.optimizer_arguments()))
      >>> history = model.fit(batches, epochs=2, verbose=0)
      >>> model.optimizer.ledger.steps
      20
      >>> model.generate(3).shape
      (3, 8)

    References:
      - Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation.
      - Burda et al., 2016, Importance Weighted Autoencoders (https://arxiv.org/abs/1509.00519), for
        `log_likelihood`.
    """

    def __init__(
        self,
        encoder: tf.keras.Model,
        decoder: tf.keras.Model,
        *,
        prior: Prior,
        likelihood: Likelihood | str = "bernoulli",
        divergence: Divergence | str | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        num_samples: int = 1,
        aggregation: str = "term_wise",
        batch_clip: float | None = None,
        num_groups: int = 16,
        split: float | str = LEAST_NOISE,
        group_capacity: int | None = None,
        num_classes: int | None = None,
        non_private_diagnostics: bool = False,
        **kwargs: Any,
    ):
        super().__init__(encoder, decoder, prior, likelihood, num_classes, **kwargs)
        _check_arguments(
            alpha=alpha,
            beta=beta,
            num_samples=num_samples,
            aggregation=aggregation,
            non_private_diagnostics=non_private_diagnostics,
        )
        self.divergence = divergences.get(divergence)
        self.alpha = alpha
        self.beta = beta
        self.num_samples = num_samples
        self._options = {
            "aggregation": aggregation,
            "batch_clip": batch_clip,
            "num_groups": num_groups,
            "split": split,
            "group_capacity": group_capacity,
            "non_private_diagnostics": non_private_diagnostics,
        }
        self.aggregation = self._make_aggregation(
            aggregation, batch_clip, num_groups, split, group_capacity
        )
        self._means = {
            name: tf.keras.metrics.Mean(name) for name in ("loss", "negative_elbo", "divergence")
        }

    # The terms of the loss, as `TwoTermLoss` needs them.

    def _sample_wise(self, rows: dict[str, tf.Tensor]) -> tf.Tensor:
        """Negative ELBO of each example, with weight beta: `[rows]`."""
        x, noise = rows["x"], rows["noise"]
        condition = self._condition(rows.get("y"))
        loc, scale = self._encode(x, condition)
        loc, scale = loc[:, tf.newaxis], scale[:, tf.newaxis]
        codes = loc + scale * noise
        log_likelihood = tf.reduce_mean(self._log_likelihood_at(x, condition, codes), axis=1)
        posterior = tfd.Independent(tfd.Normal(loc, scale), 1)
        prior = self.prior.distribution()
        if isinstance(self.prior, priors.StandardNormal):
            divergence = tfd.kl_divergence(posterior, prior)[:, 0]
        else:
            ratios = posterior.log_prob(codes) - prior.log_prob(codes)
            divergence = tf.reduce_mean(ratios, axis=1)
        return self.beta * divergence - log_likelihood

    def _batch_wise(self, rows: dict[str, tf.Tensor], mask: tf.Tensor) -> tf.Tensor:
        """Weighted divergence of the codes of the rows that `mask` keeps: a scalar."""
        if self.divergence is None:
            return tf.constant(0.0)
        loc, scale = self._encode(rows["x"], self._condition(rows.get("y")))
        posterior = tfd.Independent(tfd.Normal(loc, scale), 1)
        samples = loc + scale * rows["noise"][:, 0]
        distance = self.divergence(
            posterior, samples, self.prior.distribution(), rows["prior"], mask
        )
        return self.alpha * distance

    def _rows_of(self, data: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """The batch, with random numbers for each row; and which rows are examples."""
        x, y, mask = tf.keras.utils.unpack_x_y_sample_weight(data)
        count = tf.shape(x)[0]
        noise = tf.random.normal([count, self.num_samples, self.prior.latent_dim])
        rows = {"x": x, "noise": noise}
        if self.num_classes is not None:
            rows["y"] = y
        if self.divergence is not None:
            rows["prior"] = self.prior.distribution().sample(count)
        return rows, None if mask is None else tf.cast(mask, tf.bool)

    def _values(
        self, rows: dict[str, tf.Tensor], mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The two terms of a batch, computed at once."""
        losses = self._sample_wise(rows)
        if mask is None:
            mask = tf.ones_like(losses, tf.bool)
        total = tf.reduce_sum(tf.where(mask, losses, tf.zeros_like(losses)))
        mean = tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(mask, losses.dtype)))
        return mean, self._batch_wise(rows, mask)

    # Training.

    def compile(self, optimizer: Any, **kwargs: Any) -> None:
        """Says with what to train.

        Args:
          optimizer: `tfdp.DPSGD`, `DPAdam`, `DPSignSGD` or `DPSignAdam`; with `aggregation="none"`,
            an ordinary Keras optimizer.
          **kwargs: As in Keras, but for `loss` and metrics: the model has its own.

        Raises:
          ValueError: The optimizer does not go with the aggregation, or there is a loss.
        """
        refused = [
            key
            for key in ("loss", "metrics", "weighted_metrics", "loss_weights")
            if kwargs.get(key)
        ]
        if refused:
            raise ValueError(
                f"Argument `{refused[0]}` must not be given: TermWiseVAE has its own loss. "
                f"Received: {refused[0]}={kwargs[refused[0]]!r}."
            )
        super().compile(optimizer=optimizer, **kwargs)
        optimizer = self.optimizer
        private = isinstance(optimizer, PrivateOptimizerMixin)
        if isinstance(optimizer, SelectiveUpdateMixin) or private == (self.aggregation is None):
            allowed = "tfdp.DPSGD, DPAdam, DPSignSGD or DPSignAdam"
            if self.aggregation is None:
                allowed = "an ordinary Keras optimizer"
            raise ValueError(
                f"Argument `optimizer` must be {allowed} with "
                f"aggregation={self._options['aggregation']!r}. Received: {optimizer!r}."
            )

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """One update; shows nothing unless `non_private_diagnostics` asks for it."""
        rows, mask = self._rows_of(data)
        if self.aggregation is None:
            self._plain_step(rows, mask)
        else:
            loss = TwoTermLoss(
                sample_wise=self._sample_wise,
                batch_wise=None if self.divergence is None else self._batch_wise,
                batch=(rows,),
                mask=mask,
                aggregation=self.aggregation,
                regularizer=self._regularizer if self.losses else None,
            )
            self.optimizer.minimize(loss, self.trainable_variables)
        if not self._options["non_private_diagnostics"]:
            return {}
        return {"non_private_loss": tf.add_n(self._values(rows, mask))}

    def _regularizer(self) -> tf.Tensor:
        return tf.add_n(self.losses)

    def _plain_step(self, rows: dict[str, tf.Tensor], mask: tf.Tensor | None) -> None:
        """An update without privacy."""
        with tf.GradientTape() as tape:
            total = tf.add_n([*self._values(rows, mask), *self.losses])
        gradients = tape.gradient(total, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """The means over batches of the loss and of its two terms, D without alpha."""
        rows, mask = self._rows_of(data)
        losses, divergence = self._values(rows, mask)
        weight = tf.shape(rows["x"])[0] if mask is None else tf.math.count_nonzero(mask)
        self._means["loss"].update_state(losses + divergence, weight)
        self._means["negative_elbo"].update_state(losses, weight)
        per_alpha = divergence / self.alpha if self.alpha else divergence
        self._means["divergence"].update_state(per_alpha, weight)
        return {name: mean.result() for name, mean in self._means.items()}

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """What `evaluate` shows: Keras sets it back before each evaluation."""
        return list(self._means.values())

    # Saving.

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this model again."""
        return {
            "name": self.name,
            "encoder": tf.keras.layers.serialize(self.encoder),
            "decoder": tf.keras.layers.serialize(self.decoder),
            "prior": priors.serialize(self.prior),
            "likelihood": likelihoods.serialize(self.likelihood),
            "divergence": divergences.serialize(self.divergence),
            "alpha": self.alpha,
            "beta": self.beta,
            "num_samples": self.num_samples,
            "num_classes": self.num_classes,
            **self._options,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "TermWiseVAE":
        """Makes the model of which `get_config` returned `config`."""
        networks = {
            name: tf.keras.layers.deserialize(config[name], custom_objects)
            for name in ("encoder", "decoder")
        }
        return cls(**{**config, **networks})

    # What the arguments say.

    def _make_aggregation(
        self, name: str, batch_clip, num_groups, split, group_capacity
    ) -> Aggregation | None:
        if name == "none":
            return None
        if name != "term_wise":
            return MicroAggregation() if name == "micro" else BatchAggregation()
        if batch_clip is None and self.divergence is not None:
            raise ValueError(
                "Argument `batch_clip` must be a positive number with a divergence and "
                "aggregation='term_wise'. Received: batch_clip=None."
            )
        # Without a divergence there are no groups, and their clip does not matter.
        return TermWiseAggregation(
            1.0 if batch_clip is None else batch_clip, num_groups, split, group_capacity
        )


def _check_arguments(**values: Any) -> None:
    """Raises a ValueError that names the first argument that is out of its range."""
    for name in ("alpha", "beta"):
        value = values[name]
        if not (is_number(value) and 0 <= value < float("inf")):
            raise ValueError(
                f"Argument `{name}` must be a non-negative, finite number. Received: "
                f"{name}={value!r}."
            )
    if not (is_integer(values["num_samples"]) and values["num_samples"] >= 1):
        raise ValueError(
            "Argument `num_samples` must be a positive integer. Received: "
            f"num_samples={values['num_samples']!r}."
        )
    if values["aggregation"] not in AGGREGATIONS:
        raise ValueError(
            f"Argument `aggregation` must be one of {', '.join(map(repr, AGGREGATIONS))}. "
            f"Received: aggregation={values['aggregation']!r}."
        )
    if not isinstance(values["non_private_diagnostics"], bool):
        raise ValueError(
            "Argument `non_private_diagnostics` must be True or False. Received: "
            f"non_private_diagnostics={values['non_private_diagnostics']!r}."
        )
