"""Transfer functions: what operations do to the rows of examples. One file per family.

A transfer function may only be registered here if the operation, used so, computes the entries of
an example from the entries of that example and from public values.
"""

from tfdp.clipping.row_analysis.transfer_functions import (
    branches,
    elementwise,
    functions,
    images,
    layers,
    lists,
    products,
    ragged,
    shapes,
    tables,
)
from tfdp.clipping.row_analysis.transfer_functions.products import einsum_labels

__all__ = [
    "branches",
    "einsum_labels",
    "elementwise",
    "functions",
    "images",
    "layers",
    "lists",
    "products",
    "ragged",
    "shapes",
    "tables",
]
