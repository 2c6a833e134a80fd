"""Audit of a training by canaries: examples that each move one coordinate of their own."""

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import EXAMPLE, USER
from tfdp.auditing.audit_result import AuditResult, result_of
from tfdp.auditing.recording import Recording, StepSetting, learning_rate
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.validation import (
    between_zero_and_one,
    error,
    integer,
    is_integer,
    positive_integer,
)
from tfdp.data.users import user_numbers
from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.private_gan import PrivateGAN

# Factor of a canary's gradient, which is then far longer than any usual clip.
_SCALE = 1e6
_MOST_CANARIES = 10**7  # Each has a weight and a coin.
# Lines of the data set that are not a canary's: an example of the user, or a canary that is out.
_REAL, _OUT = 0, -1


class CanaryAudit:
    """Audit of one training, white box: a lower bound on epsilon beside that of the ledger.

    The model gets one more variable, with a coordinate for each canary. A canary is an example
    whose gradient, once clipped, is the clip at its own coordinate, and zero for all else. A secret
    coin decides for each canary whether it is in the data set or a row without any gradient is in
    its place. Training is your own, on `audit.model` and `audit.data`. The attacker sees the noisy
    sums at the coordinates, step by step (their signs, of an optimizer that `releases_signs`), and
    guesses the coins. What it achieves went through the real sampling, clipping, accumulation,
    noise, and selection of updates.

    Besides, the coordinates of canaries that are out show the noise alone: whether it has the size
    that the ledger assumes in each step, and never comes twice. And the coordinates' trajectory
    must follow from the noisy sums alone.

    Other examples keep their gradients: canaries' rows depend on no other weights, and others on no
    coordinate. But a canary takes the place of an example: q is `expected_batch_size` over all
    rows. Under a rule that clips blocks of variables apart, the coordinates are one more.

    Noise schedules, correlated noise (the sums are multiplied by the stated matrix, after which
    their noise must be independent), cyclic sampling, masks and top-k (coordinates must be chosen
    by public numbers, or by the noisy sums) and all clipping rules are audited. With
    `privacy_unit`, a canary is a user. Of a `PrivateGAN`, the critic is audited.

    Args:
      model: A model of Keras 2, to be trained by its compiled loss. Its present outputs for the
        first example are those for canaries, for good. Or a `tfdp.PrivateGAN`.
      data: `(x, y)` or `(x, y, sample_weight)`: arrays, or nested tuples or dicts of them. For a
        GAN as it is trained, `(x, x)` or `(x, labels)`.
      num_canaries: Number of canaries; at least 20. With 1000 and an epsilon from 4 to 8, bounds
        are about two thirds of it for a Gaussian mechanism, and about half with subsampling.
      seed: For tests only: makes the coins reproducible.
      privacy_unit: For users as the unit of privacy, the user of each example, as in
        `tfdp.data.poisson_batches`. A canary is then a user with examples of its own.
      examples_per_canary: Number of examples of each canary user; they have the same gradient.

    Attributes:
      model: The model to compile and train; `compile` makes the audit `watch` the optimizer. Its
        inputs are `(x, numbers)`, with 0 for rows that are no canaries; `base_model` is yours. Of a
        GAN it is a conditional one, whose further classes are the canaries.
      data: The data to train on: give it to `tfdp.data.poisson_batches`, or `tfdp.make_private`.
      privacy_unit: The user of each row of `data`, a number: give it with the data. None without
        users.
      callback: The callback that reads the updates: `fit(..., callbacks=[audit.callback])`.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(200, 8).astype("float32"), np.random.randint(0, 2, 200)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> audit = tfdp.auditing.CanaryAudit(model, (x, y), num_canaries=300)
      >>> batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=50)
      >>> audit.model.compile(
      ...     tfdp.DPSGD(1.0, 0.8, learning_rate=0.1, sampling=batches.sampling),
      ...     tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
      >>> _ = audit.model.fit(batches, epochs=2, callbacks=[audit.callback], verbose=0)
      >>> result = audit.result(delta=1e-5, significance=1e-6)
      >>> 0 <= result.lower_bound <= result.epsilon
      True

    References:
      - Nasr et al., 2023, Tight Auditing of Differentially Private Machine Learning.
      - Steinke, Nasr, Jagielski, 2023, Privacy Auditing with One (1) Training Run.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        data: Any,
        num_canaries: int = 1000,
        seed: int | None = None,
        *,
        privacy_unit: Any = None,
        examples_per_canary: int = 2,
    ):
        if not isinstance(model, tf.keras.Model):
            raise error("model", "a model of Keras 2", model)
        is_gan = isinstance(model, PrivateGAN)
        if not is_gan and type(model).train_step is not tf.keras.Model.train_step:
            raise ValueError(
                "Argument `model` must be trained by its compiled loss, or be a PrivateGAN: "
                "canaries replace outputs of the model, which a `train_step` of its own need not "
                "use. For DPSUR, give the model that `SelectiveModel` gets, and make the "
                f"SelectiveModel of `audit.model`. Received: {model!r}."
            )
        integer("num_canaries", num_canaries, 20, _MOST_CANARIES)
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            raise error("data", "(x, y) or (x, y, sample_weight), arrays", type(data))
        if not (seed is None or is_integer(seed)):
            raise error("seed", "an integer or None", seed)
        entropy = int.from_bytes(os.urandom(16), "little") if seed is None else int(seed)
        self._coins = np.random.default_rng(entropy).random(num_canaries) < 0.5
        self._is_seeded = seed is not None
        each = positive_integer("examples_per_canary", examples_per_canary)
        self.privacy_unit: np.ndarray | None = None
        size = _size(data)
        if privacy_unit is None:
            each = 1
        else:
            users = user_numbers("privacy_unit", privacy_unit, size)
            own = np.repeat(np.arange(num_canaries), each) + users.max() + 1
            self.privacy_unit = np.concatenate([users, own])
        first = tf.nest.map_structure(lambda a: np.asarray(a)[:1], tuple(data))
        self._first = first
        self.model: Any
        if is_gan:
            self.model = _CanaryGAN(model, first[0], num_canaries, self.watch)
            self.data = _with_canary_classes(model, tuple(data), first[0], self._coins, each)
        else:
            self.model = _CanaryModel(model, first[0], num_canaries, self.watch)
            self.data = _with_canaries(tuple(data), first, self._coins, each)
        with plain_variables():
            self._released = tf.Variable(tf.zeros([num_canaries]), trainable=False)
            self._kept = tf.Variable(tf.ones([num_canaries], tf.bool), trainable=False)
            self._draw = tf.Variable(tf.zeros([2], tf.int64), trainable=False)
        self._variables: list = []
        self._optimizer: Any = None
        self.callback = _Reading(self)
        self._recording = Recording()

    def watch(self, optimizer: PrivateOptimizerMixin) -> PrivateOptimizerMixin:
        """Makes the audit see the noisy sums of an optimizer, and returns it.

        `audit.model.compile` calls it. Call it if another model that holds `audit.model` is
        compiled, such as a `tfdp.SelectiveModel`, and before that.

        Raises:
          ValueError: It is no private optimizer, or another one has been trained with.
        """
        if not isinstance(optimizer, PrivateOptimizerMixin):
            raise error("optimizer", "a private optimizer of tfdp", optimizer)
        if self._optimizer is optimizer:
            return optimizer
        if self._optimizer is not None:
            raise error(
                "optimizer", "the one that is watched: an audit is of one training", optimizer
            )
        self._optimizer = optimizer
        observed_optimizer: Any = optimizer
        add_noise = optimizer._add_noise

        def observed(total: Any, step: Any) -> list:
            noisy = add_noise(total, step)
            self._variables = list(step.variables)
            self._released.assign(tf.cast(self._own(noisy, step.variables), tf.float32))
            if is_cyclic:
                self._draw.assign(tf.stack([step.use.source, step.use.sequence]))
            return noisy

        is_cyclic = optimizer.sampling is not None and optimizer.sampling.cycle_length > 1
        observed_optimizer._add_noise = observed
        compression, compressor = optimizer.compression, observed_optimizer._compressor
        if compression is not None and not compression.has_masks:
            compress = compressor.compress

            def compressed(gradients: Any, variables: Any, masks: Any) -> list:
                used = compress(gradients, variables, masks)
                self._kept.assign(self._own(used, variables) != 0)
                return used

            compressor.compress = compressed
        return optimizer

    def _own(self, values: Any, variables: Any) -> Any:
        """Returns the value for the canaries' coordinates."""
        places = [i for i, v in enumerate(variables) if v is self.model.coordinates]
        if not places:
            raise ValueError(
                "The optimizer must train `audit.model.coordinates`: `audit.model` must be the "
                f"model that is trained, or in it. Received: {[v.name for v in variables]}."
            )
        return values[places[0]]

    def result(self, delta: float, significance: float = 0.05) -> AuditResult:
        """Returns what the training so far lets an attacker know.

        Args:
          delta: The delta of the guarantee, in (0, 1).
          significance: Probability that a lower bound may be wrong, for each method.

        Raises:
          ValueError: An argument is out of its range, or nothing was recorded.
        """
        between_zero_and_one("delta", delta)
        between_zero_and_one("significance", significance)
        if not self._recording.sums:
            raise ValueError(
                "`fit` must be called first, on `audit.data`, with `callbacks=[audit.callback]`. "
                "Received an audit of no steps."
            )
        return result_of(self._recording, self._coins, self._optimizer, delta, significance)


