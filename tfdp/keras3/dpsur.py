"""The private optimizers of Keras 3 with selective update and release (DPSUR)."""

import functools

import keras

from tfdp.keras3.named import DPSGD, DPAdam, DPSignAdam, DPSignSGD
from tfdp.step.selective import SelectiveUpdateMixin, documented

_documented = functools.partial(
    documented, "tfdp.keras3", "keras", "keras, numpy as np, tfdp.keras3"
)


@keras.saving.register_keras_serializable(package="tfdp")
@_documented(rate=0.5)
class DPSURSGD(SelectiveUpdateMixin, DPSGD):  # noqa: D101
    pass


@keras.saving.register_keras_serializable(package="tfdp")
@_documented(rate=0.01)
class DPSURAdam(SelectiveUpdateMixin, DPAdam):  # noqa: D101
    pass


@keras.saving.register_keras_serializable(package="tfdp")
@_documented(rate=0.01)
class DPSURSignSGD(SelectiveUpdateMixin, DPSignSGD):  # noqa: D101
    pass


@keras.saving.register_keras_serializable(package="tfdp")
@_documented(rate=0.01)
class DPSURSignAdam(SelectiveUpdateMixin, DPSignAdam):  # noqa: D101
    pass
