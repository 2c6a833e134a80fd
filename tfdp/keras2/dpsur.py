"""The private optimizers of Keras 2 with selective update and release (DPSUR)."""

import functools

from tfdp.keras2.dp_adam import DPAdam
from tfdp.keras2.dp_sgd import DPSGD
from tfdp.keras2.dp_sign_adam import DPSignAdam
from tfdp.keras2.dp_sign_sgd import DPSignSGD
from tfdp.keras2.keras_2 import registered
from tfdp.step.selective import SelectiveUpdateMixin, documented

_documented = functools.partial(
    documented, "tfdp", "tf.keras", "numpy as np, tensorflow as tf, tfdp"
)


@registered
@_documented(rate=0.5)
class DPSURSGD(SelectiveUpdateMixin, DPSGD):  # noqa: D101
    pass


@registered
@_documented(rate=0.01)
class DPSURAdam(SelectiveUpdateMixin, DPAdam):  # noqa: D101
    pass


@registered
@_documented(rate=0.01)
class DPSURSignSGD(SelectiveUpdateMixin, DPSignSGD):  # noqa: D101
    pass


@registered
@_documented(rate=0.01)
class DPSURSignAdam(SelectiveUpdateMixin, DPSignAdam):  # noqa: D101
    pass
