"""Keras models with a training step of their own."""

from tfdp.models import divergences, likelihoods, priors
from tfdp.models.batch_normalization import replace_batch_normalization
from tfdp.models.model_check import validate
from tfdp.models.private_training import make_private
from tfdp.models.selective.progress import TooManyAttemptsError
from tfdp.models.selective.selective_model import SelectiveModel
from tfdp.models.term_wise_vae import TermWiseVAE

__all__ = [
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