def _size(data: Any) -> int:
    """Returns the number of examples."""
    size = {np.shape(a)[0] if np.ndim(a) else None for a in tf.nest.flatten(data)}
    if len(size) != 1 or not (count := size.pop()):
        raise error("data", "arrays of one positive length", [np.shape(a) for a in data])
    return count


def _with_canaries(data: tuple, first: tuple, coins: np.ndarray, each: int) -> tuple:
    """Returns `((x, numbers), y, ...)` with `each` rows for each canary, which are all alike.

    Numbers are those of the coordinates, from 1. The size of the data set does not depend on the
    coins.
    """
    count = _size(data)

    def extended(values: Any, row: Any) -> np.ndarray:
        return np.concatenate([np.asarray(values), np.repeat(row, coins.size * each, axis=0)])

    x, y, *weights = (
        tf.nest.map_structure(extended, part, row) for part, row in zip(data, first, strict=True)
    )
    for weight in weights:
        weight[count:] = 1
    canaries = np.where(coins, np.arange(1, coins.size + 1), _OUT)
    numbers = np.concatenate([np.full(count, _REAL), np.repeat(canaries, each)]).astype("int32")
    return ((x, numbers), y, *weights)


def _with_canary_classes(gan: Any, data: tuple, first: Any, coins: np.ndarray, each: int) -> tuple:
    """Returns `(x, labels)`, with `each` rows of each canary.

    Labels are those of the GAN (0, if it is not conditional), then one of canaries that are out,
    then one of each canary.
    """
    if len(data) != 2:
        raise error("data", "(x, x) or (x, labels), as a PrivateGAN is trained", len(data))
    x, labels = np.asarray(data[0]), np.zeros(_size(data), int)
    if gan.num_classes is not None:
        labels = np.asarray(data[1])
    classes = gan.num_classes or 1
    canaries = np.where(coins, classes + 1 + np.arange(coins.size), classes)
    labels = np.concatenate([labels, np.repeat(canaries, each)]).astype("int32")
    return np.concatenate([x, np.repeat(first, coins.size * each, axis=0)]), labels


