"""Variational autoencoders that are trained by terms, for every Keras."""
