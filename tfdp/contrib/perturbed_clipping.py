"""Noise on each example's gradient before it is clipped."""

import dataclasses
from typing import ClassVar

from tfdp.base.validation import error, is_number
from tfdp.clipping.clipping_rules import NAMED, FlatClipping


@dataclasses.dataclass(frozen=True)
class PerturbedClipping(FlatClipping):
    """Flat clipping of gradients with noise: `clip_C(g + N(0, (stddev * C)^2))` for each example.

    Clipping shortens gradients one by one, so that their sum has another direction than that of the
    gradients. With noise before the clip, the gradients are spread more symmetrically, and the
    directions differ less. The noise is independent for each example and coordinate.

    Formal guarantee: privacy is that of `FlatClipping`, no better. Given the noise of each example,
    which does not depend on data, an example adds a vector of norm at most C to the sum. The
    release is a mixture of such mechanisms, and hockey-stick divergences are jointly convex. The
    noise comes from the secret seed of the step, because it belongs to rows: if it were known, an
    added example would move all later ones to other noise.

    Each example's gradient is formed, as with `engine="vectorized"`, and as many random numbers as
    the batch has coordinates of gradients are drawn.

    Args:
      stddev: Standard deviation of the noise in each coordinate, in units of the clip. In a model
        of d weights, the noise on a gradient is about `stddev * sqrt(d)` clips long.

    Raises:
      ValueError: `stddev` is negative or non-finite.

    References:
      - Chen, Wu and Hong, 2020, Understanding Gradient Clipping in Private SGD: A Geometric
        Perspective (https://arxiv.org/abs/2006.15429).
    """

    is_random: ClassVar[bool] = True

    stddev: float = 0.01

    def __post_init__(self) -> None:
        if not (is_number(self.stddev) and 0 <= self.stddev < float("inf")):
            raise error("stddev", "a number that is not negative, and finite", self.stddev)

    @property
    def perturbation(self) -> float:
        """See `ClippingRule.perturbation`."""
        return self.stddev


NAMED["perturbed"] = PerturbedClipping
