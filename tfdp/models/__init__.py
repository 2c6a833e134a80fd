"""Keras models with a training step of their own."""

from tfdp.models.progress import TooManyAttemptsError
from tfdp.models.selective_model import SelectiveModel

__all__ = ["SelectiveModel", "TooManyAttemptsError"]
