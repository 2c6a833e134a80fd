"""Private training of variational autoencoders, for every Keras."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow_probability import distributions as tfd

import tfdp.contrib  # noqa: F401  # Its aggregations have names.
from tfdp.base.validation import error, non_negative, one_of, positive_integer
from tfdp.clipping.batch_losses import aggregations
from tfdp.clipping.batch_losses.aggregations import LEAST_NOISE, TermWiseAggregation
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss
from tfdp.step import replicas
from tfdp.step.private_step import PrivateStep
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training.term_wise import divergences, likelihoods, priors
from tfdp.training.term_wise.autoencoder import Autoencoder
from tfdp.training.term_wise.divergences import Divergence
from tfdp.training.term_wise.likelihoods import Likelihood
from tfdp.training.term_wise.priors import Prior


class TermWiseTraining(Autoencoder):
    """Base class of the models `TermWiseVAE` of every Keras, which are its `Model`s, too.

    The docstrings of these describe the arguments.
    """

    def __init__(
        self,
        encoder: Any,
        decoder: Any,
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
        self._evaluated = _Evaluated(self._front_end.package)

    # The terms of the loss.

    def _negative_elbo(self, rows: dict[str, tf.Tensor], training: bool) -> tf.Tensor:
        """Computes the negative ELBO of each example, with weight beta: `[rows]`."""
        x, condition = rows["x"], self._condition(rows.get("y"))
        loc, scale = self._encode(x, condition, training)
        loc, scale = loc[:, tf.newaxis], scale[:, tf.newaxis]
        codes = loc + scale * rows["noise"]
        log_likelihoods = self._log_likelihood_at(x, condition, codes, training)
        posterior = tfd.Independent(tfd.Normal(loc, scale), 1)
        prior = self.prior.distribution()
        if isinstance(self.prior, priors.StandardNormal):
            divergence = tfd.kl_divergence(posterior, prior)[:, 0]
        else:
            ratios = posterior.log_prob(codes) - prior.log_prob(codes)
            divergence = tf.reduce_mean(ratios, axis=1)
        return self.beta * divergence - tf.reduce_mean(log_likelihoods, axis=1)

    def _distance(self, rows: dict[str, tf.Tensor], mask: tf.Tensor, training: bool) -> tf.Tensor:
        """Computes D of the codes of the rows that `mask` keeps, a scalar."""
        if self.divergence is None:
            return tf.constant(0.0)
        loc, scale = self._encode(rows["x"], self._condition(rows.get("y")), training)
        posterior = tfd.Independent(tfd.Normal(loc, scale), 1)
        samples = loc + scale * rows["noise"][:, 0]
        prior = self.prior.distribution()
        return self.divergence(posterior, samples, prior, rows["prior"], mask)

    def _terms(
        self, rows: dict[str, tf.Tensor], mask: tf.Tensor | None, training: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean negative ELBO of a batch, and D."""
        losses = self._negative_elbo(rows, training)
        if mask is None:
            mask = tf.ones_like(losses, tf.bool)
        total = tf.reduce_sum(tf.where(mask, losses, tf.zeros_like(losses)))
        mean = tf.math.divide_no_nan(total, tf.reduce_sum(tf.cast(mask, losses.dtype)))
        return mean, self._distance(rows, mask, training)

    def _rows_of(self, data: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """Returns the batch, and which of its rows are examples."""
        x, y, mask = self._front_end.package.utils.unpack_x_y_sample_weight(data)
        return {"x": x} if self.num_classes is None else {"x": x, "y": y}, mask

    def _draws(self) -> list[tfd.Distribution]:
        """Returns the distributions of a row's random numbers: the code's and the prior draw's."""
        noise = tfd.Normal(tf.zeros([self.num_samples, self.prior.latent_dim]), 1.0)
        return [noise] if self.divergence is None else [noise, self.prior.distribution()]

    def _drawn_rows(self, data: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """Returns `_rows_of`, with random numbers for each row. Private training draws its own."""
        rows, mask = self._rows_of(data)
        count = tf.shape(rows["x"])[0]
        drawn = [distribution.sample(count) for distribution in self._draws()]
        return _with(rows, drawn), None if mask is None else tf.cast(mask, tf.bool)

    # Training.

    def compile(self, optimizer: Any, **kwargs: Any) -> None:
        """Configures the model for training.

        Args:
          optimizer: A private optimizer; with `aggregation="none"`, an ordinary Keras optimizer.
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
        kwargs["weighted_metrics"] = []  # Keras would warn that masks weigh no metric.
        super().compile(optimizer=optimizer, **kwargs)
        optimizer = self.optimizer
        private = isinstance(optimizer, PrivateStep)
        if isinstance(optimizer, SelectiveUpdateMixin) or private == (self.aggregation is None):
            allowed = self._front_end.optimizers
            if self.aggregation is None:
                allowed = "an ordinary Keras optimizer"
            message = error(
                "optimizer",
                f"{allowed} with aggregation={self._options['aggregation']!r}",
                optimizer,
            )
            if "LossScaleOptimizer" in type(optimizer).__name__:
                message = ValueError(
                    f"{message} The policy mixed_float16 puts a LossScaleOptimizer around an "
                    "optimizer: use mixed_bfloat16."
                )
            raise message

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that was loaded, as Keras asks for where `compile` has arguments."""
        self.compile(**self._front_end.package.saving.deserialize_keras_object(config))
        if hasattr(self.optimizer, "build"):
            self.optimizer.build(self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes one step; shows nothing unless `non_private_diagnostics` asks for it."""
        if self.aggregation is None:
            self._plain_step(data)
        else:
            loss = self._private_loss(data, self.aggregation)
            self.optimizer.minimize(loss, self.trainable_variables)
        logs = {"updates": tf.identity(self.optimizer.iterations)}
        if self._options["non_private_diagnostics"]:
            mean, distance = self._terms(*self._drawn_rows(data), training=True)
            logs["non_private_loss"] = mean + self.alpha * distance
        # Keras 2 would add up what each replica returns.
        return {name: replicas.once(_mean, value) for name, value in logs.items()}

    def _private_loss(self, data: Any, aggregation: Aggregation) -> TwoTermLoss:
        rows, mask = self._rows_of(data)

        def sample_wise(rows: dict[str, tf.Tensor], *drawn: tf.Tensor) -> tf.Tensor:
            with self._front_end.networks_called(self):
                return self._negative_elbo(_with(rows, drawn), training=True)

        def batch_wise(rows: dict[str, tf.Tensor], *drawn: tf.Tensor) -> tf.Tensor:
            with self._front_end.networks_called(self):
                distance = self._distance(_with(rows, drawn[:-1]), drawn[-1], training=True)
            return self.alpha * distance

        return TwoTermLoss(
            sample_wise=sample_wise,
            batch_wise=None if self.divergence is None else batch_wise,
            batch=(rows,),
            mask=mask,
            aggregation=aggregation,
            draws=self._draws,
            regularizer=self._regularizer,
        )

    def _regularizer(self) -> tf.Tensor:
        return tf.add_n([tf.constant(0.0), *self.losses])

    def _plain_step(self, data: Any) -> None:
        """Returns an update without privacy."""
        with tf.GradientTape() as tape:
            mean, distance = self._terms(*self._drawn_rows(data), training=True)
            total = mean + self.alpha * distance + self._regularizer()
            total = self._front_end.scaled(self.optimizer, total)
        gradients = tape.gradient(total, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Returns the means over batches of the loss and of its two terms, D without alpha."""
        rows, mask = self._drawn_rows(data)
        mean, distance = self._terms(rows, mask, training=False)
        weight = tf.shape(rows["x"])[0] if mask is None else tf.math.count_nonzero(mask)
        found = (mean + self.alpha * distance, mean, distance)
        for metric, value in zip(self.metrics, found, strict=True):
            metric.update_state(value, weight)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self) -> list[Any]:
        """Metrics of `evaluate`, which Keras resets before each evaluation."""
        return self._evaluated.means

    # Saving.

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that construct this model."""
        return {
            "name": self.name,
            "encoder": self._front_end.package.layers.serialize(self.encoder),
            "decoder": self._front_end.package.layers.serialize(self.decoder),
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
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "TermWiseTraining":
        """Returns the model that a config of `get_config` describes."""
        networks = {
            name: cls._front_end.package.layers.deserialize(config[name], custom_objects)
            for name in ("encoder", "decoder")
        }
        return cls(**{**config, **networks})

    # What the arguments say.

    def _make_aggregation(
        self,
        name: str,
        batch_clip: float | None,
        num_groups: int,
        split: float | str,
        group_capacity: int | None,
    ) -> Aggregation | None:
        # Checked also where it is not used: without a divergence there are no groups.
        term_wise = TermWiseAggregation(
            1.0 if batch_clip is None else batch_clip, num_groups, split, group_capacity
        )
        if name == "term_wise" and batch_clip is None and self.divergence is not None:
            raise ValueError(
                "Argument `batch_clip` must be a positive number with a divergence and "
                "aggregation='term_wise'. Received: batch_clip=None."
            )
        if name == "term_wise":
            return term_wise
        return None if name == "none" else aggregations.NAMED[name]()


class _Evaluated:
    """The means of an evaluation, where Keras does not take them for weights of the model."""

    def __init__(self, keras: Any) -> None:
        names = ("loss", "negative_elbo", "divergence")
        self.means = [keras.metrics.Mean(name) for name in names]


def _mean(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the mean of what the replicas have: the value itself, where it is the same in all."""
    return tf.add_n(values) / len(values) if values[0].dtype.is_floating else values[0]


def _with(rows: dict[str, tf.Tensor], drawn: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the tensors of a batch and the random numbers of its rows."""
    return {**rows, **dict(zip(("noise", "prior"), drawn, strict=False))}


def _check_arguments(**values: Any) -> None:
    """Raises a ValueError that names the first argument that is out of its range."""
    for name in ("alpha", "beta"):
        non_negative(name, values[name])
    positive_integer("num_samples", values["num_samples"])
    names = ("term_wise", *aggregations.NAMED, "none")
    one_of("aggregation", values["aggregation"], names)
    if not isinstance(values["non_private_diagnostics"], bool):
        raise error("non_private_diagnostics", "True or False", values["non_private_diagnostics"])
