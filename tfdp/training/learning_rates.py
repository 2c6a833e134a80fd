"""Learning rates, where none is given: by a rule that looks at no data.

A rate falls linearly to zero over the planned steps. Its peak is proportional to 1 / sqrt(steps):
the noise that a run leaves in a weight is proportional to the rate times sqrt(steps), while few
steps must be long ones to arrive anywhere. docs/choosing.md has the measurements.
"""

import dataclasses
import math
from typing import Any

from tfdp.base.validation import is_number


@dataclasses.dataclass(frozen=True)
class Kind:
    """The rule for one kind of optimizers.

    Attributes:
      scale: The peak, times sqrt(steps).
      largest: The largest peak.
      follows_gradient: Whether steps are proportional to the clipped gradients, as those of SGD.
    """

    scale: float
    largest: float
    follows_gradient: bool = False

    def peak(self, steps: int, l2_norm_clip: float, arguments: dict[str, Any]) -> float:
        """Returns the rate of the first step, with two digits.

        Args:
          steps: Number of planned steps.
          l2_norm_clip: The clip.
          arguments: Other arguments of the optimizer.

        Example:
          >>> ADAM.peak(900, 1.0, {})
          0.02
        """
        rate = min(self.largest, self.scale / steps**0.5)
        momentum = arguments.get("momentum", 0.0)
        # What is out of range is refused when the optimizer is made.
        if self.follows_gradient and is_number(momentum) and 0 <= momentum < 1:
            rate *= 1 - momentum
        if self.follows_gradient and is_number(l2_norm_clip) and l2_norm_clip > 0:
            rate /= l2_norm_clip
        return float(f"{rate:.2g}")


ADAM = Kind(0.6, 0.04)
SIGN = Kind(0.25, 0.02)
SGD = Kind(60.0, 4.0, follows_gradient=True)
# Public weights are changed little: large steps would lose what they know.
FINE_TUNING = Kind(0.03, 0.002)

# Rates that Keras and KerasHub set where none is given, for gradients without noise.
_KERAS = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "Nadam", "RMSprop"), (0.001, ADAM)),
    "SGD": (0.01, SGD),
}
_KERAS_HUB = {"Adam": (1e-5, 2e-5, 5e-5), "AdamW": (5e-5,)}


def instead_of(optimizer: str, rate: Any, is_task: bool) -> Kind | None:
    """Returns the rule that replaces a rate of a compiled model, if nobody chose that rate.

    Args:
      optimizer: Name of the optimizer's class.
      rate: Its learning rate, a number or a schedule.
      is_task: Whether the model is a task of KerasHub, which compiles itself.

    Example:
      >>> instead_of("Adam", 0.001, False) is ADAM, instead_of("Adam", 0.002, False)
      (True, None)
    """
    if not is_number(rate):
        return None
    if is_task and any(
        math.isclose(rate, known, rel_tol=1e-6) for known in _KERAS_HUB.get(optimizer, ())
    ):
        return FINE_TUNING
    known, kind = _KERAS.get(optimizer, (math.nan, None))
    return kind if math.isclose(rate, known, rel_tol=1e-6) else None
