"""Generative adversarial networks (GANs) whose critic is trained privately, for every Keras."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdp.base.validation import (
    elements,
    error,
    integer,
    is_integer,
    is_number,
    one_of,
    positive,
    positive_integer,
)
from tfdp.step import replicas
from tfdp.step.private_step import PrivateStep
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training.front_end import FrontEnd

if TYPE_CHECKING:
    from tensorflow.keras import Model as _Model
else:
    _Model = object

_LOSSES = ("wasserstein", "non_saturating")
# Rows that are generated at the same time.
_ROWS_AT_A_TIME = 4096
_MOST_CLASSES = 2**20  # Each has a probability.


class GANTraining(_Model):
    """Base class of the models `PrivateGAN` of every Keras, which are its `Model`s, too.

    The docstrings of these describe the arguments.
    """

    _front_end: ClassVar[FrontEnd]

    def __init__(
        self,
        generator: Any,
        critic: Any,
        *,
        loss: str = "wasserstein",
        gradient_penalty: float | None = None,
        weight_clip: float | None = None,
        critic_steps: int = 1,
        generator_batch_size: int | None = None,
        num_classes: int | None = None,
        label_probabilities: Sequence[float] | None = None,
        non_private_diagnostics: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, network in (("generator", generator), ("critic", critic)):
            is_model = isinstance(network, self._front_end.package.Model) and network.built
            if not is_model or self._front_end.takes(network) is None:
                raise error(
                    name,
                    f"a model of {self._front_end.title} that was built, such as by an `Input`",
                    network,
                )
        _check_shares_nothing(generator, critic)
        _check_loss(loss, gradient_penalty, weight_clip)
        positive_integer("critic_steps", critic_steps)
        if generator_batch_size is not None:
            positive_integer("generator_batch_size", generator_batch_size)
        integer("num_classes", num_classes, 1, _MOST_CLASSES, optional=True)
        if not isinstance(non_private_diagnostics, bool):
            raise error("non_private_diagnostics", "True or False", non_private_diagnostics)
        self.generator = generator
        self.critic = critic
        self.num_classes = num_classes
        self._label_probabilities = _checked_probabilities(label_probabilities, num_classes)
        self._options: dict[str, Any] = {
            "loss": loss,
            "gradient_penalty": gradient_penalty,
            "weight_clip": weight_clip,
            "critic_steps": critic_steps,
            "generator_batch_size": generator_batch_size,
            "non_private_diagnostics": non_private_diagnostics,
        }
        taken = self._front_end.takes(generator)
        if len(tf.nest.flatten(taken)) != (1 if num_classes is None else 2):
            raise ValueError(
                "Argument `generator` must take noise, and for a conditional GAN `[noise, one-hot "
                f"label]`. Received: a model of {taken}, with num_classes={num_classes}."
            )
        self.latent_dim = int(tf.nest.flatten(taken)[0].shape[-1])
        self._evaluated = _Evaluated(self._front_end.package)
        self.generator_optimizer: Any = None
        self.built = True
        self._make_saveable()

    def _make_saveable(self) -> None:
        """Does what the Keras needs to save a model that has not been called."""

    # The losses.

    def _inputs(self, x: tf.Tensor, labels: tf.Tensor | None) -> Any:
        """Returns what a network gets: with one-hot labels if the GAN is conditional."""
        if self.num_classes is None:
            return x
        return [x, tf.one_hot(tf.cast(labels, tf.int32), self.num_classes)]

    def _score(self, x: tf.Tensor, labels: tf.Tensor | None, training: bool) -> tf.Tensor:
        scores = self.critic(self._inputs(x, labels), training=training)
        if scores.shape.rank not in (1, 2) or (scores.shape.rank == 2 and scores.shape[1] != 1):
            raise ValueError(
                "Argument `critic` must map examples to one score each, [rows, 1] or [rows]. "
                f"Received: scores of shape {scores.shape}."
            )
        return tf.cast(tf.reshape(scores, [-1]), tf.float32)

    def _critic_losses(self, x: tf.Tensor, labels: tf.Tensor | None, training: bool) -> tf.Tensor:
        """Computes the loss of each example, `[rows]`, which depends on its row alone."""
        noise = tf.random.normal([tf.shape(x)[0], self.latent_dim])
        fakes = self.generator(self._inputs(noise, labels), training=False)
        fakes = tf.stop_gradient(tf.cast(fakes, x.dtype))
        if not fakes.shape.is_compatible_with(x.shape):
            raise ValueError(
                "Argument `generator` must make tensors of the shape of examples, "
                f"{x.shape[1:]}. Received: a model that makes {fakes.shape[1:]}."
            )
        real, fake = (self._score(rows, labels, training) for rows in (x, fakes))
        if self._options["loss"] == "wasserstein":
            losses = fake - real
        else:
            losses = tf.nn.softplus(fake) + tf.nn.softplus(-real)
        if self._options["gradient_penalty"] is not None:
            penalty = self._penalty(x, fakes, labels, training)
            losses += self._options["gradient_penalty"] * penalty
        return losses

    def _penalty(
        self, x: tf.Tensor, fakes: tf.Tensor, labels: tf.Tensor | None, training: bool
    ) -> tf.Tensor:
        """Computes `(|grad D| - 1)^2` at a random point between each example and its fake."""
        ones = [1] * (x.shape.rank - 1)
        share = tf.random.uniform([tf.shape(x)[0], *ones], dtype=x.dtype)
        points = x + share * (fakes - x)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(points)
            scores = self._score(points, labels, training)
        gradients = tf.cast(tape.gradient(scores, points), tf.float32)
        squares = tf.reduce_sum(tf.square(gradients), axis=list(range(1, x.shape.rank)))
        # Not 0, at which the root has no gradient.
        return tf.square(tf.sqrt(squares + 1e-12) - 1.0)

    def _unpack(self, data: Any) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Returns the examples, their labels if they are used, and which rows are examples."""
        x, y, mask = self._front_end.package.utils.unpack_x_y_sample_weight(data)
        if not (tf.is_tensor(x) and x.dtype.is_floating and (x.shape.rank or 0) > 1):
            raise ValueError(
                "A GAN must be trained on one floating-point tensor of examples, [rows, ...]. "
                f"Received: {x}."
            )
        if self.num_classes is None:
            return x, None, mask
        if y is None or not y.dtype.is_integer or y.shape.rank != 1:
            received = "no labels" if y is None else f"{y.dtype.name} labels of shape {y.shape}"
            raise ValueError(
                "A conditional GAN must be trained on examples with integer labels, (x, labels). "
                f"Received: {received}, with num_classes={self.num_classes}."
            )
        return x, y, mask

    # Training.

    def compile(self, critic_optimizer: Any, generator_optimizer: Any, **kwargs: Any) -> None:
        """Configures the model for training.

        Args:
          critic_optimizer: A private optimizer; it is `model.optimizer`, whose ledger is that of
            the model.
          generator_optimizer: An ordinary optimizer of Keras, or the name of one.
          **kwargs: As in Keras, but for `loss` and metrics: the model has its own.

        Raises:
          ValueError: An optimizer is not what it must be, or there is a loss.
        """
        for key in ("optimizer", "loss", "metrics", "weighted_metrics", "loss_weights"):
            if kwargs.get(key):
                raise ValueError(
                    f"Argument `{key}` must not be given: PrivateGAN has two optimizers and its "
                    f"own losses. Received: {key}={kwargs[key]!r}."
                )
        private = isinstance(critic_optimizer, PrivateStep)
        if not private or isinstance(critic_optimizer, SelectiveUpdateMixin):
            raise error(
                "critic_optimizer",
                f"{self._front_end.optimizers}: the critic sees the data",
                critic_optimizer,
            )
        generator_optimizer = self._front_end.package.optimizers.get(generator_optimizer)
        if isinstance(generator_optimizer, PrivateStep) or not hasattr(
            generator_optimizer, "build"
        ):
            raise error(
                "generator_optimizer",
                f"{self._front_end.ordinary}: the generator sees no data",
                generator_optimizer,
            )
        kwargs["weighted_metrics"] = []  # Keras would warn that masks weigh no metric.
        super().compile(optimizer=critic_optimizer, **kwargs)
        self.generator_optimizer = generator_optimizer
        generator_optimizer.build(self.generator.trainable_variables)
        # Builds now: the ledger then knows at once what the networks have cost before.
        self.optimizer.build(self.critic.trainable_variables)
        self._record_generator()

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the arguments of `compile`."""
        if self.generator_optimizer is None:
            return {}
        serialize = self._front_end.package.saving.serialize_keras_object
        return {
            "critic_optimizer": serialize(self.optimizer),
            "generator_optimizer": serialize(self.generator_optimizer),
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that was loaded."""
        deserialize = self._front_end.package.saving.deserialize_keras_object
        self.compile(**{key: deserialize(value) for key, value in config.items()})

    def _record_generator(self) -> None:
        """Notes that what the critic has cost went into the generator, too."""
        with tf.init_scope():
            self.optimizer._released.trains(
                [*map(self._front_end.tf_variable, self.generator.weights)]
            )

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Takes a private step of the critic, and every `critic_steps` one of the generator."""
        if replicas.count() > 1:
            raise ValueError(
                "A PrivateGAN must be trained on one replica. Received a distribution strategy of "
                f"{replicas.count()} replicas."
            )
        x, labels, mask = self._unpack(data)
        before = tf.identity(self.optimizer.iterations)
        losses = self._critic_losses(x, labels, training=True)
        if mask is not None:
            losses *= tf.cast(mask, losses.dtype)
        if self.critic.losses:
            losses += tf.add_n(self.critic.losses)
        self.optimizer.minimize(losses, self.critic.trainable_variables)
        self._record_generator()
        if (bound := self._options["weight_clip"]) is not None:
            for variable in self.critic.trainable_variables:
                value = self._front_end.tf_variable(variable)
                value.assign(tf.clip_by_value(value, -bound, bound))
        # If a batch comes in chunks, the last one makes the step.
        steps = tf.identity(self.optimizer.iterations)
        due = tf.logical_and(steps > before, steps % self._options["critic_steps"] == 0)
        tf.cond(due, self._generator_step, lambda: tf.constant(False))
        logs = {"updates": steps}
        if self._options["non_private_diagnostics"]:
            logs["non_private_critic_loss"] = self._mean_loss(x, labels, mask, training=True)
        return logs

    def _generator_step(self) -> tf.Tensor:
        """Takes a step of the generator, on noise and labels that do not come from the data."""
        rows = self._options["generator_batch_size"] or self.optimizer.expected_batch_size
        noise = tf.random.normal([rows, self.latent_dim])
        labels = None
        if self._label_probabilities is not None:
            logits = tf.math.log(tf.constant([self._label_probabilities], tf.float32))
            labels = tf.random.categorical(logits, rows)[0]
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            fakes = self.generator(self._inputs(noise, labels), training=True)
            scores = self._score(fakes, labels, training=True)
            if self._options["loss"] == "wasserstein":
                loss = -tf.reduce_mean(scores)
            else:
                loss = tf.reduce_mean(tf.nn.softplus(-scores))
            loss = tf.add_n([loss, *self.generator.losses])
        gradients = tape.gradient(loss, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return tf.constant(True)

    def _mean_loss(
        self, x: tf.Tensor, labels: tf.Tensor | None, mask: tf.Tensor | None, training: bool
    ) -> tf.Tensor:
        losses = self._critic_losses(x, labels, training)
        keep = tf.ones_like(losses) if mask is None else tf.cast(mask, losses.dtype)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * keep), tf.reduce_sum(keep))

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Returns the mean of the critic's loss over held-out examples."""
        x, labels, mask = self._unpack(data)
        weight = tf.shape(x)[0] if mask is None else tf.math.count_nonzero(mask)
        (metric,) = self.metrics
        metric.update_state(self._mean_loss(x, labels, mask, training=False), weight)
        return {metric.name: metric.result()}

    @property
    def metrics(self) -> list[Any]:
        """Metrics of `evaluate`, which Keras resets before each evaluation."""
        return self._evaluated.means

    # Generation.

    def call(self, inputs: Any, training: Any = None) -> tf.Tensor:
        """Maps noise, and one-hot labels for a conditional GAN, to examples."""
        return self.generator(inputs, training=training)

    def generate(self, n: int, labels: Any = None, *, seed: int | None = None) -> np.ndarray:
        """Generates synthetic examples.

        Generation reads no data, so any number of examples costs no epsilon.

        Args:
          n: Number of examples.
          labels: Their labels, int `[n]` or one for all, for a conditional GAN; None: they are
            drawn with `label_probabilities`.
          seed: Makes the draws reproducible.

        Returns:
          Examples, `[n, ...]`.

        Raises:
          ValueError: `n` or `labels` is not what it must be.
        """
        if not (is_integer(n) and n >= 0):
            raise error("n", "a non-negative integer", n)
        random = np.random.default_rng(seed)
        found = self._checked_labels(n, labels, random)
        noise = random.normal(size=[n, self.latent_dim]).astype(np.float32)
        rows = []
        for start in range(0, max(n, 1), _ROWS_AT_A_TIME):  # No rows have a shape, too.
            part = slice(start, start + _ROWS_AT_A_TIME)
            own = None if found is None else found[part]
            made = self.generator(self._inputs(tf.constant(noise[part]), own), training=False)
            rows.append(made.numpy())
        return np.concatenate(rows)

    def _checked_labels(
        self, n: int, labels: Any, random: np.random.Generator
    ) -> np.ndarray | None:
        if self.num_classes is None:
            if labels is not None:
                raise error("labels", "None for a GAN that is not conditional", labels)
            return None
        if labels is None:
            return random.choice(self.num_classes, size=n, p=self._label_probabilities)
        with contextlib.suppress(ValueError):
            labels = np.broadcast_to(np.asarray(labels), [n])
        wrong = set(np.unique(labels)) - set(range(self.num_classes))
        if wrong or np.shape(labels) != (n,):
            raise ValueError(
                f"Argument `labels` must be labels in [0, {self.num_classes}), int [n]. Received: "
                f"{wrong or f'labels of shape {np.shape(labels)}'}."
            )
        return labels

    # Saving.

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that construct this model."""
        return {
            "name": self.name,
            "generator": self._front_end.package.layers.serialize(self.generator),
            "critic": self._front_end.package.layers.serialize(self.critic),
            "num_classes": self.num_classes,
            "label_probabilities": self._label_probabilities,
            **self._options,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "GANTraining":
        """Returns the model that a config of `get_config` describes."""
        networks = {
            name: cls._front_end.package.layers.deserialize(config[name], custom_objects)
            for name in ("generator", "critic")
        }
        return cls(**{**config, **networks})


class _Evaluated:
    """The means of an evaluation, where Keras does not take them for weights of the model."""

    def __init__(self, keras: Any) -> None:
        self.means = [keras.metrics.Mean("critic_loss")]


def _check_shares_nothing(generator: Any, critic: Any) -> None:
    own = {id(variable): variable.name for variable in generator.weights}
    shared = [variable.name for variable in critic.weights if id(variable) in own]
    if shared:
        raise ValueError(
            "Arguments `generator` and `critic` must share no layers: each would undo the steps of "
            f"the other. Received: models that share the variable '{shared[0]}'."
        )


def _check_loss(loss: Any, gradient_penalty: Any, weight_clip: Any) -> None:
    one_of("loss", loss, _LOSSES)
    for name, value in (("gradient_penalty", gradient_penalty), ("weight_clip", weight_clip)):
        if value is not None:
            positive(name, value)
    if loss == "wasserstein" and (gradient_penalty is None) == (weight_clip is None):
        raise ValueError(
            "Either `gradient_penalty` or `weight_clip` must be given with loss='wasserstein', "
            f"whose critic has no bound otherwise. Received: gradient_penalty={gradient_penalty}, "
            f"weight_clip={weight_clip}."
        )


def _checked_probabilities(
    probabilities: Sequence[float] | None, num_classes: int | None
) -> list[float] | None:
    """Returns the probabilities of the classes; None if there are no classes."""
    if num_classes is None:
        if probabilities is not None:
            raise error("label_probabilities", "None without `num_classes`", probabilities)
        return None
    if probabilities is None:
        return [1 / num_classes] * num_classes
    requirement = f"{num_classes} numbers that are not negative and add up to 1"
    given = elements("label_probabilities", probabilities, requirement)
    numbers = [float(p) if is_number(p) else -1.0 for p in given]
    if len(numbers) != num_classes or min(numbers) < 0 or abs(sum(numbers) - 1) > 1e-6:
        raise error("label_probabilities", requirement, probabilities)
    return numbers
