"""What training shows of itself while accepted updates are all that may be shown."""

from typing import Any

import tensorflow as tf

from tfdp.accounting.selective_release import CONDITIONAL


class Progress(tf.keras.callbacks.Callback):
    """Prints a line per epoch, without times: how long attempts took says how many they were.

    Args:
      steps: Steps per epoch.
      selective_release: What a step is: "conditional": an accepted update, or "per_attempt".
    """

    def __init__(self, steps: int, selective_release: str):
        super().__init__()
        unit = "accepted updates" if selective_release == CONDITIONAL else "attempts"
        self._what = f"{steps} {unit}"

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Prints the line."""
        values = "".join(f" - {name}: {value:.4g}" for name, value in (logs or {}).items())
        print(f"Epoch {epoch + 1}/{self.params['epochs']}: {self._what}{values}", flush=True)


class EpochMeans:
    """Means over an epoch that are no metrics of the model, which Keras would evaluate.

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
        """A callback that begins anew in each epoch."""

        def reset(epoch: int, logs: Any = None) -> None:
            for metric in self._metrics.values():
                metric.reset_state()

        return tf.keras.callbacks.LambdaCallback(on_epoch_begin=reset)
