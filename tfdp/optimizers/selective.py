"""Selective update and release: the part that all DPSUR optimizers share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp._random.key_streams import KeyStream
from tfdp._validation import error, is_integer, is_number
from tfdp.accounting.sampling import NONE
from tfdp.accounting.selective_release import (
    CONDITIONAL,
    OBSERVABILITY,
    PER_ATTEMPT,
    acceptance_bounds,
    check_observability,
    default_max_attempts,
)
from tfdp.clipping import ClippedSum
from tfdp.data.draw_record import Use
from tfdp.optimizers import record_table, replicas
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.selection_test import ValidationLoss, ValidationTest

SELECTIVE_ARGUMENTS = """validation_batch_size: Expected number of examples B_v in the Poisson
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


class SelectiveUpdateMixin(PrivateOptimizerMixin):
    """Mixin that makes every step an attempt, which is tested and kept or rolled back.

    `tfdp.SelectiveModel` makes and rolls back the attempts. This class holds the parameters, the
    noise and the ledger. The docstrings of the DPSUR optimizers describe the arguments.
    """

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
        self._test = ValidationTest(
            validation_batch_size,
            validation_noise_multiplier,
            validation_clip,
            threshold,
            secure_noise=bool(kwargs.get("secure_noise", False)),
        )
        self._selective_release = check_observability(selective_release)
        self._least_acceptance, _ = acceptance_bounds(validation_noise_multiplier, threshold)
        self._max_attempts = self._check_max_attempts(max_attempts)
        super().__init__(
            l2_norm_clip, noise_multiplier, expected_batch_size, noise_seed=noise_seed, **kwargs
        )
        if self._gradient_accumulation_steps > 1:
            raise error(
                "gradient_accumulation_steps",
                "1: an attempt is one batch, which the clipping engine works on in parts by itself",
                self._gradient_accumulation_steps,
            )
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
        self._released.show_attempts()

    def _check_replicas(self) -> None:
        super()._check_replicas()
        if replicas.count() > 1:
            raise ValueError(
                f"{type(self).__name__} must run on one replica: each update is tested on "
                "one batch of the whole data set. Received a distribution strategy of "
                f"{replicas.count()} replicas."
            )

    # One attempt.

    @contextlib.contextmanager
    def attempt(self, position: tf.Tensor) -> Iterator[None]:
        """Allows `minimize` meanwhile; `SelectiveModel` rolls back what it must.

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

    def minimize(self, *args: Any, **kwargs: Any) -> tf.Operation:
        """Makes the update that will be tested; see the base class.

        Raises:
          RuntimeError: No `SelectiveModel` is there to test it.
        """
        self._check_replicas()
        if self._attempt is None:
            raise RuntimeError(
                f"{type(self).__name__} must be used in a `tfdp.SelectiveModel`, which tests every "
                "update: `model = tfdp.SelectiveModel(your_model); model.compile(optimizer, ...)`."
            )
        return super().minimize(*args, **kwargs)

    def _use_of(self, clipped: ClippedSum) -> tuple[Use, None]:
        """Returns the batch is a draw of the attempt's own, made in the same graph."""
        padded = self._sampled is not None and self._sampled.padding != NONE
        zero = tf.constant(0, tf.int64)
        return Use(tf.constant(not padded or clipped.mask is not None), zero, zero), None

    def _position(self) -> tf.Tensor:
        return super()._position() if self._attempt is None else self._attempt

    def _kind(self) -> int:
        return record_table.SELECTIVE

    def _check_max_attempts(self, max_attempts: int | None) -> int:
        if max_attempts is None:
            chance = self._least_acceptance
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
