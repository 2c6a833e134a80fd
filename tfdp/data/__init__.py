"""Batches sampled as the accounting assumes, features free of privacy cost, private labels."""

from tfdp.base import compat

compat.prepare_tensorflow()

from tfdp.data.distributed import distributed_poisson_batches
from tfdp.data.features import scattering_features
from tfdp.data.label_privacy import RandomizedLabels, randomized_response_labels
from tfdp.data.patches import patch_features
from tfdp.data.poisson import poisson_batches
from tfdp.data.written import read_examples, write_examples

__all__ = [
    "RandomizedLabels",
    "distributed_poisson_batches",
    "patch_features",
    "poisson_batches",
    "randomized_response_labels",
    "read_examples",
    "scattering_features",
    "write_examples",
]
