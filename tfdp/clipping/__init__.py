"""How the clipped sum of gradients is computed."""

from tfdp.clipping.aggregations import (
    BatchAggregation,
    MicroAggregation,
    Sensitivities,
    TermWiseAggregation,
)
from tfdp.clipping.clipping_rules import (
    AdaptiveQuantile,
    Automatic,
    ClippingRule,
    Flat,
    ImportanceSampling,
    PerLayer,
)
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.one_pass import OnePassClipping
from tfdp.clipping.report import Report, SlowClippingWarning
from tfdp.clipping.rules.registry import register_rule
from tfdp.clipping.two_term_loss import Aggregation, TwoTermLoss
from tfdp.clipping.vectorized import VectorizedClipping

__all__ = [
    "AdaptiveQuantile",
    "Aggregation",
    "Automatic",
    "BatchAggregation",
    "ClippedSum",
    "ClippingEngine",
    "ClippingRule",
    "Flat",
    "ImportanceSampling",
    "MicroAggregation",
    "OnePassClipping",
    "PerLayer",
    "Report",
    "Sensitivities",
    "SlowClippingWarning",
    "TermWiseAggregation",
    "TwoTermLoss",
    "VectorizedClipping",
    "register_rule",
]
