"""Differential privacy for models of Keras 3 (`import keras`), on TensorFlow."""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()
compat.check_keras_3()

from tfdp.keras3.automatic_xla import keep_varying_batches_from_xla
from tfdp.keras3.distributed_fit import let_keras_fit_distributed_batches
from tfdp.keras3.files import let_keras_keep_what_weights_cost

if TYPE_CHECKING:
    from tfdp.auditing.sensitivity import check_sensitivity
    from tfdp.keras3.batch_normalization import replace_batch_normalization
    from tfdp.keras3.callbacks import PrivacyBudget
    from tfdp.keras3.dp_optimizer import DPOptimizer
    from tfdp.keras3.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD
    from tfdp.keras3.model_check import validate
    from tfdp.keras3.named import DPSGD, DPAdam, DPAdamBC, DPSignAdam, DPSignSGD
    from tfdp.keras3.private_gan import PrivateGAN
    from tfdp.keras3.private_training import make_private
    from tfdp.keras3.selective_model import SelectiveModel
    from tfdp.keras3.term_wise_vae import TermWiseVAE
    from tfdp.training.selective.progress import TooManyAttemptsError
    from tfdp.training.term_wise import divergences, likelihoods, priors

keep_varying_batches_from_xla()
let_keras_fit_distributed_batches()
let_keras_keep_what_weights_cost()

_MODULES = {
    "DPSGD": "tfdp.keras3.named",
    "DPSURSGD": "tfdp.keras3.dpsur",
    "DPAdam": "tfdp.keras3.named",
    "DPAdamBC": "tfdp.keras3.named",
    "DPOptimizer": "tfdp.keras3.dp_optimizer",
    "DPSURAdam": "tfdp.keras3.dpsur",
    "DPSURSignAdam": "tfdp.keras3.dpsur",
    "DPSURSignSGD": "tfdp.keras3.dpsur",
    "DPSignAdam": "tfdp.keras3.named",
    "DPSignSGD": "tfdp.keras3.named",
    "PrivacyBudget": "tfdp.keras3.callbacks",
    "PrivateGAN": "tfdp.keras3.private_gan",
    "SelectiveModel": "tfdp.keras3.selective_model",
    "TermWiseVAE": "tfdp.keras3.term_wise_vae",
    "TooManyAttemptsError": "tfdp.training.selective.progress",
    "check_sensitivity": "tfdp.auditing.sensitivity",
    "divergences": "tfdp.training.term_wise.divergences",
    "likelihoods": "tfdp.training.term_wise.likelihoods",
    "make_private": "tfdp.keras3.private_training",
    "priors": "tfdp.training.term_wise.priors",
    "replace_batch_normalization": "tfdp.keras3.batch_normalization",
    "validate": "tfdp.keras3.model_check",
}
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

__getattr__, __dir__ = lazy.attributes(
    __name__, _MODULES, unlisted=lambda: compat.OF_VAE if compat.missing_for_vae() else ()
)
