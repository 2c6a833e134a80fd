"""Speed and memory, side by side with plain Keras and with peers.

A package with this file on purpose: some peers install a `benchmarks` of their own, which would be
found instead of a folder without one.
"""

import os

# `tf.keras` is Keras 2 for the programs of Keras 2; those of Keras 3 use the package `keras`.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
