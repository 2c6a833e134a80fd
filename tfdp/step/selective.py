"""Selective update and release: the part that all DPSUR optimizers share."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp.accounting.observability import (
    CONDITIONAL,
    OBSERVABILITY,
    PER_ATTEMPT,
    check_observability,
)
from tfdp.accounting.sampling import NONE
from tfdp.accounting.selective_release import acceptance_bounds, default_max_attempts
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.validation import error, is_integer, is_number
from tfdp.clipping.engine import ClippedSum
from tfdp.data.draw_record import Use
from tfdp.step import replicas
from tfdp.step.arguments import PRIVATE_ARGUMENTS
from tfdp.step.noisy_acceptance import ValidationLoss, ValidationTest
from tfdp.step.private_step import PrivateStep
from tfdp.step.record import record_table

_ARGUMENTS = """validation_batch_size: Expected number of examples B_v in the Poisson
        batch of the training set on which an update is tested.
      validation_noise_multiplier: sigma_v: standard deviation of the test's noise, over the range
        2 C_v of what it is added to.
      validation_clip: C_v: the difference of mean losses is clipped to [-C_v, C_v].
      threshold: beta: an update is kept if the noisy difference is below beta * C_v.
      max_attempts: Attempts per accepted update after which training ends with an error. The
        probability of that is part of delta; by default it is at most 1e-30.
      selective_release: Who sees what. "conditional": rejected attempts, their number and the time
        they took are never released. "per_attempt": they may be, every attempt is paid for."""

_MOST_ATTEMPTS = 10**6

_DOC = """`{base}` with selective update and release (DPSUR).

    Each attempt is a step of `{base}`, from the last accepted state w to w'. It is tested on a
    fresh Poisson batch of the training set, by the mean loss J of that batch,

        clip(J(w') - J(w), -C_v, C_v) + N(0, (2 C_v sigma_v)^2) < beta C_v

    with C_v = `validation_clip`, sigma_v = `validation_noise_multiplier` and beta = `threshold`,
    and kept, or rolled back without a trace: variables, slots, iterations and layer states. The
    optimizer works in a `{part}.SelectiveModel`, which makes the attempts. The loss is any of
    Keras, also a mean.

    Formal guarantee: T accepted updates are T adaptively composed
    `tfdp.accounting.SelectiveReleaseDpEvent`s, under zero-out; `ledger` counts them. What
    is not released with `selective_release="conditional"`: rejected attempts, how many they were,
    and the time they took. (The epsilon of the paper's Theorem 5.6 is smaller, and is not an
    upper bound: see docs/selective_release.md.)

    Args:
      {private_arguments}
        Here `gradient_accumulation_steps` must be 1.
      {selective_arguments}
      **kwargs: As for `{base}`.

    Raises:
      ValueError: An argument is out of its range.
      RuntimeError: While training: the model is not a `SelectiveModel`.

    Example:
      >>> import {imports}
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = {part}.SelectiveModel({keras}.Sequential([{keras}.layers.Dense(2)]))
      >>> model.compile(
      ...     optimizer={part}.{name}(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=2.0,
      ...         validation_batch_size=50,
      ...         validation_noise_multiplier=1.3,
      ...         learning_rate={rate},
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss={keras}.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, steps_per_epoch=5, verbose=0)  # five accepted updates
      >>> model.optimizer.ledger.steps
      5

    References:
      - Fu et al., DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using
        Selective Update and Release, Algorithm 2. (It divides by the realised batch size, which
        is private.)
    """


def documented(part: str, keras: str, imports: str, rate: float) -> Callable[[type], type]:
    """Returns a decorator that gives a DPSUR optimizer its docstring.

    Args:
      part: Name of the part of tfdp that has it.
      keras: Name of its Keras in the example.
      imports: What the example imports.
      rate: The learning rate of the example.
    """

    def add_docstring(cls: type) -> type:
        cls.__doc__ = _DOC.format(
            name=cls.__name__,
            base=cls.__mro__[2].__name__,
            part=part,
            keras=keras,
            imports=imports,
            rate=rate,
            private_arguments=PRIVATE_ARGUMENTS,
            selective_arguments=_ARGUMENTS,
        )
        return cls

    return add_docstring


if TYPE_CHECKING:

    class _PrivateOptimizer(PrivateStep):
        """Private optimizer of any Keras, which the mixin expects after it."""

        def __init__(self, *args: Any, **kwargs: Any): ...

        def get_config(self) -> dict[str, Any]: ...

else:
    _PrivateOptimizer = PrivateStep


class SelectiveUpdateMixin(_PrivateOptimizer):
    """Mixin that makes every step an attempt, which is tested and kept or rolled back.

    A DPSUR optimizer of any Keras is a class of this mixin and a private optimizer.
    `SelectiveModel` makes and rolls back the attempts. This class holds the parameters, the noise
    and the ledger. The docstrings of the DPSUR optimizers describe the arguments.
    """

    _test: ValidationTest
    _selective_release: str
    _max_attempts: int

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        expected_batch_size: int | None = None,
        *,
        validation_batch_size: int,
        validation_noise_multiplier: float,
        validation_clip: float = 0.001,
        threshold: float = -1.0,
        max_attempts: int | None = None,
        selective_release: str = CONDITIONAL,
        noise_seed: int | None = None,
        **kwargs: Any,
    ):
        if not is_number(noise_multiplier):
            raise error(
                "noise_multiplier",
                "a number with selective release: the steps of a schedule are counted before it is "
                "known whether they are released",
                noise_multiplier,
            )
        if kwargs.get("sparse_embeddings") is not None:
            raise error(
                "sparse_embeddings",
                "None with selective release, which copies all weights for each attempt",
                kwargs["sparse_embeddings"],
            )
        test = ValidationTest(
            validation_batch_size,
            validation_noise_multiplier,
            validation_clip,
            threshold,
            secure_noise=bool(kwargs.get("secure_noise", False)),
        )
        observed = check_observability(selective_release)
        # The base class needs them, and before it Keras 3 lets no attribute be set.
        vars(self).update(_test=test, _selective_release=observed)
        vars(self).update(_max_attempts=self._check_max_attempts(max_attempts))
        super().__init__(
            l2_norm_clip, noise_multiplier, expected_batch_size, noise_seed=noise_seed, **kwargs
        )
        if self._gradient_accumulation_steps > 1:
            raise error(
                "gradient_accumulation_steps",
                "1: an attempt is one batch, which the clipping engine works on in parts by itself",
                self._gradient_accumulation_steps,
            )
        if self._sampled is not None and self._sampled.cycle_length > 1:
            raise error("cycle_length", "1 for selective release", self._sampled.cycle_length)
        if self._dataset_size is not None and self._dataset_size < validation_batch_size:
            raise error(
                "validation_batch_size",
                f"at most the number of training examples, {self._dataset_size}",
                validation_batch_size,
            )
        self._test_noise = KeyStream(noise_seed, "test_noise")
        self._attempt: tf.Tensor | None = None

    # What it is.

    @property
    def validation_batch_size(self) -> int:
        """Expected number of examples in a validation batch."""
        return self._test.batch_size

    @property
    def validation_noise_multiplier(self) -> float:
        """Standard deviation of the test's noise, over the range of the clipped difference."""
        return self._test.noise_multiplier

    @property
    def validation_clip(self) -> float:
        """Largest absolute difference of losses that the test sees."""
        return self._test.clip

    @property
    def threshold(self) -> float:
        """The noisy difference below which an update is kept, in units of `validation_clip`."""
        return self._test.threshold

    @property
    def max_attempts(self) -> int:
        """Attempts in a row that may be rejected."""
        return self._max_attempts

    @property
    def selective_release(self) -> str:
        """The observable part for the accounting: "conditional" or "per_attempt"."""
        return self._selective_release

    def show_attempts(self) -> None:
        """Notes in the ledger that training shows the number of attempts."""
        self._released.note_shown()

    def note_callbacks(self, callbacks: list) -> None:
        """Does nothing: a `SelectiveModel` logs no losses and metrics of the training data."""

    def _check_replicas(self) -> None:
        if replicas.count() > 1:
            raise ValueError(
                f"{type(self).__name__} must run on one replica: each update is tested on "
                "one batch of the whole data set. Received a distribution strategy of "
                f"{replicas.count()} replicas."
            )
        super()._check_replicas()

    # One attempt.

    @contextlib.contextmanager
    def attempt(self, position: tf.Tensor) -> Iterator[None]:
        """Allows a step meanwhile; `SelectiveModel` rolls back what it must.

        Args:
          position: Number of the attempt, int64, by which a test's `noise_seed` counts.
        """
        self._attempt = position
        try:
            yield
        finally:
            self._attempt = None

    def accepts(
        self, old: ValidationLoss, new: ValidationLoss, mask: tf.Tensor, position: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether to keep an update, a scalar bool tensor: see `ValidationTest.accepts`."""
        return self._test.accepts(old, new, mask, self._test_noise.next_key(position))

    def charge(self) -> None:
        """Counts a release that ends without an accepted update, in the graph being built."""
        self._released.add(tf.constant(True))

    def releases(self) -> tf.Tensor:
        """Returns the number of releases so far, int64, in the graph being built."""
        return self._released.total()

    def kept_variables(self) -> list[tf.Variable]:
        """Returns the variables that are never rolled back, so that no noise is used twice."""
        kept = [*self._noise.variables, *self._test_noise.variables]
        if self._selective_release == PER_ATTEMPT:
            kept += self._released.counters
        return kept

    def _take_step(self, loss: Any, var_list: Any, name: str | None = None) -> Any:
        """Makes the update that will be tested; see the base class.

        Raises:
          RuntimeError: No `SelectiveModel` is there to test it.
        """
        self._check_replicas()
        if self._attempt is None:
            model = f"{self._public_name().rpartition('.')[0]}.SelectiveModel"
            raise RuntimeError(
                f"{type(self).__name__} must be used in a `{model}`, which tests every update: "
                f"`model = {model}(your_model); model.compile(optimizer, ...)`."
            )
        return super()._take_step(loss, var_list, name)

    def _use_of(self, clipped: ClippedSum, lock: tf.Tensor | None) -> Use:
        """Returns the batch is a draw of the attempt's own, made in the same graph."""
        padded = self._sampled is not None and self._sampled.padding != NONE
        return Use.unrecorded(not padded or clipped.mask is not None)

    def _position(self) -> tf.Tensor:
        return super()._position() if self._attempt is None else self._attempt

    def _kind(self) -> int:
        return record_table.SELECTIVE

    def _moves_by_signs(self) -> bool:
        return False  # A candidate counts as a Gaussian mechanism.

    def _check_max_attempts(self, max_attempts: int | None) -> int:
        if max_attempts is None:
            chance, _ = acceptance_bounds(self.validation_noise_multiplier, self.threshold)
            most = default_max_attempts(chance) if chance > 0 else _MOST_ATTEMPTS + 1
            if most > _MOST_ATTEMPTS:
                raise ValueError(
                    "Arguments `threshold` and `validation_noise_multiplier` must leave a fair "
                    "chance that a useless update is accepted, or `max_attempts` must be given. "
                    f"Received: threshold={self.threshold}, validation_noise_multiplier="
                    f"{self.validation_noise_multiplier}: a probability of {chance:.2g}."
                )
            return most
        if not is_integer(max_attempts) or not 1 <= max_attempts < 2**31:
            raise error("max_attempts", "an integer of at least 1, or None", max_attempts)
        return int(max_attempts)

    def _privacy_parameters(self) -> dict[str, float]:
        return {
            **super()._privacy_parameters(),
            "validation_batch_size": float(self.validation_batch_size),
            "validation_noise_multiplier": float(self.validation_noise_multiplier),
            "threshold": float(self.threshold),
            "max_attempts": float(self.max_attempts),
            "selective_release": float(OBSERVABILITY.index(self.selective_release)),
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that construct this optimizer."""
        return {
            **super().get_config(),
            "validation_batch_size": self.validation_batch_size,
            "validation_noise_multiplier": self.validation_noise_multiplier,
            "validation_clip": self.validation_clip,
            "threshold": self.threshold,
            "max_attempts": self.max_attempts,
            "selective_release": self.selective_release,
        }
