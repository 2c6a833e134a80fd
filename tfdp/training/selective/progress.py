"""Progress of a training, in which only accepted updates may be seen."""

from typing import Any

import tensorflow as tf

from tfdp.accounting.observability import CONDITIONAL, check_observability


class Progress:
    """Lines of text for the epochs, without times, which would tell of attempts.

    Args:
      steps: Steps per epoch.
      epochs: Number of the last epoch.
      selective_release: Meaning of a step: "conditional": an accepted update, or "per_attempt".
    """

    def __init__(self, steps: int, epochs: int, selective_release: str):
        unit = (
            "accepted updates"
            if check_observability(selective_release) == CONDITIONAL
            else "attempts"
        )
        self._epochs, self._what = epochs, f"{steps} {unit}"

    def print_line(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the line of an epoch that has ended."""
        values = "".join(f" - {name}: {value:.4g}" for name, value in (logs or {}).items())
        print(f"Epoch {epoch + 1}/{self._epochs}: {self._what}{values}", flush=True)


class TooManyAttemptsError(RuntimeError):
    """Error of a training that rejected as many attempts in a row as are allowed."""


class AttemptsCap:
    """Note that the cap on attempts was reached, which ends training, as XLA drops assertions.

    The release that this is has been counted in the ledger, with its part of delta.
    """

    def __init__(self) -> None:
        self._reached = tf.Variable(False, trainable=False)

    def note(self) -> None:
        """Notes that it was reached, in the graph being built."""
        self._reached.assign(True)

    def check(self, max_attempts: int) -> None:
        """Raises the error, once, if the cap was reached.

        Args:
          max_attempts: The cap, for the message.
        """
        if self._reached.numpy():
            self._reached.assign(False)
            raise TooManyAttemptsError(
                f"{max_attempts=} attempts in a row were rejected. Delta covers the probability of "
                "this. Is the learning rate too large?"
            )


class EpochMeans:
    """Means over an epoch that are not metrics of the model, which Keras would evaluate.

    Args:
      keras: The Keras whose metrics they are.
      *names: Names of the means.
    """

    def __init__(self, keras: Any, *names: str):
        self._metrics = {name: keras.metrics.Mean(name) for name in names}

    def mean(self, name: str, value: tf.Tensor) -> tf.Tensor:
        """Adds a value, in the graph being built; returns the mean so far."""
        self._metrics[name].update_state(tf.cast(value, tf.float32))
        return self._metrics[name].result()

    def reset(self) -> None:
        """Begins anew."""
        for metric in self._metrics.values():
            metric.reset_state()
