"""How the clipped sum of gradients is computed."""

from tfdp.clipping.batch_losses.aggregations import (
    BatchAggregation,
    MicroAggregation,
    Sensitivities,
    TermWiseAggregation,
)
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss
from tfdp.clipping.clipping_rules import (
    AdaptiveQuantile,
    Automatic,
    ClippingRule,
    Flat,
    ImportanceSampling,
    PerLayer,
)
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.one_pass.engine import OnePassClipping
from tfdp.clipping.one_pass.op_rules.registry import register_rule
from tfdp.clipping.report import Report, SlowClippingWarning
from tfdp.clipping.vectorized.engine import VectorizedClipping

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
