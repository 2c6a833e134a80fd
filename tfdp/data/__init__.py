"""Batches whose sampling is the one that is accounted for."""

from tfdp.data.poisson import poisson_batches

__all__ = ["poisson_batches"]