class _CanaryModel(tf.keras.Model):
    """A model, and the coordinates of canaries; its inputs are `(x, numbers)`.

    A canary's output is a constant, with a gradient to its coordinate in the direction of a random
    vector. So its loss and its gradient are the same in all steps.
    """

    def __init__(self, base_model: Any, first: Any, num_canaries: int, watch: Any):
        # In float32, whatever the policy of the base model, which gets its inputs as they are.
        super().__init__(name=f"audited_{base_model.name}", dtype="float32", autocast=False)
        self.base_model = base_model
        outputs = base_model(tf.nest.map_structure(tf.constant, first), training=False)
        random = np.random.default_rng(0)
        self.anchors = tf.nest.map_structure(lambda t: t.numpy(), outputs)
        self.directions = [random.normal(size=t.shape) for t in tf.nest.flatten(outputs)]
        self.coordinates = self.add_weight(
            "canary_coordinates", [num_canaries], tf.float32, "zeros", trainable=True
        )
        self._watch = watch
        self((tf.nest.map_structure(tf.constant, first), tf.zeros([1], tf.int32)))

    def call(self, inputs: Any, training: Any = None) -> Any:
        x, numbers = inputs
        own = tf.gather(self.coordinates, tf.maximum(numbers - 1, 0))
        moved = _SCALE * (own - tf.stop_gradient(own))  # Zero, with a gradient.
        moved = tf.where(numbers > 0, moved, 0.0)

        def output(found: tf.Tensor, anchor: Any, direction: Any) -> tf.Tensor:
            shape = [-1] + [1] * (anchor.ndim - 1)
            canary = tf.reshape(moved, shape) * tf.constant(direction, tf.float32)
            canary = tf.cast(canary, found.dtype) + tf.constant(anchor, found.dtype)
            return tf.where(tf.reshape(numbers == _REAL, shape), found, canary)

        # Keras passes `training` on.
        return tf.nest.map_structure(
            output,
            self.base_model(x),
            self.anchors,
            tf.nest.pack_sequence_as(self.anchors, list(self.directions)),
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model, and watches its optimizer."""
        super().compile(*args, **kwargs)
        if isinstance(self.optimizer, PrivateOptimizerMixin):
            self._watch(self.optimizer)

    def canary_gradient(self, model: Any, target: Any) -> float:
        """Returns the gradient of a canary's loss along its direction.

        Args:
          model: The compiled model, this one or one around it.
          target: The canary's target.
        """

        def gradients() -> list:
            anchors = tf.nest.map_structure(tf.constant, self.anchors)
            with tf.GradientTape() as tape:
                tape.watch(tf.nest.flatten(anchors))
                loss = model.compiled_loss(tf.nest.map_structure(tf.constant, target), anchors)
            return tape.gradient(loss, tf.nest.flatten(anchors), unconnected_gradients="zero")

        strategy = tf.distribute.get_strategy()  # `compiled_loss` updates a metric, in replicas.
        found = strategy.experimental_local_results(strategy.run(tf.function(gradients)))[0]
        return float(
            sum(
                np.sum(np.asarray(g, "float64") * d)
                for g, d in zip(found, self.directions, strict=True)
            )
        )


class _CanaryCritic(tf.keras.Model):
    """A critic, and the coordinates of canaries; it gets `[x, one-hot class]`.

    Its score for a canary's example is zero, with a gradient to the canary's coordinate. For what
    is generated with a canary's class, the score is a constant.
    """

    def __init__(self, critic: Any, num_classes: int | None, first: Any, num_canaries: int):
        super().__init__(name=f"audited_{critic.name}")
        self.base_critic = critic
        self.num_classes = num_classes
        self.anchor = np.asarray(first)
        self.coordinates = self.add_weight(
            "canary_coordinates", [num_canaries], tf.float32, "zeros", trainable=True
        )

    def call(self, inputs: Any, training: Any = None) -> Any:
        x, classes = inputs
        count = self.num_classes or 1
        given = x if self.num_classes is None else [x, classes[:, :count]]
        scores = tf.cast(tf.reshape(self.base_critic(given, training=training), [-1]), tf.float32)
        own = tf.linalg.matvec(tf.cast(classes[:, count + 1 :], tf.float32), self.coordinates)
        is_canary = tf.reduce_all(
            x == tf.constant(self.anchor, x.dtype), axis=list(range(1, x.shape.rank))
        )
        moved = tf.where(is_canary, _SCALE * (own - tf.stop_gradient(own)), 0.0)
        return tf.where(tf.reduce_any(classes[:, :count] > 0, axis=1), scores, moved)


class _CanaryGAN(PrivateGAN):
    """A GAN with classes for canaries."""

    def __init__(self, gan: Any, first: Any, num_canaries: int, watch: Any):
        classes = gan.num_classes or 1
        noise = tf.keras.Input([gan.latent_dim])
        one_hot = tf.keras.Input([classes + 1 + num_canaries])
        given = noise if gan.num_classes is None else [noise, one_hot[:, :classes]]
        critic = _CanaryCritic(gan.critic, gan.num_classes, first, num_canaries)
        critic([tf.constant(first), tf.zeros([1, classes + 1 + num_canaries])])
        shares = gan.get_config()["label_probabilities"] or [1.0]
        super().__init__(
            tf.keras.Model([noise, one_hot], gan.generator(given)),
            critic,
            num_classes=classes + 1 + num_canaries,
            label_probabilities=[*shares, *[0.0] * (num_canaries + 1)],
            name=f"audited_{gan.name}",
            **gan._options,
        )
        self.base_model = gan
        self._watch = watch

    @property
    def coordinates(self) -> tf.Variable:
        """The coordinates of canaries."""
        return self.critic.coordinates

    def compile(self, critic_optimizer: Any, generator_optimizer: Any, **kwargs: Any) -> None:
        """Compiles the model, and watches the critic's optimizer."""
        super().compile(critic_optimizer, generator_optimizer, **kwargs)
        self._watch(critic_optimizer)

    def canary_gradient(self, model: Any, target: Any) -> float:
        """Returns the derivative of a canary's loss by its score, which is 0."""
        return -1.0 if self._options["loss"] == "wasserstein" else -0.5


class _Reading(tf.keras.callbacks.Callback):
    """Reads the noisy sums and the coordinates after each step."""

    def __init__(self, audit: CanaryAudit):
        super().__init__()
        self._audit = audit
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        audit, optimizer = self._audit, self.model.optimizer
        if optimizer is not audit._optimizer:
            raise ValueError(
                "The optimizer must be watched by the audit: `audit.model.compile(optimizer)`, or "
                "`audit.watch(optimizer)` before another model is compiled. Received: "
                f"{optimizer!r}."
            )
        sampling, users = optimizer.sampling, audit.privacy_unit
        unit = EXAMPLE if sampling is None else sampling.unit
        if unit != (EXAMPLE if users is None else USER):
            raise ValueError(
                "The optimizer's unit of privacy must be that of the canaries: examples, or users "
                "with `CanaryAudit(..., privacy_unit=...)` and batches with "
                f"`privacy_unit=audit.privacy_unit`. Received: {optimizer!r}, whose unit is the "
                f"{unit}."
            )
        size = len(tf.nest.flatten(audit.data)[0]) if users is None else int(users.max()) + 1
        if optimizer.dataset_size not in (None, size):
            raise error(
                "data",
                f"`audit.data`, of {size} {'rows' if users is None else 'users'}",
                optimizer.dataset_size,
            )
        if sampling is not None and sampling.redraws_sets:
            raise error(
                "optimizer", "one whose sampling has no sets that are drawn anew", optimizer
            )
        if sampling is not None:
            audit._recording.cycle_length = sampling.cycle_length
        audit._recording.signs = optimizer.releases_signs
        if optimizer.noise_correlation is not None:
            audit._recording.bands = optimizer.noise_correlation.coefficients
            audit._recording.renewal = optimizer.noise_correlation.renewal
        if isinstance(audit.model, PrivateGAN):
            audit._recording.weight_clip = audit.model._options["weight_clip"]
        gradient = audit.model.canary_gradient(self.model, audit._first[1])
        clip = optimizer.current_l2_norm_clip
        if not np.isfinite(gradient) or abs(gradient) * _SCALE < 10 * min(clip, 1e10):
            raise ValueError(
                "The loss of the first example must have a gradient that can be clipped, from "
                f"which canaries' gradients are made. Received one of length {gradient:.3g}, with "
                f"l2_norm_clip={clip:g}: put another example first."
            )
        audit._recording.sign = float(np.sign(gradient))
        steps = int(optimizer.iterations.numpy())
        if not audit._recording.sums:
            self._steps = audit._recording.first_step = steps
        self._before()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = int(self.model.optimizer.iterations.numpy())
        if steps == self._steps:
            return  # A part of a logical batch.
        if steps != self._steps + 1:
            raise ValueError(
                "The audit must see every step: `steps_per_execution` must be 1, and the audit's "
                f"callback must be in each call of `fit`. Received step {steps} after "
                f"{self._steps}."
            )
        self._steps = steps
        audit = self._audit
        audit._recording.sums.append(audit._released.numpy())
        audit._recording.coordinates.append(audit.model.coordinates.numpy())
        optimizer, (clip, stddev) = self.model.optimizer, self._used
        source, sequence = audit._draw.numpy().tolist()
        if optimizer.compression is not None and not optimizer.compression.has_masks:
            audit._recording.kept.append(audit._kept.numpy())
        audit._recording.settings.append(
            StepSetting(
                clip, stddev, learning_rate(optimizer), self._trained(steps - 1), source, sequence
            )
        )
        self._before()

    def _trained(self, step: int) -> Any:
        """Returns which coordinates a step trains: drawn anew, from public numbers alone."""
        audit, compression = self._audit, self.model.optimizer.compression
        if compression is None or not compression.has_masks:
            return True
        masks = compression.masks(audit._variables, tf.constant(step, tf.int64))
        return audit._own(masks, audit._variables).numpy()

    def _before(self) -> None:
        """Notes what the next step will use: it may change an adaptive clip."""
        optimizer = self.model.optimizer
        self._used = optimizer.current_l2_norm_clip, optimizer.noise_stddev
