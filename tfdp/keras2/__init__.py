"""Differential privacy for models of Keras 2, with TensorFlow Privacy's classes.

`tf.keras` is Keras 2 with the environment variable TF_USE_LEGACY_KERAS=1.
"""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()
compat.allow_tensorflow_privacy()

if TYPE_CHECKING:
    from tfdp.keras2.batch_normalization import replace_batch_normalization
    from tfdp.keras2.callbacks import PrivacyBudget
    from tfdp.keras2.dp_adam import DPAdam
    from tfdp.keras2.dp_adam_bc import DPAdamBC
    from tfdp.keras2.dp_sgd import DPSGD
    from tfdp.keras2.dp_sign_adam import DPSignAdam
    from tfdp.keras2.dp_sign_sgd import DPSignSGD
    from tfdp.keras2.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD
    from tfdp.keras2.exponential_average import ExponentialMovingAverage
    from tfdp.keras2.model_check import validate
    from tfdp.keras2.private_gan import PrivateGAN
    from tfdp.keras2.private_training import make_private
    from tfdp.keras2.selective_model import SelectiveModel
    from tfdp.keras2.term_wise_vae import TermWiseVAE
    from tfdp.training.selective.progress import TooManyAttemptsError
    from tfdp.training.term_wise import divergences, likelihoods, priors

_MODULES = {
    "DPSGD": "tfdp.keras2.dp_sgd",
    "DPSURSGD": "tfdp.keras2.dpsur",
    "DPAdam": "tfdp.keras2.dp_adam",
    "DPAdamBC": "tfdp.keras2.dp_adam_bc",
    "DPSURAdam": "tfdp.keras2.dpsur",
    "DPSURSignAdam": "tfdp.keras2.dpsur",
    "DPSURSignSGD": "tfdp.keras2.dpsur",
    "DPSignAdam": "tfdp.keras2.dp_sign_adam",
    "DPSignSGD": "tfdp.keras2.dp_sign_sgd",
    "ExponentialMovingAverage": "tfdp.keras2.exponential_average",
    "PrivacyBudget": "tfdp.keras2.callbacks",
    "PrivateGAN": "tfdp.keras2.private_gan",
    "SelectiveModel": "tfdp.keras2.selective_model",
    "TermWiseVAE": "tfdp.keras2.term_wise_vae",
    "TooManyAttemptsError": "tfdp.training.selective.progress",
    "divergences": "tfdp.training.term_wise.divergences",
    "likelihoods": "tfdp.training.term_wise.likelihoods",
    "make_private": "tfdp.keras2.private_training",
    "priors": "tfdp.training.term_wise.priors",
    "replace_batch_normalization": "tfdp.keras2.batch_normalization",
    "validate": "tfdp.keras2.model_check",
}
__all__ = [
    "DPSGD",
    "DPSURSGD",
    "DPAdam",
    "DPAdamBC",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
    "ExponentialMovingAverage",
    "PrivacyBudget",
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

_OF_KERAS_2 = frozenset(__all__) - {"TooManyAttemptsError"}


def _check(name: str) -> None:
    if name in _OF_KERAS_2:
        compat.check_keras_2(f"tfdp.keras2.{name}")


__getattr__, __dir__ = lazy.attributes(
    __name__,
    _MODULES,
    check=_check,
    unlisted=lambda: _OF_KERAS_2 if compat.missing_for_keras_2() else (),
)
