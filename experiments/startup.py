"""Imports TensorFlow without the lines that it writes when it starts; to be imported first."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read when TensorFlow is imported.

_is_first = "tensorflow" not in sys.modules

from tfdp.base.compat import quiet_stderr  # noqa: E402  # Imports TensorFlow, without its lines.

if _is_first:
    with quiet_stderr():
        import tensorflow as tf

        tf.config.list_physical_devices()  # Looks for GPUs, and says what it does not find.
