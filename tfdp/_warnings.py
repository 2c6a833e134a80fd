"""Warnings that point at the user's line."""

import os
import sys
import warnings
from types import FrameType

_LIBRARIES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    *[os.path.join("site-packages", name, "") for name in ("keras", "tensorflow", "tf_keras")],
)


def warn_user(message: str) -> None:
    """Issues a UserWarning for the line outside of tfdp, Keras and TensorFlow that led here."""
    level, frame = 2, sys._getframe(1)
    while _is_library(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "__autograph_generated" in name or any(part in name for part in _LIBRARIES)
