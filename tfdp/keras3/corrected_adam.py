"""Adam of Keras 3 whose second moment is corrected for noise. Private by `DPAdamBC`."""

from typing import Any

import keras
from keras import ops

from tfdp.base.validation import positive
from tfdp.step.corrected_second_moment import LEAST_SECOND_MOMENT


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
        # In narrower numbers, beta_2 is 1.
        dtype = variable.dtype if variable.dtype == "float64" else "float32"
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        gradient, m_old, v_old = (ops.cast(each, dtype) for each in (gradient, m, v))
        m_new = m_old + (gradient - m_old) * (1 - self.beta_1)
        v_new = v_old + (ops.square(gradient) - v_old) * (1 - self.beta_2)
        step = ops.cast(self.iterations + 1, dtype)
        second = v_new / (1 - ops.power(ops.cast(self.beta_2, dtype), step)) - self.noise_variance
        root = ops.sqrt(ops.maximum(second, self._least * self.noise_variance)) + self.epsilon
        rate = ops.cast(learning_rate, dtype) / (1 - ops.power(ops.cast(self.beta_1, dtype), step))
        self.assign(m, ops.cast(m_new, m.dtype))
        self.assign(v, ops.cast(v_new, v.dtype))
        self.assign_sub(variable, ops.cast(rate * m_new / root, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again."""
        config = {**super().get_config(), "least_second_moment": self._least}
        del config["amsgrad"]
        return config
