"""Training of a Keras model by selective update and release, for every Keras."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tfdp.accounting.observability import CONDITIONAL, PER_ATTEMPT
from tfdp.accounting.sampling import EXAMPLE, FULL
from tfdp.base.tf.autotuning import without_autotuning
from tfdp.base.validation import error, positive_integer
from tfdp.clipping import step_check
from tfdp.data.elements import has_labels
from tfdp.data.source import PoissonSource
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training.selective.attempts import Attempts
from tfdp.training.selective.exclusive import exclusive_training
from tfdp.training.selective.front_end import FrontEnd
from tfdp.training.selective.progress import AttemptsCap, EpochMeans, Progress

if TYPE_CHECKING:
    from tensorflow.keras import Model as _Model
else:
    _Model = object

# What a base model would be trained by, if the model around it were not.
_STEPS = ("train_step", "test_step", "compute_loss")

# Attempts are numbered by what has been released before, and by how many came since.
_ATTEMPTS_PER_RELEASE = 2**32


class SelectiveTraining(_Model):
    """Base class of the models `SelectiveModel` of every Keras, which are its `Model`s, too.

    The docstrings of these describe the arguments.
    """

    _front_end: ClassVar[FrontEnd]

    def __init__(self, base_model: Any, non_private_diagnostics: bool = False, **kwargs: Any):
        model_class = self._front_end.package.Model
        if not isinstance(base_model, model_class):
            raise TypeError(
                f"Argument `base_model` must be a model of {self._front_end.title}. Received: "
                f"base_model={base_model!r}."
            )
        own = [s for s in _STEPS if getattr(type(base_model), s) is not getattr(model_class, s)]
        if own:
            raise ValueError(
                "Argument `base_model` must be trained by the compiled loss. Received a model with "
                f"a `{own[0]}` of its own, which would not be used: {base_model!r}."
            )
        if not isinstance(non_private_diagnostics, bool):
            raise error("non_private_diagnostics", "True or False", non_private_diagnostics)
        kwargs.setdefault("name", f"selective_{base_model.name}")
        super().__init__(**kwargs)
        self.base_model = base_model
        self.built = base_model.built
        self._non_private_diagnostics = non_private_diagnostics
        self._attempts: Any = None
        self.train_function: Any = None
        self._cap = AttemptsCap()
        self._shown = EpochMeans(self._front_end.package, "non_private_attempts", "accepted")

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the base model's output; Keras passes `training` to models that take it."""
        return self.base_model(inputs)

    def fit(
        self,
        x: Any = None,
        y: None = None,
        *,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_data: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Trains until `steps_per_epoch` updates have been accepted in each epoch.

        Args:
          x: Result of `tfdp.data.poisson_batches`.
          y: Nothing: targets are in `x`.
          epochs: See Keras.
          verbose: 0: silent; otherwise a line per epoch, without times.
          callbacks: See Keras.
          validation_data: See Keras: evaluated after each epoch. It is not the validation batch
            of the attempts, which comes from the training set.
          initial_epoch: See Keras.
          steps_per_epoch: Accepted updates per epoch (attempts, if these are released); by default
            the batches per epoch of `x`.
          validation_steps: See Keras.
          validation_batch_size: See Keras.
          validation_freq: See Keras.

        Returns:
          Keras's `History`.

        Raises:
          ValueError: The optimizer is not one of the DPSUR optimizers; or `x` is something else, or
            not sampled as the optimizer says; or `y` is given.
          RuntimeError: Another thread trains the same variables, or with the same optimizer.
          tfdp.TooManyAttemptsError: `max_attempts` attempts in a row were rejected.
        """
        callbacks = tf.nest.flatten(callbacks or [])
        if y is not None:
            raise ValueError(
                "Argument `y` must be None, and `x` what `tfdp.data.poisson_batches((x, y), ...)` "
                f"returned. Received: y of type {type(y).__name__}."
            )
        self._check(x, callbacks)
        steps = len(x) if steps_per_epoch is None else steps_per_epoch
        positive_integer("steps_per_epoch", steps)
        with exclusive_training([self, self.optimizer]):
            self._prepare(x.source, x.sampling.padding)
            with exclusive_training(self.variables), self._failures_counted():
                return super().fit(
                    without_autotuning(tf.data.Dataset.range(steps)),
                    epochs=epochs,
                    verbose=0,
                    callbacks=self._callback_list(callbacks, epochs, steps, bool(verbose)),
                    validation_data=validation_data,
                    shuffle=False,
                    initial_epoch=initial_epoch,
                    validation_steps=validation_steps,
                    validation_batch_size=validation_batch_size,
                    validation_freq=validation_freq,
                )

    @contextlib.contextmanager
    def _failures_counted(self) -> Iterator[None]:
        """Counts a release where an operation fails: that an attempt failed is seen, too."""
        try:
            yield
        except tf.errors.OpError:
            tf.function(self.optimizer.charge)()
            raise

    def _prepare(self, source: PoissonSource, padding: str) -> None:
        """Makes what the training step needs."""
        # `compile` drops the function that was traced; ours hold the optimizer and the data.
        if self.train_function is None or self._attempts.data is not source:
            self._attempts = Attempts(self._front_end, self, source, padding)
            self.train_function = None
            self._attempts.traced_step = tf.function(self._step, autograph=False)
        self.optimizer.build(self.trainable_variables)
        self._attempts.prepare()
        if self._non_private_diagnostics:
            self.optimizer.show_attempts()

    def _callback_list(self, given: list, epochs: int, steps: int, verbose: bool) -> Any:
        callbacks = self._front_end.package.callbacks

        def check_cap(batch: int, logs: Any = None) -> None:
            self._cap.check(self.optimizer.max_attempts)

        def reset_means(epoch: int, logs: Any = None) -> None:
            self._shown.reset()

        own = callbacks.LambdaCallback(on_epoch_begin=reset_means, on_train_batch_end=check_cap)
        last = []
        if verbose:
            progress = Progress(steps, epochs, self.optimizer.selective_release)
            last = [callbacks.LambdaCallback(on_epoch_end=progress.print_line)]
        made = callbacks.CallbackList(
            [own, *given, *last],
            add_history=True,
            model=self,
            verbose=0,
            epochs=epochs,
            steps=steps,
        )
        made._check_timing = False  # Keras 2 logs how long batches took.
        return made

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: every attempt draws batches of its own."""
        raise NotImplementedError("SelectiveModel trains with `fit`: attempts draw their batches.")

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Attempts until one is accepted; or one attempt, if attempts are released."""
        if self._attempts is None:
            raise ValueError("SelectiveModel must be trained with `fit`, on `poisson_batches`.")
        # With `run_eagerly`, too, in a graph: it shows what belongs to which example.
        return self._attempts.traced_step() if tf.executing_eagerly() else self._step()

    def _step(self) -> dict[str, tf.Tensor]:
        make_attempt = self._attempts.make
        optimizer = self.optimizer
        optimizer.build(self.trainable_variables)
        first = optimizer.releases() * _ATTEMPTS_PER_RELEASE
        most = optimizer.max_attempts if optimizer.selective_release == CONDITIONAL else 1
        attempts, accepted = tf.while_loop(
            lambda i, accepted: tf.logical_and(i < most, tf.logical_not(accepted)),
            lambda i, accepted: (i + 1, make_attempt(first + i)),
            (tf.constant(0, tf.int64), tf.constant(False)),
        )
        logs = {"accepted_updates": tf.cast(optimizer.iterations, tf.int64)}
        if optimizer.selective_release == PER_ATTEMPT:
            logs["accepted"] = self._shown.mean("accepted", accepted)
        else:
            with step_check.own_operations():
                tf.cond(accepted, lambda: None, self._give_up)
        if self._non_private_diagnostics:
            logs["non_private_attempts"] = self._shown.mean("non_private_attempts", attempts)
        return logs

    def _give_up(self) -> None:
        # That an accepted update is missing is seen, too.
        self.optimizer.charge()
        self._cap.note()

    def _check(self, batches: Any, callbacks: list) -> None:
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(optimizer, SelectiveUpdateMixin):
            raise ValueError(
                f"SelectiveModel must be compiled with {self._front_end.part}.DPSURSGD, DPSURAdam, "
                f"DPSURSignSGD or DPSURSignAdam. Received: {optimizer=}. (Of the policy "
                "mixed_float16, too, which puts a LossScaleOptimizer around it: use "
                "mixed_bfloat16.)"
            )
        replicas = self.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "SelectiveModel must be trained on one replica: each update is tested on one batch "
                f"of the whole data set. Received a distribution strategy of {replicas} replicas."
            )
        known = self._front_end.package.callbacks
        watching = [c for c in callbacks if isinstance(c, (known.ProgbarLogger, known.TensorBoard))]
        if watching and optimizer.selective_release == CONDITIONAL:
            raise ValueError(
                "Argument `callbacks` must have no TensorBoard and no ProgbarLogger, which show "
                f"how long attempts took. Received a {type(watching[0]).__name__}, with "
                "selective_release='conditional'."
            )
        sampling: Any = getattr(batches, "sampling", None)
        if not isinstance(getattr(batches, "source", None), PoissonSource):
            raise ValueError(
                "Argument `x` must be what `tfdp.data.poisson_batches` returned. Received: "
                f"{type(batches).__name__}."
            )
        if not has_labels(batches.source.element_spec):
            raise ValueError(
                "Argument `x` must hold examples with labels, (x, y): an update is tested by the "
                f"compiled loss. Received batches of {batches.element_spec}."
            )
        if sampling.rows_per_example > 1 or sampling.unit != EXAMPLE:
            raise ValueError(
                "Argument `x` must hold one row for each example, without `privacy_unit` and "
                f"`augmentations`: the test clips the losses of rows. Received: {sampling}."
            )
        padding = None if optimizer.sampling is None else optimizer.sampling.padding
        if optimizer.secure_noise and optimizer.noise_stddev > 0:
            padding = FULL  # See `check_secure_noise`.
        for name, own in (
            ("dataset_size", optimizer.dataset_size),
            ("expected_batch_size", optimizer.expected_batch_size),
            ("gradient_accumulation_steps", 1),
            ("padding", padding),
        ):
            if own is not None and getattr(sampling, name) != own:
                raise ValueError(
                    f"Argument `x` must be sampled with {name}={own}, as the optimizer says. "
                    f"Received: {name}={getattr(sampling, name)}."
                )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that construct this model."""
        return {
            "name": self.name,
            "base_model": self._front_end.package.layers.serialize(self.base_model),
            "non_private_diagnostics": self._non_private_diagnostics,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "SelectiveTraining":
        """Returns the model that a config of `get_config` describes."""
        base_model = cls._front_end.package.layers.deserialize(config["base_model"], custom_objects)
        return cls(**{**config, "base_model": base_model})
