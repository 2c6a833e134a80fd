"""The versions of Keras that experiments and benchmarks train with, and tfdp's part for each."""

import dataclasses
from typing import Any

import tensorflow as tf

import tfdp

VERSIONS = (2, 3)


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """A Keras, and the private optimizers, models and callbacks for it.

    Attributes:
      keras: The package, `tf.keras` or `keras`.
      private: The part of tfdp for it, with `DPSGD` and others.
      budget: The class of `PrivacyBudget`.
      packages: Packages on which results depend.
    """

    keras: Any
    private: Any
    budget: Any
    packages: tuple[str, ...]


def front_end(version: int) -> FrontEnd:
    """Returns the parts that belong to a version of Keras, one of `VERSIONS`."""
    if version == 3:
        private = tfdp.keras3  # First: it refuses Keras 2.15 without importing it.
        import keras

        return FrontEnd(keras, private, private.PrivacyBudget, ("tensorflow", "keras"))
    packages = ("tensorflow", "tf-keras", "tensorflow-privacy")
    return FrontEnd(tf.keras, tfdp.keras2, tfdp.keras2.PrivacyBudget, packages)
