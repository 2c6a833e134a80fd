"""How the clipped sum of gradients is computed."""

from tfdp.clipping.clipping_rules import (
    AdaptiveQuantile,
    Automatic,
    ClippingRule,
    Flat,
    PerLayer,
)
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.one_pass import OnePassClipping
from tfdp.clipping.plan import Report
from tfdp.clipping.rules.registry import register_rule
from tfdp.clipping.vectorized import VectorizedClipping

__all__ = [
    "AdaptiveQuantile",
    "Automatic",
    "ClippedSum",
    "ClippingEngine",
    "ClippingRule",
    "Flat",
    "OnePassClipping",
    "PerLayer",
    "Report",
    "VectorizedClipping",
    "register_rule",
]
