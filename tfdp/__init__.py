"""tfdp: training TensorFlow/Keras models with differential privacy."""

from tfdp import _compat

_compat.use_keras_2()
_compat.allow_tensorflow_privacy()

from tfdp import accounting, callbacks, clipping, data  # noqa: E402
from tfdp.accounting import (  # noqa: E402
    calibrate_noise_multiplier,
    calibrate_steps,
    privacy_statement,
)
from tfdp.optimizers import DPSGD, DPAdam, DPSignAdam, DPSignSGD  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "DPAdam",
    "DPSignAdam",
    "DPSignSGD",
    "accounting",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "callbacks",
    "clipping",
    "data",
    "privacy_statement",
]
