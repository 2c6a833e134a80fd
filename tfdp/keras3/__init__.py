"""Differential privacy for models of Keras 3 (`import keras`), on TensorFlow."""

from tfdp import _compat

_compat.use_keras_3()
_compat.import_tensorflow_probability()

from tfdp._selective.progress import TooManyAttemptsError  # noqa: E402
from tfdp._term_wise import divergences, likelihoods, priors  # noqa: E402
from tfdp.auditing.sensitivity import check_sensitivity  # noqa: E402
from tfdp.keras3.automatic_xla import keep_varying_batches_from_xla  # noqa: E402
from tfdp.keras3.batch_normalization import replace_batch_normalization  # noqa: E402
from tfdp.keras3.callbacks import PrivacyBudget  # noqa: E402
from tfdp.keras3.distributed_fit import let_keras_fit_distributed_batches  # noqa: E402
from tfdp.keras3.dp_optimizer import DPOptimizer  # noqa: E402
from tfdp.keras3.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD  # noqa: E402
from tfdp.keras3.files import let_keras_keep_what_weights_cost  # noqa: E402
from tfdp.keras3.model_check import validate  # noqa: E402
from tfdp.keras3.named import DPSGD, DPAdam, DPAdamBC, DPSignAdam, DPSignSGD  # noqa: E402
from tfdp.keras3.private_gan import PrivateGAN  # noqa: E402
from tfdp.keras3.private_training import make_private  # noqa: E402
from tfdp.keras3.selective_model import SelectiveModel  # noqa: E402
from tfdp.keras3.term_wise_vae import TermWiseVAE  # noqa: E402

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
