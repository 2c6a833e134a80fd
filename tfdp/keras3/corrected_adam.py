"""Adam of Keras 3 whose second moment is corrected for noise. Private by `DPAdamBC`."""

from typing import Any

import keras
from keras import ops

from tfdp._validation import positive
from tfdp.optimizers.corrected_second_moment import LEAST_SECOND_MOMENT


class CorrectedAdam(keras.optimizers.Adam):
    """Adam that subtracts the variance of the gradient's noise from its second moment.

    `tfdp.DPAdamBC` gives the formulas. Its private optimizer sets `noise_variance`.

    Args:
      least_second_moment: Least corrected second moment, in units of the noise's variance.
      **kwargs: As in `keras.optimizers.Adam`, without `amsgrad`.

    Raises:
      ValueError: An argument is out of its range.
    """

    def __init__(self, *, least_second_moment: float = LEAST_SECOND_MOMENT, **kwargs: Any):
        if kwargs.pop("amsgrad", False):
            raise ValueError("Argument `amsgrad` must be False. Received: amsgrad=True.")
        super().__init__(**kwargs)
        self._least = positive("least_second_moment", least_second_moment)
        self.noise_variance = 0.0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves a variable."""
        dtype = variable.dtype
        step = ops.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = ops.cast(self.beta_1, dtype), ops.cast(self.beta_2, dtype)
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        gradient = ops.cast(gradient, dtype)
        self.assign_add(m, ops.multiply(ops.subtract(gradient, m), 1 - beta_1))
        self.assign_add(v, ops.multiply(ops.subtract(ops.square(gradient), v), 1 - beta_2))
        variance = ops.cast(self.noise_variance, dtype)
        second = ops.subtract(ops.divide(v, 1 - ops.power(beta_2, step)), variance)
        root = ops.add(ops.sqrt(ops.maximum(second, self._least * variance)), self.epsilon)
        rate = ops.cast(learning_rate, dtype) / (1 - ops.power(beta_1, step))
        self.assign_sub(variable, ops.divide(ops.multiply(m, rate), root))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again."""
        config = {**super().get_config(), "least_second_moment": self._least}
        del config["amsgrad"]
        return config
