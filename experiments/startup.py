"""Imports TensorFlow without the lines that it writes when it starts; to be imported first."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read when TensorFlow is imported.


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drops what is written to standard error, also by C++, unless there is an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


if "tensorflow" not in sys.modules:
    with quiet_stderr():
        import tensorflow as tf

        import tfdp  # noqa: F401  # It imports Keras.

        tf.config.list_physical_devices()  # Looks for GPUs, and says what it does not find.
