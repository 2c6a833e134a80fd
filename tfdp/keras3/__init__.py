"""Differential privacy for models of Keras 3 (`import keras`), on TensorFlow."""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()
compat.check_keras_3()

from tfdp.auditing.sensitivity import check_sensitivity
from tfdp.keras3.automatic_xla import keep_varying_batches_from_xla
from tfdp.keras3.batch_normalization import replace_batch_normalization
from tfdp.keras3.callbacks import PrivacyBudget
from tfdp.keras3.distributed_fit import let_keras_fit_distributed_batches
from tfdp.keras3.dp_optimizer import DPOptimizer
from tfdp.keras3.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD
from tfdp.keras3.files import let_keras_keep_what_weights_cost
from tfdp.keras3.model_check import validate
from tfdp.keras3.named import DPSGD, DPAdam, DPAdamBC, DPSignAdam, DPSignSGD
from tfdp.keras3.private_gan import PrivateGAN
from tfdp.keras3.private_training import make_private
from tfdp.keras3.selective_model import SelectiveModel
from tfdp.training.selective.progress import TooManyAttemptsError

if TYPE_CHECKING:
    from tfdp.keras3.term_wise_vae import TermWiseVAE
    from tfdp.training.term_wise import divergences, likelihoods, priors

keep_varying_batches_from_xla()
let_keras_fit_distributed_batches()
let_keras_keep_what_weights_cost()

__all__ = [
    "DPSGD",
    "DPSURSGD",
    "DPAdam",
    "DPAdamBC",
    "DPOptimizer",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
    "PrivacyBudget",
    "PrivateGAN",
    "SelectiveModel",
    "TermWiseVAE",
    "TooManyAttemptsError",
    "check_sensitivity",
    "divergences",
    "likelihoods",
    "make_private",
    "priors",
    "replace_batch_normalization",
    "validate",
]

# TensorFlow Probability, which these need, takes two seconds.
__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "TermWiseVAE": "tfdp.keras3.term_wise_vae",
        "divergences": "tfdp.training.term_wise.divergences",
        "likelihoods": "tfdp.training.term_wise.likelihoods",
        "priors": "tfdp.training.term_wise.priors",
    },
)
