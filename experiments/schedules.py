"""Learning rates over the steps of a run."""

from typing import Any

import tensorflow as tf

import tfdp  # noqa: F401  # Makes `tf.keras` Keras 2.

SCHEDULES_OF_KERAS = ("constant", "linear")
SCHEDULES = (*SCHEDULES_OF_KERAS, "cooldown")


@tf.keras.utils.register_keras_serializable(package="tfdp_experiments")
class Cooldown(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A constant learning rate that ends with a linear descent to zero.

    The noise of the last steps is averaged as with a rate that falls from the beginning, but most
    steps keep their full length: private runs are short, and far from converged at their end.

    Args:
      learning_rate: Rate of the first steps, positive.
      steps: Number of steps, at least 1; the rate is zero after them.
      fraction: Part of the steps in which the rate falls, in (0, 1].

    References:
      - Haegele et al., 2024, Scaling Laws and Compute-Optimal Training Beyond Fixed Training
        Durations (https://arxiv.org/abs/2405.18392).
    """

    def __init__(self, learning_rate: float, steps: int, fraction: float = 0.3):
        super().__init__()
        self.learning_rate = learning_rate
        self.steps = steps
        self.fraction = fraction

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate of a step; the first is 0."""
        left = 1.0 - tf.cast(step, tf.float32) / self.steps
        return self.learning_rate * tf.clip_by_value(left / self.fraction, 0.0, 1.0)

    def get_config(self) -> dict:
        """Returns the arguments that make this schedule again."""
        return {
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "fraction": self.fraction,
        }


def make_schedule(name: str, learning_rate: float, steps: int, keras: Any = tf.keras) -> Any:
    """Returns the learning rate of an optimizer that makes `steps` steps.

    Args:
      name: One of `SCHEDULES`: "constant"; "linear", down to zero; "cooldown", see `Cooldown`.
      learning_rate: The highest rate.
      steps: Number of steps.
      keras: The package, `tf.keras` or `keras`, which lacks `Cooldown`.
    """
    if name == "constant":
        return learning_rate
    if name == "cooldown":
        return Cooldown(learning_rate, steps)
    if name != "linear":
        raise ValueError(f"Argument `name` must be one of {SCHEDULES}. Received: {name=}.")
    return keras.optimizers.schedules.PolynomialDecay(learning_rate, steps, end_learning_rate=0.0)
