"""The private optimizers of Keras 2: what goes into `model.compile`."""

from typing import TYPE_CHECKING

from tfdp import _lazy

if TYPE_CHECKING:
    from tfdp.optimizers.dp_adam import DPAdam
    from tfdp.optimizers.dp_adam_bc import DPAdamBC
    from tfdp.optimizers.dp_sgd import DPSGD
    from tfdp.optimizers.dp_sign_adam import DPSignAdam
    from tfdp.optimizers.dp_sign_sgd import DPSignSGD
    from tfdp.optimizers.dpsur import DPSURSGD, DPSURAdam, DPSURSignAdam, DPSURSignSGD

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
]

__getattr__, __dir__ = _lazy.attributes(
    __name__,
    {
        "DPSGD": "tfdp.optimizers.dp_sgd",
        "DPSURSGD": "tfdp.optimizers.dpsur",
        "DPAdam": "tfdp.optimizers.dp_adam",
        "DPAdamBC": "tfdp.optimizers.dp_adam_bc",
        "DPSURAdam": "tfdp.optimizers.dpsur",
        "DPSURSignAdam": "tfdp.optimizers.dpsur",
        "DPSURSignSGD": "tfdp.optimizers.dpsur",
        "DPSignAdam": "tfdp.optimizers.dp_sign_adam",
        "DPSignSGD": "tfdp.optimizers.dp_sign_sgd",
    },
    of_keras_2=__all__,
)
