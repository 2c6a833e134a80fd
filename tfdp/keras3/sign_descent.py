"""Optimizers of Keras 3 that move by signs. Private by `DPSignSGD` and `DPSignAdam`."""

from typing import Any

import keras
from keras import ops


class SignSGD(keras.optimizers.SGD):
    """Sign descent; with momentum Signum, the sign of the velocity.

    `tfdp.DPSignSGD` gives the formulas. The arguments are those of `keras.optimizers.SGD`.
    """

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves each coordinate by the learning rate, or not at all where the sign is zero."""
        direction = gradient = ops.cast(gradient, variable.dtype)
        if self.momentum != 0:
            momentum = ops.cast(self.momentum, variable.dtype)
            slot = self.momentums[self._get_variable_index(variable)]
            velocity = ops.add(ops.multiply(momentum, slot), gradient)
            self.assign(slot, velocity)
            nesterov = self.nesterov
            direction = (
                ops.add(ops.multiply(momentum, velocity), gradient) if nesterov else velocity
            )
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, ops.multiply(rate, ops.sign(direction)))


class SignAdam(keras.optimizers.Adam):
    """Adam for gradients whose entries are +-1, whose second moment needs no variable.

    After t steps it is 1 - beta_2^t, whatever the data.

    Args:
      learning_rate: A float, a `LearningRateSchedule`, or a callable.
      beta_1: Decay of the mean of gradients, in [0, 1).
      beta_2: Decay of the mean of squared gradients, in [0, 1).
      epsilon: Small constant for numerical stability, as in Keras.
      **kwargs: Others, as in `keras.optimizers.Adam`.
    """

    def build(self, variables: Any) -> None:
        """Creates one slot for each variable."""
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)
            self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves a variable as Adam does."""
        dtype = variable.dtype
        step = ops.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = ops.cast(self.beta_1, dtype), ops.cast(self.beta_2, dtype)
        root_v = ops.sqrt(1 - ops.power(beta_2, step))
        rate = ops.cast(learning_rate, dtype) * root_v / (1 - ops.power(beta_1, step))
        m = self._momentums[self._get_variable_index(variable)]
        gradient = ops.cast(gradient, dtype)
        self.assign_add(m, ops.multiply(ops.subtract(gradient, m), 1 - beta_1))
        self.assign_sub(variable, ops.divide(ops.multiply(m, rate), root_v + self.epsilon))
