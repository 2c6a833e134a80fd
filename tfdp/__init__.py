"""tfdp: training TensorFlow/Keras models with differential privacy."""

from tfdp import _compat

_compat.import_tensorflow()
_compat.allow_tensorflow_privacy()
_compat.exempt_from_autograph()

from tfdp import accounting, auditing, callbacks, clipping, contrib, data, models  # noqa: E402
from tfdp.accounting import (  # noqa: E402
    calibrate_noise_multiplier,
    calibrate_steps,
    privacy_statement,
)
from tfdp.models import (  # noqa: E402
    SelectiveModel,
    TermWiseVAE,
    make_private,
    replace_batch_normalization,
    validate,
)
from tfdp.optimizers import (  # noqa: E402
    DPSGD,
    DPSURSGD,
    DPAdam,
    DPSignAdam,
    DPSignSGD,
    DPSURAdam,
    DPSURSignAdam,
    DPSURSignSGD,
)

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "DPSURSGD",
    "DPAdam",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
    "SelectiveModel",
    "TermWiseVAE",
    "accounting",
    "auditing",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "callbacks",
    "clipping",
    "contrib",
    "data",
    "make_private",
    "models",
    "privacy_statement",
    "replace_batch_normalization",
    "validate",
]
