"""The front ends of tfdp, one for each Keras, for tests that run with both."""

import dataclasses
import importlib.metadata
import os
from typing import Any

import pytest

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # As in `conftest.py`, for what runs without it.

import tensorflow as tf

import tfdp
from tfdp.base.compat import missing_for_keras_2

HAS_KERAS_3 = importlib.metadata.version("keras").startswith("3.")
keras: Any = None  # Keras 2.15 is left alone: see `_no_keras_2_by_its_own_name` in `conftest.py`.
if HAS_KERAS_3:
    import keras


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """A Keras, the part of tfdp for it, and the names of both in messages."""

    keras: Any
    tfdp: Any
    name: str
    part: str

    def crossentropy(self, reduction: str = "sum_over_batch_size") -> Any:
        return self.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )


assert issubclass(tf.keras.Model, tf.Module)  # Keras 2.
FRONT_ENDS = [FrontEnd(tf.keras, tfdp.keras2, "tf.keras", "tfdp")]
if HAS_KERAS_3:
    FRONT_ENDS.append(FrontEnd(keras, tfdp.keras3, "keras", "tfdp.keras3"))

needs_keras_3 = pytest.mark.skipif(not HAS_KERAS_3, reason="Keras 3 is not installed")
with_both = pytest.mark.parametrize("front", FRONT_ENDS, ids=lambda front: front.part)
# For what does not pass through the front end: code that both share, and its mutants.
ONE = FRONT_ENDS[-1:] if missing_for_keras_2() else FRONT_ENDS[:1]
with_one = pytest.mark.parametrize("front", ONE, ids=lambda front: front.part)
