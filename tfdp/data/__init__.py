"""Batches that are sampled as the accounting assumes, and features free of privacy cost."""

from tfdp.data.distributed import distributed_poisson_batches
from tfdp.data.features import scattering_features
from tfdp.data.poisson import poisson_batches
from tfdp.data.written import read_examples, write_examples

__all__ = [
    "distributed_poisson_batches",
    "poisson_batches",
    "read_examples",
    "scattering_features",
    "write_examples",
]
