"""DP-AdamBC's correction of Adam's second moment: what is the same for every Keras."""

from typing import Any

import tensorflow as tf

from tfdp.base.validation import error
from tfdp.clipping import clipping_rules
from tfdp.clipping.engine import ClippedSum
from tfdp.step.privacy_config import PrivacyConfig
from tfdp.step.private_step import PrivateStep

LEAST_SECOND_MOMENT = 0.3  # The best of 0.03, 0.3 and 3 on held-out digits.


class KnownNoise(PrivateStep):
    """Mixin of private optimizers that know the variance of the noise in the mean gradient.

    It must be the same in each step and for each coordinate.
    """

    def _set_privacy(self, config: PrivacyConfig) -> None:
        super()._set_privacy(config)
        rule = clipping_rules.serialize(self._clipping.clipping_rule)
        for name, value, constant, needed in (
            ("noise_multiplier", self.noise_multiplier, len(self._stages.values) == 1, "a number"),
            ("clipping_rule", rule, self._adaptive is None, "one with a constant clip"),
            ("noise_correlation", self._correlation, self._memory is None, "None"),
            ("compression", self._compression, self._compression is None, "None"),
        ):
            if not constant:
                needed += f" for {self._public_name()}, whose noise is the same in each step"
                raise error(name, needed, value)

    @property
    def noise_variance(self) -> float:
        """Variance of the noise in each coordinate of the mean gradient."""
        divisor = self._clipping.num_microbatches or self._expected_batch_size
        return (self.noise_stddev / divisor) ** 2

    def _noise_stddevs(self, clipped: ClippedSum, stage: tf.Tensor | None) -> Any:
        if clipped.noise_scales is not None:
            raise ValueError(
                f"{self._public_name()} must not be given a TwoTermLoss, and so cannot train a "
                "TermWiseVAE: each variable has noise of its own there. Use DPAdam."
            )
        return super()._noise_stddevs(clipped, stage)
