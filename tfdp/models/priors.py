"""Priors: the distributions that latent codes of a `TermWiseVAE` should have."""

from tfdp._term_wise.priors import GaussianMixture, Prior, SpikeAndSlab, StandardNormal

__all__ = ["GaussianMixture", "Prior", "SpikeAndSlab", "StandardNormal"]
