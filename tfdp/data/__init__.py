"""Batches sampled as the accounting assumes, features free of privacy cost, private labels."""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "RandomizedLabels": "tfdp.data.label_privacy",
        "distributed_poisson_batches": "tfdp.data.distributed",
        "patch_features": "tfdp.data.patches",
        "poisson_batches": "tfdp.data.poisson",
        "randomized_response_labels": "tfdp.data.label_privacy",
        "read_examples": "tfdp.data.written",
        "scattering_features": "tfdp.data.features",
        "write_examples": "tfdp.data.written",
    },
)
