"""Rules for operations that use weights: one file per family of operations."""

from tfdp.clipping.one_pass.op_rules import (
    convolutions,
    elementwise,
    generic,
    lookup,
    normalization,
    products,
)
from tfdp.clipping.one_pass.op_rules.registry import find_rule, register_rule

__all__ = [
    "convolutions",
    "elementwise",
    "find_rule",
    "generic",
    "lookup",
    "normalization",
    "products",
    "register_rule",
]
