"""Rules for operations that use weights: one file per family of operations."""

from tfdp.clipping.one_pass.op_gradients import (
    convolutions,
    elementwise,
    generic,
    lookup,
    normalization,
    products,
)
from tfdp.clipping.one_pass.op_gradients.registry import find_op_gradients, register_op_gradients

__all__ = [
    "convolutions",
    "elementwise",
    "find_op_gradients",
    "generic",
    "lookup",
    "normalization",
    "products",
    "register_op_gradients",
]
