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
        kind = self.with_momentum(arguments.get("momentum"))
        rate = min(kind.largest, kind.scale / steps**0.5)
        # What is out of range is refused when the optimizer is made.
        if self.follows_gradient and is_number(l2_norm_clip) and l2_norm_clip > 0:
            rate /= l2_norm_clip
        return float(f"{rate:.2g}")

    def with_momentum(self, momentum: Any) -> "Kind":
        """Returns the rule for an optimizer that sums what it gets with this momentum."""
        if not (self.follows_gradient and is_number(momentum) and 0 <= momentum < 1):
            return self
        left = 1 - momentum
        return dataclasses.replace(self, scale=left * self.scale, largest=left * self.largest)


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


def instead_of(optimizer: str, config: dict[str, Any], is_task: bool) -> Kind | None:
    """Returns the rule that replaces a rate of a compiled model, if nobody chose that rate.

    Args:
      optimizer: Name of the optimizer's class.
      config: Its arguments: `learning_rate`, a number or a schedule, and others that it keeps.
      is_task: Whether the model is a task of KerasHub, which compiles itself.

    Example:
      >>> instead_of("Adam", {"learning_rate": 0.001}, False) is ADAM
      True
      >>> instead_of("Adam", {"learning_rate": 0.002}, False)
    """
    rate: Any = config.get("learning_rate")
    if not is_number(rate):
        return None
    if is_task and any(_is(rate, known) for known in _KERAS_HUB.get(optimizer, ())):
        return FINE_TUNING
    known, kind = _KERAS.get(optimizer, (math.nan, None))
    if kind is None or not _is(rate, known):
        return None
    return kind.with_momentum(config.get("momentum"))


def _is(rate: Any, known: float) -> bool:
    return math.isclose(rate, known, rel_tol=1e-6)  # Rates are kept in float32.
