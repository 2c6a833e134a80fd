"""Warnings that point at the user's line."""

import os
import sys
import warnings

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *[os.path.join("site-packages", name, "") for name in ("keras", "tensorflow", "tf_keras")],
)


def warn_user(message: str) -> None:
    """Issues a UserWarning for the line outside of tfdp, Keras and TensorFlow that led here."""
    level, frame = 2, sys._getframe(1)
    while is_library(frame.f_code.co_filename) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def is_library(filename: str) -> bool:
    """Returns whether a file is one of tfdp, Keras or TensorFlow."""
    return "__autograph_generated" in filename or any(part in filename for part in _LIBRARIES)
