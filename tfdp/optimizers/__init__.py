"""The private optimizers: what goes into `model.compile`."""

from tfdp import _compat
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.dp_adam import DPAdam
from tfdp.optimizers.dp_sgd import DPSGD
from tfdp.optimizers.dp_sign_adam import DPSignAdam
from tfdp.optimizers.dp_sign_sgd import DPSignSGD
from tfdp.optimizers.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD

_compat.let_keras_save(PrivateOptimizerMixin)

__all__ = [
    "DPSGD",
    "DPSURSGD",
    "DPAdam",
    "DPSURAdam",
    "DPSURSignAdam",
    "DPSURSignSGD",
    "DPSignAdam",
    "DPSignSGD",
]
