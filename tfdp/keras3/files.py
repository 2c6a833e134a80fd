"""Cost of weights, in what Keras 3 computes from weights."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdp.step.record import lineage


def let_keras_keep_what_weights_cost() -> None:
    """Has what `quantize` makes of weights, of a model or a layer, cost what they have.

    (What files hold of it: `tfdp.base.file_hooks`.)
    """
    layers = {cls for cls in vars(keras.layers).values() if isinstance(cls, type)}
    for cls in {keras.Model, *layers}:
        if "quantize" in vars(cls):
            cls.quantize = _deriving(cls.quantize)


def _deriving(method: Callable) -> Callable:
    @functools.wraps(method)
    def derive(*args: Any, **kwargs: Any) -> Any:
        with lineage.deriving(inherited=True):
            return method(*args, **kwargs)

    return derive
