"""Likelihoods: the distributions of an example, given its latent code."""

from tfdp._term_wise.likelihoods import Bernoulli, Laplace, Likelihood, Normal

__all__ = ["Bernoulli", "Laplace", "Likelihood", "Normal"]
