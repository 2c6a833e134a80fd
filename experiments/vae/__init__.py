"""Variational autoencoders with differential privacy."""
