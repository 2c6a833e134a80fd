"""Progress display of training in which only accepted updates may be shown."""

from typing import Any

import tensorflow as tf

from tfdp.accounting.selective_release import CONDITIONAL, check_observability


class Progress(tf.keras.callbacks.Callback):
    """Callback that prints a line per epoch, without times, which would tell of attempts.

    Args:
      steps: Steps per epoch.
      selective_release: Meaning of a step: "conditional": an accepted update, or "per_attempt".
    """

    def __init__(self, steps: int, selective_release: str):
        super().__init__()
        unit = (
            "accepted updates"
            if check_observability(selective_release) == CONDITIONAL
            else "attempts"
        )
        self._what = f"{steps} {unit}"

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the line."""
        values = "".join(f" - {name}: {value:.4g}" for name, value in (logs or {}).items())
        print(f"Epoch {epoch + 1}/{self.params['epochs']}: {self._what}{values}", flush=True)


class TooManyAttemptsError(RuntimeError):
    """Error of a training that rejected as many attempts in a row as are allowed."""


class AttemptsCap(tf.keras.callbacks.Callback):
    """Callback that ends training at the cap on attempts, as XLA drops assertions.

    The release that this is has been counted in the ledger, with its part of delta.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached = tf.Variable(False, trainable=False)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises the error."""
        if self.reached.numpy():
            self.reached.assign(False)
            raise TooManyAttemptsError(
                f"max_attempts={self.model.optimizer.max_attempts} attempts in a row were "
                "rejected. Delta covers the probability of this. Is the learning rate too large?"
            )


class EpochMeans:
    """Means over an epoch that are not metrics of the model, which Keras would evaluate.

    Args:
      *names: Names of the means.
    """

    def __init__(self, *names: str):
        self._metrics = {name: tf.keras.metrics.Mean(name) for name in names}

    def mean(self, name: str, value: tf.Tensor) -> tf.Tensor:
        """Adds a value, in the graph being built; returns the mean so far."""
        self._metrics[name].update_state(tf.cast(value, tf.float32))
        return self._metrics[name].result()

    def reset_callback(self) -> tf.keras.callbacks.Callback:
        """Returns a callback that begins anew in each epoch."""

        def reset(epoch: int, logs: Any = None) -> None:
            for metric in self._metrics.values():
                metric.reset_state()

        return tf.keras.callbacks.LambdaCallback(on_epoch_begin=reset)
