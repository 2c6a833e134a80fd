"""What weights have cost, in the files of Keras 3 and in what it computes from weights."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from tfdp.optimizers import lineage, saved_lineage


def let_keras_keep_what_weights_cost() -> None:
    """Makes Keras 3 write into every file what its weights have cost, and read it again.

    What `quantize` makes of weights, of a model or a layer, has cost what they have.
    """
    saved_lineage.let_keras_save(saving_lib, legacy_h5_format)
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
