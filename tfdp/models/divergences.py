"""Divergences between the codes of a group of examples and the prior."""

from tfdp._term_wise.divergences import DimensionwiseMMD, Divergence, PriorToAggregateKL, RbfMMD

__all__ = ["DimensionwiseMMD", "Divergence", "PriorToAggregateKL", "RbfMMD"]
