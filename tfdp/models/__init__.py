"""Keras 2 models with a training step of their own."""

from typing import TYPE_CHECKING

from tfdp import _lazy

if TYPE_CHECKING:
    from tfdp._selective.progress import TooManyAttemptsError
    from tfdp.models import divergences, likelihoods, priors
    from tfdp.models.batch_normalization import replace_batch_normalization
    from tfdp.models.model_check import validate
    from tfdp.models.private_gan import PrivateGAN
    from tfdp.models.private_training import make_private
    from tfdp.models.selective_model import SelectiveModel
    from tfdp.models.term_wise_vae import TermWiseVAE

__all__ = [
    "PrivateGAN",
    "SelectiveModel",
    "TermWiseVAE",
    "TooManyAttemptsError",
    "divergences",
    "likelihoods",
    "make_private",
    "priors",
    "replace_batch_normalization",
    "validate",
]

__getattr__, __dir__ = _lazy.attributes(
    __name__,
    {
        "PrivateGAN": "tfdp.models.private_gan",
        "SelectiveModel": "tfdp.models.selective_model",
        "TermWiseVAE": "tfdp.models.term_wise_vae",
        "TooManyAttemptsError": "tfdp._selective.progress",
        "divergences": "tfdp.models.divergences",
        "likelihoods": "tfdp.models.likelihoods",
        "make_private": "tfdp.models.private_training",
        "priors": "tfdp.models.priors",
        "replace_batch_normalization": "tfdp.models.batch_normalization",
        "validate": "tfdp.models.model_check",
    },
    of_keras_2=[name for name in __all__ if name != "TooManyAttemptsError"],
)
