"""Speed and memory, side by side with plain Keras and with peers.

A package with this file on purpose: some peers install a `benchmarks` of their own, which would be
found instead of a folder without one.
"""

import experiments  # noqa: F401  # Decides which Keras `tf.keras` is.
