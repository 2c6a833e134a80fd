"""tfdp: training TensorFlow/Keras models with differential privacy.

The names of optimizers, models and callbacks are those of the Keras that `tf.keras` is: of
`tfdp.keras3`; or, with the environment variable TF_USE_LEGACY_KERAS=1, of `tfdp.keras2`. Functions
that are given a model, such as `make_private`, take one of either. Everything is loaded when it is
first used.
"""

from typing import TYPE_CHECKING

from tfdp.base import compat, file_hooks, front_ends, lazy

if TYPE_CHECKING:
    from tfdp import (
        accounting,
        auditing,
        clipping,
        contrib,
        correlated_noise,
        data,
        evaluation,
        keras2,
        keras3,
        schedules,
    )
    from tfdp.accounting import (
        calibrate_noise_multiplier,
        calibrate_noise_schedule,
        calibrate_steps,
        plan,
        privacy_statement,
    )
    from tfdp.correlated_noise import BandedNoise, BufferedNoise, calibrate_correlated_noise
    from tfdp.keras3 import (
        DPSGD,
        DPSURSGD,
        DPAdam,
        DPAdamBC,
        DPSignAdam,
        DPSignSGD,
        DPSURAdam,
        DPSURSignAdam,
        DPSURSignSGD,
        PrivacyBudget,
        PrivateGAN,
        SelectiveModel,
        TermWiseVAE,
        TooManyAttemptsError,
        divergences,
        likelihoods,
        make_private,
        priors,
        replace_batch_normalization,
        validate,
    )
    from tfdp.privacy_card.card import report
    from tfdp.step.sparse_embeddings import SparseEmbeddings
    from tfdp.training.tuning.private_tuning import tune

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "DPSURSGD",
    "BandedNoise",
    "BufferedNoise",
    "DPAdam",
    "DPAdamBC",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
    "PrivacyBudget",
    "PrivateGAN",
    "SelectiveModel",
    "SparseEmbeddings",
    "TermWiseVAE",
    "TooManyAttemptsError",
    "accounting",
    "auditing",
    "calibrate_correlated_noise",
    "calibrate_noise_multiplier",
    "calibrate_noise_schedule",
    "calibrate_steps",
    "clipping",
    "contrib",
    "correlated_noise",
    "data",
    "divergences",
    "evaluation",
    "keras2",
    "keras3",
    "likelihoods",
    "make_private",
    "plan",
    "priors",
    "privacy_statement",
    "replace_batch_normalization",
    "report",
    "schedules",
    "tune",
    "validate",
]

_ROOMS = (
    *("accounting", "auditing", "clipping", "contrib", "correlated_noise", "data", "evaluation"),
    *("keras2", "keras3", "schedules"),
)
_of_rooms, _listed = lazy.attributes(
    __name__,
    {
        **{name: f"tfdp.{name}" for name in _ROOMS},
        "BandedNoise": "tfdp.correlated_noise",
        "BufferedNoise": "tfdp.correlated_noise",
        "SparseEmbeddings": "tfdp.step.sparse_embeddings",
        "calibrate_correlated_noise": "tfdp.correlated_noise",
        "calibrate_noise_multiplier": "tfdp.accounting",
        "calibrate_noise_schedule": "tfdp.accounting",
        "calibrate_steps": "tfdp.accounting",
        "plan": "tfdp.accounting",
        "privacy_statement": "tfdp.accounting",
        "report": "tfdp.privacy_card.card",
        "tune": "tfdp.training.tuning.private_tuning",
    },
    unlisted=lambda: () if compat.has_keras_3() else ("keras3",),
)


def __getattr__(name: str) -> object:
    return front_ends.attribute(name) if name in front_ends.NAMES else _of_rooms(name)


def __dir__() -> list[str]:
    return sorted({*_listed(), *front_ends.available()})


file_hooks.prepare()
