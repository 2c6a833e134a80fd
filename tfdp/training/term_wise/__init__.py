"""Variational autoencoders that are trained by terms, for every Keras."""

from tfdp.base import compat

compat.import_tensorflow_probability()
