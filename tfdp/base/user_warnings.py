"""Warnings that point at the user's line, and what errors of Keras say."""

import os
import re
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


def said_by_keras(error: Exception) -> str:
    """Returns the message of an error without the colors and the arguments that Keras adds."""
    said = re.sub(r"\x1b\[\d*m", "", str(error)).partition("Arguments received by")[0]
    return re.sub(r"^Exception encountered when calling .*\n+", "", said).strip()


def is_library(filename: str) -> bool:
    """Returns whether a file is one of tfdp, Keras or TensorFlow."""
    return "__autograph_generated" in filename or any(part in filename for part in _LIBRARIES)
