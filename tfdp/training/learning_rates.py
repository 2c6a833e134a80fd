"""Learning rates, where none is given: by a rule that looks at no data.

A rate falls linearly to zero over the planned steps. Its peak is proportional to 1 / sqrt(steps):
the noise that a run leaves in a weight is proportional to the rate times sqrt(steps), while few
steps must be long ones to arrive anywhere. docs/choosing.md has the measurements.
"""

import dataclasses
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
