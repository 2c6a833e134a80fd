"""tfdp: training TensorFlow/Keras models with differential privacy."""

from typing import TYPE_CHECKING

from tfdp import _compat, _keras_3_files, _lazy

_compat.import_tensorflow()
_compat.allow_tensorflow_privacy()
_compat.exempt_from_autograph()

from tfdp import (  # noqa: E402
    accounting,
    clipping,
    contrib,
    correlated_noise,
    data,
    evaluation,
    schedules,
)
from tfdp.accounting import (  # noqa: E402
    calibrate_noise_multiplier,
    calibrate_noise_schedule,
    calibrate_steps,
    privacy_statement,
)
from tfdp.correlated_noise import BandedNoise, calibrate_correlated_noise  # noqa: E402

if TYPE_CHECKING:
    from tfdp import auditing, callbacks, keras3, models
    from tfdp.models import (
        SelectiveModel,
        TermWiseVAE,
        make_private,
        replace_batch_normalization,
        validate,
    )
    from tfdp.optimizers import (
        DPSGD,
        DPSURSGD,
        DPAdam,
        DPAdamBC,
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
    "BandedNoise",
    "DPAdam",
    "DPAdamBC",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
    "SelectiveModel",
    "TermWiseVAE",
    "accounting",
    "auditing",
    "calibrate_correlated_noise",
    "calibrate_noise_multiplier",
    "calibrate_noise_schedule",
    "calibrate_steps",
    "callbacks",
    "clipping",
    "contrib",
    "correlated_noise",
    "data",
    "evaluation",
    "keras3",
    "make_private",
    "models",
    "privacy_statement",
    "replace_batch_normalization",
    "schedules",
    "validate",
]

# Each front end is loaded, with its Keras, when one of its names is first used.
_OF_KERAS_2 = {
    "callbacks": "tfdp.callbacks",
    **dict.fromkeys(
        [
            "SelectiveModel",
            "TermWiseVAE",
            "make_private",
            "replace_batch_normalization",
            "validate",
        ],
        "tfdp.models",
    ),
    **dict.fromkeys(
        [
            "DPSGD",
            "DPSURSGD",
            "DPAdam",
            "DPAdamBC",
            "DPSURAdam",
            "DPSURSignAdam",
            "DPSURSignSGD",
            "DPSignAdam",
            "DPSignSGD",
        ],
        "tfdp.optimizers",
    ),
}
__getattr__, __dir__ = _lazy.attributes(
    __name__,
    {**{name: f"tfdp.{name}" for name in ("auditing", "keras3", "models")}, **_OF_KERAS_2},
    of_keras_2=_OF_KERAS_2,
    of_keras_3=["keras3"],
)
_keras_3_files.prepare_keras_3()
